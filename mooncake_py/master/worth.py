"""Cost-aware eviction: what is cheapest to lose for the space it takes goes first.

Rules (GreedyDual-Size-Frequency, after Cherkasova 1998). Losing an object costs its next reader a
fixed part, `_MISS_BYTES` worth of work, and as much again for every byte that must be recomputed;
the *worth* of a byte of space is that cost by the extent's size, times how often the object was
used and times the `recompute_cost` that its put gave it. An object is ranked by its worth plus the
pool's *clock* at its last use. The lowest rank goes, and the clock moves on to it; so what was used
much, but long ago, is overtaken in the end. Equal ranks go in order of use, so the tail of a chain
goes before its middle.

A heap holds one entry an object. A use changes the rank and leaves the entry, which is lower then;
it is put right when it comes to the top. Entries of objects that ended are dropped there, too, or
all at once when they are more than half. Costs about 300 bytes an object beside the table.

Protected objects are parked when they are met (see `eviction.py`). Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from mooncake_py.master.eviction import Links, Pool
from mooncake_py.master.objects import HARD_PIN, PARKED, READ, SOFT_PIN, ObjectTable
from mooncake_py.model import extent_bytes

_MISS_BYTES = 4096
_USES_MAX = 255
_STALE_MIN = 1024  # entries of ended objects that are never worth a clean-up


class _Rank(NamedTuple):
    height: float
    order: int  # of its last use among all
    uses: int


class Worth(Pool):
    lists = 2

    def __init__(self, table: ObjectTable, links: Links, lease_ms: int, spare_ms: int = 0) -> None:
        super().__init__(table, links, lease_ms, spare_ms)
        self._plain, self._soft = self._heads
        self._ranks: dict[int, _Rank] = {}
        self._heap: list[tuple[float, int, int, int]] = []  # height, order, slot, generation
        self._clock = 0.0
        self._order = 0

    def _enter(self, slot: int) -> None:
        if self._table.flags[slot] & SOFT_PIN:
            self._links.append(slot, self._soft)
            return
        self._links.append(slot, self._plain)
        if slot not in self._ranks:
            self._use(slot, 0)
        self._enlist(slot)

    def _return(self, slot: int) -> None:
        self._enter(slot)

    def touch(self, slots: Iterable[int], now_ms: int) -> None:
        stamp, flags, ranks = self._table.stamp, self._table.flags, self._ranks
        for slot in slots:
            stamp[slot] = now_ms
            flags[slot] |= READ
            rank = ranks.get(slot)
            if rank is not None:
                self._use(slot, rank.uses)

    def renew(self, slot: int, now_ms: int) -> None:
        rank = self._ranks.get(slot)
        if rank is not None:
            self._use(slot, rank.uses)

    def remove(self, slot: int) -> None:
        super().remove(slot)
        self._ranks.pop(slot, None)

    def _use(self, slot: int, uses_before: int) -> None:
        length = self._table.length[slot]
        uses = min(_USES_MAX, uses_before + 1)
        self._order += 1
        cost = self._table.costs.get(slot, 1) if self._table.costs else 1
        worth = uses * cost * (_MISS_BYTES + length) / extent_bytes(length)
        self._ranks[slot] = _Rank(self._clock + worth, self._order, uses)

    def _enlist(self, slot: int) -> None:
        if len(self._heap) > 2 * len(self._ranks) + _STALE_MIN:
            self._heap = [each for each in self._heap if self._current(each[2], each[3])]
            heapq.heapify(self._heap)
        rank = self._ranks[slot]
        entry = (rank.height, rank.order, slot, self._table.generation[slot])
        heapq.heappush(self._heap, entry)

    def _current(self, slot: int, generation: int) -> bool:
        """Is this object there, and neither parked nor pinned?"""
        table = self._table
        return (
            slot in self._ranks
            and table.generation[slot] == generation
            and not table.flags[slot] & (HARD_PIN | SOFT_PIN | PARKED)
        )

    def _choose(self, now_ms: int) -> int:
        heap = self._heap
        while heap:
            height, order, slot, generation = heap[0]
            if not self._current(slot, generation):
                heapq.heappop(heap)
                continue
            rank = self._ranks[slot]
            if rank.order != order:
                heapq.heapreplace(heap, (rank.height, rank.order, slot, generation))
                continue
            until = self._table.leased_until(slot, self._lease_ms)
            if until > now_ms:
                heapq.heappop(heap)
                self.set_aside(slot, until)
                continue
            self._clock = height
            return slot
        return self._soft_victim(self._soft, now_ms)
