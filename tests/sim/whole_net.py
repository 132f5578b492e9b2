"""The network between the product's processes: the engine's and gRPC's faces, over `World`.

A message may be delayed, overtaken, lost, which is to say that it is sent again and comes later, or
come twice; a pair of hosts may be cut, which lasts until it is over. A host that is gone answers a
connection with a reset, as a kernel does. One-sided reads are served by the memory's
host without any of its Python, look at the header, the payload and, a little later, at the header
again; so what they see may be in the middle of anything.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from sim_world import World
from whole_threads import Fiber, Host, Scheduler

from mooncake_py._native.memory import crc32c
from mooncake_py.errors import AccessRefused, PeerUnreachable, TransferTimeout, error_of
from mooncake_py.transfer import FLAG_FENCE, EngineOptions
from mooncake_py.wire.lane import METHODS, Method

RESET = object()  # the answer of a host that is not there any more
MASTER = "master:1"
ETCD = "etcd:1"
_AGAIN_MS = 200  # what was lost is sent again then


@dataclass(frozen=True)
class Slices:
    """A one-sided read."""

    rows: np.ndarray


class Net:
    """Who is where, and what is on its way. `receive(sender, message, answer)` is in no fiber."""

    def __init__(self, world: World, scheduler: Scheduler) -> None:
        self.world = world
        self.scheduler = scheduler
        self.places: dict[str, tuple[Host, Callable[..., None]]] = {}  # by address
        self._open: dict[Host, dict[Callable[[object], None], Host]] = {}  # calls, by their server

    def listen(self, address: str, host: Host, receive: Callable[..., None]) -> None:
        self.places[address] = (host, receive)

    def gone(self, host: Host) -> None:
        """Its ports close, and whoever waits for an answer learns it, unless the network is cut."""
        for address in [each for each, (whose, _) in self.places.items() if whose is host]:
            del self.places[address]
        for back, asker in self._open.pop(host, {}).items():
            if not self.is_cut(asker.name, host.name):
                self.world.after(self._delay(), lambda back=back: back(RESET))  # type: ignore[misc]

    def call(
        self, address: str, message: object, timeout_ms: float | None, life: Host | None
    ) -> Any:
        """For a fiber: the answer, RESET, or None when none came. `life`: of the one who was
        connected with."""
        fiber = self.scheduler.me()
        ticket = fiber.ticket
        self.send(
            fiber.host, address, message, lambda reply: self._wake(fiber, ticket, reply), life
        )
        return self.scheduler.park(timeout_ms)

    def _wake(self, fiber: Fiber, ticket: int, reply: object) -> None:
        self.scheduler.wake(fiber, ticket, reply)

    def send(
        self,
        sender: Host,
        address: str,
        message: object,
        answer: Callable[[object], None],
        life: Host | None = None,
    ) -> None:
        world = self.world
        copies = 2 if address != ETCD and world.chance(world.weather.twice) else 1
        for _ in range(copies):
            world.after(
                self._delay(), lambda: self._deliver(sender, address, message, answer, life)
            )

    def _deliver(
        self,
        sender: Host,
        address: str,
        message: object,
        answer: Callable[[object], None],
        life: Host | None,
    ) -> None:
        world = self.world
        name = address.partition(":")[0]
        if not sender.alive:
            return
        if self.is_cut(sender.name, name):
            world.after(_AGAIN_MS, lambda: self._deliver(sender, address, message, answer, life))
            return
        pause = world.paused_until.get(name, 0)
        if pause > world.now_ms:
            wait_ms = pause - world.now_ms + 1
            world.after(wait_ms, lambda: self._deliver(sender, address, message, answer, life))
            return
        host, receive = self.places.get(address, (None, None))
        if host is None or receive is None or (life is not None and life is not host):
            world.after(self._delay(), lambda: answer(RESET))
            return
        calls = self._open.setdefault(host, {})
        calls[answer] = sender

        def back(reply: object) -> None:
            if calls.pop(answer, None) is None or not host.alive:
                return
            world.after(self._delay(), lambda: self._return(sender, name, reply, answer))

        receive(sender, message, back)

    def _return(
        self, sender: Host, name: str, reply: object, answer: Callable[[object], None]
    ) -> None:
        if self.is_cut(sender.name, name):
            self.world.after(_AGAIN_MS, lambda: self._return(sender, name, reply, answer))
        else:
            answer(reply)

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.world.cut

    def _delay(self) -> int:
        weather, random = self.world.weather, self.world.random
        if self.world.chance(weather.loss):
            return _AGAIN_MS + random.randrange(1 + weather.delay_ms)
        if self.world.chance(weather.slow):
            return random.randrange(1 + weather.slow_ms)
        return random.randrange(1 + weather.delay_ms)


# --- the engine's face ----------------------------------------------------------------------------


class Message:
    def __init__(
        self, peer_id: int, kind: int, payload: bytes, answer: Callable[..., None]
    ) -> None:
        self.peer_id, self.kind, self.payload = peer_id, kind, payload
        self.correlation = 1
        self._answer = answer

    def reply(self, payload: bytes) -> None:
        self._answer(bytes(payload))


class Region:
    def __init__(self, number: int, address: int, nbytes: int) -> None:
        self.id, self.address, self.nbytes = number, address, nbytes

    def close(self) -> None: ...


class Inbox:
    """Messages that nobody took yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._messages: deque[Message] = deque()
        self._waiting: deque[tuple[Fiber, int]] = deque()

    def put(self, message: Message) -> None:
        self._messages.append(message)
        while self._waiting:
            fiber, ticket = self._waiting.popleft()
            if fiber.ticket == ticket and not fiber.done:
                self._scheduler.wake(fiber, ticket)
                return

    def receive(self, timeout_ms: int) -> Message | None:
        if not self._messages:
            fiber = self._scheduler.me()
            self._waiting.append((fiber, fiber.ticket))
            self._scheduler.park(timeout_ms)
        return self._messages.popleft() if self._messages else None


