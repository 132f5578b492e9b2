"""Pins: what they may take, and how those of objects are set, changed and ended after the put.

Rules. A pin is its tenant's: it counts against what all tenants together, and what this one, may
pin (`hard_pin_max_ratio`, `tenant_hard_pin_max_ratio`, `tenant_soft_pin_max_ratio`). It ends with
its object, with the next pin command for its key, and a soft one at its deadline. A pin replaces
the one before, so that asking again with a later deadline is how one is renewed. What has one fate
has one pin: a command for a member of a group, or for an object in parts, is about all of it; all
objects of a command get the same deadline.

A put may take over the deadlines of another object (`ReplicaPolicy.expires_with`): they are looked
up when it starts, are absolute from then on, and are those of its record.

A soft pin keeps an object in memory, so what lies on a disk alone cannot have one (OUT_OF_SPACE);
a hard pin keeps it there, too. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from mooncake_py.errors import OK, ObjectNotFound, OutOfSpace, QuotaExceeded, UsageError
from mooncake_py.master import records
from mooncake_py.master.commands import Applied, Pin, Refused, Statuses
from mooncake_py.master.groups import is_named
from mooncake_py.master.objects import COLD, GROUP, HARD_PIN, SOFT_PIN
from mooncake_py.master.state import CatalogState, extent_units
from mooncake_py.master.tenant import Tenant
from mooncake_py.master.work import Work
from mooncake_py.model import BATCH_MAX_KEYS, ReplicaPolicy


class Ends(NamedTuple):
    """When a soft pin and the object itself end; 0: never. Counted from the commit, or absolute."""

    soft_pin_ms: int
    ttl_ms: int
    absolute: bool


def ends_of(state: CatalogState, tenant: Tenant, policy: ReplicaPolicy, now_ms: int) -> Ends:
    """Those of a put with this policy."""
    table = state.table
    slot = tenant.complete.get(policy.expires_with.encode()) if policy.expires_with else None
    if slot is not None:
        soft_pin, ttl = table.soft_pins.get(slot, 0), table.ttls.get(slot, 0)
        if not 0 < ttl <= now_ms:
            return Ends(soft_pin if soft_pin > now_ms else 0, ttl, True)
    soft_pin = min(policy.soft_pin_ms, state.settings.soft_pin_max_ms)
    return Ends(soft_pin, policy.ttl_ms, False)


def left_of(ends: Ends, now_ms: int) -> tuple[int, int] | None:
    """Of deadlines that were taken over: ms until the soft pin's and the object's, 0 for none."""
    if not ends.absolute:
        return None
    soft_pin, ttl = (max(1, each - now_ms) if each else 0 for each in ends[:2])
    return soft_pin, ttl


class RoomForPins:
    """What one call may still pin, all of it hard or all of it soft."""

    def __init__(self, state: CatalogState, tenant: Tenant, hard: bool, now_ms: int) -> None:
        capacity = sum(each.allocator.units for each in state.members.placeable)
        settings = state.settings
        if hard:
            room = capacity * settings.hard_pin_max_ratio - state.hard_pinned_units
            own_max = capacity * settings.tenant_hard_pin_max_ratio
            self.left = min(room, own_max - tenant.hard_pinned_units)
        else:
            own_max = capacity * settings.tenant_soft_pin_max_ratio
            self.left = own_max - tenant.soft_pinned_units(now_ms)

    def take(self, units: int) -> bool:
        """So many more; False: that is too much, and nothing was taken."""
        if units > self.left:
            return False
        self.left -= units
        return True


def pin(state: CatalogState, command: Pin, now_ms: int) -> Applied:
    if len(command.keys) > BATCH_MAX_KEYS:
        cause = f"{len(command.keys)} keys, at most {BATCH_MAX_KEYS} are allowed"
        return Applied(Refused(UsageError.code, cause))
    if command.soft_pin_ms < 0 or (command.soft_pin_ms and command.hard_pin):
        return Applied(Refused(UsageError.code, "a pin is soft with a length in ms, or hard"))
    tenant = state.tenants.find(command.tenant)
    if tenant is None:
        return Applied(Statuses(bytes([ObjectNotFound.code]) * len(command.keys)))
    step = _Pin(state, tenant, command, now_ms)
    return step.run()


class _Pin:
    """One pin command in the making."""

    def __init__(self, state: CatalogState, tenant: Tenant, command: Pin, now_ms: int) -> None:
        self.state, self.tenant, self.command, self.now_ms = state, tenant, command, now_ms
        self.hard = command.hard_pin
        wish_ms = min(command.soft_pin_ms, state.settings.soft_pin_max_ms)
        self.soft_until_ms = now_ms + wish_ms if wish_ms else 0
        self.work = Work()
        self.rows: list[tuple[int, int, int]] = []

    def run(self) -> Applied:
        status = bytes(self._one(key) for key in self.command.keys)
        if self.rows:
            self.work.records.append(records.encode(records.Pins(self.rows)))
            self.work.durable = True
        return self.work.done(Statuses(status), self.now_ms)

    def _one(self, key: bytes) -> int:
        state, table = self.state, self.state.table
        slot = state.find_live(self.work, self.tenant, key, self.now_ms)
        if slot is None:
            return ObjectNotFound.code
        slots = [slot]
        if table.flags[slot] & GROUP and not is_named(table.groups[slot]):
            name = table.groups[slot]
            if not state.groups.whole(name):
                return ObjectNotFound.code
            slots = sorted(state.groups.mates(name))
        if self.soft_until_ms and any(table.flags[each] & COLD for each in slots):
            return OutOfSpace.code
        if not self._room(slots):
            return QuotaExceeded.code
        for each in slots:
            set_pin(state, each, self.hard, self.soft_until_ms, self.now_ms)
            self.rows.append((table.generation[each], self.soft_until_ms, int(self.hard)))
        return OK

    def _room(self, slots: list[int]) -> bool:
        """May these be pinned so? Those that are already take no more than before."""
        if not self.hard and not self.soft_until_ms:
            return True
        state, table = self.state, self.state.table
        like = HARD_PIN if self.hard else SOFT_PIN
        units = sum(
            extent_units(table.length[slot]) * state.members.in_memory(table.places(slot))
            for slot in slots
            if not table.flags[slot] & like
        )
        room = RoomForPins(state, self.tenant, self.hard, self.now_ms)
        return not units or room.take(units)


def set_pin(state: CatalogState, slot: int, hard: bool, soft_until_ms: int, now_ms: int) -> None:
    """The object's pin is this from now on; False and 0: none."""
    table = state.table
    tenant = state.tenants.at(table.tenant[slot])
    generation, flags = table.generation[slot], table.flags[slot]
    units = extent_units(table.length[slot]) * state.members.in_memory(table.places(slot))
    if hard != bool(flags & HARD_PIN):
        state.pin(tenant, units if hard else -units)
    tenant.end_soft_pin(generation)
    if flags & COLD:  # in no pool
        table.flags[slot] = flags | HARD_PIN if hard else flags & ~HARD_PIN
        return
    tenant.pool.pin(slot, hard, soft_until_ms, now_ms)
    if soft_until_ms:
        tenant.note_soft_pin(generation, soft_until_ms, units)
