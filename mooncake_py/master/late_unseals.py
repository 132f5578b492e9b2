"""Extents of objects that ended while readers had a lease: unsealed when that is over. Pure.

Bounded by the leases: an entry stays for `lease_max_ms` at most. Not in the records: a master that
begins compares what nodes hold with what it knows (recovery.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

Extent = tuple[int, int, int, int]  # segment id, start, length, generation


class LateUnseals:
    __slots__ = ("_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, list[Extent]]] = []
        self._numbers = count()

    def add(self, until_ms: int, extents: list[Extent]) -> None:
        heapq.heappush(self._heap, (until_ms, next(self._numbers), extents))

    def due(self, now_ms: int) -> Iterator[Extent]:
        """Take out those whose time has come."""
        heap = self._heap
        while heap and heap[0][0] <= now_ms:
            yield from heapq.heappop(heap)[2]
