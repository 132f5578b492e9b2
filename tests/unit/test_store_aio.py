"""The asyncio facade by itself: what its calls wait for, over a client that moves no byte."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from mooncake_py import StoreClient
from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.errors import TransferTimeout
from mooncake_py.store import aio

PATIENCE_S = 30.0
LONG_MS = 60_000


class Stuck(StoreClient):
    """Reads wait until they are let go; what each was given as its time is noted."""

    def __init__(self) -> None:  # connects with nobody
        self.go_on = threading.Event()
        self.times: list[int] = []

    def _deadline(self, timeout_ms: int | None = None) -> Deadline:
        return Deadline(LONG_MS if timeout_ms is None else timeout_ms, SystemClock())

    def get_batch(self, keys: Sequence[str], *_: Any, timeout_ms: int = 0, **__: Any) -> list[Any]:
        self.times.append(timeout_ms)
        assert self.go_on.wait(PATIENCE_S)
        return [key.encode() for key in keys]

    def exists(self, keys: Any, *, prefix: bool = False, timeout_ms: int | None = None) -> Any:
        return [True] * len(keys)

    def close(self) -> None:
        pass


async def busy(client: aio.AsyncStoreClient, stuck: Stuck) -> list[asyncio.Future[Any]]:
    """Every worker has a call that does not end."""
    calls = []
    for number in range(aio.WORKERS):
        calls.append(asyncio.ensure_future(client.get_batch([f"k{number}"])))
        while len(stuck.times) <= number:
            await asyncio.sleep(0)
    return calls


def test_f28_f52_what_waits_for_a_worker_ends_at_its_deadline_and_the_client_goes_on() -> None:
    async def work() -> None:
        stuck = Stuck()
        client = aio.AsyncStoreClient(stuck)
        calls = await busy(client, stuck)
        for call in (
            client.get("k", timeout_ms=30),
            client.exists("k", timeout_ms=30),
            client.get_batch(["k"], timeout_ms=30),
        ):
            with pytest.raises(TransferTimeout, match=r"none .* workers was free") as caught:
                await asyncio.wait_for(call, PATIENCE_S)
            assert caught.value.retryable
        assert len(stuck.times) == aio.WORKERS, "one was begun that nobody waited for"
        stuck.go_on.set()
        assert await asyncio.gather(*calls) == [[f"k{n}".encode()] for n in range(aio.WORKERS)]
        assert await client.exists("k", timeout_ms=LONG_MS)
        await client.close()

    asyncio.run(work())


def test_f28_f52_the_time_that_a_call_waited_for_a_worker_is_its_own() -> None:
    async def work() -> None:
        stuck = Stuck()
        client = aio.AsyncStoreClient(stuck)
        calls = await busy(client, stuck)
        begun = SystemClock().now_ms()
        late = asyncio.ensure_future(client.get("late", timeout_ms=LONG_MS))
        while SystemClock().now_ms() < begun + 20:
            await asyncio.sleep(0)
        stuck.go_on.set()
        assert await late == b"late"
        assert stuck.times[-1] <= LONG_MS - 15
        await asyncio.gather(*calls)
        await client.close()

    asyncio.run(work())


def test_f52_what_fails_after_its_caller_was_cancelled_says_nothing() -> None:
    said: list[object] = []

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        stuck = Stuck()
        client = aio.AsyncStoreClient(stuck)
        calls = await busy(client, stuck)
        late = asyncio.ensure_future(client.get_batch(["k"], timeout_ms=30))
        await asyncio.sleep(0)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        while len(client._batches) > aio.WORKERS:  # until its time is over
            await asyncio.sleep(0)
        stuck.go_on.set()
        await asyncio.gather(*calls)
        await client.close()

    asyncio.run(work())
    gc.collect()
    assert said == []
