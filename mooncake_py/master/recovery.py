"""What nodes hold, and what the log says of it: the inventory after a mount. Rules and reasons are
in design/recovery.md; in short:

1. *Tell.* A node that mounts again, or whose memory was taken over by a new process, tells what it
   holds sealed of generations that no record speaks of, and of grants that were running. Until it
   has, nothing is placed there.
2. *Compare.* Then the master says page by page what it believes to be there. What the node lacks is
   a lost replica; what it holds besides has ended and is unsealed.

A page says which mount it answers. A node tells on a thread of its own, so one that was for the
master before can arrive after the mount with this one, and its "that was all" is not about what
this one asked for.

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

from collections.abc import Iterator
from itertools import chain

from mooncake_py.errors import ObjectNotFound, UsageError
from mooncake_py.master import records
from mooncake_py.master.adoption import Page, release
from mooncake_py.master.allocator import UNIT_BYTES
from mooncake_py.master.commands import Applied, Inventoried, Inventory, Mount, Refused
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.membership import ALIVE, GONE, Segment, segment_fields
from mooncake_py.master.objects import PLACE_BITS, PLACE_MASK
from mooncake_py.master.state import CatalogState
from mooncake_py.master.work import Work
from mooncake_py.model import EXTENT_ROW, REPLICA_ROW

# Of a generation so many bits count puts within a term, the rest is the term, in milliseconds. A
# term with more puts goes on with the generations of later ones, which no master has by then unless
# it grants more than two million a millisecond.
_GENERATION_BITS = 21
_SEGMENT_BITS = 16  # likewise of a segment id; more mounts than that go on in the next term's
_STRIDE = 8_192  # slots of one page of the comparison
_RANGES_MAX = 1_024  # of generations that a node is asked for


def begin_term(
    state: CatalogState, term: int, now_ms: int, foreign_until_ms: int, durable_puts: bool
) -> list[bytes]:
    """See `Catalog.begin_term`; the records of what this master may not know."""
    state.next_generation = max(state.next_generation, term << _GENERATION_BITS)
    state.generation_mark = max(state.generation_mark, (term + 1) << _GENERATION_BITS)
    state.events.begin(term << _GENERATION_BITS)
    state.term = term
    members, settings = state.members, state.settings
    lost_until_ms = now_ms + settings.recovery_ms
    unlogged = (members.next_segment_id, term << _SEGMENT_BITS, lost_until_ms)
    state.unrecorded.lost_segments = unlogged
    if members.next_segment_id == 1:  # a log that has never heard of a node may be cut short
        foreign_until_ms = max(foreign_until_ms, lost_until_ms)
    members.next_segment_id = max(members.next_segment_id, term << _SEGMENT_BITS)
    state.unrecorded.foreign_until_ms = foreign_until_ms
    leases = state.lingering.begin(
        term << _GENERATION_BITS,
        now_ms,
        (settings.lease_ms, settings.lease_max_ms),
        2 * settings.suspect_ms if durable_puts else 0,
        state.unrecorded.horizon == 1,
    )
    record = state.unrecorded.begin(state.next_generation, durable_puts)
    work = Work()
    refresh(state, work, now_ms)
    return [record, *leases, *_drops(state, now_ms), *work.records]


def _drops(state: CatalogState, now_ms: int) -> list[bytes]:
    """What ended while the state was made from records, and which none of them names."""
    by_end: dict[int, list[int]] = {}
    for generation, until_ms in state.unrecorded_drops:
        by_end.setdefault(until_ms, []).append(generation)
    state.unrecorded_drops.clear()
    return [
        records.encode(records.Drops(now_ms, until_ms, generations))
        for until_ms, generations in by_end.items()
    ]


def term_wanted(state: CatalogState, command: Mount, now_ms: int) -> int:
    """Extents of a master that nothing is known of come to light, and they may look younger than
    what this one grants: the term that is above all of theirs. 0: this one is. Nothing of theirs is
    taken over before that term is durable, since a later master must find its own above it, too."""
    lost = _disk_lost if command.disk_id else _segment_lost
    adopts = command.recovers and lost(state, command, now_ms)
    return command.former_term + 1 if adopts and command.former_term >= state.term else 0


def raise_term(state: CatalogState, term: int) -> bytes:
    """See `Catalog.raise_term`."""
    above = term << _GENERATION_BITS
    record = state.unrecorded.raise_to(above)
    state.term = term
    state.members.next_segment_id = max(state.members.next_segment_id, term << _SEGMENT_BITS)
    state.next_generation = above
    state.generation_mark = above + (1 << _GENERATION_BITS)
    return record


def refresh(state: CatalogState, work: Work, now_ms: int) -> None:
    """Does anybody still owe what no record tells? When nobody does, graves are closed."""
    unrecorded = state.unrecorded
    for segment, found in list(unrecorded.contested):
        Page(state, work, segment, now_ms).settle(found)
    unrecorded.contested = [each for each in unrecorded.contested if each[0].state != GONE]
    unrecorded.open = (
        now_ms < unrecorded.foreign_until_ms
        or bool(unrecorded.contested)
        or any(not each.recorded and each.state != GONE for each in state.members)
    )
    if not unrecorded.open:
        for group in unrecorded.gathered.values():
            for segment, found in chain.from_iterable(group.values()):
                release(state, segment, found, now_ms)
        unrecorded.close()
        for segment in state.members:
            waited = segment.disk is None or not segment.recorded_below
            untold = segment.recorded_below < unrecorded.first_generation
            if segment.state != GONE and waited and untold:
                _note_recorded(state, work, segment)
        unrecorded.forget_below(
            min(
                (each.recorded_below for each in state.members if each.state != GONE),
                default=unrecorded.horizon,
            )
        )


def give_up(state: CatalogState, work: Work, now_ms: int) -> None:
    """Too much has ended while somebody owes: what they have not told is not waited for."""
    state.unrecorded.foreign_until_ms = 0
    for segment, found in state.unrecorded.contested:
        release(state, segment, found, now_ms)
    state.unrecorded.contested.clear()
    for segment in state.members:
        if not segment.recorded:
            _mark_recorded(state, work, segment)
            state.counters["inventories_given_up"] += 1
    refresh(state, work, now_ms)


# --- mount ----------------------------------------------------------------------------------------


def former_segment(state: CatalogState, work: Work, command: Mount, now_ms: int) -> Segment | None:
    """The segment this node had in a life that this catalog or a lost one knew of, if it may come
    back with what is on it; else None."""
    if not command.segment_id or not command.recovers:
        return None
    known = state.members.by_id.get(command.segment_id)
    if _segment_lost(state, command, now_ms):
        return _adopt_segment(state, work, command, command.segment_id, now_ms)
    if known is None or command.foreign or known.state == GONE or not command.warm:
        return None
    if command.nbytes < known.nbytes:
        return None
    if command.nbytes > known.nbytes:
        known.allocator.grow(command.nbytes // UNIT_BYTES)
        known.nbytes = command.nbytes
    known.node, known.incarnation = command.node, command.incarnation
    known.compared = False
    return known


def former_disk(state: CatalogState, work: Work, command: Mount, now_ms: int) -> Segment | None:
    """The segment this disk was, or becomes with what is on it; None: nothing is known of it."""
    if not (command.recovers and _disk_lost(state, command, now_ms)):
        return state.members.find_disk(command)
    segment = _adopt_segment(state, work, command, state.members.next_segment_id, now_ms)
    state.mark(work)
    return segment


def _segment_lost(state: CatalogState, command: Mount, now_ms: int) -> bool:
    """Was it given out by a master whose records of that are lost: all of them, or the newest?"""
    if not command.segment_id or command.segment_id in state.members.by_id:
        return False
    if command.foreign:
        return now_ms < state.unrecorded.foreign_until_ms
    first, below, until_ms = state.unrecorded.lost_segments
    return first <= command.segment_id < below and now_ms < until_ms


def _disk_lost(state: CatalogState, command: Mount, now_ms: int) -> bool:
    """Likewise; a disk of this cluster, if the log has never heard of any segment."""
    ours = state.unrecorded.lost_segments[0] == 1
    adopts = (command.foreign or ours) and now_ms < state.unrecorded.foreign_until_ms
    return adopts and command.former_term > 0 and state.members.find_disk(command) is None


def _adopt_segment(
    state: CatalogState, work: Work, command: Mount, segment_id: int, now_ms: int
) -> Segment:
    """One whose records are lost. This term is above all it may hold, and its readers
    may have any lease."""
    work.records += state.lingering.lengthen(state.settings.lease_max_ms, now_ms)
    segment = state.members.add(command, segment_id, now_ms)
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
        for put in (state.running_puts() if segment.disk is None else ())
        if put.keys and put.first < limit and not state.unrecorded.durable_puts
    ]
    if not segment.owed and not runs and not segment.recorded:
        _mark_recorded(state, work, segment)
        refresh(state, work, now_ms)
    ranges = sorted({*segment.owed, *runs})
    if len(ranges) > _RANGES_MAX:
        return [(ranges[0][0], max(below for _, below in ranges))]
    return ranges


# --- inventory ------------------------------------------------------------------------------------


def inventory(state: CatalogState, command: Inventory, now_ms: int) -> Applied:
    segment = state.members.known(command.node, command.incarnation, command.segment_id)
    if segment is None or not segment.mounted:
        cause = f"segment {command.segment_id} of {command.node!r} is not mounted here"
        return Applied(Refused(ObjectNotFound.code, cause))
    if command.first_generation not in (0, segment.asked_below):
        cause = f"segment {command.segment_id} was asked for another mount than its latest"
        return Applied(Refused(ObjectNotFound.code, cause))
    if len(command.names) * EXTENT_ROW.size != len(command.rows):
        return Applied(Refused(UsageError.code, "inventory: one name a row"))
    work = Work()
    unseal = b""
    if command.rows:
        unseal = Page(state, work, segment, now_ms).judge(command)
    if command.absent:
        _lose_absent(state, work, segment, command, now_ms)
    if command.recorded and not segment.recorded:
        _mark_recorded(state, work, segment)
        segment.compared |= segment.disk is not None  # its own lists do that (audits.py)
        state.members.set_state(segment, ALIVE)
        refresh(state, work, now_ms)
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
    unrecorded = state.unrecorded
    groups = chain.from_iterable(each.values() for each in unrecorded.gathered.values())
    if not any(each is segment for found in (unrecorded.contested, *groups) for each, _ in found):
        _note_recorded(state, work, segment)


def _note_recorded(state: CatalogState, work: Work, segment: Segment) -> None:
    """No later master asks for it again. While parts that it holds wait for others, which is in no
    record, a later one has to; what ends meanwhile is buried."""
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
