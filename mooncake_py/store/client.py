"""`StoreClient`: put and get KV bytes of a cluster. The one class most users need.

    with StoreClient("127.0.0.1:50051") as store:
        store.put("page/1", b"...")
        page = store.get("page/1")

A call asks the master where (one message for a batch get, two for a batch put) and moves the bytes
itself, point to point with the nodes. Single calls are batches of one.

Thread-safe: any number of threads may share a client. After a fork the child must open its own; the
parent's raises UsageError there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mooncake_py import errors
from mooncake_py.clock import Clock, Deadline, SystemClock
from mooncake_py.errors import MooncakeError, ObjectNotFound, UsageError, error_of
from mooncake_py.master.client import MasterClient
from mooncake_py.model import (
    KEY_MAX_BYTES,
    OBJECT_MAX_BYTES,
    TENANT_MAX_BYTES,
    ReplicaPolicy,
)
from mooncake_py.store.buffers import Span, fresh_bytes, source_span, target_span
from mooncake_py.store.get import BatchReader, ReadResult, Targets
from mooncake_py.store.host import host_id
from mooncake_py.store.put import BatchWriter, PutJob
from mooncake_py.store.segments import SegmentDirectory
from mooncake_py.transfer import EngineOptions, TransferEngine

PutOutcome: TypeAlias = MooncakeError | None
GetOutcome: TypeAlias = bytes | int | MooncakeError

_RETRY_FIRST_MS = 5  # eviction on the master takes about a tick; doubled up to the limit
_RETRY_LAST_MS = 200
_PUT_AGAIN = frozenset(
    error.code  # of a key: what another placement, a little later, can cure
    for error in (
        errors.OutOfSpace,
        errors.Backpressure,
        errors.PeerUnreachable,
        errors.NodeDraining,
        errors.LeaseExpired,
    )
)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as `list` shows it."""

    key: str
    nbytes: int
    replicas: int


