"""Tasks that the master gives a node: copies of objects, pulled from other nodes.

    heartbeat: tasks wait --> Tasks --> begin (headers unsealed) --one-sided reads--> header,
    payload, header again --judged--> seal --> Tasks, with what became of each and room for new ones

Rules. Only the owner writes its memory, so a copy is made by the node that will hold it. What is
read is judged as by any reader: the header before and after names the source's generation, and the
payload fits its checksum; only then is the new extent sealed, under the generation that names the
task. Tasks of a mount that has ended are not sealed. One thread fetches and carries out all of
them, so copies never take more than one core and wait for nobody's heartbeats.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake_py import errors
from mooncake_py._native import memory
from mooncake_py._native.segment import OwnedSegment
from mooncake_py.errors import MooncakeError
from mooncake_py.master.client import MasterClient, Segment, TaskBatch
from mooncake_py.master.commands import Tasks
from mooncake_py.model import EXTENT_HEADER_BYTES
from mooncake_py.store.master_time import MasterTime
from mooncake_py.store.pull import Mounted
from mooncake_py.transfer import FLAG_CRC, FLAG_FENCE, SLICE, Peer, TransferEngine
from mooncake_py.transfer.slices import OP_READ

log = logging.getLogger(__name__)

TASKS_AT_ONCE = 32  # fetched together; the next ones come with the report
BATCH_BYTES = 64 << 20  # read in one go
_CALL_MS = 5_000
_READ_MS = 10_000  # for one batch
_WAKE_S = 0.5  # how soon the thread notices that the node is closing
_PEERS_MAX = 1_024

Rows = npt.NDArray[np.void]
Statuses = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Holder:
    """The node as tasks need it. `mounted` asks for the mount that counts now."""

    name: str
    incarnation: int
    engine: TransferEngine
    segment: OwnedSegment
    master_time: MasterTime
    mounted: Callable[[], Mounted | None]


class TaskRunner:
    """Carries out tasks; `run` is its thread, `nudge` is for any other."""

    def __init__(self, holder: Holder, master: MasterClient) -> None:
        self._holder = holder
        self._master = master
        self._nudged = threading.Event()
        self._peers: dict[tuple[int, int], Peer] = {}  # by segment id and incarnation
        self.copied = 0

    def nudge(self) -> None:
        """The master has tasks for this node."""
        self._nudged.set()

    def run(self, closing: threading.Event) -> None:
        while not closing.is_set():
            if not self._nudged.wait(_WAKE_S):
                continue
            self._nudged.clear()
            try:
                self._work_off(closing)
            except MooncakeError as error:
                log.warning("tasks were not fetched: %s", error)
            except Exception:
                log.exception("a task failed in a way it must not; the node goes on")

    def _work_off(self, closing: threading.Event) -> None:
        """Fetch and carry out until there are none."""
        done: list[tuple[int, int]] = []
        while not closing.is_set():
            mounted = self._holder.mounted()
            if mounted is None:
                return
            ask = Tasks(
                self._holder.name, self._holder.incarnation, mounted.segment_id, done, TASKS_AT_ONCE
            )
            batch = self._master.tasks(ask, timeout_ms=_CALL_MS)
            if not batch.known or not len(batch.copies):
                return
            done = self._copy_all(batch, mounted)

    def _copy_all(self, batch: TaskBatch, mounted: Mounted) -> list[tuple[int, int]]:
        """Make all copies; (task, code) each."""
        rows = np.ascontiguousarray(batch.copies["extent"])
        statuses = np.zeros(len(rows), dtype=np.int32)
        segment, time = self._holder.segment, self._holder.master_time
        segment.begin(rows, time.latest_ms(), statuses)
        begun = np.flatnonzero(statuses == errors.OK)
        results = np.zeros(len(begun), dtype=np.int32)
        self._name(rows[begun], [batch.names[i] for i in begun.tolist()], results)
        crcs = np.zeros(len(begun), dtype=np.uint32)
        try:
            for part in _parts(batch.copies, begun):
                copies = batch.copies[begun[part]]
                results[part], crcs[part] = self._read(batch.segments, copies)
        except BaseException:
            results[:] = -errors.InternalError.code
            raise
        finally:
            sealed = np.ascontiguousarray(rows[begun])
            segment.seal(sealed, crcs, time.latest_ms(), results)
            if (
                self._holder.mounted() != mounted
            ):  # looked at last: who mounts anew drops the sealed
                segment.unseal(sealed)
                results[:] = -errors.LeaseExpired.code
        statuses[begun] = results
        self.copied += int((statuses == errors.OK).sum())
        return list(zip(rows["generation"].tolist(), (-statuses).tolist(), strict=True))

    def _name(self, rows: Rows, names: Sequence[bytes], statuses: Statuses) -> None:
        """So that an inventory can tell what the copies are of."""
        ends = np.cumsum([len(name) for name in names], dtype=np.uint64)
        rows = np.ascontiguousarray(rows)
        self._holder.segment.name(rows, b"", b"".join(names), ends, b"", statuses)

    def _read(
        self, segments: Sequence[Segment], copies: Rows
    ) -> tuple[Statuses, npt.NDArray[np.uint32]]:
        """Read copies of one source into their places: statuses, and the payloads' checksums."""
        n = len(copies)
        source = segments[int(copies["source_index"][0])]
        judged = np.zeros(n, dtype=np.int32)
        headers = np.zeros((2 * n, EXTENT_HEADER_BYTES), dtype=np.uint8)
        slices = _slices(source, copies, headers, self._holder.segment.base)
        try:
            peer = self._peer(source)
            self._holder.engine.read(peer, slices, timeout_ms=_READ_MS)
        except MooncakeError as error:
            self._forget((source.segment_id, source.incarnation))
            found = np.minimum(slices["status"][:n], slices["status"][n : 2 * n])
            judged[:] = np.minimum(found, slices["status"][2 * n :])
            if not judged.any():
                judged[:] = -error.code  # the batch never started
        crcs = np.ascontiguousarray(slices["crc"][n : 2 * n])
        extents = np.ascontiguousarray(copies["extent"])
        extents["offset"] = copies["source_offset"]
        extents["generation"] = copies["source_generation"]
        memory.extent_verify(headers[:n], headers[n:], extents, crcs, judged)
        return judged, crcs

    def _peer(self, source: Segment) -> Peer:
        name = (source.segment_id, source.incarnation)
        peer = self._peers.get(name)
        if peer is None:
            if len(self._peers) >= _PEERS_MAX:
                self.close()
            peer = self._holder.engine.open(source.address, timeout_ms=_CALL_MS)
            self._peers[name] = peer
        return peer

    def _forget(self, name: tuple[int, int]) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            with suppress(MooncakeError):  # it is gone already, which is what close wants
                peer.close()

    def close(self) -> None:
        """Let go of the other nodes. After the thread has ended."""
        for name in list(self._peers):
            self._forget(name)


