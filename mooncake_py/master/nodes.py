"""Mount, heartbeat, unmount, and what silence does. The rules are in `membership.py`. Pure."""

from __future__ import annotations

from mooncake_py.errors import Backpressure, ObjectNotFound, UsageError
from mooncake_py.master import records, recovery
from mooncake_py.master.allocator import UNIT_BYTES
from mooncake_py.master.commands import Applied, Done, Heartbeat, Mount, Mounted, Refused, Unmount
from mooncake_py.master.copies import lose_target
from mooncake_py.master.drains import judge_drain
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.membership import (
    ALIVE,
    AWAY,
    DRAINING,
    GONE,
    RETURNING,
    SUSPECT,
    Leaving,
    Segment,
    segment_fields,
)
from mooncake_py.master.objects import PLACE_BITS, PLACE_MASK
from mooncake_py.master.state import CatalogState
from mooncake_py.master.tiering import forget_work
from mooncake_py.master.work import Work

_NAME_MAX_BYTES = 255
_SEGMENT_MAX_BYTES = (PLACE_MASK + 1) * UNIT_BYTES
_SEGMENTS_MAX = 1 << 16
_STRIDE = 16_384  # slots looked at in one go
_STRIDES_A_TICK = 8


def mount(state: CatalogState, command: Mount, now_ms: int) -> Applied:
    members = state.members
    texts = (command.node, command.address, command.host_id, command.domain)
    if not command.node or any(len(text.encode()) > _NAME_MAX_BYTES for text in texts):
        cause = f"node needs a name, and no text may be longer than {_NAME_MAX_BYTES} bytes"
        return Applied(Refused(UsageError.code, cause))
    if not UNIT_BYTES <= command.nbytes <= _SEGMENT_MAX_BYTES:
        cause = f"segment of {command.nbytes} bytes; {UNIT_BYTES} to {_SEGMENT_MAX_BYTES} fit"
        return Applied(Refused(UsageError.code, cause))
    if len(members.by_id) >= _SEGMENTS_MAX:
        return Applied(Refused(UsageError.code, f"{_SEGMENTS_MAX} segments are mounted already"))
    conflict = members.conflict(command, now_ms)
    if conflict:
        return Applied(Refused(UsageError.code, conflict))
    term = recovery.term_wanted(state, command, now_ms)
    if term:
        cause = f"what {command.node!r} holds may be younger than this term: {term} is begun first"
        return Applied(Refused(Backpressure.code, cause), term_wanted=term)
    work = Work()
    if command.disk_id:
        segment = recovery.former_disk(state, work, command, now_ms)
    else:
        segment = recovery.former_segment(state, work, command, now_ms)
        _lose_former(state, work, command, now_ms)
        segment = segment or members.find_mounted(command)
    if segment is None:
        segment = members.add(command, members.next_segment_id, now_ms)
        segment.recorded_below = state.next_generation  # it holds nothing yet
        state.mark(work)
    else:
        segment.waits = True
    expected = recovery.expects(state, work, segment, command, now_ms)
    if segment.disk is not None:
        forget_work(state, segment, now_ms)
        segment.node, segment.incarnation = command.node, command.incarnation
        segment.nbytes = command.nbytes
        segment.disk.usable_units = command.nbytes // UNIT_BYTES
    segment.address, segment.host_id = command.address, command.host_id
    segment.domain = command.domain
    segment.region = command.region
    segment.seen_ms = now_ms
    segment.mounted = True
    segment.keeps = command.keeps
    members.set_state(segment, segment.standing)
    segment.drain_told = False
    judge_drain(state, segment)
    work.records.append(records.encode(segment_fields(segment)))
    work.durable = True
    state.counters["mounts"] += 1
    mounted = Mounted(segment.segment_id)
    if command.recovers and not (segment.recorded and segment.compared):
        segment.asked_below = state.next_generation
        mounted = Mounted(segment.segment_id, True, expected, segment.asked_below)
    return work.done(mounted, now_ms)


def _lose_former(state: CatalogState, work: Work, command: Mount, now_ms: int) -> None:
    """A node that was started again has nothing of what it had; its disk may come back."""
    for former in state.members.of_node(command.node):
        if former.incarnation != command.incarnation:
            lose_segment(state, work, former, now_ms)
    for disk in list(state.members.disks.values()):
        if disk.node == command.node and disk.incarnation != command.incarnation:
            leave(state, work, disk, now_ms)


def heartbeat(state: CatalogState, command: Heartbeat, now_ms: int) -> Applied:
    segment = state.members.known(command.node, command.incarnation, command.segment_id)
    if segment is None or not segment.mounted or segment.disk is not None:
        if segment is not None and segment.disk is None:
            segment.seen_ms = now_ms
            state.members.set_state(segment, RETURNING)
        cause = f"segment {command.segment_id} of {command.node!r} is not mounted here"
        return Applied(Refused(ObjectNotFound.code, cause))
    segment.seen_ms = now_ms
    segment.waits = False
    segment.drain_told = command.draining
    if segment.state not in (ALIVE, DRAINING):
        state.members.set_state(segment, segment.standing)
    judge_drain(state, segment)
    for disk in state.members.disks.values():  # how busy a disk is does not say that it is dead
        if disk.node == command.node and disk.incarnation == command.incarnation and disk.mounted:
            disk.seen_ms = now_ms
            if disk.state == SUSPECT:
                state.members.set_state(disk, disk.standing)
                break
    return Applied(Done(tasks=state.tasks.waiting_for(segment.index)))


