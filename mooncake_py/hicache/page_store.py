"""Pages in the store, for callers that must never wait long and never see an exception.

Rules.
* Every call has a time limit and one answer a key: there, or not. Why not is logged, counted, and
  nobody's problem but the operator's: a page that cannot be had is computed again.
* A call that met no store at all (no master, nothing but timeouts) opens a *pause*: until it ends,
  calls answer "not there" at once. So a store that is down costs one time limit a pause, not one a
  batch. The first call after the pause asks again.
* A page that is stored already is stored: another writer of the same key has the same bytes.
* Counts as read only what filled its target to the last byte.

Thread-safe. After `close` every call answers "not there".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mooncake_py.clock import Clock, SystemClock
from mooncake_py.errors import (
    ClusterError,
    MooncakeError,
    ObjectExists,
    ObjectNotFound,
    OutOfSpace,
    PeerUnreachable,
    TransferTimeout,
)
from mooncake_py.hicache.settings import HiCacheSettings
from mooncake_py.model import BATCH_MAX_KEYS, Group, ReplicaPolicy
from mooncake_py.store.client import StoreClient
from mooncake_py.store.regions import RegisteredMemory

T = TypeVar("T")

logger = logging.getLogger(__name__)

_DOWN = (ClusterError, PeerUnreachable, TransferTimeout)
_EXPECTED = (ObjectNotFound, OutOfSpace)  # not worth a line each


class PageStore:
    def __init__(self, settings: HiCacheSettings, clock: Clock | None = None) -> None:
        """Raises what StoreClient raises."""
        self._settings = settings
        self._clock = clock or SystemClock()
        self._policy = ReplicaPolicy(replica_count=settings.replica_count)
        self._client = StoreClient(
            settings.master,
            tenant=settings.tenant,
            transports=settings.transport_names(),
            timeout_ms=settings.start_ms,
            clock=self._clock,
        )
        self._lock = threading.Lock()
        self._paused_until_ms = 0
        self._down = False
        self._closed = False
        self.failures = 0  # calls that met no store

    # --- the calls ---

    def leading(self, keys: Sequence[str]) -> int:
        """How many leading keys have objects. One master call, whose placements and leases also
        serve the reads that follow."""

        def ask() -> int:
            return int(
                self._client.exists(keys, prefix=True, timeout_ms=self._settings.exists_ms)  # type: ignore[arg-type]  # with prefix it is a count
            )

        return self._try("exists", ask, 0) if keys else 0

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which keys have objects. One master call, which also serves the reads that follow."""

        def ask() -> list[bool]:
            with self._client.session(keys, timeout_ms=self._settings.exists_ms) as session:
                return session.present

        return self._try("exists", ask, [False] * len(keys)) if keys else []

    def put(
        self, keys: Sequence[str], values: Sequence[Any], groups: Sequence[int | Group] = ()
    ) -> list[bool]:
        """Store values; those of one group (as in StoreClient.put_batch) have one fate."""

        def write() -> list[bool]:
            outcomes = self._client.put_batch(
                keys,
                values,
                policy=self._policy,
                groups=groups,
                timeout_ms=self._settings.put_ms,
            )
            self._judge("put", keys, outcomes)
            return [done is None or isinstance(done, ObjectExists) for done in outcomes]

        return self._try("put", write, [False] * len(keys)) if keys else []

    def get(self, keys: Sequence[str], targets: Sequence[Any], sizes: Sequence[int]) -> list[bool]:
        """Read objects of these sizes in bytes into the targets."""

        def read() -> list[bool]:
            outcomes = self._client.get_batch(keys, targets, timeout_ms=self._settings.get_ms)
            self._judge("get", keys, outcomes)
            return [got == size for got, size in zip(outcomes, sizes, strict=True)]

        return self._try("get", read, [False] * len(keys)) if keys else []

    def clear(self, prefix: str) -> int:
        """Remove what begins with the prefix. Answers how many objects that were."""

        def remove() -> int:
            removed = 0
            keys = [info.key for info in self._client.list(prefix)]
            for start in range(0, len(keys), BATCH_MAX_KEYS):
                part = keys[start : start + BATCH_MAX_KEYS]
                outcomes = self._client.remove(part, force=True)
                removed += sum(done is None for done in outcomes)  # type: ignore[union-attr]  # a list for a list
            return removed

        return self._try("clear", remove, 0)

    def register(self, buffer: Any, fd: int = -1) -> RegisteredMemory:
        """Memory that values and targets lie in; fd: of a memfd that begins with it. Raises
        UsageError."""
        return self._client.register(buffer, fd=fd)

    def alloc(self, nbytes: int) -> RegisteredMemory:
        """New memory that nodes on this host map: what is put from it is copied once. Raises
        OutOfSpace, UsageError."""
        return self._client.alloc(nbytes)

    def close(self) -> None:
        """Let running calls end and release everything. Twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._client.close()

    # --- failing softly ---

    def _try(self, verb: str, call: Callable[[], T], otherwise: T) -> T:
        if self._closed or self._clock.now_ms() < self._paused_until_ms:
            return otherwise
        try:
            answer = call()
        except MooncakeError as error:
            if not self._closed:
                self._failed(verb, error)
            return otherwise
        if self._down and not self._clock.now_ms() < self._paused_until_ms:
            self._down = False
            logger.info("the store answers again")
        return answer

    def _judge(self, verb: str, keys: Sequence[str], outcomes: Sequence[Any]) -> None:
        """Say what went wrong with single keys, in one line a kind; all down is the store down."""
        bad = [
            (key, outcome)
            for key, outcome in zip(keys, outcomes, strict=True)
            if isinstance(outcome, MooncakeError) and not isinstance(outcome, ObjectExists)
        ]
        if not bad:
            return
        if len(bad) == len(keys) and all(isinstance(error, _DOWN) for _, error in bad):
            self._failed(verb, bad[0][1])
            return
        kinds: dict[type[MooncakeError], list[MooncakeError]] = {}
        for _, error in bad:
            kinds.setdefault(type(error), []).append(error)
        for kind, errors in kinds.items():
            level = logging.DEBUG if kind in _EXPECTED else logging.WARNING
            logger.log(level, "%s of %d of %d pages: %s", verb, len(errors), len(keys), errors[0])

    def _failed(self, verb: str, error: MooncakeError) -> None:
        with self._lock:
            self.failures += 1
            if isinstance(error, _DOWN):
                self._paused_until_ms = self._clock.now_ms() + self._settings.pause_ms
                first, self._down = not self._down, True
            else:
                first = True
        if first:
            logger.warning("%s failed, its pages count as misses: %s", verb, error)
