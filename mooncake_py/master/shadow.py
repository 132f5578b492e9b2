"""A catalog that follows another one's records and can take its place at once.

Rules. Each record changes the same `CatalogState` that the leader has, by the same steps, except
that nothing is placed and nothing is judged: no extent is looked for, no time lets anything end, a
record says so. So there are no allocators while it follows; which ranges are free is worked out
when it takes over, from all that is taken, in columns. The cost of that is counting, not replaying:
a million objects take some tenths of a second.

`take_over` answers False when two claims on the same bytes contradict each other, which damaged
records can cause: then the records must be read again by `replay.restore`, which settles claims.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mooncake_py.master import nodes, records
from mooncake_py.master.allocator import UNIT_BYTES, Allocator
from mooncake_py.master.commands import Mount
from mooncake_py.master.commits import commit, dress
from mooncake_py.master.eviction import Pool
from mooncake_py.master.groups import is_named
from mooncake_py.master.membership import GONE, RETURNING, Segment
from mooncake_py.master.objects import PLACE_BITS, PLACE_MASK
from mooncake_py.master.pins import set_pin
from mooncake_py.master.quotas import apply_quota, forget_empty_tenants
from mooncake_py.master.records import DamagedRecord, GrantFields
from mooncake_py.master.repair import find_short
from mooncake_py.master.replay import RestoreReport
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.state import CatalogState, extent_units
from mooncake_py.master.stripes import is_part
from mooncake_py.master.tenant import Grant, Put

_TTLS_MAX = 10_000  # entries of ended objects that are tolerated


class _Unplaced(Allocator):
    """Of a segment that is followed: nothing is placed on it, so nothing is given back either."""

    __slots__ = ()

    def give(self, start: int, units: int) -> None:
        pass


class Shadow:
    """Not thread-safe."""

    def __init__(self, settings: CatalogSettings) -> None:
        self.state = CatalogState(settings)
        self.report = RestoreReport()
        self._running: dict[int, Grant] = {}  # by generation
        self._slots: dict[int, int] = {}  # of complete objects, by generation
        self._new: list[int] = []  # slots that are complete since the last `feed`
        self._pinned: set[Pool] = set()  # that got soft pins since then
        self._broken: dict[int, int] = {}  # members lost with their node -> their group
        self._lost: dict[int, int] = {}  # likewise, of groups by name
        self._youngest = 0
        self._marks = records.Marks(1, 1)
        self._now_ms = 0  # of the newest record

    def feed(self, log: Iterable[bytes]) -> None:
        """Damaged and unknown records are counted and left out."""
        for data in log:
            try:
                record = records.decode(data)
            except DamagedRecord:
                self.report.damaged_records += 1
                self.state.lingering.longest_ms = None  # it may have told of longer leases
                continue
            if record is None:
                self.report.unknown_records += 1
            else:
                self._apply(record)
        state = self.state
        state.tasks.short.clear()  # found anew by who takes over
        self._touch_new()
        if len(state.table.ttls) + _TTLS_MAX < len(state.ttls):
            state.ttls.rebuild()

    def take_over(self, now_ms: int) -> bool:
        """Make the state one that decides. False: claims contradict each other."""
        state = self.state
        state.free_rested(now_ms)
        if self._broken:
            for put in filter(_is_grouped, self._running_puts()):
                state.groups.begin(put)  # so that members in writing are ended with theirs
        for name in sorted({*self._broken.values(), *self._lost.values()}):
            state.drop_group(name, now_ms)
        slots = state.table.live_slots()
        if not self._place(slots):
            return False
        _column(state.table.stamp)[slots] = now_ms
        state.ttls.rebuild()
        state.open_grants = 0
        for put in self._running_puts():
            state.watch_grants(put)
        find_short(state)
        for segment in state.members:
            segment.seen_ms = now_ms
        marks = self._marks
        state.next_generation = state.generation_mark = max(marks.generation, self._youngest + 1)
        state.members.next_segment_id = max(state.members.next_segment_id, marks.segment_id)
        state.unrecorded.first_generation = state.next_generation
        self.report.segments = len(state.members.by_id)
        self.report.objects = len(slots)
        self.report.grants = state.open_grants
        return True

    def _touch_new(self) -> None:
        """To whoever takes over everything counts as located just now, so it enters the order of
        eviction as if it were; only its stamp is still to come then."""
        table, tenants = self.state.table, self.state.tenants
        fresh: dict[int, list[int]] = {}
        for slot in self._new:
            if table.key[slot] is not None:
                fresh.setdefault(table.tenant[slot], []).append(slot)
        self._new.clear()
        for number, slots in fresh.items():
            self.state.touch(tenants.at(number), slots, self._now_ms)
        for pool in self._pinned:
            pool.victim(self._now_ms)  # lets soft pins end
        self._pinned.clear()

    def _running_puts(self) -> list[Put]:
        return list({id(put): put for put, _ in self._valid_grants()}.values())

    # --- records --------------------------------------------------------------------------------

    def _apply(self, record: records.Record) -> None:
        match record:
            case GrantFields():
                self._add(record)
            case records.Commits():
                self._commit(record)
            case records.Drops(now_ms, until_ms, generations):
                self._pass(now_ms)
                for generation in generations:
                    self._drop(generation, until_ms)
            case records.Lost(until_ms, pairs):
                for generation, segment_id in pairs:
                    self._lose(generation, segment_id, until_ms)
            case _:
                self._apply_rare(record)

    def _apply_rare(self, record: records.Record) -> None:
        match record:
            case records.Marks(generation, segment_id):
                self._marks = records.Marks(
                    max(self._marks.generation, generation),
                    max(self._marks.segment_id, segment_id),
                )
            case records.SegmentFields():
                self._offer(record)
            case records.Gone(segment_id):
                self._forget(segment_id)
            case records.Copies(rows):
                for generation, own, segment_id, offset in rows:
                    self._copy(generation, own, segment_id, offset // UNIT_BYTES)
            case records.Pins(rows):
                for generation, until_ms, hard in rows:
                    self._pin(generation, until_ms, bool(hard))
            case records.Resting(rows):
                self._rest(rows)
            case _:
                self._apply_words(record)

    def _apply_words(self, record: records.Record) -> None:
        """What is about no extent that is placed."""
        match record:
            case records.Recorded():
                self.state.unrecorded.learn(record)
            case records.Buried():
                self.state.unrecorded.rebury(record)
            case records.Leases(length_ms):
                self.state.lingering.longest_ms = length_ms
            case records.QuotaFields():
                apply_quota(self.state, record)

    def _add(self, fields: GrantFields) -> None:
        if fields.complete:
            for put, index in self._puts(fields):
                self._install(put, index, fields)
            return
        self._pass(fields.now_ms)
        if fields.generations:
            unrecorded = self.state.unrecorded
            unrecorded.horizon = max(unrecorded.horizon, fields.generations[-1] + 1)
        for put, index in self._puts(fields):
            self._grant(put, index)

    def _pass(self, now_ms: int) -> None:
        """Time as the leader knew it: what had rested by then may be claimed again."""
        self._now_ms = max(self._now_ms, now_ms)
        self.state.free_rested(self._now_ms)

    def _puts(self, fields: GrantFields) -> Iterator[Grant]:
        """Every key of the record whose attempt is new here and has a place, with its place
        taken into account. Keys of one run of generations share a put."""
        state = self.state
        tenant = state.tenants.obtain(fields.tenant)
        if isinstance(tenant, str):  # the leader has forgotten some that are empty
            forget_empty_tenants(state)
            tenant = state.tenants.obtain(fields.tenant)
        if isinstance(tenant, str):
            return
        ids = {each.segment_id: each.index for each in state.members if each.state != GONE}
        put: Put | None = None
        at = 0
        for position, generation in enumerate(fields.generations):
            end = at + 2 * fields.replicas[position]
            pairs = zip(fields.extents[at:end:2], fields.extents[at + 1 : end : 2], strict=True)
            at = end
            places = tuple(
                ids[segment_id] << PLACE_BITS | offset // UNIT_BYTES
                for segment_id, offset in pairs
                if segment_id in ids
            )
            if generation in self._slots or generation in self._running:
                continue
            if not places:
                self.report.objects_without_segment += fields.complete
                group = fields.groups[position] if fields.groups else 0
                if fields.complete or not is_named(group):
                    self._break(group, generation)
                continue
            if put is None or generation != put.first + len(put.keys):
                groups: list[int] = []
                put = Put(
                    tenant, generation, fields.expires_ms, [], [], [], groups,
                    soft_pin_ms=fields.soft_pin_ms, hard_pin=fields.hard_pin, ttl_ms=fields.ttl_ms,
                    wanted=fields.wanted, absolute=fields.absolute, cost=fields.cost,
                )  # fmt: skip
            put.keys.append(fields.keys[position])
            tenant.part_count += is_part(fields.keys[position])
            put.lengths.append(fields.lengths[position])
            put.places.append(places)
            if fields.groups:
                groups.append(fields.groups[position])
            put.open_count += 1
            self._account(put, places, fields.lengths[position])
            self._youngest = max(self._youngest, generation)
            yield put, len(put.keys) - 1

    def _account(self, put: Put, places: tuple[int, ...], length: int) -> None:
        state, units = self.state, extent_units(length)
        for place in places:
            segment = state.members.at(place >> PLACE_BITS)
            segment.used_units += segment.charge(units)
        units *= state.members.in_memory(places)
        put.tenant.used_bytes += units * UNIT_BYTES
        if put.hard_pin:
            state.pin(put.tenant, units)

    def _grant(self, put: Put, index: int) -> None:
        key = put.keys[index]
        former = put.tenant.writing.get(key)
        if former is not None:  # its end was not read
            self._drop(former[0].first + former[1], 0)
        put.tenant.writing[key] = (put, index)
        self._running[put.first + index] = (put, index)

    def _install(self, put: Put, index: int, fields: GrantFields) -> None:
        """An object of a snapshot: its deadlines are absolute."""
        state, key, places = self.state, put.keys[index], put.places[index]
        length, generation = put.lengths[index], put.first + index
        self._lost.pop(generation, None)  # it was lost but for a replica that came just then
        self._broken.pop(generation, None)
        slot = state.table.add(key, generation, length, places[0], put.tenant.number)
        dress(state, slot, places, fields.hard_pin, fields.soft_pin_ms, fields.ttl_ms)
        state.table.set_cost(slot, fields.cost)
        if fields.wanted > 1:
            state.table.set_wanted(slot, fields.wanted)
        if put.groups and put.groups[index]:
            state.join_group(put.groups[index], put.tenant, key, slot)
        state.enter(put.tenant, key, slot, self._now_ms)
        self._complete(put, slot)

    def _complete(self, put: Put, slot: int) -> None:
        if put.soft_pin_ms:
            self._pinned.add(put.tenant.pool)
            put.tenant.soft_pinned_units(self._now_ms)  # forgets those that have ended
        self._slots[self.state.table.generation[slot]] = slot
        self._new.append(slot)

    def _commit(self, record: records.Commits) -> None:
        state = self.state
        self._now_ms = max(self._now_ms, record.now_ms)
        for generation, segment_id in record.failed:
            grant = self._valid(generation)
            if grant is not None:
                state.fail_replicas(*grant, {segment_id}, record.now_ms)
        for generation in record.generations:
            grant = self._valid(generation)
            if grant is None or not grant[0].places[grant[1]]:
                continue
            put, index = grant
            tenant, key = put.tenant, put.keys[index]
            former = tenant.complete.get(key)
            if former is not None:  # its end was not read
                self._drop(state.table.generation[former], 0)
            del self._running[generation]
            commit(state, put, index, record.now_ms)
            self._complete(put, tenant.complete[key])

    def _valid(self, generation: int) -> Grant | None:
        grant = self._running.get(generation)
        if grant is None:
            return None
        put, index = grant
        if put.keys and put.tenant.writing.get(put.keys[index]) == grant:
            return grant
        del self._running[generation]  # it ended with its node
        return None

    def _valid_grants(self) -> Iterator[Grant]:
        for generation in list(self._running):
            grant = self._valid(generation)
            if grant is not None:
                yield grant

    def _drop(self, generation: int, until_ms: int) -> None:
        state = self.state
        self._lost.pop(generation, None)
        slot = self._slots.pop(generation, None)
        if slot is not None:
            state.drop_object(slot, until_ms, self._now_ms)
            return
        grant = self._valid(generation)
        if grant is not None:
            del self._running[generation]
            state.give_up_grant(*grant, until_ms, self._now_ms)

    def _lose(self, generation: int, segment_id: int, until_ms: int) -> None:
        slot = self._slots.get(generation)
        segment = self.state.members.by_id.get(segment_id)
        if slot is None or segment is None:
            return
        places = self.state.table.places(slot)
        kept = tuple(place for place in places if place >> PLACE_BITS != segment.index)
        if kept:
            self.state.drop_replicas(slot, kept, until_ms, self._now_ms)
        else:
            group = self.state.table.groups.get(slot, 0)
            self._drop(generation, until_ms)
            self._break(group, generation)

    def _break(self, group: int, generation: int) -> None:
        """Lost with its node. Of a group by name, which may come again, the leader says more."""
        if is_named(group):
            self._lost[generation] = group
        elif group:
            self._broken[generation] = group

    def _copy(self, generation: int, own: int, segment_id: int, start: int) -> None:
        slot = self._slots.get(generation)
        segment = self.state.members.by_id.get(segment_id)
        if slot is None or segment is None:
            return
        place = segment.index << PLACE_BITS | start
        if place in self.state.table.places(slot):
            if own != generation:
                self.state.table.name_copy(slot, place, own)
            return
        segment.used_units += segment.charge(extent_units(self.state.table.length[slot]))
        self.state.add_replica(slot, place, own)
        self._youngest = max(self._youngest, own)

    def _pin(self, generation: int, soft_until_ms: int, hard: bool) -> None:
        slot = self._slots.get(generation)
        if slot is not None:
            set_pin(self.state, slot, hard, soft_until_ms, self._now_ms)
            self._pinned.add(self.state.tenants.at(self.state.table.tenant[slot]).pool)

    # --- segments -------------------------------------------------------------------------------

    def _offer(self, fields: records.SegmentFields) -> None:
        members = self.state.members
        segment = members.by_id.get(fields.segment_id)
        if segment is None:
            mount = Mount(
                fields.node, fields.incarnation, fields.address, fields.region, fields.nbytes,
                fields.host_id, fields.segment_id, disk_id=fields.disk_id,
            )  # fmt: skip
            segment = members.add(mount, fields.segment_id, self._now_ms)
            segment.allocator = _Unplaced(segment.allocator.units)
            segment.mounted = False
            segment.new_ms = 0
            members.set_state(segment, RETURNING)
        segment.address, segment.host_id = fields.address, fields.host_id
        segment.region = fields.region
        segment.node, segment.incarnation = fields.node, fields.incarnation
        segment.recorded_below, segment.keeps = fields.recorded_below, fields.keeps
        segment.recorded = segment.compared = bool(fields.disk_id and fields.recorded_below)
        segment.nbytes = fields.nbytes  # of a disk it may be another now

    def _forget(self, segment_id: int) -> None:
        state = self.state
        segment = state.members.by_id.get(segment_id)
        if segment is None:
            return
        for tenant in state.tenants:
            for put, index in tenant.writing.values():
                group = put.groups[index] if put.groups else 0
                here = (place >> PLACE_BITS == segment.index for place in put.places[index])
                if group and not is_named(group) and all(here):
                    self._break(group, put.first + index)
        for slot in nodes.lose_at_once(state, segment, self._now_ms):
            if state.table.key[slot] is not None:
                self._lose(state.table.generation[slot], segment_id, 0)
        state.members.forget(segment)

    def _rest(self, rows: Iterable[tuple[int, int, int, int]]) -> None:
        for until_ms, segment_id, offset, nbytes in rows:
            segment = self.state.members.by_id.get(segment_id)
            if segment is not None:
                units = nbytes // UNIT_BYTES
                segment.resting_units += units
                self.state.resting.add(until_ms, segment_id, offset // UNIT_BYTES, units)

    # --- taking over ----------------------------------------------------------------------------

    def _place(self, slots: NDArray[np.int64]) -> bool:
        """Give every segment an allocator with what is not taken."""
        taken = self._taken(slots)
        for segment in self.state.members:
            place, units = taken
            mine = place >> PLACE_BITS == segment.index
            allocator = _allocator_around(
                segment, (place[mine] & PLACE_MASK).astype(np.int64), units[mine]
            )
            if allocator is None:
                return False
            segment.allocator = allocator
        return True

    def _taken(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Places and units of everything that is not free."""
        state, table = self.state, self.state.table
        lengths = _column(table.length)
        places: list[int] = []
        lengths_of: list[int] = []
        for put, index in self._valid_grants():
            places += put.places[index]
            lengths_of += [put.lengths[index]] * len(put.places[index])
        for slot, more in table.more.items():
            places += more
            lengths_of += [table.length[slot]] * len(more)
        units = [extent_units(length) for length in lengths_of]
        for _, segment_id, start, count in state.resting:
            segment = state.members.by_id.get(segment_id)
            if segment is not None:
                places.append(segment.index << PLACE_BITS | start)
                units.append(count)
        first = table.place_column.many[slots].astype(np.uint64)
        whole = extent_units_many(lengths[slots])
        return (
            np.concatenate([first, np.array(places, dtype=np.uint64)]),
            np.concatenate([whole, np.array(units, dtype=np.int64)]),
        )


def _column(one: MutableSequence[int]) -> NDArray[np.uint64]:
    """A column of the object table for many values."""
    return np.frombuffer(cast("memoryview[int]", one), dtype=np.uint64)


def _is_grouped(put: Put) -> bool:
    return bool(put.groups)


def extent_units_many(lengths: NDArray[np.uint64]) -> NDArray[np.int64]:
    """`extent_units` of a column."""
    zero = extent_units(0)
    return zero + (lengths.astype(np.int64) + UNIT_BYTES - 1) // UNIT_BYTES


def _allocator_around(
    segment: Segment, starts: NDArray[np.int64], units: NDArray[np.int64]
) -> Allocator | None:
    """None: two ranges overlap, or one lies outside."""
    total = segment.allocator.units
    order = np.argsort(starts)
    starts = starts[order]
    ends = starts + units[order]
    before = np.concatenate([[0], ends])
    behind = np.concatenate([starts, [total]])
    if (before > behind).any():
        return None
    allocator = Allocator(0)
    allocator.units = total
    for hole in np.flatnonzero(before < behind).tolist():
        allocator.give(int(before[hole]), int(behind[hole] - before[hole]))
    return allocator
