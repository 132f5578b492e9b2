"""Memory, checksums, digests and extents of the native core, one call a batch.

Rules that hold for every function here:

* Arrays go in whole and results come back in place; there is no Python per item. Arrays must be
  C-contiguous, of exactly the dtype named, and as long as each other.
* The GIL is released during the call. Two calls may run at once unless they write the same memory.
* Addresses (`base`, destinations) are taken on trust: the caller keeps that memory alive and
  mapped until the call returns. Offsets and lengths in rows are not: they are checked.
* A call that is itself malformed raises UsageError and has done nothing. What became of a row is
  in `statuses` (int32: 0 or a negated code of errors.py); rows that come with a non-zero status
  are left out.

`rows` are numpy arrays of `wire.rows.EXTENT` (64 bytes a row). Format: design/extent.md.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mooncake_py._native import ffi, lib
from mooncake_py.errors import OutOfSpace, UsageError, error_of

if TYPE_CHECKING:
    import typing_extensions

    # numpy declares its buffers to type checkers from Python 3.12 on only
    Buffer = typing_extensions.Buffer | NDArray[Any]

HEADER_BYTES: int = lib.MC_EXTENT_HEADER_NBYTES
SECRET_BYTES = 16
DIGEST_BYTES = 16
_ROW_BYTES: int = ffi.sizeof("mc_extent_row")
_ROW_ALIGN: int = ffi.alignof("mc_extent_row")

Rows = NDArray[np.void]
Statuses = NDArray[np.int32]


def memory_open(
    nbytes: int, name: str = "", *, huge: bool = False, sole_writer: bool = False
) -> tuple[int, int, int]:
    """Memory to offer to others: (address, bytes, memfd), populated, to be closed once.

    `nbytes` is rounded up to pages. `huge` tries huge pages first. `sole_writer`: nobody else can
    ever map it for writing. Raises OutOfSpace (checked before the first touch) and UsageError.
    """
    if not isinstance(nbytes, Integral) or nbytes <= 0:
        raise UsageError("memory needs a whole number of bytes above 0", nbytes=nbytes)
    flags = (lib.MC_MEMORY_HUGE if huge else 0) | (lib.MC_MEMORY_SOLE_WRITER if sole_writer else 0)
    address, rounded, fd = ffi.new("uint64_t *"), ffi.new("uint64_t *"), ffi.new("int32_t *")
    size = min(nbytes, 1 << 63)  # an integer of C; nothing so large can be had anyway
    status = lib.mc_memory_open(name.encode(), size, flags, address, rounded, fd)
    if status == lib.MC_E_OUT_OF_SPACE:
        raise OutOfSpace(
            "this machine or container has too little memory left for it",
            remedy="offer less memory, free some, or raise the container's limit",
            nbytes=nbytes,
        )
    if status != 0:
        raise error_of(status, "memory could not be opened", nbytes=nbytes, name=name)
    return int(address[0]), int(rounded[0]), int(fd[0])


def memory_open_file(fd: int, nbytes: int) -> int:
    """The first `nbytes` (whole pages) of a file, allocated, mapped and populated: its address. To
    be closed with `memory_close(address, nbytes, -1)`. Raises OutOfSpace, UsageError."""
    address = ffi.new("uint64_t *")
    status = lib.mc_memory_open_file(fd, nbytes, address)
    if status:
        raise error_of(
            status, "the file has no room for a segment of this size, or is none", nbytes=nbytes
        )
    return int(address[0])


def memory_close(address: int, nbytes: int, fd: int) -> None:
    """Unmap and close what `memory_open` returned. Views of it must be gone."""
    lib.mc_memory_close(address, nbytes, fd)


def address_of(buffer: Buffer, *, writable: bool = False) -> tuple[int, int]:
    """(address, bytes) of a contiguous buffer, valid as long as the caller holds the buffer.

    Raises UsageError for what is not contiguous, or read-only although `writable` is asked for.
    """
    data = _from_buffer("uint8_t[]", buffer, writable=writable)
    return int(ffi.cast("uintptr_t", data)), len(data)


def trim_heap() -> None:
    """Give free pages of the heap back to the system, which the C library keeps after large blocks
    have come and gone. Milliseconds. (ctypes: it is a call of the C library, and not ours; one
    that has none needs none.)"""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def crc32c(buffer: Buffer, seed: int = 0) -> int:
    """crc32c of the buffer's bytes; `seed` is the crc of what came before."""
    data = _from_buffer("uint8_t[]", buffer)
    return int(lib.mc_crc32c(data, len(data), seed))


def copy_crc32c(destination: int, source: int, nbytes: int) -> int:
    """Copy between addresses that do not overlap; the crc32c of what was copied."""
    return int(lib.mc_copy_crc32c(destination, source, nbytes))