def unmount(state: CatalogState, command: Unmount, now_ms: int) -> Applied:
    work = Work()
    segment = state.members.known(command.node, command.incarnation, command.segment_id)
    if segment is not None and command.returns and segment.keeps:
        state.members.set_state(segment, AWAY)
    elif segment is not None:
        leave(state, work, segment, now_ms)
    return work.done(Done(), now_ms)


def leave(state: CatalogState, work: Work, segment: Segment, now_ms: int) -> None:
    """Its node is gone. Memory is gone with it, a disk is only away."""
    if segment.disk is None:
        lose_segment(state, work, segment, now_ms)
        return
    if segment.state in (AWAY, GONE):
        return
    state.members.set_state(segment, AWAY)
    segment.mounted = False
    forget_work(state, segment, now_ms)


def lose_segment(state: CatalogState, work: Work, segment: Segment, now_ms: int) -> None:
    """From now on nothing is on it. Its grants and objects are forgotten by `reclaim`, a few a
    tick; what must not wait for that looks whether the segment is gone."""
    if not segment.recorded:
        state.lingering.lose_untold()
    state.members.set_state(segment, GONE)
    segment.lost_units = segment.used_units
    state.leaving.append(Leaving(segment, state.running_puts()))
    state.tasks.drains.pop(segment.segment_id, None)
    lose_target(state, segment, now_ms)
    forget_work(state, segment, now_ms)
    work.records.append(records.encode(records.Gone(segment.segment_id)))
    state.counters["segments_lost"] += 1


def judge(state: CatalogState, work: Work, now_ms: int, bury: bool = True) -> None:
    """Silence makes suspects, long silence ends. Without `bury` only reports make suspects, and
    silence counts from then on."""
    suspects, dead = state.members.silent(now_ms)
    if not bury:
        for segment in dead:
            segment.seen_ms = now_ms - state.settings.suspect_ms
        return
    for segment in suspects:
        state.members.set_state(segment, SUSPECT)
        state.counters["suspects"] += 1
    for segment in dead:
        if segment.state == AWAY:
            lose_segment(state, work, segment, now_ms)
        else:
            leave(state, work, segment, now_ms)


def reclaim(state: CatalogState, work: Work, now_ms: int) -> None:
    """Forget at most `reclaim_max` grants and objects of segments that are gone."""
    left = state.settings.reclaim_max
    while state.leaving and left > 0:
        leaving = state.leaving[0]
        left = _reclaim_grants(state, work, leaving, left, now_ms)
        if leaving.puts:
            return
        left = _reclaim_objects(state, work, leaving, left, now_ms)
        if leaving.slot < len(state.table.key):
            return
        state.leaving.pop(0)
        state.members.forget(leaving.segment)


def _reclaim_grants(
    state: CatalogState, work: Work, leaving: Leaving, left: int, now_ms: int
) -> int:
    while leaving.puts and left > 0:
        put = leaving.puts[-1]
        while leaving.entry < len(put.keys) and left > 0:
            grant = (put, leaving.entry)
            leaving.entry += 1
            left -= 1
            if put.tenant.writing.get(put.keys[grant[1]]) == grant:
                state.lose_grant(work, grant, leaving.segment.index, now_ms)
        if leaving.entry >= len(put.keys):
            leaving.puts.pop()
            leaving.entry = 0
    return left


def _reclaim_objects(
    state: CatalogState, work: Work, leaving: Leaving, left: int, now_ms: int
) -> int:
    table, index = state.table, leaving.segment.index
    strides = _STRIDES_A_TICK
    while leaving.slot < len(table.key) and left > 0 and strides > 0:
        stop = leaving.slot + _STRIDE
        slots = sorted(table.slots_on(index, leaving.slot, stop))
        for slot in slots[:left]:
            if table.key[slot] is not None:
                state.lose_replica(work, slot, index, Event.NODE_LOST, now_ms)
                leaving.segment.replicas_lost += 1
        leaving.slot = stop if len(slots) <= left else slots[left]
        left -= len(slots)
        strides -= 1
    return left


def lose_at_once(state: CatalogState, segment: Segment, now_ms: int) -> list[int]:
    """For a follower, to whom records say what else ends: grants there end; slots with a replica
    there."""
    state.members.set_state(segment, GONE)
    for tenant in state.tenants:
        for put, entry in list(tenant.writing.values()):
            if all(place >> PLACE_BITS == segment.index for place in put.places[entry]):
                state.give_up_grant(put, entry, 0, now_ms)
            else:
                state.lose_grant(Work(), (put, entry), segment.index, now_ms)
    return state.table.slots_on(segment.index, 0, len(state.table.key))
