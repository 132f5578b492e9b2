"""One side of one engine under test, in whichever interpreter has that engine.

    engine_worker.py KIND serve            prints {"address", "base", ...}; ends with its input
    engine_worker.py KIND call PEER_JSON   then a JSON case a line: {"op", "nbytes", "count",
                                           "threads", "seconds"}; answers {"p50_us", "bytes_per_s",
                                           "moved"}, or {"failed"}

KIND is shm, tcp (ours), memcpy, socket (the limits), upstream, or nixl. Only ours needs
`mooncake_py`; the file imports nothing else of this tree, so that any interpreter runs it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

THREADS_MAX = 4
PLACE_BYTES = 64 << 20  # of each thread, on both sides
BUFFER_BYTES = THREADS_MAX * PLACE_BYTES
HOST = "127.0.0.1"
CALL_MS = 60_000
VIEWS_MAX = 1024  # of one call, Linux
Call = Callable[[], object]


def ranges(nbytes: int, count: int, thread: int) -> list[int]:
    """Offsets of a batch: spread over the thread's place, so that neither side is cached. A batch
    that is larger than the place goes over it again."""
    start = thread * PLACE_BYTES
    step = max(nbytes, PLACE_BYTES // count)
    return [start + i * step % PLACE_BYTES for i in range(count)]


class Buffer:
    def __init__(self) -> None:
        self.map = mmap.mmap(-1, BUFFER_BYTES)
        self.map.write(b"\x5a" * BUFFER_BYTES)  # every page is there
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.move = ctypes.memmove


class Ours:
    def __init__(self, transport: str) -> None:
        from mooncake_py.transfer import EngineOptions, Memory, TransferEngine  # noqa: PLC0415

        self.options = EngineOptions(listen=f"{HOST}:0", transports=(transport,))
        self.engine = TransferEngine(self.options)
        self.memory = Memory(BUFFER_BYTES, "bench")
        self.peer: Any = None
        self.region = 0

    def serve(self) -> dict[str, Any]:
        region = self.engine.register(self.memory, access="read_write")
        return {"address": self.engine.address, "region": region.id}

    def connect(self, peer: dict[str, Any]) -> None:
        self.peer = self.engine.open(peer["address"], timeout_ms=CALL_MS)
        self.region = peer["region"]

    def call(self, op: str, nbytes: int, count: int, thread: int) -> Call:
        from mooncake_py.transfer import make_slices  # noqa: PLC0415

        slices = make_slices(count)
        slices["region"], slices["length"] = self.region, nbytes
        offsets = ranges(nbytes, count, thread)
        slices["remote_offset"] = offsets
        slices["local"] = [self.memory.base + offset for offset in offsets]
        act = self.engine.read if op == "read" else self.engine.write
        return lambda: act(self.peer, slices, timeout_ms=CALL_MS)


class Memcpy:
    """Copies between a mapped memory and a second one: what nobody on one host can beat."""

    def __init__(self) -> None:
        self.here, self.there = Buffer(), Buffer()

    def serve(self) -> dict[str, Any]:
        return {}

    def connect(self, peer: dict[str, Any]) -> None:
        pass

    def call(self, op: str, nbytes: int, count: int, thread: int) -> Call:
        move, offsets = self.here.move, ranges(nbytes, count, thread)
        source, target = self.here.base, self.there.base

        def copy() -> None:
            for offset in offsets:
                move(target + offset, source + offset, nbytes)

        return copy


class Socket:
    """A plain stream: ask with 16 bytes, take as many as asked for (read), or the other way. A
    batch has the same places as everybody's, all of them in one call where the system allows."""

    ASK = struct.Struct("<QIHH")  # of each slice, how many, thread, reading

    def __init__(self) -> None:
        self.buffer = Buffer()
        self.address: tuple[str, int] = ("", 0)

    def serve(self) -> dict[str, Any]:
        listener = socket.create_server((HOST, 0))
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return {"address": listener.getsockname()}

    def _accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            tune(sock)
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _views(self, nbytes: int, count: int, thread: int) -> list[memoryview]:
        view = memoryview(self.buffer.map)
        return [view[offset : offset + nbytes] for offset in ranges(nbytes, count, thread)]

    def _answer(self, sock: socket.socket) -> None:
        head = bytearray(self.ASK.size)
        asked, views = b"", list[memoryview]()
        while take(sock, [memoryview(head)]):
            if head != asked:
                asked = bytes(head)
                nbytes, count, thread, reading = self.ASK.unpack(asked)
                views = self._views(nbytes, count, thread)
            if reading:
                give(sock, views)
            else:
                take(sock, views)
                sock.sendall(b"done")

    def connect(self, peer: dict[str, Any]) -> None:
        self.address = tuple(peer["address"])

    def call(self, op: str, nbytes: int, count: int, thread: int) -> Call:
        sock = socket.create_connection(self.address)
        tune(sock)
        reading = op == "read"
        views = self._views(nbytes, count, thread)
        head = self.ASK.pack(nbytes, count, thread, reading)
        word = [memoryview(bytearray(4))]

        def move() -> None:
            sock.sendall(head)
            if reading:
                take(sock, views)
            else:
                give(sock, views)
                take(sock, word)

        return move


