"""Segments as a client sees them: how to reach each one, mapped or through the engine.

A segment is reached by the best way its node offers: mapped read-only into this process (same
host, proven by the engine), else by one-sided reads. What is open is kept until the node goes away
or the client closes; a mapping stays valid even when its node has died, so a reader never faults.

Thread-safe. Two threads that meet a new node at the same time open it once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from mooncake_py.clock import Deadline
from mooncake_py.errors import AccessRefused, MooncakeError, TransferError
from mooncake_py.master.client import Segment
from mooncake_py.transfer import Mapping, Peer, TransferEngine


@dataclass(slots=True)
class Reach:
    """An open way to one incarnation of one segment. `mapping` is None without shared memory."""

    segment: Segment
    peer: Peer
    mapping: Mapping | None


class SegmentDirectory:
    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._opening: dict[int, threading.Lock] = {}
        self._open: dict[int, Reach] = {}

    def reach(self, segment: Segment, deadline: Deadline) -> Reach:
        """Open, or find open. Raises PeerUnreachable, TransferTimeout, VersionMismatch."""
        found = self._open.get(segment.segment_id)
        if found is not None and found.segment.incarnation == segment.incarnation:
            return found
        with self._lock:
            gate = self._opening.setdefault(segment.segment_id, threading.Lock())
        with gate:
            found = self._open.get(segment.segment_id)
            if found is not None and found.segment.incarnation == segment.incarnation:
                return found
            if found is not None:
                self.forget(found)
            reach = self._connect(segment, deadline)
            self._open[segment.segment_id] = reach
            return reach

    def _connect(self, segment: Segment, deadline: Deadline) -> Reach:
        peer = self._engine.open(segment.address, timeout_ms=deadline.left_ms())
        mapping: Mapping | None = None
        if peer.transport in ("shm", "local"):
            try:
                mapping = peer.map(segment.region, timeout_ms=deadline.left_ms())
            except AccessRefused:
                mapping = None  # the node's memory cannot be mapped; reads still work
        return Reach(segment, peer, mapping)

    def forget(self, reach: Reach) -> None:
        """Drop a way that proved broken; the next `reach` opens a new one. The mapping is left to
        its last user: another thread may be copying out of it right now."""
        with self._lock:
            if self._open.get(reach.segment.segment_id) is reach:
                del self._open[reach.segment.segment_id]

    def close(self) -> None:
        with self._lock:
            reaches, self._open = list(self._open.values()), {}
        for reach in reaches:
            if reach.mapping is not None:
                reach.mapping.close()
            try:
                reach.peer.close()
            except TransferError:
                continue  # it is gone already, which is what close wants
            except MooncakeError:
                continue
