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

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, overload

from mooncake_py import errors
from mooncake_py.clock import Clock, Deadline, SystemClock
from mooncake_py.errors import MooncakeError, UsageError
from mooncake_py.master.client import MasterClient
from mooncake_py.master.commands import CopyObjects
from mooncake_py.model import DEFAULT_POLICY, TENANT_MAX_BYTES, Group, ReplicaPolicy
from mooncake_py.store.arguments import (
    check_paired,
    check_pin,
    check_policy,
    check_ranges,
    check_sizes,
    check_timeout,
    group_numbers,
    key_list,
    key_names,
    one_or_many,
    text_bytes,
)
from mooncake_py.store.buffers import source_pieces, target_pieces
from mooncake_py.store.calls import CallGate
from mooncake_py.store.explain import Explanation, explain
from mooncake_py.store.get import BatchReader
from mooncake_py.store.host import host_id
from mooncake_py.store.outcomes import (
    COPY_CAUSE,
    PIN_CAUSES,
    REMOVE_CAUSES,
    GetOutcome,
    ObjectInfo,
    PutOutcome,
    PutOutcomes,
    get_error,
    plain_outcomes,
)
from mooncake_py.store.put import BatchWriter, PutJob
from mooncake_py.store.put_again import PersistentWriter, put_outcome
from mooncake_py.store.regions import RegisteredMemory
from mooncake_py.store.reservations import ReservationPool
from mooncake_py.store.results import ResultPool
from mooncake_py.store.segments import SegmentDirectory
from mooncake_py.store.session import ReadSession, WriteSession
from mooncake_py.store.targets import GivenTargets, NewTargets, Range, resolve
from mooncake_py.store.views import ObjectView, ViewTaker
from mooncake_py.transfer import TransferEngine, options_for

DEFAULT_TRANSPORTS = ("local", "shm", "tcp")
DEFAULT_TIMEOUT_MS = 10_000


