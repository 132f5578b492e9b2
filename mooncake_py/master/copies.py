"""Copies: how an object gets one more replica, or moves.

    decided (drain, repair, heat, an operator) --> waits for the target's node --> handed out
      --> the node reads a replica of another node, checks it, seals --> reported --> committed

Rules. A copy is an extent with a *generation of its own* on the target, reserved when the copy is
decided; so the native rules about ages of extents hold for it without exception, and the generation
names the task. The target's node pulls (only the owner writes its memory); its heartbeats say that
tasks wait, `Tasks` fetches them and reports the former ones. With the report the object has the
replica, in the same step a move ends the former one, whose extent rests as long as readers may
have been sent there. An object that ended or was replaced meanwhile gets nothing. An object has one
copy in the making at most, and none while its key is being written anew.

A copy that nobody reports ends at its expiry, or earlier when its node is suspect and the copy is
wanted still, and its extent rests `grant_margin_ms` longer, as with grants. Copies in the making
are in no record: after a restart of the master, nodes end what runs before they mount. Pure.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from mooncake_py.errors import (
    OK,
    Backpressure,
    ObjectNotFound,
    OutOfSpace,
    UsageError,
)
from mooncake_py.master.commands import (
    Applied,
    CopyObjects,
    CopyTask,
    Name,
    Refused,
    Statuses,
    TaskList,
    Tasks,
)
from mooncake_py.master.groups import is_named
from mooncake_py.master.membership import ALIVE, AWAY, DRAINING, GONE, SUSPECT, Segment
from mooncake_py.master.objects import HARD_PIN, PLACE_BITS, PLACE_MASK
from mooncake_py.master.placement import Placer
from mooncake_py.master.snapshots import record_replica
from mooncake_py.master.state import CatalogState, extent_units
from mooncake_py.master.stripes import part_slots
from mooncake_py.master.taskbook import Copy, Why
from mooncake_py.master.work import Work
from mooncake_py.model import BATCH_MAX_KEYS, EXTENT_ALIGN_BYTES, ReplicaPolicy

TASKS_PER_CALL = 64
WAITING_MAX = 256  # copies that wait for one node


# --- decided ------------------------------------------------------------------------------------


def start_copy(  # noqa: PLR0913  (four of them are who, three are what)
    state: CatalogState,
    work: Work,
    slot: int,
    now_ms: int,
    why: Why,
    *,
    drops: int = 0,
    targets: list[Segment] | None = None,
) -> int:
    """Decide a copy to one of `targets` (None: all that new extents may go to). A status: OK, or
    OUT_OF_SPACE, or BACKPRESSURE (there is one in the making, or another value is)."""  # fmt: skip
    table, book = state.table, state.tasks
    key = table.key[slot]
    assert key is not None
    running = book.of_slot.get(slot)
    if running is not None and running.of == table.generation[slot]:
        if state.members.at(running.target >> PLACE_BITS).state not in (SUSPECT, AWAY):
            return Backpressure.code
        end_copy(state, running, now_ms)  # its node is silent: another one may have it sooner
    if key in state.tenants.at(table.tenant[slot]).writing:
        return Backpressure.code
    chosen = [state.members.at(place >> PLACE_BITS) for place in table.places(slot)]
    open_ = [
        each
        for each in (state.members.placeable if targets is None else targets)
        if book.waiting_for(each.index) < WAITING_MAX
    ]
    state.reserve_generations(work, 1)
    generation = state.next_generation
    units = extent_units(table.length[slot])
    place = Placer(open_, ReplicaPolicy(), "", generation).another(units, chosen)
    if place < 0:
        return OutOfSpace.code
    state.next_generation += 1
    expires_ms = now_ms + state.settings.grant_ttl_ms
    copy = Copy(generation, slot, table.generation[slot], place, units, expires_ms, why, drops)
    book.running[generation] = book.of_slot[slot] = copy
    book.waiting.setdefault(place >> PLACE_BITS, deque()).append(generation)
    book.units_by_why[why] += units
    state.counters["copies_started"] += 1
    return OK


# --- the node -----------------------------------------------------------------------------------


def tasks(state: CatalogState, command: Tasks, now_ms: int) -> Applied:
    segment = state.members.known(command.node, command.incarnation, command.segment_id)
    if segment is None or not segment.mounted:
        cause = f"segment {command.segment_id} of {command.node!r} is not mounted here"
        return Applied(Refused(ObjectNotFound.code, cause))
    work = Work()
    for generation, code in command.done:
        copy = state.tasks.running.get(generation)
        if copy is not None and copy.handed and copy.target >> PLACE_BITS == segment.index:
            _finish(state, work, copy, code, now_ms)
    queue = state.tasks.waiting.get(segment.index, deque())
    entries: dict[int, int] = {}  # segment index -> entry of the reply's table
    found: list[CopyTask] = []
    while queue and len(found) < min(command.limit, TASKS_PER_CALL):
        copy = state.tasks.running.get(queue.popleft())
        if copy is None:
            continue
        task = _hand_out(state, copy, entries, now_ms)
        if task is None:
            end_copy(state, copy, now_ms)
        else:
            found.append(task)
    ids = [state.members.at(index).segment_id for index in entries]
    return work.done(TaskList(ids, found, len(queue)), now_ms)


def _lives(state: CatalogState, copy: Copy) -> bool:
    table = state.table
    return table.key[copy.slot] is not None and table.generation[copy.slot] == copy.of


def _hand_out(
    state: CatalogState, copy: Copy, entries: dict[int, int], now_ms: int
) -> CopyTask | None:
    """None: there is nothing to copy from any more."""
    if not _lives(state, copy):
        return None
    table, slot = state.table, copy.slot
    sources = [
        place
        for place in table.places(slot)
        if (segment := state.members.at(place >> PLACE_BITS)).readable and segment.disk is None
    ]
    if not sources:
        return None
    source = sources[copy.generation % len(sources)]
    copy.handed = True
    copy.expires_ms = now_ms + state.settings.grant_ttl_ms
    return CopyTask(
        name=Name(
            tenant=state.tenants.at(table.tenant[slot]).name,
            key=table.key[slot] or b"",
            soft_pin_until_ms=table.soft_pins.get(slot, 0),
            ttl_until_ms=table.ttls.get(slot, 0),
            hard_pin=bool(table.flags[slot] & HARD_PIN),
            generation=copy.of,
        ),
        group=(group := table.groups.get(slot, 0)),
        members=len(state.groups.mates(group)) if group and not is_named(group) else 0,
        length=table.length[slot],
        generation=copy.generation,
        offset=(copy.target & PLACE_MASK) * EXTENT_ALIGN_BYTES,
        expires_ms=copy.expires_ms,
        source=entries.setdefault(source >> PLACE_BITS, len(entries)),
        source_offset=(source & PLACE_MASK) * EXTENT_ALIGN_BYTES,
        source_generation=table.replica_generation(slot, source),
    )


def _finish(state: CatalogState, work: Work, copy: Copy, code: int, now_ms: int) -> None:
    """The node has reported."""
    drain = state.tasks.drains.get(copy.drops)
    lives = _lives(state, copy)
    if code != OK or not lives or copy.expires_ms <= now_ms:
        if drain is not None:
            drain.ended += not lives
            drain.failed += lives
        state.counters["copies_failed"] += lives
        end_copy(state, copy, now_ms)
        return
    _forget(state, copy)
    slot = copy.slot
    state.add_replica(slot, copy.target, copy.generation)
    record_replica(state, work, slot, copy.target, copy.generation, now_ms)
    state.counters["copies_made"] += 1
    state.counters[f"copied_bytes_{copy.why.value}"] += copy.units * EXTENT_ALIGN_BYTES
    former = state.members.by_id.get(copy.drops)
    if former is not None and former.state != GONE:
        state.shed_replica(work, slot, former.index, now_ms, state.settings.grant_margin_ms)
        if drain is not None:
            drain.moved += 1
            drain.moved_bytes += state.table.length[slot]
    if copy.why is Why.HOT:
        state.tasks.extra[slot] = copy.of


# --- ends ---------------------------------------------------------------------------------------


def _forget(state: CatalogState, copy: Copy) -> None:
    book = state.tasks
    del book.running[copy.generation]
    book.units_by_why[copy.why] -= copy.units
    if book.of_slot.get(copy.slot) is copy:
        del book.of_slot[copy.slot]


def end_copy(state: CatalogState, copy: Copy, now_ms: int) -> None:
    """The copy ends without a replica."""
    _forget(state, copy)
    until = copy.expires_ms + state.settings.grant_margin_ms if copy.handed else 0
    if state.members.at(copy.target >> PLACE_BITS).state == GONE:
        until = 0
    state.release(copy.target, copy.units, until, now_ms)
    if _lives(state, copy):
        state.note_short(copy.slot)


def lose_target(state: CatalogState, segment: Segment, now_ms: int) -> None:
    """The segment is gone, and with it what was to be copied there. Their number is bounded."""
    lost = [
        copy for copy in state.tasks.running.values() if copy.target >> PLACE_BITS == segment.index
    ]
    for copy in lost:
        end_copy(state, copy, now_ms)
    state.tasks.waiting.pop(segment.index, None)


def expire_copies(state: CatalogState, now_ms: int, count_max: int) -> None:
    """Of the oldest copies so many are looked at: those whose time is over, or whose object is not
    there any more and which no node has, end."""
    for copy in list(islice(state.tasks.running.values(), count_max)):
        if copy.expires_ms <= now_ms or not (copy.handed or _lives(state, copy)):
            drain = state.tasks.drains.get(copy.drops)
            if drain is not None:
                drain.failed += 1
            end_copy(state, copy, now_ms)


# --- an operator --------------------------------------------------------------------------------


def copy_objects(state: CatalogState, command: CopyObjects, now_ms: int) -> Applied:
    """Asked again until every key is OK: then its replica is there (and, for a move, the one on
    `from_node` is not)."""
    if len(command.keys) > BATCH_MAX_KEYS:
        return Applied(Refused(UsageError.code, f"more than {BATCH_MAX_KEYS} keys in one call"))
    if command.to_node == command.from_node:
        return Applied(Refused(UsageError.code, "to_node and from_node are the same"))
    targets = [each for each in state.members.of_node(command.to_node) if each.state == ALIVE]
    if not targets:
        cause = f"no node {command.to_node!r} that takes new objects"
        return Applied(Refused(ObjectNotFound.code, cause))
    work = Work()
    tenant = state.tenants.find(command.tenant)
    status = bytearray(len(command.keys))
    for i, key in enumerate(command.keys):
        slot = None if tenant is None else state.find_live(work, tenant, key, now_ms)
        if slot is None:
            status[i] = ObjectNotFound.code
        else:
            status[i] = _copy_whole(state, work, slot, command, targets, now_ms)
    return work.done(Statuses(bytes(status)), now_ms)


def _copy_whole(
    state: CatalogState,
    work: Work,
    slot: int,
    command: CopyObjects,
    targets: list[Segment],
    now_ms: int,
) -> int:
    """The object with all its parts. A move takes those that lie on `from_node`; the others stay
    where they are. OK once all are as asked for, else what keeps one from it."""
    further = part_slots(state.table, state.tenants.at(state.table.tenant[slot]), slot)
    codes = [_copy_one(state, work, each, command, targets, now_ms) for each in (slot, *further)]
    missing = ObjectNotFound.code
    if further and any(code != missing for code in codes):
        codes = [code for code in codes if code != missing]
    hindered = [code for code in codes if code not in (OK, Backpressure.code)]
    return (hindered or [max(codes)])[0]


def _copy_one(
    state: CatalogState,
    work: Work,
    slot: int,
    command: CopyObjects,
    targets: list[Segment],
    now_ms: int,
) -> int:
    homes = [state.members.at(place >> PLACE_BITS) for place in state.table.places(slot)]
    former = [each for each in homes if each.node == command.from_node]
    if any(each.node == command.to_node for each in homes):
        for each in former:
            state.shed_replica(work, slot, each.index, now_ms, state.settings.grant_margin_ms)
        return OK
    if command.from_node and not former:
        return ObjectNotFound.code
    drops = former[0].segment_id if former else 0
    code = start_copy(state, work, slot, now_ms, Why.ASKED, drops=drops, targets=targets)
    return Backpressure.code if code == OK else code


def elsewhere(state: CatalogState, slot: int, index: int) -> int:
    """How many replicas the object has on other segments that stay."""
    segments = [state.members.at(place >> PLACE_BITS) for place in state.table.places(slot)]
    return sum(
        each.index != index and each.state not in (DRAINING, GONE) and each.disk is None
        for each in segments
    )
