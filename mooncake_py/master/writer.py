"""The thread that makes records durable, and the replies that wait for it.

Group commit: everything that came while one transaction ran goes into the next one, so no call pays
for a disk's flush of its own. Records that no reply waits for stay `commit_linger_ms` for company:
a transaction and two thread switches for each single put would cost more than the put.

While the store refuses writes, `obstacle` says so (calls that change the catalog are refused with
it), replies that were waiting are answered with it, and the records stay here and are tried again,
in order: the catalog has them already, so nothing may overtake them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from mooncake_py._native.memory import trim_heap
from mooncake_py.errors import Backpressure, InternalError, MasterUnavailable, MooncakeError
from mooncake_py.master.inbox import Call, Limits
from mooncake_py.master.metadata import MetadataStore
from mooncake_py.metrics import Metrics
from mooncake_py.wire.lane import Method

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Commit:
    """Records, and (call, reply) pairs that leave once they are durable."""

    records: Sequence[bytes]
    replies: list[tuple[Call, bytes]]


@dataclass(slots=True)
class Base:
    """What a snapshot stands for: the records up to this sequence number."""

    sequence: int = 0


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The catalog as it was at its base."""

    payload: bytes | bytearray
    base: Base


@dataclass(frozen=True, slots=True)
class _Term:
    """The store's term is to be at least this."""

    number: int


_Entry = _Commit | _Snapshot | Base | _Term


def _is_commit(entry: _Entry) -> bool:
    return isinstance(entry, _Commit)


class Writer:
    """Owns the store from `start` to `close`. `commit` and `snapshot` are for the owner thread,
    whose order is kept, as is `raise_term`; `refuse` makes the reply of a call that failed."""

    def __init__(
        self,
        store: MetadataStore,
        sequence: int,
        refuse: Callable[[Method, MooncakeError], bytes],
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._sequence = sequence
        self._refuse = refuse
        self._limits = limits
        self._changed = threading.Condition()
        self._waiting: list[_Entry] = []
        self._waiting_nbytes = 0
        self._pressing = False  # somebody waits for what is queued
        self._closing = False
        self._failure: MooncakeError | None = None
        self.raised_term = 0  # durable; of the last `raise_term`
        self._commits = metrics.counter("metadata_commits_total", "Transactions of records")
        self._records = metrics.counter("metadata_records_total", "Records made durable")
        self._snapshots = metrics.counter("metadata_snapshots_total", "Snapshots written")
        self._failures = metrics.counter("metadata_failures_total", "Writes the store refused")
        self._thread = threading.Thread(target=self._run, name="mooncake-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def obstacle(self) -> MooncakeError | None:
        """Why nothing that changes the catalog can be accepted now. Any thread."""
        if self._failure is not None:
            return self._failure
        if self._waiting_nbytes > self._limits.commit_bytes_max:
            return Backpressure("records come faster than the metadata store takes them")
        return None

    def commit(self, records: Sequence[bytes], replies: list[tuple[Call, bytes]]) -> None:
        self._queue(_Commit(records, replies), sum(map(len, records)), pressing=bool(replies))

    def raise_term(self, term: int) -> None:
        """Have a greater term made durable; `raised_term` tells when it is."""
        self._queue(_Term(term), 0, pressing=True)

    def begin_snapshot(self) -> Base:
        """A snapshot is begun that has all records queued so far."""
        base = Base()
        self._queue(base, 0, pressing=False)
        return base

    def snapshot(self, payload: bytes | bytearray, base: Base) -> None:
        self._queue(_Snapshot(payload, base), 0, pressing=True)

    def close(self, timeout_ms: int) -> None:
        """Write what waits (one attempt), close the store. False sense of safety is avoided: what
        could not be written is logged."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_ms / 1000)
        if self._thread.is_alive():
            log.error("the metadata store is still busy after %d ms", timeout_ms)
            return
        self._store.close()

    def _queue(self, entry: _Entry, nbytes: int, *, pressing: bool) -> None:
        with self._changed:
            self._waiting.append(entry)
            self._waiting_nbytes += nbytes
            self._pressing |= pressing
            if pressing or len(self._waiting) == 1:
                self._changed.notify()

    def _ready(self) -> bool:
        return self._pressing or self._closing

    def _run(self) -> None:
        backlog: list[_Entry] = []
        closing = False
        while not closing:
            with self._changed:
                if not self._waiting and not self._closing:
                    self._changed.wait(self._limits.commit_retry_ms / 1000 if backlog else None)
                if self._waiting:
                    self._changed.wait_for(self._ready, self._limits.commit_linger_ms / 1000)
                backlog += self._waiting  # and nobody else has them: a snapshot is large
                self._waiting = []
                self._pressing = False
                closing = self._closing
            try:
                self._write(backlog)
                self._recovered()
            except MooncakeError as error:
                self._failed(error, backlog)
            except Exception as error:
                log.exception("the writer thread met a defect")
                self._failed(InternalError(f"writing metadata: {error!r}"), backlog)
        if backlog:
            log.error("stopped with %d changes that the metadata store refused", len(backlog))

    def _write(self, backlog: list[_Entry]) -> None:
        """Write from the front; what is written leaves the list."""
        while backlog:
            head = backlog[0]
            if isinstance(head, Base):
                head.sequence = self._sequence
                del backlog[0]
                continue
            if isinstance(head, _Term):
                self._store.raise_term(head.number)
                self.raised_term = max(self.raised_term, head.number)
                del backlog[0]
                continue
            if isinstance(head, _Snapshot):
                self._write_snapshot(head)
                del backlog[0], head
                trim_heap()  # else some of its size stays with this process for good
                continue
            group = [entry for entry in takewhile(_is_commit, backlog)]
            records = [r for entry in group if isinstance(entry, _Commit) for r in entry.records]
            if records:
                self._sequence = self._store.append(records)
                self._commits.value += 1
                self._records.value += len(records)
            del backlog[: len(group)]
            with self._changed:
                self._waiting_nbytes -= sum(map(len, records))
            for entry in group:
                if isinstance(entry, _Commit):
                    for call, payload in entry.replies:
                        call.reply(payload)

    def _write_snapshot(self, snapshot: _Snapshot) -> None:
        """A snapshot is an economy: when it cannot be written, the records still say it all."""
        try:
            self._store.write_snapshot(snapshot.payload, snapshot.base.sequence)
            self._snapshots.value += 1
        except MooncakeError as error:
            self._failures.value += 1
            log.warning("no snapshot of %d bytes was written: %s", len(snapshot.payload), error)

    def _failed(self, error: MooncakeError, backlog: list[_Entry]) -> None:
        self._failures.value += 1
        if self._failure is None:
            log.error("nothing can be changed until the metadata store recovers: %s", error)
        self._failure = error
        cause = f"the change may or may not last: {error.cause}"
        for entry in backlog:
            if isinstance(entry, _Commit):
                for call, _ in entry.replies:
                    call.reply(self._refuse(call.method, MasterUnavailable(cause)))
                entry.replies = []

    def _recovered(self) -> None:
        if self._failure is not None:
            log.info("the metadata store accepts writes again")
            self._failure = None
