"""Memory that a client has registered once, to put from and get into without more preparation.

Whoever holds registered memory simply passes slices of it (memoryviews, numpy or torch views) to
put and get: a put whose values all lie in one registered region names that region to the nodes
instead of registering the values for the call. Memory from `alloc` is a memfd besides, which nodes
on this host map: they copy straight out of it, once, without a system call a value.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mooncake_py._native.memory import address_of
from mooncake_py.transfer import Memory, Region, TransferEngine


class RegisteredMemory:
    """Made by `StoreClient.register` and `alloc`. Close it when no call uses it any more.

    Until then it holds the memory: it cannot be collected, nor a bytearray resized. Thread-safe.
    """

    def __init__(
        self, region: Region, owner: Any, nbytes: int, closed: Callable[[Region], None]
    ) -> None:
        self._region = region
        self._owner = owner
        self._closed = closed
        self.nbytes = nbytes

    def view(self) -> memoryview:
        """All of it as bytes; writable unless what was registered is read-only. Slices of it are
        sources and targets."""
        owner = self._owner
        return owner.view() if isinstance(owner, Memory) else memoryview(owner).cast("B")

    def close(self) -> None:
        """Take it back: no node reads it afterwards. Views of allocated memory stay valid."""
        self._closed(self._region)
        self._region.close()
        if isinstance(self._owner, Memory):
            self._owner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RegionBook:
    """The registered regions of one client, found by address. Thread-safe."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._regions: tuple[Region, ...] = ()

    def register(self, buffer: Any, fd: int = -1) -> RegisteredMemory:
        """fd: of a memfd whose first byte is the buffer's. Raises UsageError for what is no
        contiguous buffer."""
        _, nbytes = address_of(buffer)
        return self._add(buffer, nbytes, fd)

    def alloc(self, nbytes: int) -> RegisteredMemory:
        """Raises OutOfSpace, UsageError."""
        memory = Memory(nbytes, name="mooncake-client")
        try:
            return self._add(memory, memory.nbytes)
        except BaseException:
            memory.close()
            raise

    def _add(self, owner: Any, nbytes: int, fd: int = -1) -> RegisteredMemory:
        region = self._engine.register(owner, access="read", fd=fd)
        with self._lock:
            self._regions = (*self._regions, region)
        return RegisteredMemory(region, owner, nbytes, self._drop)

    def _drop(self, region: Region) -> None:
        with self._lock:
            self._regions = tuple(other for other in self._regions if other is not region)

    def find_each(
        self, addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        """Of each range the id of a region that holds all of it (0: none) and its offset there."""
        ids = np.zeros(len(addresses), dtype=np.uint32)
        inside = np.zeros(len(addresses), dtype=np.uint64)
        ends = addresses + lengths
        for region in self._regions:
            within = (addresses >= region.address) & (ends <= region.address + region.nbytes)
            ids[within] = region.id
            inside[within] = addresses[within] - np.uint64(region.address)
        return ids, inside

    def find(self, first: int, end: int) -> Region | None:
        """A region that holds all of [first, end)."""
        for region in self._regions:
            if region.address <= first and end <= region.address + region.nbytes:
                return region
        return None
