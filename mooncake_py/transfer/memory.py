"""Memory that can be offered to peers on this host, and peers' memory seen from here.

Both are unmapped when the last view of them is gone, not when they are closed: a view that
outlives its owner stays valid memory.
"""

from __future__ import annotations

from typing import Any

from mooncake_py._native import ffi, lib
from mooncake_py._native.memory import memory_close, memory_open, memory_open_file
from mooncake_py.errors import UsageError


def _unmapper(nbytes: int) -> Any:
    unmap, cast = lib.mc_peer_unmap, ffi.cast  # bound now: globals may be gone at exit
    return lambda pointer: unmap(int(cast("uintptr_t", pointer)), nbytes)


class _Mapped:
    """A range of mapped memory with an owner that every view keeps alive."""

    def __init__(self, base: int, nbytes: int, free: Any) -> None:
        self.base = base
        self.nbytes = nbytes
        self._owner: Any = ffi.gc(ffi.cast("uint8_t *", base), free)

    def _keep(self) -> Any:
        if self._owner is None:
            raise UsageError("this memory was closed")
        return self._owner

    def _bytes(self) -> memoryview:
        return memoryview(ffi.buffer(self._keep(), self.nbytes))

    @property
    def closed(self) -> bool:
        return self._owner is None

    def close(self) -> None:
        """Let go of it. It is unmapped once no view is left. Twice is fine."""
        self._owner = None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Memory(_Mapped):
    """A populated memfd of at least `nbytes` (rounded up to pages), mapped here for writing.

    Registered as a region, peers on this host map it. Raises OutOfSpace when this machine or
    container has too little memory left. Views may be used by any thread. `sole_writer`: no other
    process can ever map it for writing, whatever descriptor it gets hold of.
    """

    def __init__(self, nbytes: int, name: str = "", *, sole_writer: bool = False) -> None:
        base, rounded, fd = memory_open(nbytes, name, sole_writer=sole_writer)
        close = memory_close
        super().__init__(base, rounded, lambda _: close(base, rounded, fd))
        self.fd = fd

    def view(self) -> memoryview:
        """All of it, writable."""
        return self._bytes()


class FileMemory(Memory):
    """The first `nbytes` (whole pages) of a file that is open for reading and writing; it outlives
    this process. The descriptor stays the caller's. Peers on this host copy from it
    through the kernel and never map it: whoever cuts a file short would end their processes, and
    only a memfd can promise that nobody does (F_SEAL_SHRINK). Raises OutOfSpace, UsageError."""

    def __init__(self, fd: int, nbytes: int) -> None:
        base = memory_open_file(fd, nbytes)
        close = memory_close
        _Mapped.__init__(self, base, nbytes, lambda _: close(base, nbytes, -1))
        self.fd = fd


class Mapping(_Mapped):
    """A peer's region, mapped read-only into this process. Made by `Peer.map`."""

    def __init__(self, base: int, nbytes: int) -> None:
        super().__init__(base, nbytes, _unmapper(nbytes))

    def view(self) -> memoryview:
        """All of it, read-only; valid as long as it is referenced, also after `close`."""
        return self._bytes().toreadonly()
