"""`AsyncStoreClient`: the same client for asyncio, and cheaper when many small calls run at once.

Calls that are made in one turn of the event loop become one batch: a thousand concurrent gets cost
a few batch gets, not a thousand threads. A few worker threads run the batches; the event loop never
waits. A call that is cancelled stops waiting at once; its batch ends in the background and holds
the call's buffers until then, because bytes may still be on their way into them: `drained()` waits
for that. One loop uses one AsyncStoreClient.

A call's time runs from when it is made. What no worker was free for until then has not begun, and
ends as TransferTimeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from mooncake_py.clock import Deadline
from mooncake_py.errors import TransferTimeout, UsageError
from mooncake_py.model import DEFAULT_POLICY, Group, ReplicaPolicy
from mooncake_py.store.arguments import check_policy
from mooncake_py.store.client import DEFAULT_TIMEOUT_MS, DEFAULT_TRANSPORTS, StoreClient
from mooncake_py.store.outcomes import GetOutcome, PutOutcomes
from mooncake_py.store.targets import Range
from mooncake_py.store.views import ObjectView

WORKERS = 4
BATCH_MAX_CALLS = 512

_T = TypeVar("_T")
_Call = tuple[str, Any, "asyncio.Future[Any]"]
_Runner = Callable[[list[str], list[Any], int], Sequence[Any]]  # keys, what else they have, ms left


@dataclass(slots=True)
class _Turn:
    """Calls of one kind that are made in one turn of the loop."""

    runner: _Runner
    deadline: Deadline
    calls: list[_Call] = field(default_factory=list)


class AsyncStoreClient:
    """A StoreClient for one event loop. Opening connects, so it is done in `open`:

    async with await AsyncStoreClient.open("127.0.0.1:50051") as store: ...

    `get`, `put`, `exists` and `remove` take one key; calls of one turn of the loop are joined.
    `get_batch` and `put_batch` take lists. What a call raises is what that of StoreClient raises.
    """

    def __init__(self, store: StoreClient) -> None:
        """store: an open client, which this one closes. From an address: `open`."""
        if not isinstance(store, StoreClient):
            raise UsageError(
                f"an AsyncStoreClient is made of a StoreClient, not of a {type(store).__name__}",
                remedy="connect with: await AsyncStoreClient.open(master)",
            )
        self._store = store
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="mooncake-async")
        self._waiting: dict[object, _Turn] = {}
        self._batches: set[asyncio.Future[Any]] = set()
        self._closed = False

    @classmethod
    async def open(
        cls,
        master: str,
        *,
        tenant: str = "default",
        transports: Sequence[str] = DEFAULT_TRANSPORTS,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        hedge_ms: int = 0,
    ) -> AsyncStoreClient:
        """Connect to "host:port" of mooncake-master; the arguments are those of StoreClient.

        Raises MasterUnavailable when none answers within timeout_ms, VersionMismatch, UsageError.
        """
        connect = partial(
            StoreClient,
            master,
            tenant=tenant,
            transports=transports,
            timeout_ms=timeout_ms,
            hedge_ms=hedge_ms,
        )
        return cls(await asyncio.get_running_loop().run_in_executor(None, connect))

    async def get(
        self, key: str, into: Any | None = None, *, timeout_ms: int | None = None
    ) -> bytes | int:
        """The object's bytes, or with `into`, a writable buffer, the count of bytes written to it.

        Raises ObjectNotFound (a miss), UsageError when `into` is too small, ChecksumMismatch,
        TransferTimeout, MasterUnavailable. After a cancelled call `into` may still be written to
        until `drained` returns.
        """
        store = self._store
        if into is None:
            runner: _Runner = lambda keys, _, left_ms: store.get_batch(keys, timeout_ms=left_ms)  # noqa: E731
        else:
            runner = lambda keys, into, left_ms: store.get_batch(keys, into, timeout_ms=left_ms)  # noqa: E731
        kind = ("get", into is None, timeout_ms)
        found: bytes | int = await self._join(kind, timeout_ms, runner, key, into)
        return found

    async def put(
        self,
        key: str,
        value: Any,
        *,
        policy: ReplicaPolicy = DEFAULT_POLICY,
        upsert: bool = False,
        timeout_ms: int | None = None,
    ) -> int:
        """Store `value` (a buffer, a CPU tensor, or a list of them) under `key`; it is visible to
        every client on return, which says on how many nodes it is. upsert: replace what the key
        holds.

        Raises ObjectExists, OutOfSpace, QuotaExceeded, UsageError, MasterUnavailable, TransferError
        kinds. After a cancelled call `value` may still be read until `drained` returns.
        """
        check_policy(policy)

        def runner(keys: list[str], values: list[Any], left_ms: int) -> Sequence[Any]:
            done = self._store.put_batch(
                keys, values, policy=policy, upsert=upsert, timeout_ms=left_ms
            )
            return [
                count if outcome is None else outcome
                for outcome, count in zip(done, done.replicas, strict=True)
            ]

        kind = ("put", policy, upsert, timeout_ms)
        count: int = await self._join(kind, timeout_ms, runner, key, value)
        return count

    async def exists(self, key: str, *, timeout_ms: int | None = None) -> bool:
        """Is there a complete object under this one key? Pins nothing. Many keys: one call each,
        with `asyncio.gather`. Raises UsageError, MasterUnavailable."""

        def runner(keys: list[str], _: list[Any], left_ms: int) -> Sequence[Any]:
            found = self._store.exists(keys, timeout_ms=left_ms)
            return found if isinstance(found, list) else [found]

        found: bool = await self._join(("exists", timeout_ms), timeout_ms, runner, key, None)
        return found

    async def remove(self, key: str, *, force: bool = False, timeout_ms: int | None = None) -> None:
        """Remove the object of this one key; an absent one is a success, and a removal is durable.

        Raises ObjectLeased when a reader or a pin holds it and `force` is not given, UsageError,
        MasterUnavailable."""

        def runner(keys: list[str], _: list[Any], left_ms: int) -> Sequence[Any]:
            found = self._store.remove(keys, force=force, timeout_ms=left_ms)
            return found if isinstance(found, list) else [found]

        await self._join(("remove", force, timeout_ms), timeout_ms, runner, key, None)

    async def get_batch(
        self,
        keys: Sequence[str],
        into: Sequence[Any] | None = None,
        *,
        ranges: Sequence[Range] | None = None,
        timeout_ms: int | None = None,
    ) -> list[GetOutcome]:
        """Read the objects of a list of keys, or a range (offset, nbytes or None) of each. One
        outcome a key, in order: bytes (or with `into`, one target a key, the count written), or
        the error that `get` would raise, not raised. Raises UsageError, MasterUnavailable."""
        read = partial(self._store.get_batch, keys, into, ranges=ranges)
        return await self._run(lambda left_ms: read(timeout_ms=left_ms), timeout_ms)

    async def put_batch(
        self,
        keys: Sequence[str],
        values: Sequence[Any],
        *,
        policy: ReplicaPolicy = DEFAULT_POLICY,
        groups: Sequence[int | Group] = (),
        upsert: bool = False,
        timeout_ms: int | None = None,
    ) -> PutOutcomes:
        """Store a list of values under a list of keys. One outcome a key, in order: None, or the
        error that `put` would raise, not raised. groups: a number a key; keys with the same one
        above 0 become visible together. Raises UsageError, MasterUnavailable."""
        write = partial(
            self._store.put_batch,
            keys,
            values,
            policy=policy,
            groups=groups,
            upsert=upsert,
        )
        return await self._run(lambda left_ms: write(timeout_ms=left_ms), timeout_ms)

    async def get_view(self, key: str, *, timeout_ms: int | None = None) -> ObjectView:
        """The object's bytes where they lie, in `.memory` of the view, until it is released. The
        view is an ordinary one: use it in a `with`. Raises what `get` raises, and Backpressure."""
        view = partial(self._store.get_view, key)
        return await self._run(lambda left_ms: view(timeout_ms=left_ms), timeout_ms)

    async def drained(self) -> None:
        """Every batch that was begun has ended: no byte moves into or out of callers' buffers."""
        self._flush_all()
        while self._batches:
            await asyncio.wait(list(self._batches))

    async def close(self) -> None:
        """Refuse new calls, wait for the batches that were begun, then close the client."""
        self._closed = True
        await self.drained()
        await asyncio.get_running_loop().run_in_executor(None, self._store.close)
        self._workers.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # --- batches ---

    async def _run(self, call: Callable[[int], _T], timeout_ms: int | None) -> _T:
        """One call of its own, in a worker; cancelling the caller does not interrupt it."""
        self._check_open()
        deadline = self._store._deadline(timeout_ms)
        work = asyncio.ensure_future(self._work(call, deadline))
        self._remember(work)
        return await asyncio.shield(work)

    async def _work(self, call: Callable[[int], _T], deadline: Deadline) -> _T:
        """In a worker, with the time that is left; TransferTimeout when there is none before one
        is free."""
        work = self._workers.submit(lambda: call(_left_ms(deadline)))
        late = False

        def give_up() -> None:
            nonlocal late
            late = work.cancel()  # False: it has begun, and ends by its own deadline

        loop = asyncio.get_running_loop()
        timer = loop.call_later(deadline.left_ms() / 1000, give_up)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            if late:
                raise _no_worker() from None
            raise
        finally:
            timer.cancel()

    async def _join(
        self, kind: object, timeout_ms: int | None, runner: _Runner, key: str, extra: Any
    ) -> Any:
        """Wait for this key's outcome in the next batch of its kind."""
        self._check_open()
        if not isinstance(key, str):  # here, so that it cannot fail the calls of others
            raise UsageError(f"a key is a str, not {type(key).__name__}", key=key)
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()
        if kind not in self._waiting:
            self._waiting[kind] = _Turn(runner, self._store._deadline(timeout_ms))
            loop.call_soon(self._flush, kind)
        calls = self._waiting[kind].calls
        calls.append((key, extra, outcome))
        if len(calls) >= BATCH_MAX_CALLS:
            self._flush(kind)
        return await outcome

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the client is closed", remedy="open a new AsyncStoreClient")

    def _flush_all(self) -> None:
        for kind in list(self._waiting):
            self._flush(kind)

    def _flush(self, kind: object) -> None:
        if kind not in self._waiting:
            return
        turn = self._waiting.pop(kind)
        turn.calls = [call for call in turn.calls if not call[2].done()]  # some were cancelled
        if turn.calls:
            self._remember(asyncio.ensure_future(self._batch(turn)))

    def _remember(self, work: asyncio.Future[Any]) -> None:
        self._batches.add(work)
        work.add_done_callback(self._over)

    def _over(self, work: asyncio.Future[Any]) -> None:
        self._batches.discard(work)
        if not work.cancelled():
            work.exception()  # seen: whoever was cancelled wants no words about it in the log

    async def _batch(self, turn: _Turn) -> None:
        runner, calls = turn.runner, turn.calls
        keys, extras = [call[0] for call in calls], [call[1] for call in calls]
        try:
            outcomes = await self._work(partial(runner, keys, extras), turn.deadline)
        except UsageError as error:
            if len(calls) == 1:
                _settle(calls[0], error)
                return
            for call in calls:  # one of them is wrong; each is tried alone, so it alone fails
                await self._batch(_Turn(runner, turn.deadline, [call]))
            return
        except Exception as error:
            outcomes = [error] * len(calls)
        for call, outcome in zip(calls, outcomes, strict=True):
            _settle(call, outcome)


def _left_ms(deadline: Deadline) -> int:
    if deadline.passed():
        raise _no_worker()
    return max(1, deadline.left_ms())


def _no_worker() -> TransferTimeout:
    return TransferTimeout(
        f"none of this client's {WORKERS} workers was free before the deadline: nothing was done",
        remedy="give more time, or let fewer large calls run at once",
    )


def _settle(call: _Call, outcome: Any) -> None:
    waiting = call[2]
    if waiting.done():  # cancelled meanwhile
        return
    if isinstance(outcome, Exception):
        waiting.set_exception(outcome)
    else:
        waiting.set_result(outcome)
