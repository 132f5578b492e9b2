"""The node's side of a put: check the grant, begin, copy, seal.

    PullRequest --mac, expiry, overlap--> begin (headers unsealed) --engine or inline--> payload
                --crc--> seal (headers complete) --> PullReply, one status a row

Nothing of a request is believed but what the grant's mac covers: rows, and with them offsets,
lengths and generations, come from the master. Where the bytes come from is the client's word, and
can only decide what the client's own object contains.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake_py import errors
from mooncake_py._native.segment import OwnedSegment
from mooncake_py.errors import MooncakeError, UsageError
from mooncake_py.model import EXTENT_HEADER_BYTES
from mooncake_py.store.master_time import MasterTime
from mooncake_py.transfer import FLAG_CRC, SLICE, Message, Peer, TransferEngine
from mooncake_py.wire.node import PullReply, PullRequest
from mooncake_py.wire.rows import EXTENT

Rows = npt.NDArray[np.void]  # EXTENT
Offsets = npt.NDArray[np.uint64]
Statuses = npt.NDArray[np.int32]

PEERS_MAX = 1_024  # remembered; more than that many clients cost a little more each
_PULL_MAX_MS = 600_000  # a client's wish; its grant usually ends earlier


def grant_mac(segment_id: int, rows: bytes, secret: bytes) -> bytes:
    """The master's word for a set of extent rows of one segment (keyed BLAKE2b, 16 bytes)."""
    return hashlib.blake2b(
        segment_id.to_bytes(8, "little") + rows, key=secret, digest_size=16
    ).digest()


@dataclass(frozen=True, slots=True)
class Mounted:
    """What the master answered to the mount."""

    segment_id: int
    grant_secret: bytes


class PullHandler:
    """Serves pulls for one segment. Thread-safe; every thread of the node's pool may call it."""

    def __init__(
        self,
        engine: TransferEngine,
        segment: OwnedSegment,
        master_time: MasterTime,
    ) -> None:
        self._engine = engine
        self._segment = segment
        self._master_time = master_time
        self._peers: dict[int, Peer] = {}
        self.mounted: Mounted | None = None
        self.draining = False

    def serve(self, message: Message) -> PullReply:
        """Never raises for what a client sends."""
        try:
            request = PullRequest.decode(message.payload)
            rows, sources = self._checked(request)
            return self._pull(message.peer_id, request, rows, sources)
        except MooncakeError as error:
            return PullReply(code=error.code, cause=error.cause)

    def _checked(self, request: PullRequest) -> tuple[Rows, Offsets]:
        mounted = self.mounted
        if self.draining or mounted is None:
            raise errors.NodeDraining("this node takes no new objects")
        if request.segment_id != mounted.segment_id:
            raise errors.LeaseExpired(
                "the grant is for a segment this node does not have",
                granted=request.segment_id,
                here=mounted.segment_id,
            )
        expected = grant_mac(request.segment_id, request.rows, mounted.grant_secret)
        if not hmac.compare_digest(expected, request.mac):
            raise errors.AccessRefused("the grant was not signed by this node's master")
        if len(request.rows) % EXTENT.itemsize or len(request.sources) % 8:
            raise UsageError("rows and sources are whole records")
        rows = np.frombuffer(request.rows, dtype=EXTENT)
        sources = np.frombuffer(request.sources, dtype="<u8")
        if len(rows) != len(sources):
            raise UsageError("one source a row", rows=len(rows), sources=len(sources))
        return rows, sources

    def _pull(self, peer_id: int, request: PullRequest, rows: Rows, sources: Offsets) -> PullReply:
        answer = np.zeros(len(rows), dtype=np.int32)
        self._segment.begin(rows, self._master_time.latest_ms(), answer)
        # Only what was begun here is sealed here: the same grant may be in work in another thread.
        if not answer.any():
            answer = self._copy_and_seal(peer_id, request, rows, sources)
        else:
            begun = np.flatnonzero(answer == errors.OK)
            if len(begun):
                answer[begun] = self._copy_and_seal(peer_id, request, rows[begun], sources[begun])
        return PullReply(status=(-answer).astype(np.uint8).tobytes())

    def _copy_and_seal(
        self, peer_id: int, request: PullRequest, rows: Rows, sources: Offsets
    ) -> Statuses:
        mounted = self.mounted
        statuses = np.zeros(len(rows), dtype=np.int32)
        crcs = np.zeros(len(rows), dtype=np.uint32)
        try:
            if request.region == 0:
                self._segment.fill(rows, request.inline_values, sources, crcs, statuses)
            else:
                self._copy_from_peer(peer_id, request, rows, sources, crcs, statuses)
        except BaseException:
            statuses[:] = -errors.InternalError.code
            raise
        finally:
            if self.mounted is not mounted:
                statuses[:] = -errors.LeaseExpired.code  # another master's memory by now
            self._segment.seal(rows, crcs, self._master_time.latest_ms(), statuses)
        return statuses

    def _copy_from_peer(
        self,
        peer_id: int,
        request: PullRequest,
        rows: Rows,
        sources: Offsets,
        crcs: npt.NDArray[np.uint32],
        statuses: Statuses,
    ) -> None:
        slices = np.zeros(len(rows), dtype=SLICE)
        slices["region"] = request.region
        slices["remote_offset"] = sources
        slices["local"] = (
            rows["offset"] + np.uint64(self._segment.base) + np.uint64(EXTENT_HEADER_BYTES)
        )
        slices["length"] = rows["length"]
        slices["flags"] = FLAG_CRC
        timeout_ms = max(1, min(request.timeout_ms, _PULL_MAX_MS))
        try:
            self._engine.read(self._peer(peer_id), slices, timeout_ms=timeout_ms)
        except MooncakeError as error:
            failed = slices["status"]
            # Slices of a batch that never started have no status of their own.
            statuses[:] = failed if failed.any() else -error.code
        crcs[:] = slices["crc"]

    def _peer(self, peer_id: int) -> Peer:
        """The sender, made once: ids are never re-used. Bounded by forgetting all of them."""
        peer = self._peers.get(peer_id)
        if peer is None:
            if len(self._peers) >= PEERS_MAX:
                self._peers.clear()
            peer = self._peers[peer_id] = self._engine.peer(peer_id)
        return peer
