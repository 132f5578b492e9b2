"""Groups: objects that are useless alone and therefore have one fate.

Rules. Keys with the same non-zero number in one put start form a group, named by the generation of
its first member. No member is reported present before all are committed, nor while one cannot be
read. As soon as one ends, for whatever reason, the others end too; so eviction takes the whole
group or, while any member is leased, none of it. If one member cannot be granted, none is. A key
that exists already is not part of the new group. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake_py.master.tenant import Grant, Put, Tenant


@dataclass(slots=True)
class Group:
    tenant: Tenant
    open: set[bytes] = field(default_factory=set)  # keys in writing
    slots: set[int] = field(default_factory=set)  # of complete members


class Groups:
    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def begin(self, put: Put) -> None:
        """Members in writing."""
        writing = put.tenant.writing
        for index, (key, name) in enumerate(zip(put.keys, put.groups, strict=True)):
            if name and writing.get(key) == (put, index):
                self._obtain(name, put.tenant).open.add(key)

    def join(self, name: int, tenant: Tenant, key: bytes, slot: int) -> None:
        """A complete member."""
        group = self._obtain(name, tenant)
        group.open.discard(key)
        group.slots.add(slot)

    def leave(self, name: int, key: bytes, slot: int) -> None:
        """A member, in writing (slot -1) or complete, is not there any more."""
        group = self._groups.get(name)
        if group is None:
            return
        group.slots.discard(slot)
        if slot < 0:
            group.open.discard(key)
        if not group.open and not group.slots:
            del self._groups[name]

    def _obtain(self, name: int, tenant: Tenant) -> Group:
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(tenant)
        return group

    def whole(self, name: int) -> bool:
        return not self._groups[name].open

    def mates(self, name: int) -> set[int]:
        """Slots of all complete members."""
        return self._groups[name].slots

    def dissolve(self, name: int) -> tuple[list[int], list[Grant]]:
        """A member has ended: what is left to end. Nothing when this is known already."""
        group = self._groups.pop(name, None)
        if group is None:
            return [], []
        writing = group.tenant.writing
        grants = [writing[key] for key in sorted(group.open) if key in writing]
        return sorted(group.slots), [
            (put, index) for put, index in grants if put.groups and put.groups[index] == name
        ]


def names_of(numbers: Sequence[int], first: int) -> list[int]:
    """Names of the groups of grants with these numbers, whose generations begin at `first`."""
    seen: dict[int, int] = {}
    return [
        seen.setdefault(number, generation) if number else 0
        for generation, number in enumerate(numbers, first)
    ]
