"""What nodes hold, and what the log says of it: the inventory after a mount. Rules and reasons are
in design/recovery.md; in short:

1. *Tell.* A node that mounts again, or whose memory was taken over by a new process, tells what it
   holds sealed of generations that no record speaks of, and of grants that were running. Until it
   has, nothing is placed there.
2. *Compare.* Then the master says page by page what it believes to be there. What the node lacks is
   a lost replica; what it holds besides has ended and is unsealed.

Each extent that is told is judged alone; nothing depends on another one's fate:

| the catalog has | then |
|---|---|
| this very replica | it stays |
| the object, complete, without this replica; unrecorded | one more replica |
| its grant running, of this master | it stays: its writer will say |
| its grant running, of a former master | committed: the put may have been acknowledged |
| no record of its generation, and the key is free or older | adopted |
| a younger object of the key, a grave, or its TTL is over | unsealed |
| a record of its generation, so it has ended | unsealed |

Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from mooncake_py.errors import ObjectNotFound, UsageError
from mooncake_py.master import records
from mooncake_py.master.allocator import UNIT_BYTES
from mooncake_py.master.commands import Applied, Inventoried, Inventory, Mount, Name, Refused
from mooncake_py.master.commits import commit, dress, replace_former
from mooncake_py.master.events import STORED
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.membership import ALIVE, GONE, RETURNING, Segment, segment_fields
from mooncake_py.master.objects import PLACE_BITS, PLACE_MASK
from mooncake_py.master.state import CatalogState, extent_units
from mooncake_py.master.tenant import Grant, Tenant
from mooncake_py.master.work import Work
from mooncake_py.model import EXTENT_ROW, REPLICA_ROW, RESERVED_ROW, reserved_key

_GENERATION_BITS = 40  # of a generation count puts within a term, the rest is the term
_SEGMENT_BITS = 16  # likewise of a segment id; more mounts than that go on in the next term's
_STRIDE = 8_192  # slots of one page of the comparison
_RANGES_MAX = 1_024  # of generations that a node is asked for


def begin_term(
    state: CatalogState, term: int, now_ms: int, foreign_until_ms: int, durable_puts: bool
) -> bytes:
    """See `Catalog.begin_term`; the record of what this master may not know."""
    state.next_generation = max(state.next_generation, term << _GENERATION_BITS)
    state.generation_mark = max(state.generation_mark, (term + 1) << _GENERATION_BITS)
    state.events.begin(term << _GENERATION_BITS)
    state.term = term
    members = state.members
    members.next_segment_id = max(members.next_segment_id, term << _SEGMENT_BITS)
    state.unrecorded.foreign_until_ms = foreign_until_ms
    record = state.unrecorded.begin(state.next_generation, durable_puts)
    refresh(state, now_ms)
    return record


def _skip_terms(state: CatalogState, term: int) -> None:
    """Extents of this term have come to light, of a master that nothing is known of: from now on
    generations are above all of its."""
    above = (term + 1) << _GENERATION_BITS
    if above > state.next_generation:
        state.next_generation = state.unrecorded.first_generation = above
        state.unrecorded.deepen(above)


def refresh(state: CatalogState, now_ms: int) -> None:
    """Does anybody still owe what no record tells? When nobody does, graves are closed."""
    unrecorded = state.unrecorded
    unrecorded.open = now_ms < unrecorded.foreign_until_ms or any(
        not each.recorded and each.state != GONE for each in state.members
    )
    if not unrecorded.open:
        unrecorded.close()
        unrecorded.forget_below(
            min(
                (each.recorded_below for each in state.members if each.state != GONE),
                default=unrecorded.horizon,
            )
        )


def give_up(state: CatalogState, work: Work, now_ms: int) -> None:
    """Too much has ended while somebody owes: what they have not told is not waited for."""
    state.unrecorded.foreign_until_ms = 0
    for segment in state.members:
        if not segment.recorded:
            _mark_recorded(state, work, segment)
            state.counters["inventories_given_up"] += 1
    refresh(state, now_ms)


# --- mount ----------------------------------------------------------------------------------------


def former_segment(state: CatalogState, command: Mount, now_ms: int) -> Segment | None:
    """The segment this node had in a life that this catalog or a lost one knew of, if it may come
    back with what is on it; else None."""
    if not command.segment_id or not command.recovers:
        return None
    known = state.members.by_id.get(command.segment_id)
    if command.foreign:
        if known is not None or now_ms >= state.unrecorded.foreign_until_ms:
            return None
        return _adopt_segment(state, command, now_ms)
    if known is None or known.state == GONE or not command.warm:
        return None
    if command.nbytes < known.nbytes:
        return None
    if command.nbytes > known.nbytes:
        known.allocator.grow(command.nbytes // UNIT_BYTES)
        known.nbytes = command.nbytes
    known.node, known.incarnation = command.node, command.incarnation
    known.compared = False
    return known


def _adopt_segment(state: CatalogState, command: Mount, now_ms: int) -> Segment:
    """One of a cluster whose records are lost. Generations go on above all it may hold."""
    _skip_terms(state, command.former_term)
    segment = state.members.add(command, command.segment_id, now_ms)
    segment.recorded = segment.compared = False
    segment.owed = [(1, state.unrecorded.first_generation)]
    state.counters["segments_adopted"] += 1
    return segment


def expects(
    state: CatalogState, work: Work, segment: Segment, command: Mount, now_ms: int
) -> list[tuple[int, int]]:
    """Which generations the node is to tell first: what it owes, and running grants of former
    masters. A node that cannot tell is believed to hold what is recorded."""
    limit = state.unrecorded.first_generation
    if not command.recovers:
        segment.recorded = segment.compared = True
        return []
    if not segment.recorded and not segment.owed:
        segment.owed = state.unrecorded.owed_by(segment.recorded_below)
    runs = [
        (put.first, put.first + len(put.keys))
        for put in state.running_puts()
        if put.keys and put.first < limit and not state.unrecorded.durable_puts
    ]
    if not segment.owed and not runs and not segment.recorded:
        _mark_recorded(state, work, segment)
        refresh(state, now_ms)
    ranges = sorted({*segment.owed, *runs})
    if len(ranges) > _RANGES_MAX:
        return [(ranges[0][0], max(below for _, below in ranges))]
    return ranges


def standing(segment: Segment) -> str:
    """State of a segment whose node is heard."""
    return ALIVE if segment.recorded else RETURNING


# --- inventory ------------------------------------------------------------------------------------


def inventory(state: CatalogState, command: Inventory, now_ms: int) -> Applied:
    segment = state.members.known(command.node, command.incarnation, command.segment_id)
    if segment is None or not segment.mounted:
        cause = f"segment {command.segment_id} of {command.node!r} is not mounted here"
        return Applied(Refused(ObjectNotFound.code, cause))
    if len(command.names) * EXTENT_ROW.size != len(command.rows):
        return Applied(Refused(UsageError.code, "inventory: one name a row"))
    work = Work()
    unseal = b""
    if command.rows:
        unseal = _Page(state, work, segment, now_ms).judge(command)
    if command.absent:
        _lose_absent(state, work, segment, command, now_ms)
    if command.recorded and not segment.recorded:
        _mark_recorded(state, work, segment)
        state.members.set_state(segment, ALIVE)
        refresh(state, now_ms)
    if not command.compare:
        return work.done(Inventoried(unseal), now_ms)
    cursor = command.cursor + _STRIDE
    more = cursor < len(state.table.key)
    believed = b"".join(_believed(state, segment, command.cursor, cursor))
    if not more:
        segment.compared = True
        state.counters["inventories"] += 1
    return work.done(Inventoried(unseal, believed, cursor, more), now_ms)


def _mark_recorded(state: CatalogState, work: Work, segment: Segment) -> None:
    segment.recorded = True
    segment.owed = ()
    segment.recorded_below = state.unrecorded.first_generation
    work.records.append(records.encode(segment_fields(segment)))


def _believed(state: CatalogState, segment: Segment, start: int, stop: int) -> Iterator[bytes]:
    table = state.table
    for slot in table.slots_on(segment.index, start, stop):
        for place in table.places(slot):
            if place >> PLACE_BITS == segment.index:
                offset = (place & PLACE_MASK) * UNIT_BYTES
                yield REPLICA_ROW.pack(offset, table.replica_generation(slot, place))


def _lose_absent(
    state: CatalogState, work: Work, segment: Segment, command: Inventory, now_ms: int
) -> None:
    """Of the page that ended at the cursor these replicas are not there."""
    absent = dict(REPLICA_ROW.iter_unpack(command.absent))
    table = state.table
    for slot in table.slots_on(segment.index, max(0, command.cursor - _STRIDE), command.cursor):
        for place in table.places(slot):
            offset = (place & PLACE_MASK) * UNIT_BYTES
            if (
                place >> PLACE_BITS == segment.index
                and table.key[slot] is not None
                and absent.get(offset) == table.replica_generation(slot, place)
            ):
                state.counters["replicas_absent"] += 1
                state.lose_replica(work, slot, segment.index, Event.NODE_LOST, now_ms)
                break


@dataclass(slots=True)
class _Found:
    """An extent that a node told of."""

    name: Name
    start: int
    units: int
    length: int
    own: int  # generation in its header
    group: int
    free_only: bool  # granted without a key: the put was refused if the key was taken

    @property
    def generation(self) -> int:
        return self.name.generation or self.own


class _Page:
    """Judges the extents of one page."""

    def __init__(self, state: CatalogState, work: Work, segment: Segment, now_ms: int) -> None:
        self.state, self.work, self.segment, self.now_ms = state, work, segment, now_ms
        self.adopted: defaultdict[tuple[str, int, int, bool], list[_Found]] = defaultdict(list)
        self.touched: defaultdict[Tenant, list[int]] = defaultdict(list)
        state.free_rested(now_ms)

    def judge(self, command: Inventory) -> bytes:
        """Rows that the node is to unseal."""
        rows, size = command.rows, EXTENT_ROW.size
        ended = []
        for at, name in enumerate(command.names):
            _, _, offset, length, own, _, _, group = EXTENT_ROW.unpack_from(rows, at * size)
            if own >= self.state.next_generation:
                continue
            units = extent_units(length)
            start = offset // UNIT_BYTES
            free_only = group == RESERVED_ROW
            if free_only:
                group = 0
            found = name and _Found(name, start, units, length, own, group, free_only)
            if not found or not self._stays(found):
                self.state.counters["extents_unsealed" if found else "extents_nameless"] += 1
                ended.append(rows[at * size : (at + 1) * size])
        self._record()
        for tenant, slots in self.touched.items():
            live = [slot for slot in slots if self.state.table.key[slot] is not None]
            tenant.pool.touch(live, self.now_ms)
        return b"".join(ended)

    def _stays(self, found: _Found) -> bool:
        state, name = self.state, found.name
        tenant = state.tenants.find(name.tenant)
        if tenant is not None:
            slot = tenant.complete.get(name.key)
            if slot is not None and state.table.generation[slot] == found.generation:
                return self._is_replica(slot, found) or self._add_replica(slot, found)
            grant = tenant.writing.get(name.key) or tenant.writing.get(reserved_key(found.own))
            if grant is not None and grant[0].first + grant[1] == found.generation:
                return self._settle(grant, found)
        if found.own in state.tasks.running:
            return True
        return self._owed(found) and self._adopt(found)

    def _owed(self, found: _Found) -> bool:
        return any(start <= found.own < below for start, below in self.segment.owed)

    # --- known objects --------------------------------------------------------------------------

    def _is_replica(self, slot: int, found: _Found) -> bool:
        table = self.state.table
        place = self.segment.index << PLACE_BITS | found.start
        return place in table.places(slot) and (table.replica_generation(slot, place) == found.own)

    def _add_replica(self, slot: int, found: _Found) -> bool:
        state, table = self.state, self.state.table
        if not self._owed(found) or table.length[slot] != found.length:
            return False
        if any(place >> PLACE_BITS == self.segment.index for place in table.places(slot)):
            return False
        if not self._claim(found):
            return False
        state.add_replica(slot, self.segment.index << PLACE_BITS | found.start, found.own)
        self.work.copy(table.generation[slot], found.own, self.segment.segment_id, found.start)
        state.counters["replicas_adopted"] += 1
        return True

    def _settle(self, grant: Grant, found: _Found) -> bool:
        """The put may have been acknowledged: it counts (unless its record came first). Its
        replicas elsewhere are believed in until their nodes tell."""
        state, (put, index) = self.state, grant
        if state.unrecorded.durable_puts or put.first >= state.unrecorded.first_generation:
            return True  # its writer will say
        place = self.segment.index << PLACE_BITS | found.start
        if place not in put.places[index] or put.lengths[index] != found.length:
            return False
        others = {
            segment.segment_id
            for each in put.places[index]
            if (segment := state.members.at(each >> PLACE_BITS)) is not self.segment
            and segment.recorded
        }
        if others:
            state.fail_replicas(put, index, others, self.now_ms)
        tenant, key = put.tenant, put.keys[index]
        replace_former(state, self.work, tenant, key, self.now_ms)
        commit(state, put, index, self.now_ms)
        lost = [(found.generation, each) for each in others]
        self.work.records.append(
            records.encode(records.Commits(self.now_ms, [found.generation], lost))
        )
        state.counters["objects_settled"] += 1
        return True

    # --- objects that no record tells of --------------------------------------------------------

    def _adopt(self, found: _Found) -> bool:
        state, name = self.state, found.name
        if name.ttl_until_ms and name.ttl_until_ms <= self.now_ms:
            return False
        if state.unrecorded.buried(name.tenant, name.key, found.generation):
            return False
        tenant = state.tenants.obtain(name.tenant)
        if isinstance(tenant, str) or len(state.table) >= state.table.capacity:
            state.counters["extents_no_room"] += 1
            return False
        former = tenant.complete.get(name.key)
        if former is not None and (
            found.free_only or state.table.generation[former] > found.generation
        ):
            return False
        if not self._claim(found):
            return False
        if former is not None and tenant.complete.get(name.key) == former:
            state.end_object(self.work, former, Event.REPLACED, self.now_ms)
        self._install(tenant, found)
        return True

    def _install(self, tenant: Tenant, found: _Found) -> None:
        state, name, units = self.state, found.name, found.units
        place = self.segment.index << PLACE_BITS | found.start
        slot = state.table.add(name.key, found.generation, found.length, place, tenant.number)
        tenant.used_bytes += units * UNIT_BYTES
        pinned = name.hard_pin and self._may_pin(tenant, units)
        if pinned:
            state.pin(tenant, units)
        dress(state, slot, (place,), pinned, name.soft_pin_until_ms, name.ttl_until_ms)
        if found.own != found.generation:
            state.table.name_copy(slot, place, found.own)
        if found.group:
            state.join_group(found.group, tenant, name.key, slot)
        state.enter(tenant, name.key, slot, self.now_ms)
        state.events.add(STORED, tenant.name, name.key, found.generation)
        self.touched[tenant].append(slot)
        kind = (name.tenant, name.soft_pin_until_ms, name.ttl_until_ms, pinned)
        self.adopted[kind].append(found)
        state.counters["objects_adopted"] += 1

    def _may_pin(self, tenant: Tenant, units: int) -> bool:
        """What a node says of a pin holds only within what may be pinned at all."""
        state, settings = self.state, self.state.settings
        capacity = sum(each.allocator.units for each in state.members)
        return (
            state.hard_pinned_units + units <= capacity * settings.hard_pin_max_ratio
            and tenant.hard_pinned_units + units <= capacity * settings.tenant_hard_pin_max_ratio
        )

    def _claim(self, found: _Found) -> bool:
        """Take its place. What the catalog believes there and is older has ended: the record of its
        end is among the lost ones."""
        allocator = self.segment.allocator
        if found.start + found.units > allocator.units:
            return False
        if not allocator.claim(found.start, found.units):
            for slot in self._older_in_place(found):
                self._displace(slot)
            if not allocator.claim(found.start, found.units):
                self.state.counters["extents_overlapping"] += 1
                return False
        self.segment.used_units += found.units
        return True

    def _older_in_place(self, found: _Found) -> list[int]:
        table, index = self.state.table, self.segment.index
        end = found.start + found.units
        slots = []
        for slot in table.slots_on(index, 0, len(table.key)):
            units = extent_units(table.length[slot])
            slots += [
                slot
                for place in table.places(slot)
                if place >> PLACE_BITS == index
                and (start := place & PLACE_MASK) < end
                and start + units > found.start
                and table.replica_generation(slot, place) < found.own
            ]
        return slots

    def _displace(self, slot: int) -> None:
        """The replica here ends, and its extent with it: another one has been written over it."""
        state, table = self.state, self.state.table
        places = table.places(slot)
        kept = tuple(place for place in places if place >> PLACE_BITS != self.segment.index)
        if not kept:
            state.end_object(self.work, slot, Event.NODE_LOST, self.now_ms)
            return
        self.work.lose(table.generation[slot], self.segment.segment_id, 0)
        state.drop_replicas(slot, kept, 0, self.now_ms)
        state.note_short(slot)

    def _record(self) -> None:
        segment_id = self.segment.segment_id
        for (tenant, soft_pin, ttl, pinned), found in self.adopted.items():
            fields = records.GrantFields(
                now_ms=self.now_ms,
                expires_ms=0,
                tenant=tenant,
                soft_pin_ms=soft_pin,
                ttl_ms=ttl,
                hard_pin=pinned,
                keys=[each.name.key for each in found],
                generations=[each.generation for each in found],
                lengths=[each.length for each in found],
                replicas=[1] * len(found),
                extents=[n for each in found for n in (segment_id, each.start * UNIT_BYTES)],
                groups=[each.group for each in found] if any(e.group for e in found) else (),
                complete=True,
            )
            self.work.records.append(records.encode(fields))
            copies = [
                (each.generation, each.own, segment_id, each.start * UNIT_BYTES)
                for each in found
                if each.own != each.generation
            ]
            if copies:
                self.work.records.append(records.encode(records.Copies(copies)))