def digests(keys: Sequence[bytes], secret: bytes) -> bytes:
    """SipHash-2-4-128 of each key under a 16-byte secret: 16 bytes a key, in order."""
    if len(secret) != SECRET_BYTES:
        raise UsageError("a digest secret has 16 bytes", got=len(secret))
    ends = np.cumsum(np.fromiter(map(len, keys), np.uint64, len(keys)), dtype=np.uint64)
    out = bytearray(DIGEST_BYTES * len(keys))
    lib.mc_digest(
        b"".join(keys),
        _array("uint64_t[]", ends),
        len(keys),
        secret,
        _from_buffer("uint8_t[]", out),
    )
    return bytes(out)


def extent_begin(base: int, nbytes: int, rows: Rows, statuses: Statuses) -> None:
    """Mark the headers as being written, before any payload.

    LeaseExpired for a header that is not older than the row. Live extents that overlap are the
    business of the node's own table, which is asked first (design/extent.md).
    """
    n = _count(rows, statuses)
    _check(lib.mc_extent_begin(base, nbytes, _rows(rows), n, _statuses(statuses)))


def extent_seal(
    base: int, nbytes: int, rows: Rows, crcs: NDArray[np.uint32], statuses: Statuses
) -> None:
    """The payloads are in place and have these crcs: make them readable.

    LeaseExpired for a header other than the one begun, or unsealed since.
    """
    n = _count(rows, statuses, crcs)
    c = _array("uint32_t[]", crcs)
    _check(lib.mc_extent_seal(base, nbytes, _rows(rows), n, c, _statuses(statuses)))


def extent_unseal(base: int, nbytes: int, rows: Rows, statuses: Statuses) -> None:
    """End extents of exactly these generations, sealed or not: no reader accepts them from now on,
    no seal succeeds. LeaseExpired where another generation is."""
    n = _count(rows, statuses)
    _check(lib.mc_extent_unseal(base, nbytes, _rows(rows), n, _statuses(statuses)))


def extent_read(
    base: int,
    nbytes: int,
    rows: Rows,
    destinations: NDArray[np.uint64],
    capacities: NDArray[np.uint64],
    statuses: Statuses,
) -> None:
    """Copy payloads out of a mapped segment, validated before and after and by crc32c.

    `destinations` are addresses with room for `capacities` bytes each. LeaseExpired: something
    else is there now. ChecksumMismatch: damaged. UsageError: too little room (nothing was written)
    or outside the segment. A destination whose status is not 0 may hold partial bytes.
    """
    n = _count(rows, statuses, destinations, capacities)
    where, room = _array("uint64_t[]", destinations), _array("uint64_t[]", capacities)
    _check(lib.mc_extent_read(base, nbytes, _rows(rows), n, where, room, _statuses(statuses)))


def extent_verify(
    before: Buffer, after: Buffer, rows: Rows, crcs: NDArray[np.uint32], statuses: Statuses
) -> None:
    """Judge payloads that a transport brought: the 64-byte headers fetched before and after each
    payload, and the crc32c of what arrived. Statuses as in `extent_read`."""
    n = _count(rows, statuses, crcs)
    old, new = _from_buffer("uint8_t[]", before), _from_buffer("uint8_t[]", after)
    if len(old) != n * HEADER_BYTES or len(new) != n * HEADER_BYTES:
        raise UsageError("headers need 64 bytes a row", rows=n, before=len(old), after=len(new))
    c = _array("uint32_t[]", crcs)
    _check(lib.mc_extent_verify(old, new, _rows(rows), n, c, _statuses(statuses)))


def _check(status: int) -> None:
    if status != 0:
        raise error_of(status, "malformed call of the native core")


def _count(rows: Rows, *columns: NDArray[Any]) -> int:
    n = len(rows)
    if any(len(column) != n for column in columns):
        lengths = [len(column) for column in columns]
        raise UsageError("columns differ in length", rows=n, columns=lengths)
    return n


def _rows(rows: Rows) -> Any:
    if rows.itemsize != _ROW_BYTES:
        raise UsageError("rows must be of dtype wire.rows.EXTENT", itemsize=rows.itemsize)
    pointer = _from_buffer("mc_extent_row[]", rows)
    if int(ffi.cast("uintptr_t", pointer)) % _ROW_ALIGN:  # rows in the middle of a message
        pointer = _from_buffer("mc_extent_row[]", rows.copy())
    return pointer


def _statuses(statuses: Statuses) -> Any:
    return _array("int32_t[]", statuses, writable=True)


_ITEM = {"int32_t[]": np.int32, "uint32_t[]": np.uint32, "uint64_t[]": np.uint64}


def _array(kind: str, column: NDArray[Any], *, writable: bool = False) -> Any:
    if column.dtype != _ITEM[kind]:
        raise UsageError(f"a column must be {kind[:-2]}", dtype=str(column.dtype))
    return _from_buffer(kind, column, writable=writable)


def _from_buffer(kind: str, buffer: Buffer, *, writable: bool = False) -> Any:
    """A C array over the buffer; it holds the buffer as long as it lives."""
    try:
        return ffi.from_buffer(kind, buffer, require_writable=writable)
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(f"not a usable buffer: {error}", type=type(buffer).__name__) from None