def _parts(copies: Rows, begun: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Positions in `begun` that are read in one go: one source, a bounded number of bytes."""
    parts: list[npt.NDArray[np.int64]] = []
    sources = copies["source_index"][begun]
    lengths = copies["extent"]["length"][begun].astype(np.int64)
    for source in np.unique(sources).tolist():
        mine = np.flatnonzero(sources == source)
        share = (np.cumsum(lengths[mine]) - lengths[mine]) // BATCH_BYTES
        parts += [mine[share == each] for each in np.unique(share)]
    return parts


def _slices(source: Segment, copies: Rows, headers: npt.NDArray[np.uint8], base: int) -> Rows:
    """n headers, n payloads, and behind a fence the n headers again."""
    n = len(copies)
    slices = np.zeros(3 * n, dtype=SLICE)
    slices["op"] = OP_READ
    slices["region"] = source.region
    slices["length"] = EXTENT_HEADER_BYTES
    places = headers.ctypes.data + np.arange(2 * n, dtype=np.uint64) * EXTENT_HEADER_BYTES
    for at, local in ((slice(0, n), places[:n]), (slice(2 * n, None), places[n:])):
        slices["remote_offset"][at] = copies["source_offset"]
        slices["local"][at] = local
    payloads = slices[n : 2 * n]
    header = np.uint64(EXTENT_HEADER_BYTES)
    payloads["remote_offset"] = copies["source_offset"] + header
    payloads["local"] = copies["extent"]["offset"] + np.uint64(base) + header
    payloads["length"] = copies["extent"]["length"]
    payloads["flags"] = FLAG_CRC
    slices["flags"][2 * n] |= FLAG_FENCE
    return slices
