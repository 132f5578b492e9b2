"""The owner's view of one segment (native/abi/segment.h) as a Python object."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np

from mooncake_py._native import ffi, lib
from mooncake_py.errors import UsageError, error_of
from mooncake_py.wire.rows import EXTENT


class SegmentStats(NamedTuple):
    extent_count: int
    extent_nbytes: int
    writing_count: int
    refused_count: int
    held_count: int


class OwnedSegment:
    """Table and headers of a segment that this process owns. Thread-safe.

    base, nbytes: the memory, which stays the caller's and must outlive this object. Row arrays are
    of dtype EXTENT, `statuses` int32 in native sign (0 or negative), changed in place.
    """

    def __init__(self, base: int, nbytes: int) -> None:
        out = ffi.new("mc_segment **")
        status = lib.mc_segment_open(base, nbytes, out)
        if status:
            raise error_of(status, "memory that cannot be a segment", base=base, nbytes=nbytes)
        self._handle = out[0]
        self._lock = threading.Lock()
        self.base = base
        self.nbytes = nbytes

    @property
    def native(self) -> Any:
        """The native handle, for other native code."""
        return self._live()

    def begin(self, rows: np.ndarray, now_ms: int, statuses: np.ndarray) -> None:
        lib.mc_segment_begin(self._live(), _rows(rows), len(rows), now_ms, _i32(statuses, rows))

    def fill(
        self,
        rows: np.ndarray,
        values: bytes,
        sources: np.ndarray,
        crcs: np.ndarray,
        statuses: np.ndarray,
    ) -> None:
        """Copy row i's payload from `values[sources[i]:]`, with its crc. A row whose range is not
        inside `values` gets the status of a UsageError and nothing is copied for it."""
        data = ffi.from_buffer("uint8_t[]", values)
        lib.mc_segment_fill(
            self._live(),
            _rows(rows),
            len(rows),
            data,
            len(data),
            ffi.from_buffer("uint64_t[]", sources),
            ffi.from_buffer("uint32_t[]", crcs, require_writable=True),
            _i32(statuses, rows),
        )

    def seal(self, rows: np.ndarray, crcs: np.ndarray, now_ms: int, statuses: np.ndarray) -> None:
        lib.mc_segment_seal(
            self._live(),
            _rows(rows),
            len(rows),
            ffi.from_buffer("uint32_t[]", crcs),
            now_ms,
            _i32(statuses, rows),
        )

    def unseal(self, rows: np.ndarray) -> None:
        statuses = np.zeros(len(rows), dtype=np.int32)
        lib.mc_segment_unseal(self._live(), _rows(rows), len(rows), _i32(statuses, rows))

    def hold(self, rows: np.ndarray, statuses: np.ndarray) -> None:
        """No new extent covers these sealed ones until `release`, which must be called as often."""
        lib.mc_segment_hold(self._live(), _rows(rows), len(rows), _i32(statuses, rows))

    def release(self, rows: np.ndarray) -> None:
        lib.mc_segment_release(self._live(), _rows(rows), len(rows))

    def stats(self) -> SegmentStats:
        out = ffi.new("mc_segment_stats *")
        lib.mc_segment_stat(self._live(), out)
        return SegmentStats(
            out.extent_count,
            out.extent_nbytes,
            out.writing_count,
            out.refused_count,
            out.held_count,
        )

    def inventory(self, offset: int = 0, limit: int = 4096) -> np.ndarray:
        """Sealed extents at `offset` and behind, ascending, at most `limit`, as EXTENT rows."""
        rows = np.zeros(limit, dtype=EXTENT)
        count = lib.mc_segment_inventory(self._live(), offset, _rows(rows), limit)
        return rows[:count]

    def close(self) -> None:
        """Forget the table; the memory is not touched. May be called twice, by one owner at a
        time when no other call runs."""
        with self._lock:
            handle, self._handle = self._handle, ffi.NULL
        lib.mc_segment_close(handle)

    def _live(self) -> object:
        handle = self._handle
        if handle == ffi.NULL:
            raise UsageError("the segment is closed")
        return handle


def _rows(rows: np.ndarray) -> object:
    return ffi.from_buffer("mc_extent_row[]", rows)


def _i32(statuses: np.ndarray, rows: np.ndarray) -> object:
    if len(statuses) != len(rows):
        raise UsageError("one status a row", rows=len(rows), statuses=len(statuses))
    return ffi.from_buffer("int32_t[]", statuses, require_writable=True)