class Engine:
    """Of the host whose fiber makes it."""

    native = None

    def __init__(self, net: Net, options: EngineOptions, port: int = 1) -> None:
        self.net = net
        self.options = options
        self.host = net.scheduler.me().host
        self.address = f"{self.host.name}:{port}"
        self.inbox = Inbox(net.scheduler)
        self._regions: dict[int, Region] = {}
        self._peers: dict[int, Host] = {}  # who has sent something
        net.listen(self.address, self.host, self._receive)

    def register(self, memory: Any, *, access: str = "read", fd: int = -1) -> Region:
        region = Region(len(self._regions) + 1, memory.base, memory.nbytes)
        self._regions[region.id] = region
        return region

    def open(self, address: str, *, timeout_ms: int) -> Peer:
        found = self.net.call(address, "hello", timeout_ms, None)
        if found is None:
            raise TransferTimeout("open: no answer", peer=address)
        if found is RESET:
            raise PeerUnreachable("open: connection refused", peer=address)
        return Peer(self, address, found)

    def peer(self, peer_id: int) -> Peer:
        return Peer(self, "", self._peers[peer_id])

    def submit(self, peer: Peer, slices: np.ndarray, *, timeout_ms: int) -> Batch:
        return Batch(self.net, peer, slices, timeout_ms)

    def read(self, peer: Peer, slices: np.ndarray, *, timeout_ms: int) -> None:
        self.submit(peer, slices, timeout_ms=timeout_ms).wait(timeout_ms + 1)

    def close(self) -> None: ...

    # --- what others ask, in no fiber ---

    def _receive(self, sender: Host, message: object, answer: Callable[[object], None]) -> None:
        if message == "hello":
            answer(self.host)
        elif isinstance(message, Slices):
            self._serve_slices(message.rows, answer)
        else:
            assert isinstance(message, tuple)
            kind, payload = message
            self._peers[id(sender)] = sender
            self.inbox.put(Message(id(sender), kind, payload, answer))

    def _serve_slices(self, rows: np.ndarray, answer: Callable[[object], None]) -> None:
        """Up to the fence now, the rest a moment later."""
        fences = np.flatnonzero(rows["flags"] & FLAG_FENCE).tolist() or [len(rows)]
        first = self._look(rows[: fences[0]])

        def second() -> None:
            if self.host.alive:
                answer(first + self._look(rows[fences[0] :]))

        self.net.world.after(self.net.world.random.choice([0, 0, 1, 30]), second)

    def _look(self, rows: np.ndarray) -> list[bytes | None]:
        found: list[bytes | None] = []
        for row in rows:
            region = self._regions.get(int(row["region"]))
            offset, length = int(row["remote_offset"]), int(row["length"])
            inside = region is not None and offset + length <= region.nbytes
            found.append(ctypes.string_at(region.address + offset, length) if inside else None)  # type: ignore[union-attr]
        return found


