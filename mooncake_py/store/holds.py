"""The node's side of views: extents that clients look at in place.

Rules.
* A hold is of one sealed extent for one connection. While it lasts no put gets its space, whatever
  the master thinks: leases of the master keep a viewed object from being evicted, the hold keeps
  its bytes in place even when it was removed by force or a master forgot the lease.
* It ends when the client releases it or its connection ends, as it does when the process dies. A
  process that is stopped keeps its connection and its holds. Nothing else ends a hold.
* The answer to a release says whether the extent was held until then, so a client that had lost its
  connection meanwhile learns that the bytes may have changed.
* At most `HELD_SHARE_MAX` of the segment may be held: one reader cannot stop all writers.

Thread-safe.
"""

from __future__ import annotations

import threading

import numpy as np

from mooncake_py import errors
from mooncake_py._native.segment import OwnedSegment
from mooncake_py.errors import MooncakeError, UsageError
from mooncake_py.model import extent_bytes
from mooncake_py.transfer import Message, TransferEngine
from mooncake_py.wire.node import HoldReply, HoldRequest
from mooncake_py.wire.rows import EXTENT

HELD_SHARE_MAX = 0.5


class HoldHandler:
    def __init__(self, engine: TransferEngine, segment: OwnedSegment) -> None:
        self._engine = engine
        self._segment = segment
        self._lock = threading.Lock()
        self._of_peer: dict[int, dict[bytes, int]] = {}  # peer -> row -> how often
        self._held_bytes = 0  # an extent held twice counts twice

    def serve(self, message: Message, segment_id: int) -> HoldReply:
        """Never raises for what a client sends. `segment_id`: of this node's segment."""
        try:
            request = HoldRequest.decode(message.payload)
            if request.segment_id != segment_id:
                raise errors.LeaseExpired("this node does not have that segment")
            if len(request.rows) % EXTENT.itemsize:
                raise UsageError("rows are whole records")
            rows = _identified(np.frombuffer(request.rows, EXTENT))
            with self._lock:
                change = self._release if request.release else self._hold
                return HoldReply(status=bytes(change(message.peer_id, rows)))
        except MooncakeError as error:
            return HoldReply(code=error.code, cause=error.cause)

    def _hold(self, peer_id: int, rows: np.ndarray) -> list[int]:
        wanted = sum(map(extent_bytes, rows["length"].tolist()))
        if self._held_bytes + wanted > HELD_SHARE_MAX * self._segment.nbytes:
            raise errors.Backpressure(
                "as much of this node's memory is held by views as may be", held=self._held_bytes
            )
        statuses = np.zeros(len(rows), dtype=np.int32)
        self._segment.hold(rows, statuses)
        mine = self._of_peer.setdefault(peer_id, {})
        for row, status in zip(rows, statuses.tolist(), strict=True):
            if status == errors.OK:
                mine[row.tobytes()] = mine.get(row.tobytes(), 0) + 1
                self._held_bytes += extent_bytes(int(row["length"]))
        return [-status for status in statuses.tolist()]

    def _release(self, peer_id: int, rows: np.ndarray) -> list[int]:
        mine = self._of_peer.get(peer_id, {})
        codes = []
        for row in rows:
            name = row.tobytes()
            if name not in mine:
                codes.append(errors.LeaseExpired.code)
                continue
            mine[name] -= 1
            if mine[name] == 0:
                del mine[name]
            self._let_go(name, 1)
            codes.append(errors.OK)
        if not mine:
            self._of_peer.pop(peer_id, None)
        return codes

    def _let_go(self, name: bytes, times: int) -> None:
        row = np.frombuffer(name, EXTENT)
        for _ in range(times):
            self._segment.release(row)
        self._held_bytes -= times * extent_bytes(int(row["length"][0]))

    def sweep(self) -> None:
        """End the holds of connections that have ended. Called now and then."""
        with self._lock:
            for peer_id in [peer for peer in self._of_peer if self._gone(peer)]:
                for name, times in self._of_peer.pop(peer_id).items():
                    self._let_go(name, times)

    def _gone(self, peer_id: int) -> bool:
        try:
            _ = self._engine.peer(peer_id).transport
        except MooncakeError:
            return True
        return False


def _identified(rows: np.ndarray) -> np.ndarray:
    """The rows with nothing but what names the extent."""
    named = np.zeros(len(rows), dtype=EXTENT)
    for name in ("offset", "length", "generation"):
        named[name] = rows[name]
    return named
