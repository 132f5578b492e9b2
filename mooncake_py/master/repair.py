"""Repair and heat: objects get back the replicas they want, and hot ones get another for a while.

Rules. An object that lost a replica and has fewer than its put asked for waits in a heap, hottest
first (by Locates of late if they are counted, then by the last one). Copies of this kind, and those
for heat, share a budget of `repair_bytes_per_s`, filled by time up to one second's worth, and go
only where the cluster stays below the high watermark: they never make others go. What finds no
place is tried again after a second, and when nodes come.

*Heat* is the number of Locates of an object in the running window of `hot_window_ms`, plus half of
that of the window before, and so on; it is counted with `hot_copies_max` above 0 only. An object
whose heat is `hot_factor` times the mean of all others that were located (and at least `hot_min`:
one that is located alone is hot) gets a replica more at the window's end, and loses it when its
heat has fallen below half of that. Clients remember placements for as long as their lease, so heat
counts clients and leases, not reads. Pure.
"""

from __future__ import annotations

import heapq

import numpy as np

from mooncake_py.errors import OK
from mooncake_py.master.copies import start_copy
from mooncake_py.master.membership import GONE
from mooncake_py.master.objects import PLACE_BITS
from mooncake_py.master.state import CatalogState, extent_units
from mooncake_py.master.taskbook import Why
from mooncake_py.master.work import Work
from mooncake_py.model import EXTENT_ALIGN_BYTES

_PARKED_MS = 1_000
_HOT_PER_WINDOW = 64  # new copies at the end of one window
_LOOK_MAX = 256  # objects of the heap looked at in a tick


def repair_step(state: CatalogState, work: Work, now_ms: int) -> None:
    book, settings = state.tasks, state.settings
    passed_ms = min(1_000, now_ms - book.budget_ms)
    book.budget_ms = now_ms
    most = settings.repair_bytes_per_s
    book.budget_bytes = min(most, book.budget_bytes + most * passed_ms // 1_000)
    if book.parked and now_ms >= book.parked_until_ms:
        for entry in book.parked:
            heapq.heappush(book.short, entry)
        book.parked.clear()
    if book.short:
        _repair(state, work, now_ms)
    if settings.hot_copies_max and now_ms >= book.window_ms:
        book.window_ms = now_ms + settings.hot_window_ms
        _end_window(state, work, now_ms)


def _replicas(state: CatalogState, slot: int) -> int:
    """Replicas that are there, on nodes that are not gone."""
    places = state.table.places(slot)
    segments = [state.members.at(place >> PLACE_BITS) for place in places]
    return sum(each.state != GONE and each.disk is None for each in segments)


def _room_units(state: CatalogState) -> int:
    """Units that may be used until the high watermark."""
    segments = state.members.placeable
    capacity = sum(each.allocator.units for each in segments)
    high = int(capacity * state.settings.evict_high_ratio)
    return high - sum(each.used_units for each in segments)


def _repair(state: CatalogState, work: Work, now_ms: int) -> None:
    book, table = state.tasks, state.table
    room = _room_units(state)
    for _ in range(_LOOK_MAX):
        if not book.short or book.budget_bytes <= 0:
            return
        entry = heapq.heappop(book.short)
        slot, generation = entry[2:]
        if table.key[slot] is None or table.generation[slot] != generation:
            continue
        if _replicas(state, slot) >= table.wanted.get(slot, 1):
            continue
        units = extent_units(table.length[slot])
        code = start_copy(state, work, slot, now_ms, Why.REPAIR) if units <= room else -1
        if code == OK:
            room -= units
            book.budget_bytes -= units * EXTENT_ALIGN_BYTES
            if _replicas(state, slot) + 1 >= table.wanted[slot]:
                continue  # a copy that fails puts the object back here
        _park(state, entry, now_ms)


def _park(state: CatalogState, entry: tuple[int, int, int, int], now_ms: int) -> None:
    book = state.tasks
    if not book.parked:
        book.parked_until_ms = now_ms + _PARKED_MS
    book.parked.append(entry)


def _end_window(state: CatalogState, work: Work, now_ms: int) -> None:
    table = state.table
    heat = table.heat_column.many[: len(table.key)]
    warm = int(np.count_nonzero(heat))
    settings = state.settings
    threshold = settings.hot_min
    if warm:
        # heat >= factor * (sum - heat) / (warm - 1), solved for the heat
        total, factor = int(heat.sum(dtype=np.uint64)), settings.hot_factor
        threshold = max(threshold, -(-factor * total // (warm - 1 + factor)))
    _cool(state, work, threshold // 2, now_ms)
    if warm:
        hot = np.flatnonzero(heat >= threshold)
        hottest = hot[np.argsort(heat[hot].astype(np.int64) * -1, kind="stable")]
        for slot in hottest[:_HOT_PER_WINDOW].tolist():
            _spread(state, work, slot, now_ms)
    heat >>= np.uint16(1)


def _cool(state: CatalogState, work: Work, threshold: int, now_ms: int) -> None:
    """Objects that were hot lose what they got for it."""
    table, extra = state.table, state.tasks.extra
    for slot, generation in list(extra.items()):
        if table.key[slot] is None or table.generation[slot] != generation:
            del extra[slot]
        elif table.heat[slot] < threshold:
            del extra[slot]
            if _replicas(state, slot) > table.wanted.get(slot, 1):
                state.shed_replica(work, slot, table.places(slot)[-1] >> PLACE_BITS, now_ms)
                state.counters["hot_replicas_dropped"] += 1


def _spread(state: CatalogState, work: Work, slot: int, now_ms: int) -> None:
    table, book = state.table, state.tasks
    if table.key[slot] is None or slot in book.extra:
        return
    wanted = table.wanted.get(slot, 1)
    units = extent_units(table.length[slot])
    tenant = state.tenants.at(table.tenant[slot])
    if (
        len(table.places(slot)) >= wanted + state.settings.hot_copies_max
        or tenant.quota is not None
        or units > _room_units(state)
        or units * EXTENT_ALIGN_BYTES > book.budget_bytes
    ):
        return
    if start_copy(state, work, slot, now_ms, Why.HOT) == OK:
        book.budget_bytes -= units * EXTENT_ALIGN_BYTES


def find_short(state: CatalogState) -> None:
    """After a restart: which objects have fewer replicas than they want."""
    for slot in list(state.table.wanted):
        state.note_short(slot)
