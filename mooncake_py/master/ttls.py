"""Objects that end at a certain time: which are due. Pure."""

from __future__ import annotations

import heapq

from mooncake_py.master.objects import TTL, ObjectTable


class TtlWatch:
    """Knows the TTLs of a table in the order of their ends. Of objects that ended before, the
    entries stay until their time; `rebuild` drops them."""

    __slots__ = ("_heap", "_table")

    def __init__(self, table: ObjectTable) -> None:
        self._table = table
        self._heap: list[tuple[int, int, int]] = []  # until ms, slot, generation

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, slot: int, until_ms: int) -> None:
        table = self._table
        table.flags[slot] |= TTL
        table.ttls[slot] = until_ms
        heapq.heappush(self._heap, (until_ms, slot, table.generation[slot]))

    def rebuild(self) -> None:
        """Anew, from what the objects say."""
        generation = self._table.generation
        self._heap = [(until, slot, generation[slot]) for slot, until in self._table.ttls.items()]
        heapq.heapify(self._heap)

    def due(self, now_ms: int) -> bool:
        return bool(self._heap) and self._heap[0][0] <= now_ms

    def take(self) -> int:
        """The slot whose time ended first, or -1 if its object had ended before."""
        _, slot, generation = heapq.heappop(self._heap)
        table = self._table
        alive = table.flags[slot] & TTL and table.generation[slot] == generation
        return slot if alive else -1
