"""From a state to a snapshot: the log in its shortest form. `replay.py` reads it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from mooncake_py.master import records
from mooncake_py.master.allocator import UNIT_BYTES
from mooncake_py.master.membership import segment_fields
from mooncake_py.master.objects import COPIED, HARD_PIN, PLACE_BITS, PLACE_MASK, SOFT_PIN, TTL
from mooncake_py.master.puts import grant_fields
from mooncake_py.master.quotas import quota_fields
from mooncake_py.master.records import GrantFields
from mooncake_py.master.state import CatalogState
from mooncake_py.master.tenant import Put
from mooncake_py.model import is_reserved

_RUN = 1024  # objects a record


def snapshot(state: CatalogState, now_ms: int = 0) -> bytes:
    """The state as records. Cost: all objects."""
    return records.pack(records.encode(each) for each in _snapshot_records(state, now_ms))


def _snapshot_records(state: CatalogState, now_ms: int) -> Iterator[records.Record]:
    members = state.members
    yield records.Marks(state.generation_mark, members.next_segment_id)
    yield records.Recorded(state.next_generation, state.unrecorded.voids, _reserved(state))
    yield from state.unrecorded.records_of_graves()
    for segment in members:
        if segment.state != "gone":
            yield segment_fields(segment)
    yield from _object_records(state, now_ms)
    for tenant in state.tenants:
        if tenant.quota is not None:
            yield quota_fields(tenant)
        for key, (put, index) in tenant.writing.items():
            if not is_reserved(key):  # a reservation ends with its master
                yield grant_fields(state, _alone(put, index), now_ms)
    yield records.Resting(
        [
            (until, segment_id, start * UNIT_BYTES, units * UNIT_BYTES)
            for until, segment_id, start, units in state.resting
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


def _alone(put: Put, index: int) -> Put:
    """One grant of a put as a put of its own."""
    return replace(
        put,
        first=put.first + index,
        keys=[put.keys[index]],
        lengths=[put.lengths[index]],
        places=[put.places[index]],
        groups=[put.groups[index]] if put.groups else (),
        open_count=1,
    )


def _object_records(state: CatalogState, now_ms: int) -> Iterator[records.Record]:
    """Complete objects in runs that share tenant, pins, TTL and how many replicas they want; after
    each run the generations of its copies."""
    table = state.table
    alike: dict[tuple[int, int, int, bool, int], list[int]] = {}
    for slot in table.live():
        flags = table.flags[slot]
        kind = (
            table.tenant[slot],
            table.soft_pins[slot] if flags & SOFT_PIN else 0,
            table.ttls[slot] if flags & TTL else 0,
            bool(flags & HARD_PIN),
            table.wanted.get(slot, 1),
        )
        alike.setdefault(kind, []).append(slot)
    ids = {segment.index: segment.segment_id for segment in state.members}
    for (tenant, soft_pin, ttl, hard_pin, wanted), slots in alike.items():
        rest = iter(slots)
        while run := list(islice(rest, _RUN)):
            yield GrantFields(
                now_ms=now_ms,
                expires_ms=0,
                tenant=state.tenants.at(tenant).name,
                soft_pin_ms=soft_pin,
                ttl_ms=ttl,
                hard_pin=hard_pin,
                keys=[table.key[slot] or b"" for slot in run],
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
            )
            yield records.Copies(
                [
                    (table.generation[slot], table.copied[place], ids[place >> PLACE_BITS],
                     (place & PLACE_MASK) * UNIT_BYTES)
                    for slot in run
                    if table.flags[slot] & COPIED
                    for place in table.places(slot)
                    if place in table.copied
                ]
            )  # fmt: skip
