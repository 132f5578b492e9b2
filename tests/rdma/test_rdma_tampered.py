"""A peer that lies about its memory: what the devices refuse is a defined error and costs nothing.

Between two honest engines stands a relay on the control connection that changes what the far side
says of a region: its keys, its addresses, its shape.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from rdma_ports import FAR, NEAR
from transport_far import pattern
from transport_pair import MS, slices_for

from mooncake_py.errors import AccessRefused, PeerUnreachable
from mooncake_py.transfer import EngineOptions, TransferEngine

HELLO_BYTES, HEAD_BYTES = 272, 32  # as in hello.h and frame.h
REGION_FRAME, RAIL_ANSWER_FRAME = 9, 16
REGION_HEAD_BYTES, SPAN = 16, struct.Struct("<3Q8I")  # as in rail.h and memory_book.h
NBYTES = 64 << 10

Lie = Callable[[int, int, int, list[int]], tuple[int, int, int, list[int]]]

LIES: dict[str, tuple[Lie, type[Exception]]] = {
    "another key": (
        lambda offset, address, nbytes, keys: (offset, address, nbytes, [k ^ 0x5A00 for k in keys]),
        AccessRefused,
    ),
    "other memory under the key": (
        lambda offset, address, nbytes, keys: (offset, address + (1 << 30), nbytes, keys),
        AccessRefused,
    ),
    "more than the region has": (
        lambda offset, address, nbytes, keys: (offset, address, nbytes + 1, keys),
        PeerUnreachable,  # nothing is believed from a peer that says so: it is cut
    ),
}


def read_exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = sock.recv(nbytes - len(data))
        if not more:
            raise ConnectionError
        data += more
    return data


class Relay:
    """Listens for one caller and joins it with the engine at `address`."""

    def __init__(self, address: str, lie: Lie) -> None:
        host, port = address.rsplit(":", 1)
        self._lie = lie
        self.lies = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._far = socket.create_connection((host, int(port)))
        self._near: socket.socket | None = None
        self._threads = [threading.Thread(target=self._answers)]
        self._threads[0].start()

    def _asks(self) -> None:
        assert self._near is not None
        with suppress(OSError):
            while data := self._near.recv(65_536):
                self._far.sendall(data)
        with suppress(OSError):
            self._far.shutdown(socket.SHUT_RDWR)

    def _answers(self) -> None:
        with suppress(OSError):
            self._near, _ = self._listener.accept()
            self._threads.append(threading.Thread(target=self._asks))
            self._threads[1].start()
            self._near.sendall(read_exactly(self._far, HELLO_BYTES))
            self._near.sendall(read_exactly(self._far, HELLO_BYTES))
            while True:
                head = read_exactly(self._far, HEAD_BYTES)
                nbytes, kind = struct.unpack_from("<IH", head)
                body = read_exactly(self._far, nbytes)
                self._near.sendall(head + self._passed(kind, body))
        if self._near is not None:
            with suppress(OSError):
                self._near.shutdown(socket.SHUT_RDWR)

    def _passed(self, kind: int, body: bytes) -> bytes:
        return self._changed(body) if kind == REGION_FRAME else body

    def _changed(self, body: bytes) -> bytes:
        changed = body[:REGION_HEAD_BYTES]
        for offset, address, nbytes, *keys in SPAN.iter_unpack(body[REGION_HEAD_BYTES:]):
            *place, told = self._lie(offset, address, nbytes, keys)
            changed += SPAN.pack(*place, *told)
            self.lies += 1
        return changed

    def close(self) -> None:
        self._listener.close()
        for sock in (self._far, self._near):
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._far, self._near):
            if sock is not None:
                sock.close()


@contextmanager
def relay(address: str, lie: Lie, kind: type[Relay] | None = None) -> Iterator[Relay]:
    made = (kind or Relay)(address, lie)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("name", LIES)
def test_a38_a_peer_that_lies_about_its_memory_is_refused(name: str, verb: str) -> None:
    lie, expected = LIES[name]
    source = pattern(NBYTES, 7)
    with (
        TransferEngine(EngineOptions("127.0.0.1:0", transports=("rdma",), rdma=FAR)) as far,
        TransferEngine(EngineOptions(transports=("rdma",), rdma=NEAR)) as near,
        relay(far.address, lie) as between,
    ):
        memory = source.copy()
        region = far.register(memory, access="read_write")
        target = np.full(NBYTES, 0xAA, np.uint8)
        mine = near.register(target)
        liar = near.open(between.address, timeout_ms=MS)
        for _ in range(2):  # it lies again, and is refused again
            slices = slices_for(region.id, target, [(0, NBYTES)])
            with pytest.raises(expected):
                getattr(near, verb)(liar, slices, timeout_ms=MS)
        assert between.lies >= 1
        assert (target == 0xAA).all()
        assert np.array_equal(memory, source)
        honest = near.open(far.address, timeout_ms=MS)
        near.read(honest, slices_for(region.id, target, [(0, NBYTES)]), timeout_ms=MS)
        assert np.array_equal(target, source)
        for peer in (liar, honest):
            peer.close()
        fabric = near.describe()["rdma"]["fabric"]
        assert sum(port["queue_pairs"] for port in fabric["ports"]) == 0
        mine.close()
        assert near.describe()["rdma"]["fabric"]["memory"]["registrations"] == 0


class CutsAtTheAnswer(Relay):
    """Hangs up where the far side tells its half of a queue pair: both halves are made by then."""

    def _passed(self, kind: int, body: bytes) -> bytes:
        if kind == RAIL_ANSWER_FRAME:
            self.lies += 1
            raise ConnectionError
        return body


def honest(
    offset: int, address: int, nbytes: int, keys: list[int]
) -> tuple[int, int, int, list[int]]:
    return offset, address, nbytes, keys


def level() -> tuple[int, int]:
    """Descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


