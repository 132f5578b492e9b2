"""The two ways into the master: gRPC, the complete public API, and the hot lane.

Both hand the same request bytes to the owner thread and send back the same reply bytes; neither
looks into them. The gRPC server runs asynchronously on one thread of its own, so that calls which
wait occupy no thread each; a reply is handed to that thread's loop. The lane has no thread: the
owner itself waits at the engine, and replies are sent by whoever made them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from mooncake_py.clock import Clock
from mooncake_py.errors import MasterUnavailable, MooncakeError
from mooncake_py.master.inbox import GRPC, LANE, Call
from mooncake_py.master.quick import QuickAnswers
from mooncake_py.metrics import Metrics
from mooncake_py.transfer import Message, TransferEngine
from mooncake_py.wire.lane import BY_NUMBER, METHODS, SERVICE, Method

log = logging.getLogger(__name__)

HEALTH_SECONDS = 0.25  # between two looks at whether the process can still serve
START_SECONDS = 10.0


class Traffic:
    """Payload bytes through one door, both ways. They exist also for a door that is closed, so that
    whoever adds them up needs to know nothing of doors."""

    def __init__(self, door: str, metrics: Metrics) -> None:
        self.received = metrics.counter(f"{door}_received_bytes", f"Request bytes, {door}")
        self.sent = metrics.counter(f"{door}_sent_bytes", f"Reply bytes, {door}")


class GrpcDoor:
    """A gRPC server at `address` (literal host and port) that submits calls.

    `healthy` is asked four times a second and answered by the standard health service, from the
    moment of `serve`. Construction listens; MasterUnavailable: that is not possible.
    """

    def __init__(
        self,
        address: str,
        submit: Callable[[Call], None],
        limits: tuple[int, int],  # message_bytes_max, call_ms_max
        clock: Clock,
        traffic: Traffic,
    ) -> None:
        self._submit = submit
        self._message_bytes_max, self._call_ms_max = limits
        self._clock = clock
        self._traffic = traffic
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="mooncake-grpc", daemon=True
        )
        self._thread.start()
        try:
            self.port: int = self._run(self._listen(address)).result(START_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            self._end_loop()
            raise MasterUnavailable(
                f"gRPC cannot listen on {address}: {error}",
                remedy="choose another --listen, or stop the process that has it",
            ) from None

    def serve(self, healthy: Callable[[], bool]) -> None:
        """Accept calls. Health turns SERVING before this returns."""
        self._run(self._start(healthy)).result(START_SECONDS)

    def stop(self, grace_ms: int) -> None:
        """Turn health off, accept nothing new, let running calls end within the grace. Harmless
        twice."""
        if self._loop.is_closed():
            return
        with suppress(TimeoutError):
            self._run(self._stop(grace_ms / 1000)).result(grace_ms / 1000 + 1)
        self._end_loop()

    def _run(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1)
        if not self._thread.is_alive():
            self._loop.close()

    # --- on the loop's thread -------------------------------------------------------------------

    async def _listen(self, address: str) -> int:
        options = [
            ("grpc.so_reuseport", 0),  # else a second master would share the port unnoticed
            ("grpc.max_receive_message_length", self._message_bytes_max),
            ("grpc.max_send_message_length", -1),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ]
        self._server = aio.server(options=options)
        handlers = {
            method.name: grpc.unary_unary_rpc_method_handler(self._behaviour(method))
            for method in METHODS
        }
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # it is there
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        port: int = self._server.add_insecure_port(address)
        if port == 0:
            raise RuntimeError("the address is not available")
        return port

    async def _start(self, healthy: Callable[[], bool]) -> None:
        await self._server.start()
        await self._tell_health(True)
        self._watch = asyncio.get_running_loop().create_task(self._watch_health(healthy))

    async def _watch_health(self, healthy: Callable[[], bool]) -> None:
        told = True
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            good = healthy()
            if good != told:
                await self._tell_health(good)
                told = good

    async def _tell_health(self, good: bool) -> None:
        kind = health_pb2.HealthCheckResponse
        for service in ("", SERVICE):
            await self._health.set(service, kind.SERVING if good else kind.NOT_SERVING)

    async def _stop(self, grace_seconds: float) -> None:
        if hasattr(self, "_watch"):
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)

    def _behaviour(self, method: Method) -> Callable[[bytes, Any], Awaitable[bytes]]:
        loop = self._loop

        async def behaviour(request: bytes, context: Any) -> bytes:
            answered = loop.create_future()

            def reply(payload: bytes) -> None:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(_settle, answered, payload)

            left = context.time_remaining()
            left_ms = self._call_ms_max if left is None else int(left * 1000)
            self._traffic.received.value += len(request)
            self._submit(Call(method, request, reply, self._clock.now_ms() + left_ms, GRPC))
            if left is None:
                payload: bytes = await asyncio.wait_for(answered, left_ms / 1000)
            else:
                payload = await answered  # gRPC cancels this at the caller's deadline
            self._traffic.sent.value += len(payload)
            return payload

        return behaviour


def _settle(answered: asyncio.Future[bytes], payload: bytes) -> None:
    if not answered.done():
        answered.set_result(payload)


class LaneDoor:
    """A `Source` of calls: the owner waits here for messages of the transfer engine.

    `receive` is for the owner thread; `wake` and the replies for any.
    """

    def __init__(
        self, engine: TransferEngine, call_ms_max: int, clock: Clock, traffic: Traffic
    ) -> None:
        self.engine = engine
        self._inbox = engine.inbox
        self._call_ms_max = call_ms_max
        self._clock = clock
        self._traffic = traffic
        self._quick: QuickAnswers | None = None
        self._count: Callable[[int, int], None] | None = None

    def answer_quickly(self, quick: QuickAnswers, count: Callable[[int, int], None]) -> None:
        """Answer from the mirror what can be. Before the first `receive`. `count` is told of Exists
        calls and commits."""
        self._quick, self._count = quick, count

    def receive(self, timeout_ms: int) -> Call | None:
        message = self._receive(timeout_ms)
        if message is None:
            return None
        method = BY_NUMBER.get(message.kind)
        if method is None or not message.correlation:
            log.debug("a message of kind %d is no call", message.kind)
            return None
        self._traffic.received.value += len(message.payload)
        expires_ms = self._clock.now_ms() + self._call_ms_max
        return Call(method, message.payload, partial(self._reply, message), expires_ms, LANE)

    def _receive(self, timeout_ms: int) -> Message | None:
        """What was promised meanwhile is kept before anything else is done."""
        if self._quick is None or self._count is None:
            return self._inbox.receive(timeout_ms)
        try:
            return self._inbox.receive(timeout_ms, through=self._quick.serve)
        finally:
            exists, commits, received, sent = self._quick.settle()
            if received:
                self._traffic.received.value += received
                self._traffic.sent.value += sent
                self._count(exists, commits)

    def wake(self) -> None:
        self._inbox.wake()

    def _reply(self, message: Message, payload: bytes) -> None:
        try:
            message.reply(payload)
            self._traffic.sent.value += len(payload)
        except MooncakeError as error:
            log.debug("an answer found no taker: %s", error)