def tune(sock: socket.socket) -> None:
    """As good as one host can have it: nothing waits to be sent, nothing is paced."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def give(sock: socket.socket, views: list[memoryview]) -> None:
    rest = views
    while rest:
        rest = behind(rest, sock.sendmsg(rest[:VIEWS_MAX]))


def take(sock: socket.socket, views: list[memoryview]) -> bool:
    rest = views
    while rest:
        got = sock.recvmsg_into(rest[:VIEWS_MAX])[0]
        if not got:
            return False
        rest = behind(rest, got)
    return True


def behind(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of them behind so many bytes."""
    done = 0
    while done < len(views) and nbytes >= len(views[done]):
        nbytes -= len(views[done])
        done += 1
    return [views[done][nbytes:], *views[done + 1 :]] if nbytes else views[done:]


class Upstream:
    def __init__(self) -> None:
        from mooncake.engine import TransferEngine  # noqa: PLC0415

        self.buffer = Buffer()
        self.engine = TransferEngine()
        with socket.create_server((HOST, 0)) as free:
            name = f"{HOST}:{free.getsockname()[1]}"
        assert self.engine.initialize(name, "P2PHANDSHAKE", "tcp", "") == 0
        assert self.engine.register_memory(self.buffer.base, BUFFER_BYTES) == 0
        self.peer: dict[str, Any] = {}

    def serve(self) -> dict[str, Any]:
        return {"address": f"{HOST}:{self.engine.get_rpc_port()}", "base": self.buffer.base}

    def connect(self, peer: dict[str, Any]) -> None:
        self.peer = peer

    def call(self, op: str, nbytes: int, count: int, thread: int) -> Call:
        act = getattr(self.engine, f"batch_transfer_sync_{op}")
        offsets = ranges(nbytes, count, thread)
        here = [self.buffer.base + offset for offset in offsets]
        there = [self.peer["base"] + offset for offset in offsets]
        lengths, address = [nbytes] * count, self.peer["address"]

        def move() -> None:
            assert act(address, here, there, lengths) == 0

        return move


class Nixl:
    """Over UCX, as it chooses by itself. Metadata travel as hexadecimal text."""

    def __init__(self) -> None:
        for name in ("nixl_cu13._api", "nixl_cu12._api", "nixl._api"):  # without CUDA too
            try:
                api = importlib.import_module(name)
                break
            except ImportError:
                continue
        self.buffer = Buffer()
        config = api.nixl_agent_config(backends=["UCX"])
        self.agent = api.nixl_agent(f"bench-{time.monotonic_ns()}", config)
        self.agent.register_memory([(self.buffer.base, BUFFER_BYTES, 0, "")], "DRAM")
        self.peer: dict[str, Any] = {}

    def serve(self) -> dict[str, Any]:
        return {"meta": self.agent.get_agent_metadata().hex(), "base": self.buffer.base}

    def connect(self, peer: dict[str, Any]) -> None:
        name = self.agent.add_remote_agent(bytes.fromhex(peer["meta"]))
        self.peer = {**peer, "name": name.decode() if isinstance(name, bytes) else name}

    def call(self, op: str, nbytes: int, count: int, thread: int) -> Call:
        offsets = ranges(nbytes, count, thread)
        lists = [
            self.agent.get_xfer_descs([(base + offset, nbytes, 0) for offset in offsets], "DRAM")
            for base in (self.buffer.base, self.peer["base"])
        ]
        handle = self.agent.initialize_xfer(op.upper(), lists[0], lists[1], self.peer["name"])

        def move() -> None:
            state = self.agent.transfer(handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
            assert state == "DONE"

        return move


KINDS: dict[str, Callable[[], Any]] = {
    "shm": lambda: Ours("shm"),
    "tcp": lambda: Ours("tcp"),
    "memcpy": Memcpy,
    "socket": Socket,
    "upstream": Upstream,
    "nixl": Nixl,
}


def measure(engine: Any, case: dict[str, Any]) -> dict[str, float]:
    """Each thread calls until the time is over; medians over all calls, the first ones left out."""
    times: list[list[int]] = [[] for _ in range(case["threads"])]
    begin = threading.Barrier(case["threads"])
    failures: list[BaseException] = []
    is_large = case["nbytes"] * case["count"] > PLACE_BYTES  # seconds each, on slow engines
    warming, least = (0, 1) if is_large else (3, 5)

    def work(number: int) -> None:
        call = engine.call(case["op"], case["nbytes"], case["count"], number)
        for _ in range(warming):
            call()
        begin.wait()
        end = time.perf_counter_ns() + int(case["seconds"] * 1e9)
        now = time.perf_counter_ns()
        while now < end or len(times[number]) < least:
            before = now
            call()
            now = time.perf_counter_ns()
            times[number].append(now - before)

    def work_or_tell(number: int) -> None:
        try:
            work(number)
        except Exception as error:  # whatever an engine raises
            failures.append(error)
            begin.abort()

    threads = [threading.Thread(target=work_or_tell, args=(n,)) for n in range(case["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    calls = [duration for one in times for duration in one]
    wall_s = max(sum(one) for one in times) / 1e9
    moved = len(calls) * case["nbytes"] * case["count"]
    return {"p50_us": statistics.median(calls) / 1e3, "bytes_per_s": moved / wall_s, "moved": moved}


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    kind, role = sys.argv[1:3]
    engine = KINDS[kind]()
    if role == "serve":
        say(engine.serve())
        sys.stdin.read()
        return
    engine.connect(json.loads(sys.argv[3]))
    say({"ready": True})
    for line in sys.stdin:
        try:
            say(measure(engine, json.loads(line)))
        except Exception as error:  # as above
            say({"failed": repr(error)[:200]})


if __name__ == "__main__":
    main()