class StoreClient:
    """A connection to one cluster, for one tenant.

    master: "host:port" of mooncake-master, of several with commas between. transports: ways to
    move bytes that may be used, best one is chosen per node; ("tcp",) forces TCP. timeout_ms:
    default deadline of every call.

    Raises MasterUnavailable when no master answers within timeout_ms, VersionMismatch, UsageError.
    """

    def __init__(
        self,
        master: str,
        *,
        tenant: str = "default",
        transports: Sequence[str] = ("local", "shm", "tcp"),
        timeout_ms: int = 10_000,
        clock: Clock | None = None,
    ) -> None:
        if not 1 <= len(tenant.encode()) <= TENANT_MAX_BYTES:
            raise UsageError(f"a tenant's name has 1 to {TENANT_MAX_BYTES} bytes", tenant=tenant)
        self._tenant = tenant
        self._timeout_ms = timeout_ms
        self._clock = clock or SystemClock()
        self._engine = TransferEngine(EngineOptions(transports=tuple(transports)))
        try:
            self._master = MasterClient(
                master, engine=self._engine, role="client", clock=self._clock
            )
            self._master.connect(timeout_ms=timeout_ms)
        except BaseException:
            self._engine.close()
            raise
        self._nodes = ThreadPoolExecutor(max_workers=8, thread_name_prefix="mooncake-client")
        self._directory = SegmentDirectory(self._engine)
        self._reader = BatchReader(self._engine, self._directory)
        self._writer = BatchWriter(
            self._engine, self._directory, self._master, self._nodes, host_id()
        )
        self._closing = threading.Event()
        self._calls = _CallCounter()

    # --- put ---

    def put(
        self,
        key: str,
        value: Any,
        *,
        policy: ReplicaPolicy = ReplicaPolicy(),
        timeout_ms: int | None = None,
    ) -> None:
        """Store `value` (any contiguous buffer or CPU tensor) under `key`, immutable from now on.

        Returns once the object is visible to every client. Raises ObjectExists (the first writer
        won; its bytes are unchanged), OutOfSpace, QuotaExceeded, UsageError, MasterUnavailable,
        TransferError kinds. The value's memory is not touched any more after the call.
        """
        (outcome,) = self.put_batch([key], [value], policy=policy, timeout_ms=timeout_ms)
        if outcome is not None:
            raise outcome

    def put_batch(
        self,
        keys: Sequence[str],
        values: Sequence[Any],
        *,
        policy: ReplicaPolicy = ReplicaPolicy(),
        timeout_ms: int | None = None,
    ) -> list[PutOutcome]:
        """Store many objects with two master calls. One outcome a key, in order: None, or the
        error that `put` would raise. One key's failure changes nothing for the others. Keys that
        find no space, or whose node is gone, are tried again until the deadline."""
        if len(keys) != len(values):
            raise UsageError("one value a key", keys=len(keys), values=len(values))
        names = [_key_bytes(key) for key in keys]
        spans = [_sized(source_span(value)) for value in values]
        if not names:
            return []
        with self._calls.one(self._closing):
            job = PutJob(self._tenant, names, spans, policy, self._deadline(timeout_ms))
            codes = self._writer.write(job)
            self._put_again(job, codes)
        return [
            None if code == errors.OK else self._put_error(code, key, span)
            for code, key, span in zip(codes, keys, spans, strict=True)
        ]

    def _put_again(self, job: PutJob, codes: list[int]) -> None:
        """Try keys again that met a lack of space or a lost node; `codes` changes in place."""
        wait_ms = _RETRY_FIRST_MS
        while todo := [i for i, code in enumerate(codes) if code in _PUT_AGAIN]:
            if job.deadline.left_ms() <= wait_ms or self._closing.wait(wait_ms / 1000):
                break
            wait_ms = min(2 * wait_ms, _RETRY_LAST_MS)
            rest = PutJob(
                job.tenant,
                [job.keys[i] for i in todo],
                [job.spans[i] for i in todo],
                job.policy,
                job.deadline,
            )
            for i, code in zip(todo, self._writer.write(rest), strict=True):
                codes[i] = code

    def _put_error(self, code: int, key: str, span: Span) -> MooncakeError:
        cause = {
            errors.ObjectExists.code: "the key holds an object already",
            errors.OutOfSpace.code: "no space for the object within the deadline",
        }.get(code, "the object was not stored")
        return error_of(code, cause, key=key, nbytes=span.nbytes, tenant=self._tenant)

    # --- get ---

    def get(
        self, key: str, into: Any | None = None, *, timeout_ms: int | None = None
    ) -> bytes | int:
        """The object's bytes, or with `into` (writable buffer or CPU tensor) the count of bytes
        written at its start; what lies behind them in `into` stays as it was.

        Raises ObjectNotFound (a miss), UsageError when `into` is smaller than the object (nothing
        is written then), ChecksumMismatch when every replica is damaged, TransferTimeout,
        MasterUnavailable. After an error `into` may hold partial bytes, and nobody writes to it
        any more.
        """
        targets = None if into is None else [into]
        (outcome,) = self.get_batch([key], targets, timeout_ms=timeout_ms)
        if isinstance(outcome, MooncakeError):
            raise outcome
        return outcome

    def get_batch(
        self,
        keys: Sequence[str],
        into: Sequence[Any] | None = None,
        *,
        timeout_ms: int | None = None,
    ) -> list[GetOutcome]:
        """Read many objects with one master call. One outcome a key, in order: bytes (or with
        `into`, one buffer a key, the count written), or the error that `get` would raise."""
        if into is not None and len(into) != len(keys):
            raise UsageError("one target a key", keys=len(keys), targets=len(into))
        names = [_key_bytes(key) for key in keys]
        given = None if into is None else [target_span(target) for target in into]
        if not names:
            return []
        with self._calls.one(self._closing):
            deadline = self._deadline(timeout_ms)
            return self._get(keys, names, given, deadline)

    def _get(
        self,
        keys: Sequence[str],
        names: Sequence[bytes],
        given: Sequence[Span] | None,
        deadline: Deadline,
    ) -> list[GetOutcome]:
        placements = self._master.locate(self._tenant, names, timeout_ms=deadline.left_ms())
        outcomes: list[GetOutcome] = [
            error_of(code, "there is no object under the key", key=key, tenant=self._tenant)
            if code
            else 0
            for key, code in zip(keys, placements.status.tolist(), strict=True)
        ]
        rows = placements.rows
        lengths = dict(zip(rows["key_index"].tolist(), rows["length"].tolist(), strict=True))
        if given is None:
            targets, owners = _fresh_targets(len(keys), lengths, outcomes)
        else:
            targets, owners = _given_targets(keys, given, lengths, outcomes), {}
        result = self._reader.read(placements, targets, deadline)
        for i in np.flatnonzero(targets.wanted & (result.codes != errors.OK)).tolist():
            outcomes[i] = _read_error(int(result.codes[i]), keys[i], lengths[i])
        for i, scratch in owners.items():
            if not isinstance(outcomes[i], MooncakeError):
                outcomes[i] = bytes(scratch)
        self._report(names, result, deadline)
        return outcomes

    def _report(self, names: Sequence[bytes], result: ReadResult, deadline: Deadline) -> None:
        """Tell the master once what could not be read, so that nobody is sent there again."""
        if not result.broken:
            return
        try:
            self._master.report(
                self._tenant,
                [names[b.key_index] for b in result.broken],
                [b.generation for b in result.broken],
                [b.segment_id for b in result.broken],
                [b.code for b in result.broken],
                timeout_ms=max(1, deadline.left_ms()),
            )
        except MooncakeError:
            return  # advice only: the master finds out by itself a little later

    # --- the rest ---

    def exists(
        self, keys: str | Sequence[str], *, prefix: bool = False, timeout_ms: int | None = None
    ) -> bool | int | list[bool]:
        """Is there a complete object? For one key a bool, for a sequence a list of bools in order;
        with `prefix` the count of leading keys that are present. Never pins anything."""
        single = isinstance(keys, str)
        names = [_key_bytes(key) for key in ([keys] if isinstance(keys, str) else keys)]
        if not names:
            return 0 if prefix else []
        with self._calls.one(self._closing):
            deadline = self._deadline(timeout_ms)
            present = self._master.exists(
                self._tenant, names, prefix=prefix, timeout_ms=deadline.left_ms()
            )
        if prefix:
            return int(present.sum())
        return bool(present[0]) if single else [bool(p) for p in present]

    def remove(
        self,
        keys: str | Sequence[str],
        *,
        force: bool = False,
        timeout_ms: int | None = None,
    ) -> PutOutcome | list[PutOutcome]:
        """Remove objects; an absent key is a success. One outcome a key (one, or a list in order):
        None, or ObjectLeased when a reader or a pin holds it and `force` is not given. An
        acknowledged removal is durable: the object never comes back."""
        single = isinstance(keys, str)
        texts = [keys] if isinstance(keys, str) else list(keys)
        names = [_key_bytes(key) for key in texts]
        if not names:
            return []
        with self._calls.one(self._closing):
            deadline = self._deadline(timeout_ms)
            removed = self._master.remove(
                self._tenant, names, force=force, timeout_ms=deadline.left_ms()
            )
        outcomes: list[PutOutcome] = [
            error_of(code, "a reader's lease or a pin holds the object", key=key) if code else None
            for code, key in zip(removed.status.tolist(), texts, strict=True)
        ]
        return outcomes[0] if single else outcomes

    def list(self, prefix: str = "", *, timeout_ms: int | None = None) -> Iterator[ObjectInfo]:
        """Complete objects whose key begins with `prefix`, in key order, fetched page by page.
        Not a snapshot: what is put or removed meanwhile may or may not be seen."""
        after = b""
        while True:
            with self._calls.one(self._closing):
                deadline = self._deadline(timeout_ms)
                page = self._master.list(
                    self._tenant, prefix.encode(), after=after, timeout_ms=deadline.left_ms()
                )
            lengths, replicas = page.lengths.tolist(), page.replicas.tolist()
            for key, nbytes, count in zip(page.keys, lengths, replicas, strict=True):
                yield ObjectInfo(key.decode(), nbytes, count)
            if not page.more:
                return
            after = page.keys[-1]

    def close(self) -> None:
        """Refuse new calls, let running ones end, release everything. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._calls.wait_idle(self._timeout_ms)
        self._nodes.shutdown(wait=True, cancel_futures=True)
        self._directory.close()
        self._master.close()
        self._engine.close()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _deadline(self, timeout_ms: int | None) -> Deadline:
        chosen = self._timeout_ms if timeout_ms is None else timeout_ms
        if chosen <= 0:
            raise UsageError("timeout_ms is a positive number of milliseconds", timeout_ms=chosen)
        return Deadline(chosen, self._clock)


class _CallCounter:
    """Counts running calls, so that close can unmap memory only when nobody copies from it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running = 0
        self._pid = os.getpid()

    def one(self, closing: threading.Event) -> _CallCounter:
        if os.getpid() != self._pid:
            raise UsageError(
                "this client was opened before a fork and belongs to the parent process",
                remedy="open a StoreClient in the child",
            )
        with self._condition:
            if closing.is_set():
                raise UsageError("the client is closed", remedy="open a new StoreClient")
            self._running += 1
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._running -= 1
            self._condition.notify_all()

    def wait_idle(self, timeout_ms: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._running == 0, timeout_ms / 1000)


