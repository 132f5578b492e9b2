"""Copies between a node's memory and its disk: offloads and promotions, by threads of their own.

Rules.
* An offload writes from the segment itself: header, payload, header again, as every reader does.
  Bytes that were replaced meanwhile are not kept. They are compared with the checksum of the put,
  so that damage in memory does not become an object on the disk.
* Offloads are flushed file by file, several at once, and become known a batch at a time.
* A promotion reads into an extent that the master reserved: begin, read, compare, seal.
* How many may wait is the master's business: it hands out a bounded number of bytes (disks.py).

Every task ends with `done(task, code)`. Thread-safe.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from mooncake_py import errors
from mooncake_py._native import memory
from mooncake_py._native.segment import OwnedSegment
from mooncake_py.errors import MooncakeError, error_of
from mooncake_py.model import EXTENT_HEADER_BYTES
from mooncake_py.store.disk_files import DiskFiles, DiskFull
from mooncake_py.store.disk_index import DiskObject
from mooncake_py.store.disk_telling import told_of
from mooncake_py.store.master_time import MasterTime
from mooncake_py.transfer import Memory
from mooncake_py.wire.rows import EXTENT

log = logging.getLogger(__name__)

BATCH_MAX = 256  # offloads that become known together
WRITERS = 4  # files flushed at once
_LOOK_S = 0.5
_CRC = slice(40, 44)  # of a header (design/extent.md)
_DIGEST = slice(16, 32)


@dataclass(frozen=True, slots=True)
class CopyTask:
    """One DISK_TASK row; an offload also has the object's name."""

    generation: int
    length: int
    segment_id: int
    offset: int
    memory_generation: int
    expires_ms: int
    tenant: str = ""
    key: bytes = b""

    def extent(self, digest: bytes = bytes(16)) -> np.ndarray:
        row = np.zeros(1, dtype=EXTENT)
        row["offset"], row["length"] = self.offset, self.length
        row["generation"], row["expires_ms"] = self.memory_generation, self.expires_ms
        row["digest"] = np.void(digest)
        return row


@dataclass(slots=True)
class CopyCounters:
    offloads: int = 0
    offload_bytes: int = 0
    offloads_stale: int = 0
    offloads_full: int = 0
    offloads_failed: int = 0
    promotions: int = 0
    promotions_failed: int = 0


