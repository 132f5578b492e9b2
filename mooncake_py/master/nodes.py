"""Mount, heartbeat, unmount, and what silence does. The rules are in `membership.py`. Pure."""

from __future__ import annotations

import numpy as np

from mooncake_py.errors import ObjectNotFound, UsageError
from mooncake_py.master import records
from mooncake_py.master.allocator import UNIT_BYTES
from mooncake_py.master.commands import Applied, Done, Heartbeat, Mount, Mounted, Refused, Unmount
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.membership import ALIVE, DRAINING, GONE, RETURNING, SUSPECT, Segment
from mooncake_py.master.objects import PLACE_BITS, PLACE_MASK
from mooncake_py.master.state import CatalogState
from mooncake_py.master.work import Work

_NAME_MAX_BYTES = 255
_SEGMENT_MAX_BYTES = (PLACE_MASK + 1) * UNIT_BYTES
_SEGMENTS_MAX = 1 << 16


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
    work = Work()
    for former in members.of_node(command.node):
        if former.incarnation != command.incarnation:
            lose_segment(state, work, former, now_ms)
    segment = members.find_mounted(command)
    if segment is None:
        segment = members.add(command, members.next_segment_id, now_ms)
        state.mark(work)
    segment.address, segment.host_id = command.address, command.host_id
    segment.domain = command.domain
    segment.region = command.region
    segment.seen_ms = now_ms
    segment.mounted = True
    members.set_state(segment, ALIVE)
    work.records.append(records.encode(segment_fields(segment)))
    work.durable = True
    state.counters["mounts"] += 1
    return work.done(Mounted(segment.segment_id), now_ms)


def segment_fields(segment: Segment) -> records.SegmentFields:
    return records.SegmentFields(
        segment.segment_id,
        segment.node,
        segment.incarnation,
        segment.address,
        segment.region,
        segment.nbytes,
        segment.host_id,
    )


def heartbeat(state: CatalogState, command: Heartbeat, now_ms: int) -> Applied:
    segment = state.members.known(command.node, command.incarnation, command.segment_id)
    if segment is None or not segment.mounted:
        if segment is not None:
            segment.seen_ms = now_ms
            state.members.set_state(segment, RETURNING)
        cause = f"segment {command.segment_id} of {command.node!r} is not mounted here"
        return Applied(Refused(ObjectNotFound.code, cause))
    segment.seen_ms = now_ms
    state.members.set_state(segment, DRAINING if command.draining else ALIVE)
    return Applied(Done())


def unmount(state: CatalogState, command: Unmount, now_ms: int) -> Applied:
    work = Work()
    segment = state.members.known(command.node, command.incarnation, command.segment_id)
    if segment is not None:
        lose_segment(state, work, segment, now_ms)
    return work.done(Done(), now_ms)


def lose_segment(state: CatalogState, work: Work, segment: Segment, now_ms: int) -> None:
    """From now on nothing is on it. Its objects are forgotten by `reclaim`, a few a tick."""
    state.members.set_state(segment, GONE)
    state.leaving.append((segment, None))
    work.records.append(records.encode(records.Gone(segment.segment_id)))
    state.counters["segments_lost"] += 1
    state.lose_grants(work, segment.index, now_ms)


def judge(state: CatalogState, work: Work, now_ms: int) -> None:
    """Silence makes suspects, long silence ends."""
    suspects, dead = state.members.silent(now_ms)
    for segment in suspects:
        state.members.set_state(segment, SUSPECT)
        state.counters["suspects"] += 1
    for segment in dead:
        lose_segment(state, work, segment, now_ms)


def reclaim(state: CatalogState, work: Work, now_ms: int) -> None:
    """Forget at most `reclaim_max` objects of segments that are gone."""
    left = state.settings.reclaim_max
    while state.leaving and left > 0:
        segment, slots = state.leaving[0]
        if slots is None:
            slots = slots_on(state, segment.index)
            state.leaving[0] = (segment, slots)
        while slots and left > 0:
            slot = slots.pop()
            left -= 1
            if state.table.key[slot] is not None:
                state.lose_replica(work, slot, segment.index, Event.NODE_LOST, now_ms)
        if not slots:
            state.leaving.pop(0)
            state.members.forget(segment)


def slots_on(state: CatalogState, index: int) -> list[int]:
    """Slots that have, or had before they were emptied, a replica on this segment."""
    table = state.table
    places = table.place_column.many[: len(table.key)]
    first = np.nonzero(places >> np.uint64(PLACE_BITS) == index)[0].tolist()
    further = [
        slot
        for slot, more in table.more.items()
        if any(place >> PLACE_BITS == index for place in more)
    ]
    return [*first, *further]
