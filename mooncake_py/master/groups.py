"""Groups: objects that are useless alone and therefore have one fate.

Rules. Keys with the same non-zero number in one put start form a group, named by the generation of
its first member. No member is reported present before all are committed, nor while one cannot be
read. As soon as one ends, for whatever reason, the others end too; so eviction takes the whole
group or, while any member is leased, none of it. If one member cannot be granted, none is. A key
that exists already is not part of the new group.

Groups of a tenant by name (`model.Group`; numbers with NAMED_GROUP) are what objects of several
puts join, each at its commit. So there is no knowing when one is whole: members are seen and read
one by one, and what is in writing is none yet. All end when one ends, unless it was replaced, or
was one that FOLLOWS: that ends with the others and by itself. Beyond MEMBERS_MAX, and under a name
that another tenant uses, nobody joins. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake_py.master.tenant import Grant, Put, Tenant
from mooncake_py.model import FOLLOWS, NAMED_GROUP

MEMBERS_MAX = 1_024  # of a group by name: they end in one step


@dataclass(slots=True)
class Group:
    """There may be one a page: what most have not is no set of their own."""

    tenant: Tenant
    slots: set[int] = field(default_factory=set)  # of complete members
    open: set[bytes] | None = None  # keys in writing
    followers: set[int] | None = None  # of the complete ones, those whose end ends nobody else


class Groups:
    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self.hiding = 0  # groups of one put: a member that is there may not be seen

    def __len__(self) -> int:
        return len(self._groups)

    def begin(self, put: Put) -> None:
        """Members in writing."""
        writing = put.tenant.writing
        for index, (key, name) in enumerate(zip(put.keys, put.groups, strict=True)):
            if name and not is_named(name) and writing.get(key) == (put, index):
                group = self._obtain(name, put.tenant)
                if group.open is None:
                    group.open = set()
                group.open.add(key)

    def join(self, name: int, tenant: Tenant, key: bytes, slot: int) -> bool:
        """A complete member; or not, as far as groups by name go."""
        group = self._obtain(name & ~FOLLOWS, tenant)
        if is_named(name) and (group.tenant is not tenant or len(group.slots) >= MEMBERS_MAX):
            return False
        _leave(group, key)
        group.slots.add(slot)
        if name & FOLLOWS:
            group.followers = {slot, *(group.followers or ())}
        return True

    def leave(self, name: int, key: bytes, slot: int) -> None:
        """A member, in writing (slot -1) or complete, is not there any more."""
        group = self._groups.get(name & ~FOLLOWS)
        if group is None:
            return
        group.slots.discard(slot)
        if group.followers is not None:
            group.followers.discard(slot)
        if slot < 0:
            _leave(group, key)
        if not group.open and not group.slots:
            self._forget(name & ~FOLLOWS)

    def _obtain(self, name: int, tenant: Tenant) -> Group:
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(tenant)
            self.hiding += not is_named(name)
        return group

    def _forget(self, name: int) -> Group | None:
        group = self._groups.pop(name, None)
        if group is not None:
            self.hiding -= not is_named(name)
        return group

    def whole(self, name: int) -> bool:
        return not self._groups[name].open

    def mates(self, name: int) -> set[int]:
        """Slots of all complete members."""
        return self._groups[name & ~FOLLOWS].slots

    def end_with(self, name: int, slot: int) -> set[int]:
        """Slots of all that end when this member does."""
        return {slot} if name & FOLLOWS else self._groups[name].slots

    def leaders(self, name: int) -> set[int]:
        """Slots of those whose end ends all others."""
        group = self._groups[name & ~FOLLOWS]
        return group.slots - (group.followers or set())

    def dissolve(self, name: int) -> tuple[list[int], list[Grant]]:
        """A member has ended: what is left to end. Nothing when this is known already, or when it
        is nobody else's end."""
        group = None if name & FOLLOWS else self._forget(name)
        if group is None:
            return [], []
        writing = group.tenant.writing
        grants = [writing[key] for key in sorted(group.open or ()) if key in writing]
        return sorted(group.slots), [
            (put, index) for put, index in grants if put.groups and put.groups[index] == name
        ]


def _leave(group: Group, key: bytes) -> None:
    """The key is not in writing any more."""
    if group.open is not None:
        group.open.discard(key)
        group.open = group.open or None


def is_named(name: int) -> bool:
    """Is it a group of several puts, by name?"""
    return bool(name & NAMED_GROUP)


def names_of(numbers: Sequence[int], first: int) -> list[int]:
    """Names of the groups of grants with these numbers, whose generations begin at `first`."""
    seen: dict[int, int] = {}
    return [
        number if is_named(number) else seen.setdefault(number, generation) if number else 0
        for generation, number in enumerate(numbers, first)
    ]
