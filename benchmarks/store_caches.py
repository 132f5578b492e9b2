"""Redis and memcached over their unix sockets, spoken by hand: no library to install, and the bytes
go straight between the socket and the caller's memory, which no library of theirs does faster.

{"kind": "redis" | "memcached", "socket": path}
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

from benchmarks.worker import Batch, plain_memory

_PART = 64  # requests under way before their answers are read: both sides' buffers are finite


class _Line:
    """A connection: lines and blocks of bytes."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(path)
        self._buffer = bytearray(1 << 16)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0

    def send(self, *parts: Any) -> None:
        for part in parts:
            self._socket.sendall(part)

    def line(self) -> bytes:
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            self._fill()
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return line

    def block(self, into: memoryview) -> None:
        """As many bytes as there is room, and the end of their line."""
        had = min(len(into), self._end - self._start)
        into[:had] = self._view[self._start : self._start + had]
        self._start += had
        while had < len(into):
            got = self._socket.recv_into(into[had:])
            if got == 0:
                raise RuntimeError("the server hung up")
            had += got
        if self.line():
            raise RuntimeError("a value has another length")

    def _fill(self) -> None:
        left = self._end - self._start
        self._buffer[:left] = self._buffer[self._start : self._end]
        self._start, self._end = 0, left
        got = self._socket.recv_into(self._view[left:])
        if got == 0:
            raise RuntimeError("the server hung up")
        self._end += got

    def close(self) -> None:
        self._socket.close()


def _parts(batch: Batch) -> Iterator[tuple[list[str], list[memoryview]]]:
    for at in range(0, batch.count, _PART):
        yield batch.keys[at : at + _PART], batch.views[at : at + _PART]


def _expect(got: bytes, wanted: bytes) -> None:
    if got != wanted:
        raise RuntimeError(f"the server answered {got[:80]!r}")


class Redis:
    def __init__(self, line: _Line) -> None:
        self._line = line

    def put(self, batch: Batch) -> None:
        for keys, views in _parts(batch):
            for key, view in zip(keys, views, strict=True):
                head = f"*3\r\n$3\r\nSET\r\n${len(key)}\r\n{key}\r\n${len(view)}\r\n"
                self._line.send(head.encode(), view, b"\r\n")
            for _ in keys:
                _expect(self._line.line(), b"+OK")

    def get(self, batch: Batch) -> None:
        self._ask("MGET", batch.keys)
        _expect(self._line.line(), b"*%d" % batch.count)
        for view in batch.views:
            _expect(self._line.line(), b"$%d" % len(view))
            self._line.block(view)

    def exists(self, batch: Batch) -> None:
        """One answer a key, so one request a key: EXISTS of several only counts."""
        for keys, _ in _parts(batch):
            asked = [f"*2\r\n$6\r\nEXISTS\r\n${len(key)}\r\n{key}\r\n" for key in keys]
            self._line.send("".join(asked).encode())
            for _ in keys:
                _expect(self._line.line(), b":1")

    def remove(self, batch: Batch) -> None:
        self._ask("DEL", batch.keys)
        self._line.line()

    def _ask(self, verb: str, keys: list[str]) -> None:
        words = [verb, *keys]
        text = f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        self._line.send(text.encode())


class Memcached:
    def __init__(self, line: _Line) -> None:
        self._line = line

    def put(self, batch: Batch) -> None:
        for keys, views in _parts(batch):
            for key, view in zip(keys, views, strict=True):
                self._line.send(f"set {key} 0 0 {len(view)}\r\n".encode(), view, b"\r\n")
            for _ in keys:
                _expect(self._line.line(), b"STORED")

    def get(self, batch: Batch) -> None:
        self._line.send(f"get {' '.join(batch.keys)}\r\n".encode())
        for key, view in zip(batch.keys, batch.views, strict=True):
            _expect(self._line.line(), f"VALUE {key} 0 {len(view)}".encode())
            self._line.block(view)
        _expect(self._line.line(), b"END")

    def exists(self, batch: Batch) -> None:
        for keys, _ in _parts(batch):
            self._line.send("".join(f"mg {key}\r\n" for key in keys).encode())
            for _ in keys:
                _expect(self._line.line(), b"HD")

    def remove(self, batch: Batch) -> None:
        for keys, _ in _parts(batch):
            self._line.send("".join(f"delete {key}\r\n" for key in keys).encode())
            for _ in keys:
                self._line.line()


class _Store:
    def __init__(self, settings: dict, nbytes: int) -> None:
        self._line = _Line(settings["socket"])
        inner = {"redis": Redis, "memcached": Memcached}[settings["kind"]](self._line)
        self.put, self.get, self.exists = inner.put, inner.get, inner.exists
        self.remove = inner.remove
        self.memory = plain_memory(nbytes)

    def close(self) -> None:
        self._line.close()


def open_store(settings: dict, nbytes: int) -> _Store:
    return _Store(settings, nbytes)
