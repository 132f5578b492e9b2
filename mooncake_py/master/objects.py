"""Complete objects in packed columns: 43 bytes an object besides its key and index entry.

A slot is a row number in all columns. Columns are reserved for `objects_max` rows at once; pages of
memory that no row has used cost nothing, and no column ever moves (growing by copy would stop the
owner thread and leave holes in the heap). `Column` gives both views of one: a memoryview for single
values, a numpy array for many. What few objects have (further replicas, long leases, pins,
TTL, group) is in side dictionaries, and `flags` says so, so that the usual object costs one test.

`place` holds the first replica: segment index in the upper bits, start in units of 64 bytes in
the lower `PLACE_BITS`. Not thread-safe; pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableSequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

PLACE_BITS = 44
PLACE_MASK = (1 << PLACE_BITS) - 1

READ = 1  # located at least once: leased until stamp + lease_ms
LONG_LEASE = 2  # leased until `leases[slot]`
REPLICAS = 4  # more than one: `more[slot]`
SOFT_PIN = 8  # until `soft_pins[slot]`
HARD_PIN = 16
TTL = 32  # until `ttls[slot]`
GROUP = 64  # `groups[slot]`
PARKED = 128  # not in the order of eviction for now


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
        "_free",
        "capacity",
        "flags",
        "generation",
        "groups",
        "key",
        "leases",
        "length",
        "more",
        "place",
        "place_column",
        "soft_pins",
        "stamp",
        "tenant",
        "tenant_column",
        "ttls",
    )

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.key: list[bytes | None] = []
        self.place_column = Column("u8", capacity)
        self.place = self.place_column.one
        self.generation = Column("u8", capacity).one
        self.length = Column("u8", capacity).one
        self.stamp = Column("u8", capacity).one  # ms of the last Locate, or of the commit
        self.tenant_column = Column("u2", capacity)
        self.tenant = self.tenant_column.one
        self.flags = Column("u1", capacity).one
        self._free = array("I")  # slots below len(key) without an object
        self.more: dict[int, tuple[int, ...]] = {}  # places of replicas after the first
        self.leases: dict[int, int] = {}
        self.soft_pins: dict[int, int] = {}
        self.ttls: dict[int, int] = {}
        self.groups: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.key) - len(self._free)

    def add(self, key: bytes, generation: int, length: int, place: int, tenant: int) -> int:
        """A slot that holds these values; stamp and flags are 0. The table must not be full."""
        if self._free:
            slot = self._free.pop()
            self.key[slot] = key
        else:
            slot = len(self.key)
            self.key.append(key)
        self.generation[slot] = generation
        self.length[slot] = length
        self.place[slot] = place
        self.tenant[slot] = tenant
        return slot

    def drop(self, slot: int) -> None:
        """Empty the slot; it is used again by a later object."""
        if self.flags[slot] & ~(READ | HARD_PIN | PARKED):
            self.more.pop(slot, None)
            self.leases.pop(slot, None)
            self.soft_pins.pop(slot, None)
            self.ttls.pop(slot, None)
            self.groups.pop(slot, None)
        self.key[slot] = None
        self.flags[slot] = 0
        self.stamp[slot] = 0
        self._free.append(slot)

    def places(self, slot: int) -> tuple[int, ...]:
        """Places of all replicas, the first one first."""
        if self.flags[slot] & REPLICAS:
            return (self.place[slot], *self.more[slot])
        return (self.place[slot],)

    def keep_places(self, slot: int, places: tuple[int, ...]) -> None:
        """Replace the replicas by `places` (at least one)."""
        self.place[slot] = places[0]
        if len(places) > 1:
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

    def live(self) -> Iterable[int]:
        """Slots that hold an object, in no useful order. Cost: all slots."""
        return (slot for slot, key in enumerate(self.key) if key is not None)

    def live_slots(self) -> NDArray[np.int64]:
        """Slots that hold an object, in order."""
        mask = np.ones(len(self.key), dtype=bool)
        mask[np.array(self._free, dtype=np.int64)] = False
        return np.flatnonzero(mask)