# Ten thousand take minutes: by hand, with this and --timeout 0.
FAILURES = int(os.environ.get("MOONCAKE_RDMA_CONNECTIONS", "150"))


def test_a38_connects_that_fail_give_everything_back() -> None:
    """By turns: nobody listens; no way for bytes in common; cut when the queue pairs are made."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    with (
        TransferEngine(EngineOptions("127.0.0.1:0", transports=("tcp",))) as stranger,
        TransferEngine(EngineOptions("127.0.0.1:0", transports=("rdma",), rdma=FAR)) as far,
        TransferEngine(EngineOptions(transports=("rdma",), rdma=NEAR)) as near,
    ):
        region = far.register(pattern(NBYTES, 7))
        target = np.full(NBYTES, 0xAA, np.uint8)
        mine = near.register(target)
        slices = slices_for(region.id, target, [(0, NBYTES)])

        def cut_at_the_answer() -> None:
            with relay(far.address, honest, CutsAtTheAnswer) as between:
                with (
                    near.open(between.address, timeout_ms=MS) as peer,
                    pytest.raises(PeerUnreachable),
                ):
                    near.read(peer, slices, timeout_ms=MS)
                assert between.lies == 1

        def fail(count: int) -> None:
            for number in range(count):
                if number % 3 == 2:
                    cut_at_the_answer()
                    continue
                with pytest.raises(PeerUnreachable):
                    near.open((nobody, stranger.address)[number % 3], timeout_ms=MS)

        def queue_pairs() -> int:
            fabrics = [each.describe()["rdma"]["fabric"] for each in (near, far)]
            return sum(port["queue_pairs"] for fabric in fabrics for port in fabric["ports"])

        fail(FAILURES // 10)  # what is kept once is kept by now
        wait_for(lambda: not far.describe()["peers"])
        before = level()
        fail(FAILURES)
        wait_for(lambda: not far.describe()["peers"] and queue_pairs() == 0 and level() <= before)
        assert (target == 0xAA).all()
        assert near.describe()["rdma"]["fabric"]["rails"] == 0
        with near.open(far.address, timeout_ms=MS) as peer:
            near.read(peer, slices, timeout_ms=MS)
        assert np.array_equal(target, pattern(NBYTES, 7))
        mine.close()


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        pause.wait(0.01)
