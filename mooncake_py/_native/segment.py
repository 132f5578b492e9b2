"""The owner's view of one segment (native/abi/segment.h) as a Python object."""

from __future__ import annotations

import threading
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np

from mooncake_py._native import ffi, lib
from mooncake_py.errors import UsageError, error_of
from mooncake_py.wire.rows import EXTENT, GENERATIONS, REPLICA

_END = (1 << 64) - 1
NAMES_MAX_BYTES = 1 << 20  # of one page of named extents; longer than any single name


class SegmentStats(NamedTuple):
    extent_count: int
    extent_nbytes: int
    writing_count: int
    refused_count: int
    held_count: int
    journal_nbytes: int
    journal_failures: int


class Adopted(NamedTuple):
    """What became of the extents of a former life."""

    kept: int = 0
    torn: int = 0  # begun and not sealed, unsealed, or overwritten
    damaged: int = 0  # sealed, and the bytes do not fit


class NamedExtents(NamedTuple):
    """A page of sealed extents: `rows` (EXTENT), where in `names` each one's name ends, and the
    offset to go on at (None: there are no more)."""

    rows: np.ndarray
    names: bytes
    ends: np.ndarray
    following: int | None


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

    def name(
        self,
        rows: np.ndarray,
        common: bytes,
        keys: bytes,
        ends: np.ndarray,
        secret: bytes,
        statuses: np.ndarray,
    ) -> None:
        """Between begin and seal: row i's object is called `common` and then its key, the part of
        `keys` up to `ends[i]` (u64). A key whose digest under `secret` (16 bytes) is not the row's
        gets the status of AccessRefused; without a secret (b"") all are believed."""
        if len(ends) != len(rows) or len(secret) not in (0, 16):
            raise UsageError("one end a row, and a secret of 16 bytes", rows=len(rows))
        lib.mc_segment_name(
            self._live(),
            _rows(rows),
            len(rows),
            ffi.from_buffer("uint8_t[]", common),
            len(common),
            ffi.from_buffer("uint8_t[]", keys),
            len(keys),
            ffi.from_buffer("uint64_t[]", ends),
            ffi.from_buffer("uint8_t[]", secret) if secret else ffi.NULL,
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
            out.journal_nbytes,
            out.journal_failures,
        )

    def inventory(self, offset: int = 0, limit: int = 4096) -> np.ndarray:
        """Sealed extents at `offset` and behind, ascending, at most `limit`, as EXTENT rows."""
        rows = np.zeros(limit, dtype=EXTENT)
        count = lib.mc_segment_inventory(self._live(), offset, _rows(rows), limit)
        return rows[:count]

    def named(
        self, ranges: np.ndarray, offset: int = 0, mark: int = 0, limit: int = 512
    ) -> NamedExtents:
        """Sealed extents at `offset` and behind whose generation is in one of `ranges`
        (GENERATIONS) and that do not carry `mark`; at most `limit`."""
        rows = np.zeros(limit, dtype=EXTENT)
        ends = np.zeros(limit, dtype=np.uint64)
        names = bytearray(NAMES_MAX_BYTES)
        following = ffi.new("uint64_t *")
        count = lib.mc_segment_named(
            self._live(),
            offset,
            ffi.from_buffer("mc_generations[]", np.ascontiguousarray(ranges, GENERATIONS)),
            len(ranges),
            mark,
            _rows(rows),
            limit,
            ffi.from_buffer("uint8_t[]", names),
            len(names),
            ffi.from_buffer("uint64_t[]", ends),
            following,
        )
        if count < 0:
            raise error_of(count, "a name is longer than a page of names")
        used = int(ends[count - 1]) if count else 0
        after = None if following[0] == _END else following[0]
        return NamedExtents(rows[:count], bytes(names[:used]), ends[:count], after)

    def mark(self, replicas: np.ndarray, mark: int) -> np.ndarray:
        """The master believes in these (REPLICA): mark those that are there, answer the others."""
        absent = np.zeros(len(replicas), dtype=np.uint8)
        lib.mc_segment_mark(
            self._live(),
            ffi.from_buffer("mc_replica[]", np.ascontiguousarray(replicas, REPLICA)),
            len(replicas),
            mark,
            ffi.from_buffer("uint8_t[]", absent, require_writable=True),
        )
        missing: np.ndarray = replicas[absent != 0]
        return missing

    def adopt(self, journal: bytes | mmap) -> Adopted:
        """Take over what a former owner of this memory left (native/abi/segment.h). Before anything
        else happens to the segment. OutOfSpace: what was adopted by then stays."""
        data = ffi.from_buffer("uint8_t[]", journal)
        out = ffi.new("mc_adopted *")
        status = lib.mc_segment_adopt(self._live(), data, len(data), out)
        if status:
            raise error_of(status, "no memory for the table of the segment's former extents")
        return Adopted(out.count, out.torn, out.damaged)

    def journal(self, fd: int) -> None:
        """Keep the journal in this file from now on (native/abi/segment.h), beginning with what is
        in the table. OutOfSpace: it goes on in the file before."""
        status = lib.mc_segment_journal(self._live(), fd)
        if status:
            raise error_of(status, "the segment's journal could not be written")

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
