"""Drains: a segment is emptied so that its node can leave.

Rules. Nothing new goes to a draining segment; its objects stay readable. In passes over all slots,
some a tick, every object on it is copied to another node and then given up here, or only given up
if it has the replicas it wants elsewhere. Objects for which there is no place stay, are counted,
and are tried again in the next pass; no object is evicted for the sake of another one here (the
watermarks see to that). A drain is *done* when nothing of the segment is used, and *stuck* while a
whole pass has found nothing to do but objects without a place.

Drains are in no record: whoever drains asks again and again (which is how progress is told), and
after a change of the leader goes on with the new one. Pure.
"""

from __future__ import annotations

from mooncake_py.errors import OK, Backpressure, ObjectNotFound
from mooncake_py.master.commands import Applied, Drain, DrainInfo, Refused
from mooncake_py.master.copies import elsewhere, start_copy
from mooncake_py.master.membership import ALIVE, AWAY, DRAINING, GONE, Segment
from mooncake_py.master.state import CatalogState
from mooncake_py.master.taskbook import DrainBook, Why
from mooncake_py.master.work import Work
from mooncake_py.model import EXTENT_ALIGN_BYTES

_STRIDE = 16_384  # slots looked at in a tick
_RUNNING_BYTES = 256 << 20  # of copies in the making
_PASS_MS = 100  # between two passes


def drain(state: CatalogState, command: Drain, now_ms: int) -> Applied:
    found = [
        each
        for each in state.members
        if each.state != GONE
        and each.disk is None  # what is on a disk stays with it
        and command.what in (each.node, str(each.segment_id))
    ]
    if not found:
        cause = f"no node and no segment is called {command.what!r}"
        return Applied(Refused(ObjectNotFound.code, cause))
    if not command.cancel and all(each.state == AWAY for each in found):
        cause = f"{command.what!r} is away: nothing can be moved off it before it is back"
        return Applied(Refused(ObjectNotFound.code, cause))
    for segment in found:
        segment.drain_asked = not command.cancel
        judge_drain(state, segment)
    return Applied(_info(state, found, command.cancel))


def judge_drain(state: CatalogState, segment: Segment) -> None:
    """Its state, after a heartbeat or an operator's word."""
    if segment.state not in (ALIVE, DRAINING):
        return
    asked = segment.drain_asked or segment.drain_told
    state.members.set_state(segment, DRAINING if asked else ALIVE)
    drains = state.tasks.drains
    if asked and segment.segment_id not in drains:
        drains[segment.segment_id] = DrainBook(segment.segment_id)
    elif not asked:
        drains.pop(segment.segment_id, None)


def _info(state: CatalogState, segments: list[Segment], cancelled: bool) -> DrainInfo:
    books = [state.tasks.drains.get(each.segment_id) for each in segments]
    known = [book for book in books if book is not None]
    left_bytes = sum(each.used_units for each in segments) * EXTENT_ALIGN_BYTES
    left = sum(book.stuck_before + book.pending_before for book in known)
    if cancelled:
        stand = "cancelled"
    elif not left_bytes:
        stand, left = "done", 0
    elif all(book.passes and not book.pending_before for book in known) and left:
        stand = "stuck"
    else:
        stand = "running"
    return DrainInfo(
        state=stand,
        moved=sum(book.moved for book in known),
        moved_bytes=sum(book.moved_bytes for book in known),
        dropped=sum(book.dropped for book in known),
        ended=sum(book.ended for book in known),
        failed=sum(book.failed for book in known),
        left=left,
        left_bytes=left_bytes,
    )


def drain_step(state: CatalogState, work: Work, now_ms: int) -> bool:
    """Go on with every drain for a while; is there more to do at once?"""
    more = False
    for segment in state.members.draining:
        book = state.tasks.drains.get(segment.segment_id)
        if book is None:  # draining since before this master
            judge_drain(state, segment)
        elif segment.used_units and now_ms >= book.again_ms:
            more |= _go_on(state, work, segment, book, now_ms)
    return more


def _go_on(state: CatalogState, work: Work, segment: Segment, book: DrainBook, now_ms: int) -> bool:
    limit = _RUNNING_BYTES // EXTENT_ALIGN_BYTES
    slots = state.table.slots_on(segment.index, book.cursor, book.cursor + _STRIDE)
    left = state.settings.step_max
    for slot in sorted(slots):
        if not left or state.tasks.units_by_why[Why.DRAIN] > limit:
            book.cursor = slot
            return not left
        left -= 1
        if state.table.key[slot] is not None:  # else it ended with its group just now
            _leave(state, work, segment, book, slot, now_ms)
    book.cursor += _STRIDE
    if book.cursor < len(state.table.key):
        return True
    book.cursor, book.passes, book.again_ms = 0, book.passes + 1, now_ms + _PASS_MS
    book.stuck_before, book.pending_before = book.stuck, book.pending
    book.stuck = book.pending = 0
    return False


def _leave(
    state: CatalogState, work: Work, segment: Segment, book: DrainBook, slot: int, now_ms: int
) -> None:
    table = state.table
    others = elsewhere(state, slot, segment.index)
    if others >= table.wanted.get(slot, 1):
        state.shed_replica(work, slot, segment.index, now_ms)
        book.dropped += 1
        return
    code = start_copy(state, work, slot, now_ms, Why.DRAIN, drops=segment.segment_id)
    if code in (OK, Backpressure.code):
        book.pending += 1
    elif others:
        state.shed_replica(work, slot, segment.index, now_ms)
        book.dropped += 1
    else:
        book.stuck += 1
