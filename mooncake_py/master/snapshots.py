"""From a state to a snapshot: the log in its shortest form, made in slices. `replay.py` reads it.

A snapshot stands for all records before the moment it was begun. What is small is written down at
that moment; objects follow slot by slot, a few at a time, while the catalog goes on, then graves
(unrecorded.py) and what rests, as they were. Until a slot has had its turn, what is there is
written down before it ends. So every object of that moment is in the snapshot. Some that came later
are, too, and replicas are as they were at their slot's turn: the records after that moment say it
all again, which changes nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from mooncake_py.master import records
from mooncake_py.master.allocator import UNIT_BYTES
from mooncake_py.master.membership import GONE, segment_fields
from mooncake_py.master.objects import HARD_PIN, PLACE_BITS, PLACE_MASK, REPLICAS, SOFT_PIN, TTL
from mooncake_py.master.puts import grant_fields
from mooncake_py.master.quotas import quota_fields
from mooncake_py.master.records import GrantFields
from mooncake_py.master.state import CatalogState
from mooncake_py.master.tenant import Put, Tenant
from mooncake_py.master.unrecorded import records_of_graves
from mooncake_py.master.work import Work
from mooncake_py.model import is_reserved

STEP_SLOTS = 512  # about a millisecond
_RUN = 1024  # objects a record
_RESTING_RUN = 4096


class Slices:
    """A snapshot in the making. `step` until it answers False; then `packed` is the whole of it."""

    def __init__(self, state: CatalogState, now_ms: int = 0) -> None:
        self._state = state
        self._now_ms = now_ms
        self._next = 0
        self._slots = len(state.table.key)
        self.packed = bytearray()
        self._graves = state.unrecorded.graves()
        self._resting = list(state.resting)
        self._write(_small_records(state, now_ms))
        state.before_drop = self._before_drop

    def step(self, count: int = STEP_SLOTS) -> bool:
        """Write down so many slots, or a like amount of others. False: that was all."""
        start, self._next = self._next, self._next + count
        if start < self._slots:
            stop = min(self._next, self._slots)
            live = self._state.table.key.live(start, stop)
            self._write(_object_records(self._state, self._now_ms, live.tolist()))
            return True
        self._state.before_drop = None
        if self._graves:
            some, self._graves[-count:] = self._graves[-count:], []
            self._write(records_of_graves(some))
            return True
        rows = self._resting[-_RESTING_RUN:]
        del self._resting[-_RESTING_RUN:]
        self._write([_resting_record(rows)])
        return bool(self._resting)

    def _before_drop(self, slot: int) -> None:
        if self._next <= slot < self._slots:
            self._write(_object_records(self._state, self._now_ms, [slot]))

    def _write(self, found: Iterable[records.Record]) -> None:
        for record in found:
            data = records.encode(record)
            self.packed += records.length_of(data)
            self.packed += data


def snapshot(state: CatalogState, now_ms: int = 0) -> bytes:
    """The state as records, in one go. Cost: all objects."""
    slices = Slices(state, now_ms)
    while slices.step(1 << 20):
        pass
    return bytes(slices.packed)


def _small_records(state: CatalogState, now_ms: int) -> Iterator[records.Record]:
    members = state.members
    yield records.Marks(state.generation_mark, members.next_segment_id)
    yield records.Recorded(state.next_generation, state.unrecorded.voids, _reserved(state))
    if state.lingering.longest_ms is not None:
        yield records.Leases(state.lingering.longest_ms)
    yield from state.unrecorded.records_of_sweeps()
    for segment in members:
        if segment.state != "gone":
            yield segment_fields(segment)
    for tenant in state.tenants:
        if tenant.quota is not None:
            yield quota_fields(tenant)
        yield from _grant_records(state, tenant, now_ms)


def _resting_record(rows: list[tuple[int, int, int, int]]) -> records.Resting:
    return records.Resting(
        [
            (until, segment_id, start * UNIT_BYTES, units * UNIT_BYTES)
            for until, segment_id, start, units in rows
        ]
    )


def _reserved(state: CatalogState) -> list[tuple[int, int]]:
    """Generations that were granted without a key, and are not committed."""
    generations = (
        put.first + index
        for tenant in state.tenants
        for key, (put, index) in tenant.writing.items()
        if is_reserved(key)
    )
    return [(each, each + 1) for each in sorted(generations)]


def _grant_records(state: CatalogState, tenant: Tenant, now_ms: int) -> Iterator[GrantFields]:
    """Running grants; those of one put together. A reservation ends with its master."""
    by_put: dict[int, tuple[Put, list[int]]] = {}
    for key, (put, index) in tenant.writing.items():
        if not is_reserved(key):
            by_put.setdefault(id(put), (put, []))[1].append(index)
    for put, indices in by_put.values():
        part = replace(
            put,
            keys=[put.keys[i] for i in indices],
            lengths=[put.lengths[i] for i in indices],
            places=[put.places[i] for i in indices],
            groups=[put.groups[i] for i in indices] if put.groups else (),
        )
        yield grant_fields(state, part, now_ms, [put.first + i for i in indices])


def record_replica(
    state: CatalogState, work: Work, slot: int, place: int, own: int, now_ms: int
) -> None:
    """The object has got a replica, with a generation of its own. When all its others are on
    segments that are gone, who follows the records forgot it with the last of these, so they tell
    of it once more."""
    table, members = state.table, state.members
    segment_id = members.at(place >> PLACE_BITS).segment_id
    work.copy(table.generation[slot], own, segment_id, place & PLACE_MASK)
    others = (each for each in table.places(slot) if each != place)
    if all(members.at(each >> PLACE_BITS).state == GONE for each in others):
        work.records += map(records.encode, _object_records(state, now_ms, [slot]))


def _object_records(
    state: CatalogState, now_ms: int, live: Sequence[int]
) -> Iterator[records.Record]:
    """These complete objects, in runs that share tenant, pins, TTL, cost and how many replicas they
    want; after each run the generations of its copies."""
    table = state.table
    alike: dict[tuple[int, int, int, bool, int, int], list[int]] = {}
    for slot in live:
        flags = table.flags[slot]
        kind = (
            table.tenant[slot],
            table.soft_pins[slot] if flags & SOFT_PIN else 0,
            table.ttls[slot] if flags & TTL else 0,
            bool(flags & HARD_PIN),
            table.wanted.get(slot, 1),
            table.costs.get(slot, 1),
        )
        alike.setdefault(kind, []).append(slot)
    ids = {segment.index: segment.segment_id for segment in state.members}
    for (tenant, soft_pin, ttl, hard_pin, wanted, cost), slots in alike.items():
        rest = iter(slots)
        while run := list(islice(rest, _RUN)):
            yield GrantFields(
                now_ms=now_ms,
                expires_ms=0,
                tenant=state.tenants.at(tenant).name,
                soft_pin_ms=soft_pin,
                ttl_ms=ttl,
                hard_pin=hard_pin,
                keys=[key or b"" for key in table.key.many(run)],
                generations=[table.generation[slot] for slot in run],
                lengths=[table.length[slot] for slot in run],
                replicas=[len(table.places(slot)) for slot in run],
                extents=[
                    number
                    for slot in run
                    for place in table.places(slot)
                    for number in (ids[place >> PLACE_BITS], (place & PLACE_MASK) * UNIT_BYTES)
                ],
                groups=[table.groups.get(slot, 0) for slot in run] if table.groups else (),
                complete=True,
                wanted=wanted,
                cost=cost,
            )
            copies = [
                    (table.generation[slot], table.copied[place], ids[place >> PLACE_BITS],
                     (place & PLACE_MASK) * UNIT_BYTES)
                    for slot in run
                    if table.flags[slot] & REPLICAS
                    for place in table.places(slot)
                    if place in table.copied
            ]  # fmt: skip
            if copies:
                yield records.Copies(copies)