class DiskCopier:
    """`segment_id()`: of the mounted memory segment, 0 when there is none; copies for another one
    are stale. `done` is called by this object's threads and must not block."""

    def __init__(
        self,
        files: DiskFiles,
        owned: tuple[Memory, OwnedSegment],
        segment_id: Callable[[], int],
        master_time: MasterTime,
        done: Callable[[int, int], None],
    ) -> None:
        self._files = files
        self._memory, self._segment = owned
        self._segment_id = segment_id
        self._master_time = master_time
        self._done = done
        self.counters = CopyCounters()
        self._changed = threading.Condition()
        self._offloads: deque[CopyTask] = deque()
        self._promotions: deque[CopyTask] = deque()
        self._closing = False
        self._trouble = ""  # why the disk takes nothing just now
        self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="mooncake-disk-write")
        self._threads = [
            threading.Thread(target=self._run, args=each, name=name, daemon=True)
            for name, each in (
                ("mooncake-disk-offload", (self._offloads, BATCH_MAX, self._offload)),
                ("mooncake-disk-promote", (self._promotions, 1, self._promote)),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        return len(self._offloads) + len(self._promotions)

    def offload(self, tasks: Sequence[CopyTask]) -> None:
        self._add(self._offloads, tasks)

    def promote(self, tasks: Sequence[CopyTask]) -> None:
        self._add(self._promotions, tasks)

    def _add(self, queue: deque[CopyTask], tasks: Sequence[CopyTask]) -> None:
        if tasks:
            with self._changed:
                queue.extend(tasks)
                self._changed.notify_all()

    def stop(self) -> None:
        """Ends what is in work; what waits is left undone."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._pool.shutdown()

    def _run(
        self,
        queue: deque[CopyTask],
        count_max: int,
        work: Callable[[Sequence[CopyTask]], None],
    ) -> None:
        while True:
            with self._changed:
                while not queue and not self._closing:
                    self._changed.wait(_LOOK_S)
                if self._closing:
                    return
                batch = [queue.popleft() for _ in range(min(len(queue), count_max))]
            try:
                work(batch)
            except Exception:
                log.exception("a copy of the disk tier failed in a way it must not")
                for task in batch:
                    self._done(task.generation, errors.InternalError.code)

    def _over(self, task: CopyTask) -> bool:
        """Has the master given it up, or is the memory another one by now?"""
        late = self._master_time.latest_ms() > task.expires_ms
        return late or task.segment_id != self._segment_id()

    # --- memory to disk -------------------------------------------------------------------------

    def _offload(self, tasks: Sequence[CopyTask]) -> None:
        """What took too long for the master may have been ordered again: it is done once."""
        tasks = list({each.generation: each for each in tasks}.values())
        written: list[tuple[DiskObject, bytes | None]] = []
        for task, outcome in zip(tasks, self._pool.map(self._write, tasks), strict=True):
            if isinstance(outcome, int):
                self._done(task.generation, outcome)
            else:
                written.append(outcome)
        if not written:
            return
        try:
            self._files.commit(written)
        except (MooncakeError, OSError) as error:
            code = self._count_failure(error)
            for found, _ in written:
                self._done(found.generation, code)
            return
        if len(written) == len(tasks):
            self._recovered()
        for found, _ in written:
            self.counters.offloads += 1
            self.counters.offload_bytes += found.length
            self._done(found.generation, errors.OK)

    def _write(self, task: CopyTask) -> tuple[DiskObject, bytes | None] | int:
        """The object with its bytes on the disk, not yet known there; or how it ended."""
        if self._files.holds(task.generation):
            return errors.OK
        if self._over(task):
            self.counters.offloads_stale += 1
            return errors.LeaseExpired.code
        start = task.offset + EXTENT_HEADER_BYTES
        everything = self._memory.view()
        if start + task.length > len(everything):
            return errors.UsageError.code
        before = bytes(everything[task.offset : start])
        payload = everything[start : start + task.length]
        crc = int.from_bytes(before[_CRC], "little")
        found = DiskObject(
            task.generation, task.tenant, task.key, task.length, crc, before[_DIGEST],
            told_of(self._segment, task.offset, task.memory_generation),
        )  # fmt: skip
        try:
            self._check(task, before, before, crc)  # not worth writing otherwise
            value = self._files.write(found, payload)
        except (MooncakeError, OSError) as error:
            return self._count_failure(error)
        try:
            seen = memory.crc32c(payload) if value is None else memory.crc32c(value)
            self._check(task, before, bytes(everything[task.offset : start]), seen)
        except MooncakeError as error:
            self._files.abandon([found])
            return self._count_failure(error)
        return found, value

    @staticmethod
    def _check(task: CopyTask, before: bytes, after: bytes, crc: int) -> None:
        statuses = np.zeros(1, dtype=np.int32)
        crcs = np.array([crc], dtype=np.uint32)
        memory.extent_verify(before, after, task.extent(), crcs, statuses)
        if statuses[0]:
            raise error_of(int(statuses[0]), "the extent is not what was to be offloaded")

    def _count_failure(self, error: Exception) -> int:
        if isinstance(error, errors.OutOfSpace):
            self.counters.offloads_full += 1
            if isinstance(error, DiskFull):
                self._troubled("it is full")
            return error.code
        if isinstance(error, errors.LeaseExpired | errors.ChecksumMismatch):
            self.counters.offloads_stale += 1
            return error.code
        self.counters.offloads_failed += 1
        self._troubled(str(error))
        return errors.InternalError.code

    def _troubled(self, cause: str) -> None:
        """The master stops offloading for a while, twice as long each time: said once, not for
        every object."""
        with self._changed:
            before, self._trouble = self._trouble, cause
        if not before:
            log.warning("the disk %s pauses: %s; objects are dropped", self._files.path, cause)

    def _recovered(self) -> None:
        if self._trouble:
            log.warning("the disk %s resumes: it takes objects again", self._files.path)
        self._trouble = ""

    # --- disk to memory -------------------------------------------------------------------------

    def _promote(self, tasks: Sequence[CopyTask]) -> None:
        for task in tasks:
            try:
                self._copy_in(task)
            except (MooncakeError, OSError) as error:
                self.counters.promotions_failed += 1
                code = error.code if isinstance(error, MooncakeError) else 0
                self._done(task.memory_generation, code or errors.InternalError.code)
            else:
                self.counters.promotions += 1
                self._done(task.memory_generation, errors.OK)

    def _copy_in(self, task: CopyTask) -> None:
        if self._over(task):
            raise errors.LeaseExpired("the promotion is over")
        found = self._files.find(task.generation)
        if found is None or found.length != task.length:
            raise errors.LeaseExpired("the object is not on this disk any more")
        row = task.extent(found.digest)
        statuses = np.zeros(1, dtype=np.int32)
        self._segment.begin(row, self._master_time.latest_ms(), statuses)
        if statuses[0]:
            raise error_of(int(statuses[0]), "the memory reserved for a promotion is in use")
        start = task.offset + EXTENT_HEADER_BYTES
        crcs = np.array([found.crc], dtype=np.uint32)
        try:
            self._files.read(found, self._memory.view()[start : start + task.length])
        except MooncakeError as error:
            statuses[0] = -error.code
            raise
        except BaseException:
            statuses[0] = -errors.InternalError.code
            raise
        finally:
            self._segment.seal(row, crcs, self._master_time.latest_ms(), statuses)
            if self._segment_id() != task.segment_id and not statuses[0]:
                self._segment.unseal(
                    row
                )  # after the seal: whoever mounts anew drops what is sealed
                statuses[0] = -errors.LeaseExpired.code
        if statuses[0]:
            raise error_of(int(statuses[0]), "the promotion came too late")
