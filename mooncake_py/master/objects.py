"""Complete objects in packed columns: 43 bytes an object besides its key and index entry (keys.py).

A slot is a row number in all columns. Columns are reserved for `objects_max` rows at once; pages of
memory that no row has used cost nothing, and no column ever moves (growing by copy would stop the
owner thread and leave holes in the heap). `Column` gives both views of one: a memoryview for single
values, a numpy array for many. What few objects have (further replicas, long leases, pins, TTL,
group, cost) is in side dictionaries, and `flags` says so, so that the usual object costs one test.

`place` holds the first replica: segment index in the upper bits, start in units of 64 bytes in
the lower `PLACE_BITS`. A replica that was copied later has a generation of its own, by which its
node and its readers know it; `copied` has it by place. `heat` counts Locates of late, if anybody
wants to know (repair.py): another two bytes then.
Not thread-safe; pure.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mooncake_py._native.keys import NativeKeys
from mooncake_py.master.keys import CompleteKeys, SlotKeys

PLACE_BITS = 44
PLACE_MASK = (1 << PLACE_BITS) - 1

READ = 1  # located at least once: leased until stamp + lease_ms
LONG_LEASE = 2  # leased until `leases[slot]`
REPLICAS = 4  # more than one, or copied, or wanted: `more[slot]`, which may be empty
SOFT_PIN = 8  # until `soft_pins[slot]`
HARD_PIN = 16
TTL = 32  # until `ttls[slot]`
GROUP = 64  # `groups[slot]`
PARKED = 128  # not in the order of eviction for now
COLD = 256  # on a disk only, and in no pool (tiering.py)
ON_DISK = 512  # one of its replicas is on a disk
COSTLY = 1024  # `costs[slot]`
_PLAIN = READ | HARD_PIN | PARKED | ON_DISK | COLD  # flags without an entry in a side dictionary


class Column:
    """One packed column of fixed length, all 0."""

    __slots__ = ("many", "one")

    def __init__(self, kind: str, count: int) -> None:
        self.many: NDArray[np.unsignedinteger[Any]] = np.zeros(count, dtype=kind)
        view = memoryview(cast("Any", self.many))
        self.one: MutableSequence[int] = cast("MutableSequence[int]", view)


class ObjectTable:
    """Columns of complete objects."""

    __slots__ = (
        "_clear_key",
        "_free",
        "_native",
        "_set_key",
        "capacity",
        "copied",
        "costs",
        "flags",
        "flags_column",
        "generation",
        "generation_column",
        "groups",
        "heat",
        "heat_column",
        "key",
        "leases",
        "length",
        "length_column",
        "more",
        "place",
        "place_column",
        "soft_pins",
        "stamp",
        "stamp_column",
        "tenant",
        "tenant_column",
        "ttls",
        "wanted",
    )

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._native = NativeKeys(capacity)
        self.key = SlotKeys(self._native)
        self._set_key, self._clear_key = self._native.set, self._native.clear
        self.place_column = Column("u8", capacity)
        self.place = self.place_column.one
        self.generation_column = Column("u8", capacity)
        self.generation = self.generation_column.one
        self.length_column = Column("u8", capacity)
        self.length = self.length_column.one
        self.stamp_column = Column("u8", capacity)
        self.stamp = self.stamp_column.one  # ms of the last Locate, or of the commit
        self.tenant_column = Column("u2", capacity)
        self.tenant = self.tenant_column.one
        self.flags_column = Column("u2", capacity)
        self.flags = self.flags_column.one
        self.heat_column = Column("u2", capacity)
        self.heat = self.heat_column.one
        self._free = array("I")  # slots below len(key) without an object
        self.more: dict[int, tuple[int, ...]] = {}  # places of replicas after the first
        self.leases: dict[int, int] = {}
        self.soft_pins: dict[int, int] = {}
        self.ttls: dict[int, int] = {}
        self.groups: dict[int, int] = {}
        self.copied: dict[int, int] = {}  # generation of a replica, by its place
        self.wanted: dict[int, int] = {}  # replicas that the put asked for
        self.costs: dict[int, int] = {}  # times as dear to recompute as usual

    def __len__(self) -> int:
        return self.key.used - len(self._free)

    def keys_of(self, tenant: int, name: str) -> CompleteKeys:
        """The index of the keys of a tenant that has this number from now on."""
        self._native.name_tenant(tenant, name.encode())
        return CompleteKeys(self._native, self.key, tenant)

    def forget_keys_of(self, tenant: int) -> None:
        """There is no tenant with this number any more; it had no keys."""
        self._native.forget_tenant(tenant)

    @property
    def native_keys(self) -> NativeKeys:
        """For who answers from them natively (quick.py)."""
        return self._native

    def add(self, key: bytes, generation: int, length: int, place: int, tenant: int) -> int:
        """A slot that holds these values; stamp and flags are 0. The table must not be full."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self.key.used
            self.key.used += 1
        status = self._set_key(slot, tenant, key)  # found by it only after `CompleteKeys.enter`
        if status < 0:
            self._free.append(slot)
            self._native.fail(status)
        self.generation[slot] = generation
        self.length[slot] = length
        self.place[slot] = place
        self.tenant[slot] = tenant
        return slot

    def drop(self, slot: int) -> None:
        """Empty the slot; it is used again by a later object."""
        if self.flags[slot] & ~_PLAIN:
            for place in self.places(slot):
                self.copied.pop(place, None)
            self.more.pop(slot, None)
            self.wanted.pop(slot, None)
            self.leases.pop(slot, None)
            self.soft_pins.pop(slot, None)
            self.ttls.pop(slot, None)
            self.groups.pop(slot, None)
            self.costs.pop(slot, None)
        self._clear_key(slot)
        self.flags[slot] = 0
        self.stamp[slot] = 0
        if self.heat[slot]:  # else a page of it may be touched for nothing
            self.heat[slot] = 0
        self._free.append(slot)

    def places(self, slot: int) -> tuple[int, ...]:
        """Places of all replicas, the first one first."""
        if self.flags[slot] & REPLICAS:
            return (self.place[slot], *self.more[slot])
        return (self.place[slot],)

    def replica_generation(self, slot: int, place: int) -> int:
        """The generation in the header of this replica."""
        if self.flags[slot] & REPLICAS:
            return self.copied.get(place, self.generation[slot])
        return self.generation[slot]

    def set_wanted(self, slot: int, count: int) -> None:
        """More than one replica was asked for."""
        self.wanted[slot] = count
        self.more.setdefault(slot, ())
        self.flags[slot] |= REPLICAS

    def set_cost(self, slot: int, cost: int) -> None:
        """It is so many times as dear to recompute as others."""
        if cost > 1:
            self.costs[slot] = cost
            self.flags[slot] |= COSTLY

    def add_place(self, slot: int, place: int, generation: int) -> None:
        """One more replica, with a generation of its own."""
        self.keep_places(slot, (*self.places(slot), place))
        self.name_copy(slot, place, generation)

    def name_copy(self, slot: int, place: int, generation: int) -> None:
        """This replica has a generation of its own, unless it is the object's."""
        if generation == self.generation[slot]:
            return
        self.copied[place] = generation
        self.more.setdefault(slot, ())
        self.flags[slot] |= REPLICAS

    def keep_places(self, slot: int, places: tuple[int, ...]) -> None:
        """Replace the replicas by `places` (at least one)."""
        copied = self.copied
        if self.flags[slot] & REPLICAS and copied:
            for place in self.places(slot):
                if place not in places:
                    copied.pop(place, None)
        self.place[slot] = places[0]
        if len(places) > 1 or slot in self.wanted or places[0] in copied:
            self.more[slot] = places[1:]
            self.flags[slot] |= REPLICAS
        else:
            self.more.pop(slot, None)
            self.flags[slot] &= ~REPLICAS

    def leased_until(self, slot: int, lease_ms: int) -> int:
        """End of the running lease; a time in the past when there is none."""
        flags = self.flags[slot]
        if not flags & (READ | LONG_LEASE):
            return 0
        until = self.stamp[slot] + lease_ms
        return max(until, self.leases[slot]) if flags & LONG_LEASE else until

    def slots_on(self, index: int, start: int, stop: int) -> list[int]:
        """Of these slots those with a replica on the segment with this index."""
        stop = min(stop, len(self.key))
        first = self.place_column.many[start:stop] >> np.uint64(PLACE_BITS) == index
        found: list[int] = (np.flatnonzero(first) + start).tolist()
        several = self.flags_column.many[start:stop] & np.uint16(REPLICAS) != 0
        found += [
            slot
            for slot in (np.flatnonzero(several & ~first) + start).tolist()
            if any(place >> PLACE_BITS == index for place in self.more[slot])
        ]
        names = self._native.names
        return [slot for slot in found if names[slot]]

    def live(self) -> list[int]:
        """Slots that hold an object, in order. Cost: all slots."""
        found: list[int] = self.live_slots().tolist()
        return found

    def live_slots(self) -> NDArray[np.int64]:
        """Slots that hold an object, in order."""
        return self.key.live()
