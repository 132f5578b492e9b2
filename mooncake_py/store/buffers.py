"""Where a caller's bytes lie: one function that turns any accepted value into address and length.

Accepted: anything with a C-contiguous buffer (bytes, bytearray, memoryview, numpy, mmap ...) and
CPU torch tensors (recognised by their methods, torch is never imported). A device tensor is
refused: its `data_ptr` is not an address of this process's memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mooncake_py._native import ffi
from mooncake_py.errors import UsageError


class Span(NamedTuple):
    """Memory of this process. `owner` keeps it alive (and a bytearray from being resized)."""

    address: int
    nbytes: int
    owner: object


_EMPTY = ffi.new("char[1]")


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


def view_of(span: Span) -> Any:
    """The span's memory as an object with the buffer protocol. Does not keep the owner alive."""
    return ffi.buffer(ffi.cast("char *", span.address), span.nbytes)


def fresh_bytes(nbytes: int) -> tuple[bytes, Span]:
    """A new bytes object nobody else has seen yet, and the memory to fill it through.

    The object is filled before it is handed out, which is what C code does with
    PyBytes_FromStringAndSize(NULL, n). Objects of up to one byte are shared by the interpreter and
    must never be written; callers take `bytes(...)` of a scratch buffer for those.
    """
    if nbytes <= 1:
        raise UsageError("fresh_bytes is for two bytes and more", nbytes=nbytes)
    value = bytes(nbytes)
    pointer = ffi.from_buffer(value)
    return value, Span(int(ffi.cast("uintptr_t", pointer)), nbytes, pointer)


def _buffer_span(value: Any, *, writable: bool) -> Span:
    try:
        pointer = ffi.from_buffer("char[]", value, require_writable=writable)
    except (TypeError, ValueError, BufferError) as error:
        kind = "writable" if writable else "readable"
        raise UsageError(
            f"a {type(value).__name__} is no {kind} contiguous buffer ({error})",
            remedy="pass bytes, bytearray, memoryview, a contiguous numpy array or a CPU tensor",
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
