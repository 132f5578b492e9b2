"""Memory that callers name by address, as byte views that values and targets are made of."""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Sequence

from mooncake_py.errors import UsageError

Piece = tuple[int, int]  # address, bytes

ADDRESS_MAX = 1 << 63
_MS_ASYNC = 1
_msync = ctypes.CDLL(None).msync
_msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def raw_view(address: int, nbytes: int) -> memoryview:
    """The range as bytes; the caller keeps it mapped. Raises UsageError for what is no range."""
    if address <= 0 or nbytes < 0:
        raise UsageError("memory is an address above 0 and a size", address=address, nbytes=nbytes)
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def is_mapped(address: int, nbytes: int) -> bool:
    """Whether all of the range is memory of this process: reading elsewhere would end it. Asks the
    kernel, without looking at the memory itself."""
    if address <= 0 or nbytes < 0 or address + nbytes > ADDRESS_MAX:
        return False
    start = address - address % mmap.PAGESIZE
    # MS_ASYNC has written nothing since Linux 2.6.19; what is left is the check of the range.
    return bool(_msync(start, address + nbytes - start, _MS_ASYNC) == 0)


class RawMemory:
    """Ranges that callers have made known. Any thread may make slices; adding and dropping is for
    one at a time."""

    def __init__(self) -> None:
        # Starts, ascending, and their views; replaced, never changed: who reads holds its own.
        self._table: tuple[list[int], list[memoryview]] = ([], [])

    def add(self, address: int, nbytes: int) -> memoryview | None:
        """The range's view, or None when all of it is known already."""
        if self.covers(address, nbytes):
            return None
        view = raw_view(address, nbytes)
        starts, views = self._table
        at = bisect_right(starts, address)
        self._table = (
            [*starts[:at], address, *starts[at:]],
            [*views[:at], view, *views[at:]],
        )
        return view

    def drop(self, address: int) -> None:
        """Forget the range that begins there."""
        starts, views = self._table
        if address in starts:
            at = starts.index(address)
            self._table = (starts[:at] + starts[at + 1 :], views[:at] + views[at + 1 :])

    def covers(self, address: int, nbytes: int) -> bool:
        return self._find(address, nbytes) is not None

    def slices(self, pieces: Sequence[Piece]) -> list[memoryview]:
        """Raises UsageError for a piece that lies in no known range."""
        starts, views = self._table
        if len(starts) == 1:  # the usual case, without a search a piece
            (start,), (view,) = starts, views
            end = start + len(view)
            out = [
                view[address - start : address - start + nbytes]
                for address, nbytes in pieces
                if start <= address and address + nbytes <= end
            ]
            if len(out) == len(pieces):
                return out
        return [self.slice(address, nbytes) for address, nbytes in pieces]

    def slice(self, address: int, nbytes: int) -> memoryview:
        """Raises UsageError when it lies in no known range."""
        found = self._find(address, nbytes)
        if found is None:
            raise UsageError("the memory lies outside of what is registered", address=address)
        return found

    def _find(self, address: int, nbytes: int) -> memoryview | None:
        starts, views = self._table
        at = bisect_right(starts, address) - 1
        if at < 0 or address + nbytes > starts[at] + len(views[at]):
            return None
        offset = address - starts[at]
        return views[at][offset : offset + nbytes]
