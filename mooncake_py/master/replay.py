"""From records back to a state, and from a state to a snapshot.

Rules. Records are applied in order to a plain picture of the log (`_Log`): segments, grants,
objects, drops. Then the state is built from it in one go. What is missing or damaged costs only
what it described: where two attempts claim the same bytes the younger generation is right (the
older must have ended before), where a segment is unknown its replicas are lost.

Afterwards:

* generations and segment ids continue beyond the last durable mark, so none is used twice;
* every object counts as located just now: readers may hold leases that no record mentions;
* segments are *returning*: readable, but nothing is placed on them until their node mounts again
  (see `membership.py`);
* grants that were running go on running until their expiry.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mooncake_py.master import records
from mooncake_py.master.allocator import UNIT_BYTES
from mooncake_py.master.commands import Mount
from mooncake_py.master.commits import dress
from mooncake_py.master.groups import is_named
from mooncake_py.master.membership import RETURNING, Membership
from mooncake_py.master.objects import (
    PLACE_BITS,
)
from mooncake_py.master.quotas import apply_quota
from mooncake_py.master.records import DamagedRecord, GrantFields
from mooncake_py.master.repair import find_short
from mooncake_py.master.state import CatalogState, extent_units
from mooncake_py.master.stripes import is_part
from mooncake_py.master.tenant import Put
from mooncake_py.master.unrecorded import Gaps, Unrecorded


@dataclass(slots=True)
class RestoreReport:
    """What came back, and what did not."""

    segments: int = 0
    objects: int = 0
    grants: int = 0
    damaged_records: int = 0
    unknown_records: int = 0
    objects_without_segment: int = 0
    extents_overlapping: int = 0


@dataclass(slots=True)
class _Attempt:
    fields: GrantFields
    position: int  # in the columns of `fields`
    extents: list[tuple[int, int]]
    committed_ms: int = 0  # 0: deadlines in `fields` are absolute
    copied: dict[tuple[int, int], int] = field(default_factory=dict)  # extent -> its generation
    pinned: tuple[int, bool] | None = None  # end of the soft pin, hard: instead of the put's

    @property
    def length(self) -> int:
        return self.fields.lengths[self.position]

    @property
    def generation(self) -> int:
        return self.fields.generations[self.position]

    @property
    def group(self) -> int:
        return self.fields.groups[self.position] if self.fields.groups else 0

    def generation_at(self, extent: tuple[int, int]) -> int:
        return self.copied.get(extent, self.generation)


class _Log:
    """The picture that the records paint."""

    def __init__(self, margin_ms: int) -> None:
        self._margin_ms = margin_ms
        self.marks = records.Marks(1, 1)
        self.segments: dict[int, records.SegmentFields] = {}
        self.quotas: dict[str, records.QuotaFields] = {}
        self.writing: dict[int, _Attempt] = {}
        self.complete: dict[int, _Attempt] = {}
        self.resting: list[tuple[int, int, int, int]] = []  # until, segment id, start, units
        self.unrecorded = Unrecorded()
        self.gaps = Gaps()
        self.longest_lease_ms: int | None = None

    def apply(self, record: records.Record) -> None:
        match record:
            case GrantFields():
                self._add(record)
            case records.Commits():
                self._commit(record)
            case records.Drops():
                self._drop(record)
            case records.Lost(until_ms, pairs):
                for generation, segment_id in pairs:
                    self._strip(self.complete.get(generation), segment_id, until_ms)
            case _:
                self._apply_rare(record)

    def _apply_rare(self, record: records.Record) -> None:
        match record:
            case records.Marks(generation, segment_id):
                self.marks = records.Marks(
                    max(self.marks.generation, generation),
                    max(self.marks.segment_id, segment_id),
                )
            case records.SegmentFields():
                self.segments[record.segment_id] = record
            case records.Copies(rows):
                for generation, own, segment_id, offset in rows:
                    self._copy(generation, own, (segment_id, offset))
            case records.Pins(rows):
                self._pin(rows)
            case records.Recorded():
                self.unrecorded.learn(record)
                self.gaps.learn(record)
            case records.Buried():
                self.unrecorded.rebury(record)
            case records.Leases(length_ms):
                self.longest_lease_ms = length_ms
            case records.QuotaFields():
                self.quotas[record.tenant] = record
            case records.Gone(segment_id):
                self.segments.pop(segment_id, None)
            case records.Resting(rows):
                self._rested(rows)

    def _copy(self, generation: int, own: int, extent: tuple[int, int]) -> None:
        if own != generation:
            self.gaps.granted((own,))  # it is recorded, and ends with its object
        attempt = self.complete.get(generation)
        if attempt is not None:
            if extent not in attempt.extents:
                if not any(map(self._in_memory, attempt.extents)) and self._in_memory(extent):
                    # Its soft pin had ended when it was left on a disk alone.
                    hard = attempt.pinned[1] if attempt.pinned else attempt.fields.hard_pin
                    attempt.pinned = (0, hard)
                attempt.extents.append(extent)
            if own != generation:
                attempt.copied[extent] = own

    def _in_memory(self, extent: tuple[int, int]) -> bool:
        segment = self.segments.get(extent[0])
        return segment is not None and not segment.disk_id

    def _rested(self, rows: Sequence[tuple[int, int, int, int]]) -> None:
        self.resting.extend(
            (until, segment_id, offset // UNIT_BYTES, nbytes // UNIT_BYTES)
            for until, segment_id, offset, nbytes in rows
        )

    def _pin(self, rows: Sequence[tuple[int, int, int]]) -> None:
        for generation, until, hard in rows:
            attempt = self.complete.get(generation)
            if attempt is not None:
                attempt.pinned = (until, bool(hard))

    def _drop(self, record: records.Drops) -> None:
        for generation in record.generations:
            attempt = self.writing.pop(generation, None) or self.complete.pop(generation, None)
            if attempt is not None:
                self._rest(attempt, attempt.extents, record.until_ms)
            else:
                self.gaps.fill(generation)

    def _add(self, record: GrantFields) -> None:
        if not record.complete:
            self.gaps.granted(record.generations)
        into = self.complete if record.complete else self.writing
        extents = record.extents
        at = 0
        for position, generation in enumerate(record.generations):
            end = at + 2 * record.replicas[position]
            if generation not in self.complete:  # else the snapshot knew it already
                pairs = zip(extents[at:end:2], extents[at + 1 : end : 2], strict=True)
                into[generation] = _Attempt(record, position, list(pairs))
            at = end

    def _commit(self, record: records.Commits) -> None:
        for generation, segment_id in record.failed:
            attempt = self.writing.get(generation)
            if attempt is not None:
                until = attempt.fields.expires_ms + self._margin_ms
                self._strip(attempt, segment_id, until)
        for generation in record.generations:
            attempt = self.writing.pop(generation, None)
            if attempt is not None:
                attempt.committed_ms = record.now_ms
                self.complete[generation] = attempt

    def _strip(self, attempt: _Attempt | None, segment_id: int, until_ms: int) -> None:
        if attempt is None:
            return
        lost = [extent for extent in attempt.extents if extent[0] == segment_id]
        attempt.extents = [extent for extent in attempt.extents if extent[0] != segment_id]
        self._rest(attempt, lost, until_ms)

    def _rest(self, attempt: _Attempt, extents: Sequence[tuple[int, int]], until_ms: int) -> None:
        units = extent_units(attempt.length)
        self.resting.extend(
            (until_ms, segment_id, offset // UNIT_BYTES, units) for segment_id, offset in extents
        )


def restore(
    state: CatalogState,
    snapshot: bytes | None,
    log: Iterable[bytes],
    now_ms: int,
    corrupt: int = 0,
) -> RestoreReport:
    """Fill a fresh state. Damaged and unknown records are counted and left out, with the `corrupt`
    ones that the store has left out already."""
    report = RestoreReport(damaged_records=corrupt)
    picture = _Log(state.settings.grant_margin_ms)
    for data in (*records.unpack(snapshot or b""), *log):
        try:
            record = records.decode(data)
        except DamagedRecord:
            report.damaged_records += 1
            picture.longest_lease_ms = None  # it may have told of longer leases
            continue
        if record is None:
            report.unknown_records += 1
        else:
            picture.apply(record)
    _build(state, picture, report, now_ms)
    state.lingering.longest_ms = None if corrupt else picture.longest_lease_ms
    return report


def _build(state: CatalogState, log: _Log, report: RestoreReport, now_ms: int) -> None:
    members = state.members
    for fields in log.segments.values():
        command = Mount(
            fields.node, fields.incarnation, fields.address, fields.region, fields.nbytes,
            fields.host_id, fields.segment_id, disk_id=fields.disk_id,
        )  # fmt: skip
        segment = members.add(command, fields.segment_id, now_ms)
        segment.mounted = False
        segment.recorded = segment.compared = bool(fields.disk_id and fields.recorded_below)
        segment.recorded_below, segment.keeps = fields.recorded_below, fields.keeps
        segment.new_ms = 0
        members.set_state(segment, RETURNING)
    report.segments = len(log.segments)
    for quota in log.quotas.values():
        apply_quota(state, quota)
    complete, writing = _newest(log.complete), _newest(log.writing)
    granted = _claim_extents(state, (*complete, *writing), log.resting, report, now_ms)
    for attempt in complete:
        _add_object(state, attempt, _places(members, attempt, granted), report, now_ms)
    for attempt in writing:
        _add_grant(state, attempt, _places(members, attempt, granted), report)
    _locate_all(state, now_ms)
    for attempt in (*complete, *(each for each in writing if not is_named(each.group))):
        if attempt.group and not _places(members, attempt, granted):
            state.drop_group(attempt.group, now_ms)
    find_short(state)
    youngest = max(
        (max((each.generation, *each.copied.values())) for each in (*complete, *writing)), default=0
    )
    youngest = max(youngest, log.gaps.youngest)
    state.next_generation = state.generation_mark = max(log.marks.generation, youngest + 1)
    _learn_unrecorded(state, log)
    members.next_segment_id = max(members.next_segment_id, log.marks.segment_id)


def _locate_all(state: CatalogState, now_ms: int) -> None:
    """In the order of slots, and with one look at them: `Tenant.complete.values()` looks at all
    slots for each tenant."""
    slots = state.table.live_slots()
    numbers = state.table.tenant_column.many[slots]
    slots = slots[np.argsort(numbers, kind="stable")]
    ends = np.cumsum(np.bincount(numbers)).tolist()
    for tenant in state.tenants:
        if tenant.number < len(ends):
            start = ends[tenant.number - 1] if tenant.number else 0
            state.touch(tenant, slots[start : ends[tenant.number]].tolist(), now_ms)


def _learn_unrecorded(state: CatalogState, log: _Log) -> None:
    """What the records do not tell."""
    unrecorded = state.unrecorded = log.unrecorded
    unrecorded.voids += log.gaps.ranges()
    unrecorded.horizon = max(unrecorded.horizon, log.gaps.youngest + 1)
    unrecorded.first_generation = state.next_generation


def _claim_extents(
    state: CatalogState,
    attempts: Sequence[_Attempt],
    all_resting: Sequence[tuple[int, int, int, int]],
    report: RestoreReport,
    now_ms: int,
) -> dict[int, set[tuple[int, int, int]]]:
    """Give every range to one of those who claim it. By segment id: (start, units, generation) of
    the attempts that got theirs."""
    members = state.members
    claims: dict[int, list[tuple[int, int, int]]] = {each: [] for each in members.by_id}
    for attempt in attempts:
        units = extent_units(attempt.length)
        for extent in attempt.extents:
            if extent[0] in claims:
                claim = (extent[1] // UNIT_BYTES, units, attempt.generation_at(extent))
                claims[extent[0]].append(claim)
    resting = [each for each in all_resting if each[0] > now_ms and each[1] in claims]
    for _, segment_id, start, units in resting:
        claims[segment_id].append((start, units, 0))
    granted: dict[int, set[tuple[int, int, int]]] = {}
    for segment_id, wanted in claims.items():
        segment = members.by_id[segment_id]
        kept = _settle(wanted, segment.allocator.units)
        attempts_left = sum(1 for _, _, generation in kept if generation)
        report.extents_overlapping += sum(1 for claim in wanted if claim[2]) - attempts_left
        segment.allocator.rebuild((start, units) for start, units, _ in kept)
        granted[segment_id] = set(kept)
    for until, segment_id, start, units in resting:
        if (start, units, 0) in granted[segment_id]:
            granted[segment_id].discard((start, units, 0))  # it may have rested twice
            members.by_id[segment_id].resting_units += units
            state.resting.add(until, segment_id, start, units)
    return granted


def _newest(attempts: dict[int, _Attempt]) -> list[_Attempt]:
    """In order of generation, one a key: an older one has ended even if no record says so."""
    by_key: dict[tuple[str, bytes], _Attempt] = {}
    for _, attempt in sorted(attempts.items()):
        by_key[attempt.fields.tenant, attempt.fields.keys[attempt.position]] = attempt
    return sorted(by_key.values(), key=lambda each: each.generation)


def _settle(claims: list[tuple[int, int, int]], units_max: int) -> list[tuple[int, int, int]]:
    """Of (start, units, generation) that overlap the younger stays."""
    kept: list[tuple[int, int, int]] = []
    for claim in sorted(claims):
        start, units, generation = claim
        if start + units > units_max:
            continue
        while kept and kept[-1][0] + kept[-1][1] > start and kept[-1][2] < generation:
            kept.pop()
        if not kept or kept[-1][0] + kept[-1][1] <= start:
            kept.append(claim)
    return kept


def _places(
    members: Membership, attempt: _Attempt, granted: dict[int, set[tuple[int, int, int]]]
) -> tuple[int, ...]:
    units = extent_units(attempt.length)
    return tuple(
        _place(members, extent)
        for extent in attempt.extents
        if (extent[1] // UNIT_BYTES, units, attempt.generation_at(extent))
        in granted.get(extent[0], ())
    )


def _place(members: Membership, extent: tuple[int, int]) -> int:
    return members.by_id[extent[0]].index << PLACE_BITS | extent[1] // UNIT_BYTES


def _put_of(state: CatalogState, attempt: _Attempt, places: tuple[int, ...]) -> Put | None:
    """The attempt as a put of one key, its space accounted for; None when nothing is left."""
    fields, position = attempt.fields, attempt.position
    tenant = state.tenants.obtain(fields.tenant)
    if not places or isinstance(tenant, str):
        return None
    hard_pin = attempt.pinned[1] if attempt.pinned else fields.hard_pin
    put = Put(
        tenant=tenant,
        first=attempt.generation,
        expires_ms=fields.expires_ms,
        keys=[fields.keys[position]],
        lengths=[attempt.length],
        places=[places],
        groups=[fields.groups[position]] if fields.groups else (),
        soft_pin_ms=fields.soft_pin_ms,
        hard_pin=hard_pin,
        ttl_ms=fields.ttl_ms,
        open_count=1,
        wanted=fields.wanted,
        absolute=fields.absolute,
        cost=fields.cost,
    )
    units = extent_units(attempt.length)
    for place in places:
        segment = state.members.at(place >> PLACE_BITS)
        segment.used_units += segment.charge(units)
    units *= state.members.in_memory(places)
    tenant.used_bytes += units * UNIT_BYTES
    tenant.part_count += is_part(put.keys[0])
    if hard_pin:
        state.pin(tenant, units)
    return put


def _add_grant(
    state: CatalogState, attempt: _Attempt, places: tuple[int, ...], report: RestoreReport
) -> None:
    put = _put_of(state, attempt, places)
    if put is not None:
        put.tenant.writing[put.keys[0]] = (put, 0)
        state.watch_grants(put)
        report.grants += 1


def _add_object(
    state: CatalogState,
    attempt: _Attempt,
    places: tuple[int, ...],
    report: RestoreReport,
    now_ms: int,
) -> None:
    put = _put_of(state, attempt, places)
    if put is None:
        report.objects_without_segment += 1
        return
    fields = attempt.fields
    since = 0 if fields.absolute else attempt.committed_ms
    tenant, key = put.tenant, put.keys[0]
    slot = state.table.add(key, put.first, attempt.length, places[0], tenant.number)
    soft_pin = fields.soft_pin_ms + since if fields.soft_pin_ms else 0
    ttl = fields.ttl_ms + since if fields.ttl_ms else 0
    if attempt.pinned:
        soft_pin = attempt.pinned[0]
    dress(state, slot, places, put.hard_pin, soft_pin, ttl)
    state.table.set_cost(slot, fields.cost)
    if fields.wanted > 1:
        state.table.set_wanted(slot, fields.wanted)
    for extent, own in attempt.copied.items():
        known = extent in attempt.extents and extent[0] in state.members.by_id
        if known and (place := _place(state.members, extent)) in places:
            state.table.name_copy(slot, place, own)
    if put.groups and put.groups[0]:
        state.join_group(put.groups[0], tenant, key, slot)
    state.enter(tenant, key, slot, now_ms)
    report.objects += 1
