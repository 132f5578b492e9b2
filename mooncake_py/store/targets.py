"""Where a get puts its bytes: buffers of the caller, or new bytes objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake_py._native import ffi
from mooncake_py._native.reading import Destinations
from mooncake_py.store.buffers import Pieces
from mooncake_py.store.results import LARGE_BYTES, ResultPool

_BYTES = ffi.typeof("char[]")

Range = tuple[int, int | None]  # start, bytes; None: to the end of the object


def resolve(wanted: Range, length: int) -> tuple[int, int]:
    """The range in an object of this length. It may lie outside, which the reader refuses."""
    start, nbytes = wanted
    return start, max(0, length - start) if nbytes is None else nbytes


def _resolved(
    ranges: Sequence[Range] | None, keys: Sequence[int], lengths: Sequence[int]
) -> list[tuple[int, int]] | None:
    if ranges is None:
        return None
    return [resolve(ranges[i], length) for i, length in zip(keys, lengths, strict=True)]


class GivenTargets:
    """The caller's buffers, one or several a key."""

    def __init__(self, pieces: Pieces, count: int, ranges: Sequence[Range] | None) -> None:
        self._pieces = pieces
        self._count = count
        self._ranges = ranges

    def place(self, keys: Sequence[int], lengths: Sequence[int]) -> Destinations:
        pieces = self._pieces if len(keys) == self._count else self._pieces.select(keys)
        ranges = _resolved(self._ranges, keys, lengths)
        return Destinations(pieces.pointers, pieces.sizes, pieces.ends, ranges)

    def release(self) -> None:
        self._pieces.release()

    def room(self, key: int) -> int:
        return self._pieces.totals()[key]


class NewTargets:
    """New bytes objects, filled before anybody else sees them.

    That is what C code does with PyBytes_FromStringAndSize(NULL, n). Objects of up to one byte are
    shared by the interpreter and must never be written: for those there is scratch memory. Large
    ones are of the pool (`results.py`).
    """

    def __init__(self, count: int, ranges: Sequence[Range] | None, pool: ResultPool) -> None:
        self._ranges = ranges
        self._pool = pool
        self._values: list[bytes | bytearray] = [b""] * count

    def place(self, keys: Sequence[int], lengths: Sequence[int]) -> Destinations:
        ranges = _resolved(self._ranges, keys, lengths)
        sizes = lengths if ranges is None else [nbytes for _, nbytes in ranges]
        if ranges is not None:  # outside of the object nothing is read, so nothing is allocated
            sizes = [
                nbytes if start + nbytes <= length else 0
                for (start, nbytes), length in zip(ranges, lengths, strict=True)
            ]
        if sizes and max(sizes) >= LARGE_BYTES:
            new = [self._new(size) for size in sizes]
        else:
            new = [bytes(size) if size > 1 else bytearray(size) for size in sizes]
        for key, value in zip(keys, new, strict=True):
            self._values[key] = value
        from_buffer = ffi.from_buffer
        pointers = [from_buffer(_BYTES, value) for value in new]
        return Destinations(pointers, sizes, None, ranges)

    def _new(self, size: int) -> bytes | bytearray:
        if size >= LARGE_BYTES:
            return self._pool.new(size)
        return bytes(size) if size > 1 else bytearray(size)

    def values(self) -> list[Any]:
        """What the keys' objects are now, as bytes."""
        return [value if type(value) is bytes else bytes(value) for value in self._values]
