"""Promises with a deadline: leases of readers, grants of writers, and extents that rest.

An extent whose object or grant has ended may still be used by somebody who was promised it: a
reader until the end of its lease, a node that pulls for a grant until the grant's expiry plus a
margin (nodes refuse expired grants; the margin covers a pull that began just before). Until then
the extent *rests*: it belongs to nothing, is not counted as used, and is not given out. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from mooncake_py.master.settings import CatalogSettings

LEASE_MARGIN_MS = 10  # clocks count whole ms, at both ends of a lease


def lease_length_ms(wish_ms: int, settings: CatalogSettings) -> int:
    """The lease that is granted for this wish: never shorter than the default (the order of
    eviction relies on it), never longer than the limit."""
    return min(max(wish_ms, settings.lease_ms), settings.lease_max_ms)


class RestingExtents:
    """Extents that may not be given out yet, by the end of the promise."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        return iter(self._heap)

    def add(self, until_ms: int, segment_id: int, start: int, units: int) -> None:
        heapq.heappush(self._heap, (until_ms, segment_id, start, units))

    def due(self, now_ms: int) -> bool:
        """Has the time of any come?"""
        return bool(self._heap) and self._heap[0][0] <= now_ms

    def ended(self, now_ms: int) -> Iterator[tuple[int, int, int]]:
        """Take out (segment id, start, units) of those whose time has come."""
        heap = self._heap
        while heap and heap[0][0] <= now_ms:
            _, segment_id, start, units = heapq.heappop(heap)
            yield segment_id, start, units
