"""Views: objects looked at where they lie, in the mapped segment, without a copy.

A view is taken in this order: placement, hold at the node (store/holds.py), header, checksum of all
bytes, header again. From then on the bytes cannot change until it is released, whatever is evicted
or removed meanwhile. While views live, a thread renews the objects' leases at the master, so that
nobody tries to use their space; the hold does not depend on it.

The one thing that ends a hold without us is the loss of the connection to the node. `release` finds
out and raises LeaseExpired then: what was read through the view must not be taken as good.

An object whose node cannot be mapped from here is read once into memory of its own.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Self

import numpy as np

from mooncake_py import errors
from mooncake_py._native import ffi, memory
from mooncake_py.clock import Clock, Deadline
from mooncake_py.errors import (
    LeaseExpired,
    MooncakeError,
    ObjectNotFound,
    UsageError,
    error_of,
)
from mooncake_py.master.client import MasterClient
from mooncake_py.model import EXTENT_HEADER_BYTES
from mooncake_py.store.buffers import pointer_to
from mooncake_py.store.get import PATIENCE_MS, BatchReader
from mooncake_py.store.outcomes import get_error
from mooncake_py.store.placement_cache import ROW_BYTES
from mooncake_py.store.segments import Reach, SegmentDirectory
from mooncake_py.store.stripes import is_striped
from mooncake_py.transfer import Mapping, Peer
from mooncake_py.wire.node import HOLD_KIND, HoldReply, HoldRequest
from mooncake_py.wire.rows import EXTENT

log = logging.getLogger(__name__)

RENEW_MS = 2_000  # or a third of the lease, if that is sooner
RENEW_MIN_MS = 50
RENEW_CALL_MS = 10_000
RELEASE_MS = 5_000
# What another replica, or a read, may make good.
_ELSEWHERE = (LeaseExpired, errors.ChecksumMismatch, errors.PeerUnreachable, errors.TransferTimeout)


class ObjectView:
    """One object, read-only, until `release` (or the end of a `with`). Made by `get_view`.

    memory: its bytes. mapped: they lie in the node's segment; else in a private copy. numpy and
    torch views of `memory` keep it in use: `release` raises UsageError while there are any, and
    LeaseExpired when the bytes may have changed meanwhile. Without a release it ends some seconds
    after the last array or memoryview of it is gone. Use and release are thread-safe.
    """

    def __init__(self, key: str, owner: Any, release: Callable[[], None] | None = None) -> None:
        """owner: the bytes as an object that every view of them keeps alive."""
        self.key = key
        self.memory = memoryview(owner).toreadonly()
        self.nbytes = self.memory.nbytes
        self.mapped = release is not None
        self._owner = weakref.ref(owner) if self.mapped else None
        self._release = release

    def __repr__(self) -> str:
        where = "in the node's memory" if self.mapped else "a private copy"
        return f"<ObjectView {self.key!r}: {self.nbytes} bytes in .memory, {where}>"

    def release(self) -> None:
        """Twice is fine."""
        self.memory = memoryview(b"")
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            self.memory = memoryview(owner).toreadonly()
            raise UsageError(
                "arrays or memoryviews made from the view are still in use",
                remedy="drop them first, or copy what is needed longer",
                key=self.key,
            )
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Hold:
    """What one view holds at its node. Ends once."""

    __slots__ = ("name", "peer", "row", "segment_id")

    def __init__(self, name: bytes, reach: Reach, row: bytes) -> None:
        self.name = name
        self.peer: Peer = reach.peer
        self.segment_id = reach.segment.segment_id
        self.row = row

    def ask(self, release: bool, timeout_ms: int) -> None:
        """Raises LeaseExpired when it is not (or was no longer) held, and TransferErrors."""
        request = HoldRequest(self.segment_id, self.row, release)
        answer = self.peer.request(HOLD_KIND, request.encode(), timeout_ms=timeout_ms)
        reply = HoldReply.decode(answer)
        code = reply.code or reply.status[0]
        if code != errors.OK:
            cause = reply.cause or "the object is not there any more"
            raise error_of(code, cause, key=self.name.decode())


class ViewTaker:
    """Takes views and keeps their leases. One for each client."""

    def __init__(
        self, directory: SegmentDirectory, master: MasterClient, tenant: str, clock: Clock
    ) -> None:
        self._directory = directory
        self._master = master
        self._tenant = tenant
        self._clock = clock
        self._lock = threading.Lock()
        self._live: dict[int, _Hold] = {}
        self._numbers = count()
        self._dropped: deque[int] = deque()  # views that were collected and never released
        self._renew_ms = RENEW_MS
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def find(
        self, key: str, name: bytes, reader: BatchReader, deadline: Deadline
    ) -> ObjectView | None:
        """A view of the object, wherever it is by now; None: it can be viewed nowhere, and whether
        it can be read, and if not why, a read will say. Raises what `StoreClient.get_view` does."""
        remembered = reader.recall(name)
        for known in (remembered, None):
            rows = reader.locate([name], deadline)[0] if known is None else known
            if not rows:
                raise get_error(ObjectNotFound.code, key, 0, self._tenant)
            if is_striped(rows):
                return None  # not in one piece anywhere
            try:
                return self.take(key, name, rows, deadline)
            except _ELSEWHERE:
                reader.cache.forget([name])
        return None

    def take(self, key: str, name: bytes, rows: bytes, deadline: Deadline) -> ObjectView | None:
        """A view of the first replica that can be viewed; None when none can be mapped. Raises what
        was wrong with the last one: LeaseExpired (the rows are stale, or its node has another
        segment by now), ChecksumMismatch, PeerUnreachable, TransferTimeout."""
        failure: MooncakeError | None = None
        for at in range(0, len(rows), ROW_BYTES):
            row = np.frombuffer(rows[at : at + ROW_BYTES], EXTENT)
            segment = self._directory.segment(int(row["segment_index"][0]))
            if segment.disk_id:
                continue
            last = at + ROW_BYTES == len(rows)
            patience_ms = min(RELEASE_MS if last else PATIENCE_MS, deadline.left_ms())
            patience = Deadline(patience_ms, self._clock)
            try:
                reach = self._directory.reach(segment, patience)
                if reach.mapping is None:
                    continue
                left_ms = int(row["expires_ms"][0]) - self._clock.now_ms()
                self._renew_ms = max(RENEW_MIN_MS, min(self._renew_ms, left_ms // 3))
                hold = _Hold(name, reach, row.tobytes())
                return self._hold_and_check(key, hold, row, reach.mapping, patience)
            except _ELSEWHERE as error:
                failure = error
        if failure is not None:
            raise failure
        return None

    def _hold_and_check(
        self, key: str, hold: _Hold, row: np.ndarray, mapping: Mapping, patience: Deadline
    ) -> ObjectView:
        hold.ask(release=False, timeout_ms=patience.left_ms())
        try:
            start = int(row["offset"][0])
            payload = start + EXTENT_HEADER_BYTES
            end = payload + int(row["length"][0])
            everything = mapping.view()
            if end > len(everything):
                raise LeaseExpired("the placement is outside of the segment", key=key)
            before = bytes(everything[start:payload])
            crcs = np.array([memory.crc32c(everything[payload:end])], dtype=np.uint32)
            statuses = np.zeros(1, dtype=np.int32)
            memory.extent_verify(before, bytes(everything[start:payload]), row, crcs, statuses)
            if statuses[0]:
                raise error_of(int(statuses[0]), "the object cannot be viewed", key=key)
        except BaseException:
            with suppress(MooncakeError):
                hold.ask(release=True, timeout_ms=RELEASE_MS)
            raise
        pointer = pointer_to(mapping.base + payload, everything)
        return self._keep(key, hold, ffi.buffer(pointer, end - payload))

    def _keep(self, key: str, hold: _Hold, data: Any) -> ObjectView:
        number = next(self._numbers)
        with self._lock:
            self._live[number] = hold
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(
                    target=self._renewals, name="mooncake-views", daemon=True
                )
                self._thread.start()
        # The finalizer may run anywhere, so it only leaves a note for the thread.
        weakref.finalize(data, self._dropped.append, number).atexit = False
        return ObjectView(key, data, lambda: self._end(number))

    def _end(self, number: int) -> None:
        with self._lock:
            hold = self._live.pop(number, None)
        if hold is None:
            return
        try:
            hold.ask(release=True, timeout_ms=RELEASE_MS)
        except (errors.PeerUnreachable, errors.TransferTimeout, LeaseExpired) as error:
            raise LeaseExpired(
                "the object's node was lost, or fell silent, while the object was viewed",
                remedy="take what was read through the view as a miss",
                key=hold.name.decode(),
            ) from error

    def _renewals(self) -> None:
        while not self._closing.wait(self._renew_ms / 1000):
            while self._dropped:
                self._forget(self._dropped.popleft())
            with self._lock:
                names = sorted({hold.name for hold in self._live.values()})
            if names:
                self._renew(names)

    def _forget(self, number: int) -> None:
        try:
            self._end(number)
        except MooncakeError as error:
            log.debug("a dropped view: %s", error)

    def _renew(self, names: Sequence[bytes]) -> None:
        try:
            self._master.locate(self._tenant, names, timeout_ms=RENEW_CALL_MS)
        except MooncakeError as error:
            log.info("leases of %d viewed objects were not renewed: %s", len(names), error)

    def close(self) -> None:
        """End all holds. Views that live on show memory that nobody protects any more."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        for number in list(self._live):
            self._forget(number)
