"""Exists, locate, report.

Rules. Exists answers yes for a complete object with a replica that a reader may be sent to; it
changes nothing. Locate answers such replicas, renews the lease and counts as the access that the
order of eviction goes by. A report of a replica whose *bytes* are wrong ends that replica; a report
that a node could not be *reached* takes the placement out of answers for `doubt_ms`, and makes the
node suspect if it missed a heartbeat as well. A mere timeout counts only if it did: the reader may
have stood still, or given less time than a disk takes. A report that names another generation is
late and changes nothing. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mooncake_py.errors import (
    OK,
    ChecksumMismatch,
    LeaseExpired,
    ObjectNotFound,
    PeerUnreachable,
    TransferTimeout,
    UsageError,
)
from mooncake_py.master.commands import (
    Applied,
    Exists,
    Locate,
    Located,
    Present,
    Refused,
    Report,
    Statuses,
)
from mooncake_py.master.groups import is_named
from mooncake_py.master.lease import lease_length_ms
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.membership import ALIVE, DRAINING, SUSPECT
from mooncake_py.master.objects import (
    GROUP,
    LONG_LEASE,
    PLACE_BITS,
    PLACE_MASK,
    REPLICAS,
    TTL,
    ObjectTable,
)
from mooncake_py.master.state import CatalogState
from mooncake_py.master.stripes import part_slots
from mooncake_py.master.tenant import Tenant
from mooncake_py.master.work import Work
from mooncake_py.model import (
    BATCH_MAX_KEYS,
    EXTENT_ALIGN_BYTES,
    PART_ROW,
    PLACEMENT_ROW,
)

_MISS = ObjectNotFound.code
_SPECIAL = REPLICAS | TTL | GROUP
_FEW = 8  # keys that are not worth columns
# As PLACEMENT_ROW has it.
_PLACEMENT = np.dtype(
    [("key", "<u4"), ("entry", "<u4"), ("start", "<u8"), ("length", "<u8"), ("generation", "<u8")]
)
_WRONG_BYTES = (ChecksumMismatch.code, LeaseExpired.code)
_UNREACHED = (PeerUnreachable.code, TransferTimeout.code)


def _too_many(keys: Sequence[bytes]) -> Refused:
    return Refused(
        UsageError.code, f"{len(keys)} keys in one call, at most {BATCH_MAX_KEYS} are allowed"
    )


def exists(state: CatalogState, command: Exists, now_ms: int) -> Applied:
    keys = command.keys
    if len(keys) > BATCH_MAX_KEYS:
        return Applied(_too_many(keys))
    tenant = state.tenants.find(command.tenant)
    if tenant is None:
        present = bytes(len(keys))
    elif not (state.members.impaired or state.doubts or state.table.ttls or state.groups.hiding):
        present = tenant.complete.has_each(keys)
    else:
        present = bytes(map(_readable(state, tenant, now_ms), keys))
    if command.prefix:
        first = present.find(0)
        if first >= 0:
            present = present[: first + 1]
    return Applied(Present(present))


def _readable(state: CatalogState, tenant: Tenant, now_ms: int) -> Callable[[bytes], bool]:
    table, complete = state.table, tenant.complete

    def readable(key: bytes) -> bool:
        slot = complete.get(key)
        if slot is None:
            return False
        if table.flags[slot] & TTL and table.ttls[slot] <= now_ms:
            return False
        return bool(_readable_places(state, slot, now_ms))

    return readable


def locate(state: CatalogState, command: Locate, now_ms: int) -> Applied:
    keys = command.keys
    if len(keys) > BATCH_MAX_KEYS:
        return Applied(_too_many(keys))
    lease_ms = lease_length_ms(command.lease_ms, state.settings)
    tenant = state.tenants.find(command.tenant)
    if tenant is None:
        misses = min(1, len(keys)) if command.prefix else len(keys)
        return Applied(Located(bytes([_MISS]) * misses, (), b"", lease_ms))
    table = state.table
    found = _Found()
    status = bytearray(len(keys))
    hits = tenant.complete.find_many(keys)
    if len(keys) < _FEW or not _add_usual(state, hits, command.prefix, status, found):
        _add_any(state, hits.tolist(), command.prefix, status, found, now_ms)
    slots = found.slots
    objects = _own_generations(table, slots, status) if found.moved else b""
    _count_located(state, tenant, slots + found.further, lease_ms, now_ms)
    for counters in (state.counters, tenant.counters):
        counters["locate_hits"] += len(slots)
        counters["locate_misses"] += len(status) - len(slots)
    ids = [state.members.at(index).segment_id for index in found.entries]
    rows, parts = b"".join(found.rows), b"".join(found.parts)
    answer = Located(bytes(status), ids, rows, lease_ms, parts, objects)
    if lease_ms > state.settings.lease_ms:  # a later master must know that there may be such ones
        return Applied(answer, state.lingering.lengthen(lease_ms, now_ms), durable_first=True)
    return Applied(answer)


@dataclass(slots=True)
class _Found:
    """Of one locate, in the making."""

    slots: list[int] = field(default_factory=list)
    entries: dict[int, int] = field(default_factory=dict)  # segment index -> entry of the table
    rows: list[bytes] = field(default_factory=list)  # PLACEMENT
    parts: list[bytes] = field(default_factory=list)  # PART
    further: list[int] = field(default_factory=list)  # slots of parts
    moved: bool = False  # some replica has another generation than its object


def _add_usual(
    state: CatalogState, hits: NDArray[np.int32], prefix: bool, status: bytearray, found: _Found
) -> bool:
    """Rows of all, column by column, so that they wait for memory together; False, and nothing is
    done: some of them are not the usual object."""
    table = state.table
    missing = hits < 0
    if prefix and missing.any():
        first = int(missing.argmax())
        hits, missing = hits[:first], missing[: first + 1]
    there = np.flatnonzero(hits >= 0)
    slots = hits[there].astype(np.int64)
    careful = state.members.impaired or state.doubts
    if careful or (table.flags_column.many[slots] & np.uint16(_SPECIAL)).any():
        return False
    places = table.place_column.many[slots]
    on = (places >> np.uint64(PLACE_BITS)).astype(np.int64)
    rows = np.empty(len(slots), dtype=_PLACEMENT)
    rows["entry"] = _entries_of(on, found.entries)
    rows["key"] = there
    rows["start"] = (places & np.uint64(PLACE_MASK)) * np.uint64(EXTENT_ALIGN_BYTES)
    rows["length"] = table.length_column.many[slots]
    rows["generation"] = table.generation_column.many[slots]
    found.rows.append(rows.tobytes())
    found.slots = slots.tolist()
    status[:] = (missing * np.uint8(_MISS)).tobytes()
    return True


def _entries_of(on: NDArray[np.int64], entries: dict[int, int]) -> NDArray[np.int64]:
    """Entry of each of these segments, in the order in which they appear; `entries` is filled."""
    entries.update((index, entry) for entry, index in enumerate(dict.fromkeys(on.tolist())))
    entry_of = np.zeros(max(entries, default=0) + 1, dtype=np.int64)
    entry_of[list(entries)] = range(len(entries))
    return entry_of[on]


def _add_any(
    state: CatalogState,
    hits: Sequence[int],
    prefix: bool,
    status: bytearray,
    found: _Found,
    now_ms: int,
) -> None:
    """Rows of any objects, one by one."""
    table, entries, pack = state.table, found.entries, PLACEMENT_ROW.pack
    careful = bool(state.members.impaired or state.doubts)
    for i, slot in enumerate(hits):
        good = slot >= 0
        if good and (careful or table.flags[slot] & _SPECIAL):
            good = _add_special(state, slot, i, found, now_ms)
        elif good:
            place = table.place[slot]
            entry = entries.setdefault(place >> PLACE_BITS, len(entries))
            start = (place & PLACE_MASK) * EXTENT_ALIGN_BYTES
            row = (i, entry, start, table.length[slot], table.generation[slot])
            found.rows.append(pack(*row))
        if good:
            found.slots.append(slot)
            continue
        status[i] = _MISS
        if prefix:
            del status[i + 1 :]
            break


def _own_generations(table: ObjectTable, slots: Sequence[int], status: bytearray) -> bytes:
    """One a key, from the slots of those that were found."""
    left = iter(slots)
    own = [0 if code else table.generation[next(left)] for code in status]
    return struct.pack(f"<{len(own)}Q", *own)


def _add_special(state: CatalogState, slot: int, i: int, found: _Found, now_ms: int) -> bool:
    """Rows of an object that is not the usual one; False: nobody may be sent to it."""
    table = state.table
    if table.flags[slot] & TTL and table.ttls[slot] <= now_ms:
        return False
    further = part_slots(table, state.tenants.at(table.tenant[slot]), slot)
    if not further:
        rows = [PLACEMENT_ROW.pack(*row) for row in _rows_of(state, slot, i, found, now_ms)]
        found.rows += rows
        return bool(rows)
    start, parts = 0, []
    for part in (slot, *further):
        rows = [PART_ROW.pack(*row, start) for row in _rows_of(state, part, i, found, now_ms)]
        if not rows:
            return False
        parts += rows
        start += table.length[part]
    found.parts += parts
    found.further += further
    return True


def _count_located(
    state: CatalogState, tenant: Tenant, slots: list[int], lease_ms: int, now_ms: int
) -> None:
    """Leases, heat, and the order of eviction."""
    table = state.table
    if lease_ms > state.settings.lease_ms:
        until = now_ms + lease_ms
        for slot in slots:
            table.leases[slot] = max(until, table.leases.get(slot, 0))
            table.flags[slot] |= LONG_LEASE
    if state.settings.hot_copies_max:
        heat = table.heat
        with suppress(ValueError):  # one that cannot be hotter
            for slot in slots:
                heat[slot] += 1
    slots.reverse()  # so that the tail of a prefix goes before its head
    state.touch(tenant, slots, now_ms)


def _rows_of(
    state: CatalogState, slot: int, i: int, found: _Found, now_ms: int
) -> list[tuple[int, int, int, int, int]]:
    """A row for every replica that a reader may be sent to."""
    table, entries = state.table, found.entries
    own, length = table.generation[slot], table.length[slot]
    rows = []
    for place in _readable_places(state, slot, now_ms):
        entry = entries.setdefault(place >> PLACE_BITS, len(entries))
        generation = table.replica_generation(slot, place)
        found.moved |= generation != own
        start = (place & PLACE_MASK) * EXTENT_ALIGN_BYTES
        rows.append((i, entry, start, length, generation))
    return rows


def _readable_places(state: CatalogState, slot: int, now_ms: int) -> list[int]:
    """Places that a reader may be sent to; none unless the whole group can be read, if it is one of
    a put."""
    if state.table.flags[slot] & GROUP and not is_named(state.table.groups[slot]):
        name = state.table.groups[slot]
        if not state.groups.whole(name) or not all(
            _own_places(state, mate, now_ms) for mate in state.groups.mates(name)
        ):
            return []
    return _own_places(state, slot, now_ms)


def _own_places(state: CatalogState, slot: int, now_ms: int) -> list[int]:
    impaired, doubts = state.members.impaired, state.doubts
    generation = state.table.generation[slot]
    return [
        place
        for place in state.table.places(slot)
        if place >> PLACE_BITS not in impaired
        and doubts.get((generation, place >> PLACE_BITS), 0) <= now_ms
    ]


def report(state: CatalogState, command: Report, now_ms: int) -> Applied:
    keys = command.keys
    columns = (command.generations, command.segment_ids, command.codes)
    ragged = len(command.incarnations) not in (0, len(keys))
    if len(keys) > BATCH_MAX_KEYS or any(len(column) != len(keys) for column in columns) or ragged:
        return Applied(Refused(UsageError.code, "too many keys, or columns differ in length"))
    work = Work()
    tenant = state.tenants.find(command.tenant)
    incarnations = command.incarnations or [0] * len(keys)
    rows = zip(keys, *columns, incarnations, strict=True)
    for key, generation, segment_id, code, incarnation in rows:
        segment = state.members.by_id.get(segment_id)
        if segment is not None and incarnation not in (0, segment.incarnation):
            continue  # another process has this memory now
        slot = tenant.complete.get(key) if tenant is not None else None
        if segment is None or slot is None or not _is_of(state, slot, segment.index, generation):
            continue
        if code in _WRONG_BYTES:
            state.counters["reports_wrong_bytes"] += 1
            state.lose_replica(work, slot, segment.index, Event.DAMAGED, now_ms)
        elif code in _UNREACHED:
            state.counters["reports_unreached"] += 1
            missed = now_ms - segment.seen_ms > 2 * state.settings.heartbeat_ms
            if code == TransferTimeout.code and not missed:
                continue  # it was late by the reader's clock, and the reader may have stood still
            state.doubts[state.table.generation[slot], segment.index] = (
                now_ms + state.settings.doubt_ms
            )
            if missed and segment.state in (ALIVE, DRAINING):
                state.members.set_state(segment, SUSPECT)
    return work.done(Statuses(bytes([OK]) * len(keys)), now_ms)


def _is_of(state: CatalogState, slot: int, index: int, generation: int) -> bool:
    """Is this the generation of the object's replica on that segment?"""
    return any(
        place >> PLACE_BITS == index and state.table.replica_generation(slot, place) == generation
        for place in state.table.places(slot)
    )