def _key_bytes(key: str) -> bytes:
    if not isinstance(key, str):
        raise UsageError(f"a key is a str, not {type(key).__name__}", key=key)
    try:
        name = key.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the key is no valid text: {error}", key=key) from None
    if not 1 <= len(name) <= KEY_MAX_BYTES:
        raise UsageError(
            f"a key has 1 to {KEY_MAX_BYTES} bytes of UTF-8", nbytes=len(name), key=key[:64]
        )
    return name


def _sized(span: Span) -> Span:
    if span.nbytes > OBJECT_MAX_BYTES:
        raise UsageError(f"an object has at most {OBJECT_MAX_BYTES} bytes", nbytes=span.nbytes)
    return span


def _given_targets(
    keys: Sequence[str],
    given: Sequence[Span],
    lengths: dict[int, int],
    outcomes: list[GetOutcome],
) -> Targets:
    """The caller's buffers. One that is too small is refused here, before any byte moves."""
    sizes = np.fromiter((span.nbytes for span in given), dtype=np.uint64, count=len(given))
    addresses = np.fromiter((span.address for span in given), dtype=np.uint64, count=len(given))
    wanted = np.zeros(len(given), dtype=bool)
    for i, nbytes in lengths.items():
        if given[i].nbytes >= nbytes:
            wanted[i] = True
            outcomes[i] = nbytes
        else:
            outcomes[i] = UsageError(
                f"the target has {given[i].nbytes} bytes, the object {nbytes}",
                remedy="pass a target at least as large as the object; nothing was written",
                key=keys[i],
            )
    return Targets(addresses, sizes, wanted)


