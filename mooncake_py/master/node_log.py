"""What an operator reads about nodes: one line of the log for each change of a segment's state.

The catalog decides and says nothing; the service looks at its membership after each mount and
unmount and after each tick. What changed and changed back between two looks is not told. Each line
begins with the node, so that a search for "node NAME" finds its story.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mooncake_py.master.membership import (
    ALIVE,
    AWAY,
    DRAINING,
    GONE,
    RETURNING,
    SUSPECT,
    Membership,
    Segment,
)
from mooncake_py.model import EXTENT_ALIGN_BYTES

log = logging.getLogger(__name__)

LEFT = "has left"
REPLACED, SILENT = "is lost: it was started anew", "is lost: it was silent for too long"


@dataclass(slots=True)
class _Told:
    """What was said last about a segment."""

    segment: Segment
    state: str
    drained: bool = False


class NodeLog:
    """Owner thread only."""

    def __init__(self) -> None:
        self._version = -1
        self._told: dict[int, _Told] = {}

    def look(self, members: Membership, now_ms: int, gone: str) -> None:
        """Log what has changed since the last look. gone: why segments are gone that now are."""
        if members.version != self._version:
            self._version = members.version
            for segment_id in self._told.keys() - members.by_id.keys():
                self._forgotten(self._told.pop(segment_id), gone)
            for segment in members:
                self._compare(segment, now_ms, gone)
        for segment in members.draining:
            told = self._told[segment.segment_id]
            if not told.drained and not segment.used_units:
                told.drained = True
                log.info("%s is drained: nothing is on it", _name(segment))

    def _compare(self, segment: Segment, now_ms: int, gone: str) -> None:
        told, name, state = self._told.get(segment.segment_id), _name(segment), segment.state
        if told is None:
            self._told[segment.segment_id] = told = _Told(segment, state)
            if segment.mounted and segment.readable and state != RETURNING:
                log.info("%s mounted: %d bytes at %s", name, segment.nbytes, segment.address)
            else:
                log.info("%s is known from before: %s", name, state)
            return
        before, told.state = told.state, state
        if before == state:
            return
        told.drained = False
        if state == GONE:
            _lost(segment, gone)
        elif state == SUSPECT:
            silent_ms = now_ms - segment.seen_ms
            log.warning("%s is suspect: last heard of %d ms ago; not used until it is heard again",
                        name, silent_ms)  # fmt: skip
        elif state == AWAY:
            level = logging.INFO if gone == LEFT else logging.WARNING
            log.log(level, "%s is away: its file or disk keeps what it holds", name)
        elif state == DRAINING:
            log.info("%s is draining: it takes nothing new", name)
        elif state == ALIVE:
            log.info("%s %s", name, "takes new objects again" if before == DRAINING else "is back")

    @staticmethod
    def _forgotten(told: _Told, gone: str) -> None:
        """The catalog is through with it: how many objects were there is known only now."""
        if told.state != GONE:  # within one tick
            _lost(told.segment, gone)
        count = told.segment.replicas_lost
        log.info("%s is forgotten; objects with a replica there: %d", _name(told.segment), count)


def _lost(segment: Segment, gone: str) -> None:
    level = logging.INFO if gone == LEFT else logging.WARNING
    nbytes = segment.lost_units * EXTENT_ALIGN_BYTES
    log.log(level, "%s %s; %d bytes go with it", _name(segment), gone, nbytes)


def _name(segment: Segment) -> str:
    disk = " disk" if segment.disk_id else ""
    return f"node {segment.node}{disk} (segment {segment.segment_id})"