class StoreClient:
    """A connection to one cluster, for one tenant.

    master: "host:port" of mooncake-master, of several with commas between, or the address of their
    etcd ("etcd://h1,h2/prefix"), which says who leads. transports: ways to move bytes that may be
    used, best one is chosen per node; ("tcp",) forces TCP, "rdma" or "rdma:mlx5_0+mlx5_1" uses RDMA
    between hosts, and tcp instead, with a warning, if that is allowed too and no device is usable.
    timeout_ms: default deadline of every call. hedge_ms: how long a read waits for one replica
    while there is another (0: half a second).

    Raises MasterUnavailable when no master answers within timeout_ms, VersionMismatch, UsageError.
    """

    def __init__(
        self,
        master: str,
        *,
        tenant: str = "default",
        transports: Sequence[str] = DEFAULT_TRANSPORTS,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        hedge_ms: int = 0,
        clock: Clock | None = None,
    ) -> None:
        check_timeout(timeout_ms)
        if hedge_ms:
            check_timeout(hedge_ms, "hedge_ms")
        text_bytes("master", master)
        if not 1 <= len(text_bytes("tenant", tenant)) <= TENANT_MAX_BYTES:
            raise UsageError(f"a tenant's name has 1 to {TENANT_MAX_BYTES} bytes", tenant=tenant)
        self._tenant = tenant
        self._timeout_ms = timeout_ms
        self._clock = clock or SystemClock()
        self._engine = TransferEngine(options_for(transports))
        try:
            self._master = MasterClient(
                master, engine=self._engine, role="client", clock=self._clock, find_ms=timeout_ms
            )
            self._master.connect(timeout_ms=timeout_ms)
        except BaseException:
            self._engine.close()
            raise
        self._nodes = ThreadPoolExecutor(max_workers=8, thread_name_prefix="mooncake-client")
        self._directory = SegmentDirectory(self._engine, host_id())
        where = (self._engine, self._directory, self._master, tenant, self._clock)
        self._reader = BatchReader(*where, hedge_ms)
        self._views = ViewTaker(self._directory, self._master, tenant, self._clock)
        pool = ReservationPool(self._master, tenant, host_id(), self._nodes, self._clock)
        self._writer = BatchWriter(self._engine, self._directory, self._master, self._nodes, pool)
        self._results = ResultPool()
        self._calls = CallGate()
        closing = self._calls.closing
        self._puts = PersistentWriter(self._writer, self._master, closing, self._clock)

    # --- put ---

    def put(
        self,
        key: str,
        value: Any,
        *,
        policy: ReplicaPolicy = DEFAULT_POLICY,
        upsert: bool = False,
        timeout_ms: int | None = None,
    ) -> int:
        """Store `value` under `key`, immutable from now on. A value is any contiguous buffer or CPU
        tensor, or a list of them, whose bytes then lie one after the other in the object.

        upsert: replace the object that the key holds. It is read until the new one is complete, and
        stays when that fails; readers that hold a lease on it may go on reading it meanwhile.

        Returns, once the object is visible to every client, on how many nodes it is: as many as
        `policy` asks for or, unless that is strict, fewer. Raises ObjectExists (the first writer
        won; its bytes are unchanged), OutOfSpace, QuotaExceeded, UsageError, MasterUnavailable,
        TransferError kinds. The value's memory is not touched any more after the call.
        """
        outcomes = self.put_batch(
            [key], [value], policy=policy, upsert=upsert, timeout_ms=timeout_ms
        )
        (outcome,) = outcomes
        if outcome is not None:
            try:
                raise outcome
            finally:
                del outcome, outcomes  # what holds a frame that holds it would hold the value, too
        return outcomes.replicas[0]

    def put_batch(
        self,
        keys: Sequence[str],
        values: Sequence[Any],
        *,
        policy: ReplicaPolicy = DEFAULT_POLICY,
        groups: Sequence[int | Group] = (),
        upsert: bool = False,
        timeout_ms: int | None = None,
    ) -> PutOutcomes:
        """Store many objects with two master calls. One outcome a key, in order: None, or the
        error that `put` would raise; their `replicas` are what `put` would return. One key's
        failure changes nothing for the others. Keys that find no space, or whose node is gone, are
        tried again until the deadline; those for which there can be none (no node is mounted, they
        exceed the cluster) for a second or two only.

        groups: a number a key; keys with the same one above 0 become visible, and end, together. Or
        a `model.Group`, which has a name: other puts may join it, and it is evicted as one."""
        names = key_names(keys)
        check_paired("value", keys, values)
        check_policy(policy)
        numbers = group_numbers(self._tenant, keys, groups)
        pieces = source_pieces(values)
        sizes = pieces.totals()
        if not names:
            return PutOutcomes((), ())
        check_sizes(sizes)
        with self._calls:
            until = self._deadline(timeout_ms)
            job = PutJob(self._tenant, names, pieces, sizes, policy, until, numbers, upsert)
            try:
                codes, reasons = self._puts.write(job)
            finally:
                pieces.release()
            self._reader.cache.forget(names)
        outcomes: list[PutOutcome] = [None] * len(codes)
        if any(codes):
            for i, (code, key, nbytes) in enumerate(zip(codes, keys, sizes, strict=True)):
                outcomes[i] = put_outcome(code, key, nbytes, self._tenant, reasons.get(i))
        return PutOutcomes(outcomes, job.replica_counts(codes))

    # --- get ---

    def get(
        self,
        key: str,
        into: Any | None = None,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        timeout_ms: int | None = None,
    ) -> bytes | int:
        """The object's bytes, or with `into` the count of bytes written at its start; what lies
        behind them in `into` stays as it was.

        into: a writable buffer or CPU tensor, or a list of them, filled one after the other.
        Without it the memory of large results is used again once nothing refers to them any more
        (`store/results.py`). `get_view` copies nothing.
        offset, nbytes: only that part of the object (None: to its end). A part is proven to be of
        the object by its header, and not compared with a checksum (`design/extent.md`).

        Raises ObjectNotFound (a miss), UsageError when `into` is too small or the object too short
        (nothing is written then), ChecksumMismatch when every replica is damaged, TransferTimeout,
        MasterUnavailable. After an error `into` may hold partial bytes, and nobody writes to it
        any more.
        """
        ranges = None if offset == 0 and nbytes is None else [(offset, nbytes)]
        targets = None if into is None else [into]
        (outcome,) = self.get_batch([key], targets, ranges=ranges, timeout_ms=timeout_ms)
        if isinstance(outcome, MooncakeError):
            try:
                raise outcome
            finally:
                del outcome  # see put
        return outcome

    def get_batch(
        self,
        keys: Sequence[str],
        into: Sequence[Any] | None = None,
        *,
        ranges: Sequence[Range] | None = None,
        timeout_ms: int | None = None,
    ) -> list[GetOutcome]:
        """Read many objects, or a range (offset, nbytes or None) of each. One outcome a key, in
        order: bytes (or with `into`, one target a key, the count written), or the error that `get`
        would raise. One master call for all keys whose placements are not known, else none."""
        return self._read(keys, key_names(keys), into, ranges, self._deadline(timeout_ms))

    def _read(
        self,
        keys: Sequence[str],
        names: Sequence[bytes],
        into: Sequence[Any] | None,
        ranges: Sequence[Range] | None,
        deadline: Deadline,
        rows: list[bytes] | None = None,
    ) -> list[GetOutcome]:
        """rows: the placements to read from and no others; None: the current ones."""
        if into is not None:
            check_paired("target", keys, into)
        if ranges is not None:
            check_ranges(keys, ranges)
        given = None if into is None else GivenTargets(target_pieces(into), len(keys), ranges)
        if not names:
            return []
        with self._calls:
            new = NewTargets(len(keys), ranges, self._results)
            try:
                result = self._reader.read(names, given or new, deadline, rows)
            finally:
                if given is not None:
                    given.release()
            if result.broken:
                self._reader.report(names, result, deadline)
        written = result.lengths
        if ranges is not None:
            written = [resolve(r, length)[1] for r, length in zip(ranges, written, strict=True)]
        outcomes: list[GetOutcome] = new.values() if given is None else list(written)
        if any(result.codes):
            for i, code in enumerate(result.codes):
                if code != errors.OK:
                    room = None if given is None else given.room(i)
                    outcomes[i] = get_error(
                        code, keys[i], result.lengths[i], self._tenant, room=room
                    )
        return outcomes

    def get_view(self, key: str, *, timeout_ms: int | None = None) -> ObjectView:
        """The object's bytes where they lie, read-only and without a copy, in `.memory` of the
        view until that is released, whatever ends meanwhile (`store/views.py`).

            with store.get_view("page/1") as view:
                page = numpy.frombuffer(view.memory, dtype)

        Where the node's memory cannot be mapped (another host, `--segment-file`) it is a private
        copy, and `view.mapped` is False.

        Raises what `get` raises, and Backpressure when views hold too much of a node already.
        """
        (name,) = key_names([key])
        with self._calls:
            deadline = self._deadline(timeout_ms)
            view = self._views.find(key, name, self._reader, deadline)
        if view is not None:
            return view
        return ObjectView(key, self.get(key, timeout_ms=max(1, deadline.left_ms())))

    # --- sessions and explanations ---

    @overload
    def session(self, keys: Sequence[str], *, timeout_ms: int | None = None) -> ReadSession: ...

    @overload
    def session(
        self, keys: Sequence[str], *, sizes: Sequence[int], timeout_ms: int | None = None
    ) -> WriteSession: ...

    def session(
        self,
        keys: Sequence[str],
        *,
        sizes: Sequence[int] | None = None,
        timeout_ms: int | None = None,
    ) -> ReadSession | WriteSession:
        """Read many objects part by part after one master call; or, with their sizes in bytes,
        write them part by part and commit once (`store/session.py`). Use it in a `with`.

        Raises MasterUnavailable, and OutOfSpace for a writing session without memory for it.
        """
        names = key_names(keys)
        if sizes is not None:
            check_paired("size", keys, sizes)
            return WriteSession(keys, sizes, self.alloc, self.put_batch)

        def locate(until: Deadline) -> tuple[list[bytes], list[int]]:
            with self._calls:
                return self._reader.sight(names, until) if names else ([], [])

        def read(
            rows: list[bytes], into: Any, ranges: Sequence[Range], until: Deadline
        ) -> list[GetOutcome]:
            return self._read(keys, names, into, ranges, until, rows)

        deadline, where = partial(self._deadline, timeout_ms), self._directory.segment
        return ReadSession(keys, locate, read, deadline, self._clock.now_ms, where)

    def explain(self, key: str, *, timeout_ms: int | None = None) -> Explanation:
        """Where the object is, by which way it is read from here, or why it cannot be; and how long
        each step of reading it once took. Raises MasterUnavailable."""
        (name,) = key_names([key])
        with self._calls:
            deadline = self._deadline(timeout_ms)
            return explain(key, name, self._reader, self._directory, deadline)

    # --- memory ---

    def register(self, buffer: Any, *, fd: int = -1) -> RegisteredMemory:
        """Make memory known once. Values that are slices of it (memoryviews, numpy or torch views)
        are then put without being registered for each call. fd: of a memfd that begins with the
        buffer, for nodes on this host. Raises UsageError."""
        with self._calls:
            return self._writer.regions.register(buffer, fd)

    def alloc(self, nbytes: int) -> RegisteredMemory:
        """New registered memory that nodes on this host map: what is put from it is copied once,
        by the node. Rounded up to pages. Raises OutOfSpace, UsageError."""
        with self._calls:
            return self._writer.regions.alloc(nbytes)

    # --- the rest ---

    def exists(
        self, keys: str | Sequence[str], *, prefix: bool = False, timeout_ms: int | None = None
    ) -> bool | int | list[bool]:
        """Is there a complete object? For one key a bool, for a sequence a list of bools in order;
        with `prefix` the count of leading keys that are present.

        The plain form never pins anything. With `prefix` it is the question before a read: the
        leading objects are leased (as by a get) and their placements remembered, so that reading
        them within the lease asks the master nothing."""
        names = key_names([keys] if isinstance(keys, str) else keys)
        if not names:
            return 0 if prefix else []
        with self._calls:
            deadline = self._deadline(timeout_ms)
            if prefix:
                return self._reader.leading(names, deadline)
            present = self._master.exists(self._tenant, names, timeout_ms=deadline.left_ms())
        return bool(present[0]) if isinstance(keys, str) else present.astype(bool).tolist()

    def remove(
        self,
        keys: str | Sequence[str],
        *,
        force: bool = False,
        timeout_ms: int | None = None,
    ) -> PutOutcome | list[PutOutcome]:
        """Remove objects; an absent key is a success. One outcome a key (one, or a list in order):
        None, or ObjectLeased when a reader or a pin holds it and `force` is not given. An
        acknowledged removal is durable, and no reader gets the object any more. PeerUnreachable: it
        is removed, but a node was not told in time; whoever has a lease reads it for a while."""
        texts, names = one_or_many(keys)
        if not names:
            return []
        with self._calls:
            left_ms = self._deadline(timeout_ms).left_ms()
            try:
                removed = self._master.remove(self._tenant, names, force=force, timeout_ms=left_ms)
            finally:
                self._reader.cache.forget(names)
        outcomes = plain_outcomes(removed.status.tolist(), REMOVE_CAUSES, texts)
        return outcomes[0] if isinstance(keys, str) else outcomes

    def pin(
        self,
        keys: str | Sequence[str],
        *,
        soft_pin_ms: int | None = None,
        hard_pin: bool = False,
        timeout_ms: int | None = None,
    ) -> PutOutcome | list[PutOutcome]:
        """Pin objects that are there, as `ReplicaPolicy` does at the put: softly from now on for
        so long, or hard. It replaces the pin before, so a soft one is renewed by another, and
        `soft_pin_ms=0` ends either kind. All of `keys` get the same deadline; a group's pin is of
        all its members.

        Outcomes as of `remove`: None once it is durable; ObjectNotFound; QuotaExceeded when the
        tenant, or all of them, pin too much already; OutOfSpace for a soft pin of what lies on a
        disk alone."""
        check_pin(soft_pin_ms, hard_pin)
        texts, names = one_or_many(keys)
        if not names:
            return []
        with self._calls:
            asked = (self._tenant, names, soft_pin_ms or 0, hard_pin)
            status = self._master.pin(*asked, timeout_ms=self._deadline(timeout_ms).left_ms())
        outcomes = plain_outcomes(status.tolist(), PIN_CAUSES, texts)
        return outcomes[0] if isinstance(keys, str) else outcomes

    def copy(
        self,
        keys: Sequence[str],
        to_node: str,
        *,
        from_node: str = "",
        timeout_ms: int | None = None,
    ) -> list[PutOutcome]:
        """Have objects copied to a node; with `from_node` they move, and have no replica there
        then. One outcome a key, at once: None when it is so, Backpressure while it is in the making
        (ask again), else what keeps it from being. Raises ObjectNotFound: there is no such node."""
        texts = key_list(keys)
        names = key_names(texts)
        if not names:
            return []
        with self._calls:
            wish = CopyObjects(self._tenant, names, to_node, from_node)
            left_ms = self._deadline(timeout_ms).left_ms()
            codes = self._master.copy(wish, timeout_ms=left_ms).tolist()
        return plain_outcomes(codes, COPY_CAUSE, texts)

    def list(self, prefix: str = "", *, timeout_ms: int | None = None) -> Iterator[ObjectInfo]:
        """Complete objects whose key begins with `prefix`, in key order, fetched page by page.
        Not a snapshot: what is put or removed meanwhile may or may not be seen."""
        return self._pages(text_bytes("prefix", prefix), timeout_ms)

    def _pages(self, prefix: bytes, timeout_ms: int | None) -> Iterator[ObjectInfo]:
        after = b""
        while True:
            with self._calls:
                left_ms = self._deadline(timeout_ms).left_ms()
                page = self._master.list(self._tenant, prefix, after=after, timeout_ms=left_ms)
            lengths, replicas = page.lengths.tolist(), page.replicas.tolist()
            for key, nbytes, count in zip(page.keys, lengths, replicas, strict=True):
                yield ObjectInfo(key.decode(), nbytes, count)
            if not page.more:
                return
            after = page.keys[-1]

    def close(self) -> None:
        """Refuse new calls, let running ones end, release everything. May be called twice."""
        if not self._calls.close(self._timeout_ms):
            return
        self._views.close()
        self._results.clear()
        self._nodes.shutdown(wait=True, cancel_futures=True)
        self._directory.close()
        self._master.close()
        self._engine.close()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _deadline(self, timeout_ms: int | None) -> Deadline:
        """When a call that is made now has to end. Raises UsageError."""
        chosen = self._timeout_ms if timeout_ms is None else timeout_ms
        check_timeout(chosen)
        return Deadline(chosen, self._clock)
