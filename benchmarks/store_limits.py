"""What the machine can do: the same verbs with nothing of a store in them.

memcpy      get and put are numpy's copy of rows that lie 64 bytes apart, as extents do
tcp stream  one connection to another process: a small request and the bytes back (get), the bytes
            and a byte back (put), the keys and a byte a key back (exists)
grpc        exists as one unary call that carries the same bytes and decodes nothing
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from typing import Any

from benchmarks.worker import Batch, plain_memory

_HEADER = struct.Struct("<QQ")  # bytes that follow, bytes wanted back
_GAP = 64


class _Copies:
    """Objects in one block a batch: header gap, payload, header gap, payload ..."""

    def __init__(self, nbytes: int) -> None:
        import numpy  # noqa: PLC0415 - only here: upstream's environment need not have it

        self._numpy = numpy
        self._objects: dict[str, Any] = {}
        self._spare: dict[tuple[int, int], list[Any]] = {}
        self.memory = plain_memory(nbytes)

    def _rows(self, batch: Batch) -> Any:
        whole = self._numpy.frombuffer(batch.whole, self._numpy.uint8)
        return whole.reshape(batch.count, batch.nbytes)

    def put(self, batch: Batch) -> None:
        shape = (batch.count, batch.nbytes)
        spare = self._spare.get(shape)
        if spare:
            block = spare.pop(0)
        else:
            block = self._numpy.zeros((batch.count, _GAP + batch.nbytes), self._numpy.uint8)
            block.fill(1)  # populated, as a segment is
        self._objects[batch.keys[0]] = block
        self._numpy.copyto(block[:, _GAP:], self._rows(batch))

    def get(self, batch: Batch) -> None:
        self._numpy.copyto(self._rows(batch), self._objects[batch.keys[0]][:, _GAP:])

    def remove(self, batch: Batch) -> None:
        """Space that comes back is used last, as an allocator that goes round would."""
        block = self._objects.pop(batch.keys[0])
        self._spare.setdefault((batch.count, batch.nbytes), []).append(block)

    def close(self) -> None:
        self._objects.clear()


class _Stream:
    """The client's end of a connection to `serve_tcp` in a process of its own."""

    def __init__(self, nbytes: int) -> None:
        self.memory = plain_memory(nbytes)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.store_limits", "tcp", str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        self._socket = socket.create_connection(("127.0.0.1", int(self._server.stdout.readline())))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answer = memoryview(bytearray(1 << 16))

    def _ask(self, sent: memoryview | bytes, into: memoryview) -> None:
        self._socket.sendall(_HEADER.pack(len(sent), len(into)))
        self._socket.sendall(sent)
        _receive(self._socket, into)

    def put(self, batch: Batch) -> None:
        self._ask(batch.whole, self._answer[:1])

    def get(self, batch: Batch) -> None:
        self._ask(b"", batch.whole)

    def exists(self, batch: Batch) -> None:
        self._ask("\n".join(batch.keys).encode(), self._answer[: batch.count])

    def remove(self, batch: Batch) -> None:
        pass

    def close(self) -> None:
        self._socket.close()
        self._server.communicate()


class _Grpc:
    def __init__(self, nbytes: int) -> None:
        import grpc  # noqa: PLC0415 - only here: upstream's environment need not have it

        self.memory = plain_memory(nbytes)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.store_limits", "grpc", str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        self._channel = grpc.insecure_channel(f"127.0.0.1:{int(self._server.stdout.readline())}")
        self._call = self._channel.unary_unary("/limits/Echo")

    def put(self, batch: Batch) -> None:
        pass

    def exists(self, batch: Batch) -> None:
        reply = self._call("\n".join(batch.keys).encode(), timeout=10)
        if len(reply) != batch.count:
            raise RuntimeError("the echo lost something")

    def remove(self, batch: Batch) -> None:
        pass

    def close(self) -> None:
        self._channel.close()
        self._server.communicate()


def _receive(connection: socket.socket, into: memoryview) -> bool:
    at = 0
    while at < len(into):
        got = connection.recv_into(into[at:])
        if got == 0:
            return False
        at += got
    return True


def _serve_tcp(nbytes: int) -> None:
    memory = plain_memory(nbytes)
    memory[:] = b"\1" * nbytes
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    header = memoryview(bytearray(_HEADER.size))
    while _receive(connection, header):
        comes, wanted = _HEADER.unpack(header)
        _receive(connection, memory[:comes])
        connection.sendall(memory[:wanted])


def _serve_grpc() -> None:
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    import grpc  # noqa: PLC0415

    def echo(request: bytes, _: object) -> bytes:
        return b"\1" * (request.count(b"\n") + 1)

    server = grpc.server(ThreadPoolExecutor(4))
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("limits", {"Echo": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()  # until our parent is gone
    server.stop(None)


def open_store(settings: dict, nbytes: int) -> _Copies | _Stream | _Grpc:
    return {"memcpy": _Copies, "tcp stream": _Stream, "grpc": _Grpc}[settings["limit"]](nbytes)


if __name__ == "__main__":
    if sys.argv[1] == "tcp":
        _serve_tcp(int(sys.argv[2]))
    else:
        _serve_grpc()