class Peer:
    def __init__(self, engine: Engine, address: str, life: Host) -> None:
        self._engine = engine
        self.address = address
        self.life = life
        self.id = id(life)

    @property
    def transport(self) -> str:
        if not self.life.alive:
            raise PeerUnreachable("the connection has ended", peer=self.address)
        return "tcp"

    def request(self, kind: int, payload: bytes, *, timeout_ms: int) -> bytes:
        message = (kind, bytes(payload))
        found = self._engine.net.call(self.address, message, timeout_ms, self.life)
        if found is None:
            raise TransferTimeout("request: no answer", peer=self.address)
        if found is RESET:
            raise PeerUnreachable("request: connection reset", peer=self.address)
        assert isinstance(found, bytes)
        return found

    def close(self) -> None: ...


class Batch:
    """Slices on their way; results are in them once it is done."""

    def __init__(self, net: Net, peer: Peer, slices: np.ndarray, timeout_ms: int) -> None:
        self._net = net
        self._slices = slices
        self._over = False
        self._waiting: tuple[Fiber, int] | None = None
        sender = net.scheduler.me().host
        self._sender = sender
        net.send(sender, peer.address, Slices(slices.copy()), self._arrived, peer.life)
        net.world.after(timeout_ms, lambda: self._end(TransferTimeout.code))

    def _arrived(self, found: object) -> None:
        if self._over or not self._sender.alive:
            return
        if found is RESET:
            self._end(PeerUnreachable.code)
            return
        assert isinstance(found, list)
        for row, data in zip(self._slices, found, strict=True):
            if data is None:
                row["status"] = -AccessRefused.code
                continue
            ctypes.memmove(int(row["local"]), data, len(data))
            row["crc"], row["status"] = crc32c(data), 0
        self._finish()

    def _end(self, code: int) -> None:
        if not self._over:
            self._slices["status"] = -code
            self._finish()

    def _finish(self) -> None:
        self._over = True
        if self._waiting is not None:
            self._net.scheduler.wake(*self._waiting)

    def wait(self, timeout_ms: int) -> None:
        if not self._over:
            fiber = self._net.scheduler.me()
            self._waiting = (fiber, fiber.ticket)
            self._net.scheduler.park(timeout_ms)
        failed = [int(each) for each in self._slices["status"] if each]
        if failed or not self._over:
            code = -failed[0] if failed else TransferTimeout.code
            raise error_of(code, "batch")

    def cancel(self) -> None:
        self._over = True

    close = cancel


# --- gRPC's face ----------------------------------------------------------------------------------


class RpcError(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, words: str) -> None:
        self._code, self._words = code, words

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._words


class Stop:
    """Stands in for `route.Stop`: one master on the route."""

    _AGAIN_MS = 50

    def __init__(self, net: Net, address: str) -> None:
        self._net = net
        self.address = address
        self.host = address.partition(":")[0]
        self.channel = self
        self.unary = {method.number: self._unary(method) for method in METHODS}

    def _unary(self, method: Method) -> Callable[..., bytes]:
        def call(payload: bytes, timeout: float, wait_for_ready: bool = False) -> bytes:
            world = self._net.world
            end_ms = world.now_ms + timeout * 1000
            while True:
                left_ms = end_ms - world.now_ms
                there = self.address in self._net.places
                message = (method, payload, left_ms)
                found = self._net.call(self.address, message, left_ms, None)
                if found is None:
                    raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded")
                if found is not RESET:
                    assert isinstance(found, bytes)
                    return found
                if not wait_for_ready or there:
                    words = "connection reset" if there else "failed to connect to all addresses"
                    raise RpcError(grpc.StatusCode.UNAVAILABLE, words)
                self._net.scheduler.park(min(self._AGAIN_MS, max(0, end_ms - world.now_ms)))

        return call

    def close(self) -> None: ...