def _fresh_targets(
    count: int, lengths: dict[int, int], outcomes: list[GetOutcome]
) -> tuple[Targets, dict[int, bytearray]]:
    """New bytes objects, put into `outcomes` already; and scratch for those too short to be new."""
    targets = Targets(np.zeros(count, np.uint64), np.zeros(count, np.uint64), np.zeros(count, bool))
    scratch: dict[int, bytearray] = {}
    for i, nbytes in lengths.items():
        if nbytes <= 1:
            scratch[i] = bytearray(nbytes)
            span = target_span(scratch[i])
        else:
            outcomes[i], span = fresh_bytes(nbytes)
        targets.addresses[i], targets.sizes[i] = span.address, nbytes
        targets.wanted[i] = True
    return targets, scratch


def _read_error(code: int, key: str, nbytes: int) -> MooncakeError:
    """What a read that failed on every replica means to the caller."""
    if code in (errors.LeaseExpired.code, errors.PeerUnreachable.code, errors.AccessRefused.code):
        return ObjectNotFound(
            "the object was placed but can be read from no node any more", key=key, nbytes=nbytes
        )
    cause = {
        errors.ChecksumMismatch.code: "the object's bytes are damaged on every replica",
        errors.TransferTimeout.code: "the object did not arrive within the deadline",
    }.get(code, "the object could not be read")
    return error_of(code, cause, key=key, nbytes=nbytes)
