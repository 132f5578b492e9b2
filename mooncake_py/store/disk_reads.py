"""Reads of the disk tier: fetches of clients, served by threads of their own.

    message thread --rows--> queue --reading threads--> staging --> reply, by who reads the last row

Rules.
* Message threads only put rows into the queue. It is bounded; a fetch that finds it full is
  answered Backpressure at once.
* The first row of a fetch waits for room in staging, within the client's deadline. The others take
  what is there and are answered Backpressure when there is none, so that a fetch larger than
  staging makes progress and no two of them wait for each other.
* Bytes that do not fit the checksum of the put, and rows whose object is not here any more, are
  told to `lost`: they are deleted and delisted, and no reader gets them.

Thread-safe.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mooncake_py import errors
from mooncake_py.clock import Clock, Deadline
from mooncake_py.errors import Backpressure, MooncakeError, TransferTimeout, UsageError
from mooncake_py.store.disk_files import DiskFiles
from mooncake_py.store.disk_index import DiskObject
from mooncake_py.store.disk_staging import Staged, Staging
from mooncake_py.transfer import Message
from mooncake_py.wire.node import FetchReply, FetchRequest
from mooncake_py.wire.rows import EXTENT

log = logging.getLogger(__name__)

QUEUE_ROWS_MAX = 8_192
PROMOTE_AT = 2  # reads
_READS_KNOWN_MAX = 100_000  # objects whose reads are counted
_WAIT_MAX_MS = 60_000  # a client's wish is cut to this
_LOOK_S = 0.5


@dataclass(slots=True, eq=False)
class _Fetch:
    """One request in work. The thread that ends its last row replies."""

    message: Message
    deadline: Deadline
    status: np.ndarray
    rows: np.ndarray  # staged
    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class ReadCounters:
    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    damaged: int = 0
    refused: int = 0


class DiskReader:
    """`lost(generation)` and `wanted(object)` are called by reading threads and must not block."""

    def __init__(
        self,
        files: DiskFiles,
        staging: Staging,
        clock: Clock,
        lost: Callable[[int], None],
        wanted: Callable[[DiskObject], None],
    ) -> None:
        self._files = files
        self._staging = staging
        self._clock = clock
        self._lost = lost
        self._wanted = wanted
        self.counters = ReadCounters()
        self._queue: deque[tuple[_Fetch, int, int]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._reads: OrderedDict[int, int] = OrderedDict()
        self._threads: list[threading.Thread] = []

    def start(self, count: int) -> None:
        for number in range(count):
            thread = threading.Thread(
                target=self._run, name=f"mooncake-disk-read-{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """What waits is answered NodeDraining by nobody: its client's deadline ends it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    # --- message threads ------------------------------------------------------------------------

    def serve(self, message: Message, segment_id: int) -> None:
        """Queue a fetch, or refuse it. Never raises for what a client sends; a reply that cannot
        be delivered raises TransferError."""
        try:
            request = FetchRequest.decode(message.payload)
            for serial in np.frombuffer(request.done, dtype="<u8").tolist():
                self._staging.done(serial, message.peer_id)
            if not message.correlation:
                return
            if request.segment_id != segment_id:
                raise errors.LeaseExpired("this node does not have that disk")
            if len(request.rows) % EXTENT.itemsize:
                raise UsageError("rows are whole records")
            self._enqueue(message, request)
        except MooncakeError as error:
            message.reply(FetchReply(code=error.code, cause=error.cause).encode())

    def _enqueue(self, message: Message, request: FetchRequest) -> None:
        rows = np.frombuffer(request.rows, EXTENT)
        count = len(rows)
        if not count:
            message.reply(FetchReply().encode())
            return
        timeout_ms = max(1, min(request.timeout_ms, _WAIT_MAX_MS))
        fetch = _Fetch(
            message,
            Deadline(timeout_ms, self._clock),
            np.zeros(count, dtype=np.uint8),
            np.zeros(count, dtype=EXTENT),
            count,
        )
        generations = rows["generation"].tolist()
        with self._changed:
            if len(self._queue) + count > QUEUE_ROWS_MAX:
                self.counters.refused += 1
                raise Backpressure("the disk tier has as many reads waiting as it accepts")
            for at, generation in enumerate(generations):
                self._queue.append((fetch, at, generation))
            self._changed.notify(count)

    # --- reading threads ------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait(_LOOK_S)
                    self._staging.sweep()
                if self._closing:
                    return
                fetch, at, generation = self._queue.popleft()
            try:
                self._row(fetch, at, generation)
            except errors.TransferError as error:
                log.info("a fetch was not answered: %s", error)  # that client is gone
            except Exception:
                log.exception("a read of the disk tier failed in a way it must not")

    def _row(self, fetch: _Fetch, at: int, generation: int) -> None:
        try:
            self._bring(fetch, at, generation)
        except MooncakeError as error:
            fetch.status[at] = error.code
        except BaseException:
            fetch.status[at] = errors.InternalError.code
            raise
        finally:
            with fetch.lock:
                fetch.left -= 1
                last = fetch.left == 0
            if last:
                reply = FetchReply(status=fetch.status.tobytes(), rows=fetch.rows.tobytes())
                fetch.message.reply(reply.encode())

    def _bring(self, fetch: _Fetch, at: int, generation: int) -> None:
        if fetch.deadline.passed():
            raise TransferTimeout("the read waited longer than its client does")
        try:
            found = self._files.find(generation)
        except OSError as error:
            raise errors.ChecksumMismatch(f"the index cannot be read: {error}") from error
        if found is None:
            self.counters.misses += 1
            self._lost(generation)
            raise errors.LeaseExpired("the object is not on this disk any more")
        patience = fetch.deadline if at == 0 else Deadline(0, self._clock)
        staged, mine = self._staging.take(
            generation, found.length, fetch.message.peer_id, patience, fetch.deadline
        )
        if mine:
            self._fill(staged, found)
        elif not staged.filled.wait(fetch.deadline.left_ms() / 1000):
            raise TransferTimeout("another read of the object takes longer than this client waits")
        if staged.failure is not None:
            raise staged.failure
        fetch.rows[at] = staged.row()[0]
        self.counters.hits += 1
        self.counters.hit_bytes += found.length
        self._count(found)

    def _fill(self, staged: Staged, found: DiskObject) -> None:
        def read(into: memoryview) -> int:
            self._files.read(found, into)
            return found.crc

        try:
            self._staging.fill(staged, read)
        except errors.ChecksumMismatch:
            self.counters.damaged += 1
            self._lost(found.generation)
            raise
        except errors.LeaseExpired:
            self.counters.misses += 1
            self._lost(found.generation)
            raise

    def _count(self, found: DiskObject) -> None:
        with self._changed:
            reads = self._reads.pop(found.generation, 0) + 1
            self._reads[found.generation] = reads
            if len(self._reads) > _READS_KNOWN_MAX:
                self._reads.popitem(last=False)
        if reads >= PROMOTE_AT:
            self._wanted(found)

    def forget(self, generation: int) -> None:
        """The object has ended."""
        self._staging.forget(generation)
        with self._changed:
            self._reads.pop(generation, None)
