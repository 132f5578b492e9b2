"""Where a caller's bytes lie: any accepted values turned into pointers and sizes.

Accepted: anything with a C-contiguous buffer (bytes, bytearray, memoryview, numpy, mmap ...), CPU
torch tensors (recognised by their methods, torch is never imported), and a list or tuple of those:
one object whose bytes lie one after the other in several buffers. A device tensor is refused: its
`data_ptr` is not an address of this process's memory.

A batch in which every value is one plain buffer, which is the usual one, takes a short path: a
third of a microsecond a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from mooncake_py._native import ffi
from mooncake_py.errors import UsageError


class Span(NamedTuple):
    """Memory of this process. `owner` keeps it alive (and a bytearray from being resized)."""

    address: int
    nbytes: int
    owner: object


_EMPTY = ffi.new("char[1]")
_BYTES = ffi.typeof("char[]")


@dataclass(frozen=True, slots=True)
class Pieces:
    """The memory of several values. `pointers` (char pointers) keep it alive.

    `ends`: end of each value's run of pieces; None: every value is exactly one piece.
    """

    pointers: list[Any]
    sizes: Sequence[int]
    ends: Sequence[int] | None = None

    def release(self) -> None:
        """Let go of the memory. An error that somebody keeps also keeps the frames it came through,
        and through them this. Before Python 3.12.7 the collector crashes on a memoryview in such
        a cycle whose bytes are still held (python/cpython issue 77894)."""
        self.pointers.clear()

    def totals(self) -> Sequence[int]:
        """Bytes of each value."""
        if self.ends is None:
            return self.sizes
        sums = [0, *accumulate(self.sizes)]
        starts = [0, *self.ends[:-1]]
        return [sums[end] - sums[start] for start, end in zip(starts, self.ends, strict=True)]

    def select(self, which: Sequence[int]) -> Pieces:
        """The pieces of some of the values, in the order of `which`."""
        if self.ends is None:
            return Pieces([self.pointers[i] for i in which], [self.sizes[i] for i in which])
        runs = [range(self.ends[i - 1] if i else 0, self.ends[i]) for i in which]
        flat = [piece for run in runs for piece in run]
        return Pieces(
            [self.pointers[piece] for piece in flat],
            [self.sizes[piece] for piece in flat],
            list(accumulate(map(len, runs))),
        )


def source_pieces(values: Sequence[Any]) -> Pieces:
    """Memory to read from. Raises UsageError for what cannot be read as bytes."""
    return _pieces(values, source_span, writable=False)


def target_pieces(values: Sequence[Any]) -> Pieces:
    """Memory to write into. Raises UsageError when it is read-only or not contiguous."""
    return _pieces(values, target_span, writable=True)


def _pieces(values: Sequence[Any], span: Any, *, writable: bool) -> Pieces:
    from_buffer = ffi.from_buffer
    try:
        pointers = [from_buffer(_BYTES, value, writable) for value in values]
    except (TypeError, ValueError, BufferError):  # a tensor, several buffers, or a mistake
        return _pieces_of_all_kinds(values, span)
    return Pieces(pointers, list(map(len, pointers)))


def _pieces_of_all_kinds(values: Sequence[Any], span: Any) -> Pieces:
    pointers, sizes, ends = [], [], []
    for value in values:
        for part in value if isinstance(value, (list, tuple)) else (value,):
            address, nbytes, owner = span(part)
            pointers.append(pointer_to(address, owner))
            sizes.append(nbytes)
        ends.append(len(pointers))
    plain = ends == list(range(1, len(values) + 1))
    return Pieces(pointers, sizes, None if plain else ends)


def pointer_to(address: int, owner: object) -> Any:
    """A pointer that keeps the owner alive."""
    return ffi.gc(ffi.cast("char *", address), lambda _, owner=owner: None)


def source_span(value: Any) -> Span:
    """Memory to read from. Raises UsageError for what cannot be read as bytes."""
    if hasattr(value, "data_ptr"):
        return _tensor_span(value)
    return _buffer_span(value, writable=False)


def target_span(value: Any) -> Span:
    """Memory to write into. Raises UsageError when it is read-only or not contiguous."""
    if hasattr(value, "data_ptr"):
        return _tensor_span(value)
    return _buffer_span(value, writable=True)


def _buffer_span(value: Any, *, writable: bool) -> Span:
    try:
        pointer = ffi.from_buffer("char[]", value, require_writable=writable)
    except (TypeError, ValueError, BufferError) as error:
        kind = "writable" if writable else "readable"
        bytes_like = "a bytearray, a writable memoryview" if writable else "bytes, a memoryview"
        remedy = f"pass {bytes_like}, a contiguous numpy array or a CPU tensor"
        if isinstance(value, str):
            remedy = "text has no bytes of its own: pass value.encode()"
        raise UsageError(
            f"this {type(value).__name__} is no {kind} contiguous buffer ({error})", remedy=remedy
        ) from None
    nbytes = len(pointer)
    if nbytes == 0:
        return Span(int(ffi.cast("uintptr_t", _EMPTY)), 0, pointer)
    return Span(int(ffi.cast("uintptr_t", pointer)), nbytes, pointer)


def _tensor_span(tensor: Any) -> Span:
    if tensor.device.type != "cpu":
        raise UsageError(
            f"a tensor on {tensor.device} is not in this process's memory",
            remedy="copy it to the CPU first (tensor.cpu())",
        )
    if not tensor.is_contiguous():
        raise UsageError(
            "a non-contiguous tensor has no single range of bytes",
            remedy="pass tensor.contiguous()",
            shape=tuple(tensor.shape),
        )
    nbytes = tensor.numel() * tensor.element_size()
    address = tensor.data_ptr() if nbytes else int(ffi.cast("uintptr_t", _EMPTY))
    return Span(address, nbytes, tensor)
