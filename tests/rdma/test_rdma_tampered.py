"""A peer that lies about its memory: what the devices refuse is a defined error and costs nothing.

Between two honest engines stands a relay on the control connection that changes what the far side
says of a region: its keys, its addresses, its shape.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from rdma_ports import FAR, NEAR
from transport_far import pattern
from transport_pair import MS, slices_for

from mooncake_py.errors import AccessRefused, PeerUnreachable
from mooncake_py.transfer import EngineOptions, TransferEngine

HELLO_BYTES, HEAD_BYTES, REGION_FRAME = 272, 32, 9  # as in hello.h and frame.h
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
                self._near.sendall(head + (self._changed(body) if kind == REGION_FRAME else body))
        if self._near is not None:
            with suppress(OSError):
                self._near.shutdown(socket.SHUT_RDWR)

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
def relay(address: str, lie: Lie) -> Iterator[Relay]:
    made = Relay(address, lie)
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
