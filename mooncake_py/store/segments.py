"""Segments as a client sees them: how to reach each one, mapped or through the engine.

A segment is reached by the best way its node offers: mapped read-only into this process (same
host, proven by the engine), else by one-sided reads. What is open is kept until the node goes away
or the client closes; a mapping stays valid even when its node has died, so a reader never faults.

Every incarnation of a segment has a small number of its own in this client, its *index*; rows of
placements carry it, and the native reader finds the mapping by it. `table` is replaced, never
changed: who reads holds the one it began with, and with it every mapping in it.

A thread looks for nodes that are gone and lets go of their memory, also while nobody calls: else
it would stay occupied on this host for as long as the client lives.

Thread-safe. Two threads that meet a new node at the same time open it once.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake_py._native.reading import MappedTable
from mooncake_py.clock import Deadline
from mooncake_py.errors import AccessRefused, MooncakeError
from mooncake_py.master.client import Segment
from mooncake_py.transfer import Mapping, Peer, TransferEngine

_LOOK_S = 0.5  # between two looks for nodes that are gone

FAILED_MS = 5_000
_DISK = 2


@dataclass(slots=True)
class Reach:
    """An open way to one incarnation of one segment. `mapping` is None without shared memory."""

    segment: Segment
    peer: Peer
    mapping: Mapping | None

    def gone(self) -> bool:
        """The connection has ended, so nobody changes or frees what is mapped for us any more."""
        try:
            return not self.peer.transport
        except MooncakeError:
            return True


class SegmentDirectory:
    def __init__(self, engine: TransferEngine, host_id: str) -> None:
        self._engine = engine
        self._host_id = host_id
        self._lock = threading.Lock()
        self._opening: dict[int, threading.Lock] = {}
        self._open: dict[int, Reach] = {}  # by segment id
        self._index: dict[tuple[int, int], int] = {}  # (segment id, incarnation) -> index
        self._known: list[Segment] = []  # by index
        self.disks: frozenset[int] = frozenset()  # indices of those that are disks
        self._failed_until: dict[int, int] = {}  # by index
        self.table = MappedTable([], [])
        self._closed = threading.Event()
        threading.Thread(
            target=_look_for_gone,
            args=(weakref.ref(self), self._closed),
            name="mooncake-segments",
            daemon=True,
        ).start()

    # --- indices ---

    def index(self, segment: Segment) -> int:
        """This incarnation's index. Never re-used."""
        name = (segment.segment_id, segment.incarnation)
        found = self._index.get(name)
        if found is None:
            with self._lock:
                found = self._index.setdefault(name, len(self._known))
                if found == len(self._known):
                    self._known.append(segment)
                    if segment.disk_id:
                        self.disks |= {found}
        return found

    def segment(self, index: int) -> Segment:
        return self._known[index]

    def failed(self, index: int, now_ms: int) -> None:
        """A node did not answer: for a while its replicas are tried last."""
        with self._lock:
            self._failed_until[index] = now_ms + FAILED_MS

    def failed_lately(self, now_ms: int) -> frozenset[int]:
        """Indices of segments whose replicas are tried last just now."""
        if not self._failed_until:
            return frozenset()
        with self._lock:
            return frozenset(each for each, until in self._failed_until.items() if until > now_ms)

    def distances(self, now_ms: int) -> npt.NDArray[np.int8]:
        """By index: 0 this host, 1 elsewhere, 2 a disk, 3 failed lately."""
        with self._lock:
            far = [
                _DISK if segment.disk_id else int(segment.host_id != self._host_id)
                for segment in self._known
            ]
            for index, until in self._failed_until.items():
                if until > now_ms:
                    far[index] = _DISK + 1
        return np.array(far, dtype=np.int8)

    # --- ways ---

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
            reach = self._connect(segment, deadline)
            with self._lock:
                self._open[segment.segment_id] = reach
                self._drop_dead()
                self._publish()
            return reach

    def _drop_dead(self) -> None:
        """A node that is gone is not to keep its memory alive in here for ever: when another is
        met, mappings of dead ones go."""
        for segment_id, reach in list(self._open.items()):
            try:
                _ = reach.peer.transport
            except MooncakeError:
                del self._open[segment_id]

    def _connect(self, segment: Segment, deadline: Deadline) -> Reach:
        peer = self._engine.open(segment.address, timeout_ms=deadline.left_ms())
        mapping: Mapping | None = None
        if peer.transport in ("shm", "local"):
            try:
                mapping = peer.map(segment.region, timeout_ms=deadline.left_ms())
            except AccessRefused:
                mapping = None  # the node's memory cannot be mapped; reads still work
        self.index(segment)
        return Reach(segment, peer, mapping)

    def _publish(self) -> None:
        """Make the table of what is open. A mapping that is in no table any more is unmapped
        once the last reader has let go of it."""
        entries, owners = [(0, 0)] * len(self._known), []
        for reach in self._open.values():
            if reach.mapping is not None and not reach.mapping.closed:
                index = self._index[reach.segment.segment_id, reach.segment.incarnation]
                entries[index] = (reach.mapping.base, reach.mapping.nbytes)
                owners.append(reach.mapping.view())
        self.table = MappedTable(entries, owners)

    def forget(self, reach: Reach) -> None:
        """Drop a way that proved broken; the next `reach` opens a new one. Readers that copy out
        of its mapping right now keep it."""
        with self._lock:
            if self._open.get(reach.segment.segment_id) is reach:
                del self._open[reach.segment.segment_id]
                self._publish()

    def forget_gone(self) -> None:
        """Let go of the memory of nodes that are gone."""
        for reach in list(self._open.values()):
            if reach.gone():
                self.forget(reach)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            reaches, self._open = list(self._open.values()), {}
            self.table = MappedTable([], [])
        for reach in reaches:
            if reach.mapping is not None:
                reach.mapping.close()
            with suppress(MooncakeError):  # it is gone already, which is what close wants
                reach.peer.close()


def _look_for_gone(directory: weakref.ref[SegmentDirectory], closed: threading.Event) -> None:
    """Does not keep a directory alive that was never closed."""
    while not closed.wait(_LOOK_S):
        alive = directory()
        if alive is None:
            return
        alive.forget_gone()
        del alive
