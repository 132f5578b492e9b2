"""Reads of segments that are not mapped into this process, through the engine.

One batch a node, all nodes at once: headers and payloads, then, behind a fence, the headers again,
so that every payload lies between two readings of its header. Headers that are equal and name the
row's generation mean that the payload is that generation's; the checksum judges the transport and
the memory. A part of an object is judged by the headers alone.

A segment that can be mapped after all (it is met for the first time) is mapped and read natively.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake_py import errors
from mooncake_py._native import ffi, memory
from mooncake_py._native.reading import NOT_MAPPED, Destinations, read_mapped
from mooncake_py.clock import Deadline
from mooncake_py.errors import MooncakeError
from mooncake_py.model import EXTENT_HEADER_BYTES
from mooncake_py.store.buffers import Pieces
from mooncake_py.store.segments import Reach, SegmentDirectory
from mooncake_py.transfer import FLAG_CRC, FLAG_FENCE, SLICE, Batch, TransferEngine
from mooncake_py.transfer.slices import OP_READ
from mooncake_py.wire.rows import EXTENT

Rows = npt.NDArray[np.void]
Numbers = npt.NDArray[np.uint64]
_POINTERS = ffi.typeof("char *[]")
_CRC_AT = slice(40, 44)  # of a header (design/extent.md)
_WAIT_SLACK_MS = 1_000  # a batch ends by its own deadline; this only bounds a defect


@dataclass(slots=True)
class _Flight:
    """One node's batch on its way."""

    reach: Reach
    which: Sequence[int]
    extents: Rows
    to: Destinations
    headers: npt.NDArray[np.uint8]  # before and after, a row each
    slices: Rows
    ends: npt.NDArray[np.int64]  # of each row's payload slices, which follow the n first headers
    batch: Batch | None
    error: MooncakeError | None = None


class RemoteReader:
    """Any thread may use it."""

    def __init__(self, engine: TransferEngine, directory: SegmentDirectory) -> None:
        self._engine = engine
        self._directory = directory

    def read(self, rows: bytes, to: Destinations, statuses: list[int], deadline: Deadline) -> None:
        """Read the rows whose status is NOT_MAPPED; `statuses` changes in place."""
        table = np.frombuffer(rows, EXTENT)
        groups: dict[int, Sequence[int]] = {}
        indices = table["segment_index"]
        if statuses.count(NOT_MAPPED) == len(table) and (indices == indices[0]).all():
            groups[int(indices[0])] = range(len(table))
        else:
            open_ = np.flatnonzero(np.array(statuses) == NOT_MAPPED)
            for index in np.unique(indices[open_]).tolist():
                groups[index] = open_[indices[open_] == index].tolist()
        flights = []
        try:
            for index, which in groups.items():
                flight = self._start(index, which, table, to, statuses, deadline)
                if flight is not None:
                    flights.append(flight)
            for flight in flights:
                self._finish(flight, statuses, deadline)
        finally:
            for flight in flights:
                if flight.batch is not None:
                    flight.batch.close()

    def _start(
        self,
        index: int,
        which: Sequence[int],
        table: Rows,
        to: Destinations,
        statuses: list[int],
        deadline: Deadline,
    ) -> _Flight | None:
        try:
            reach = self._directory.reach(self._directory.segment(index), deadline)
        except MooncakeError as error:
            _set(statuses, which, [-error.code] * len(which))
            return None
        whole = len(which) == len(table)
        mine, places = (table, to) if whole else (table[which], select(to, which))
        if reach.mapping is not None:
            found = read_mapped(self._directory.table, mine.tobytes(), len(which), places)
            _set(statuses, which, found or [0] * len(which))
            return None
        fits = _fits(mine, places)
        if not fits.all():
            _set(statuses, which, np.where(fits, 0, -errors.UsageError.code).tolist())
            good = np.flatnonzero(fits).tolist()
            which, mine, places = [which[at] for at in good], mine[good], select(places, good)
            if not which:
                return None
        flight = _layout(reach, which, mine, places)
        try:
            flight.batch = self._engine.submit(
                reach.peer, flight.slices, timeout_ms=deadline.left_ms()
            )
        except MooncakeError as error:
            flight.error = error
        return flight

    def _finish(self, flight: _Flight, statuses: list[int], deadline: Deadline) -> None:
        if flight.batch is not None:
            try:
                flight.batch.wait(deadline.left_ms() + _WAIT_SLACK_MS)
            except MooncakeError as error:
                flight.error = error
                flight.batch.cancel()
        n = len(flight.which)
        judged = np.zeros(n, dtype=np.int32)
        if flight.error is not None:
            of_slices = flight.slices["status"]
            parts = _per_row(of_slices[n:-n], flight.ends, np.minimum)
            worst = np.minimum(np.minimum(of_slices[:n], parts), of_slices[-n:])
            np.copyto(judged, worst)  # statuses are negative
            if not judged.any():
                judged[:] = -flight.error.code  # the batch never started
            if isinstance(flight.error, errors.PeerUnreachable):
                self._directory.forget(flight.reach)
        before, after = flight.headers[:n], flight.headers[n:]
        crcs = _crcs(flight, before)
        memory.extent_verify(before, after, flight.extents, crcs, judged)
        _set(statuses, flight.which, judged.tolist())


def select(to: Destinations, which: Sequence[int]) -> Destinations:
    """The destinations of some rows, in that order."""
    pieces = Pieces(to.pointers, to.sizes, to.ends).select(which)
    ranges = None if to.ranges is None else [to.ranges[i] for i in which]
    return Destinations(pieces.pointers, pieces.sizes, pieces.ends, ranges)


def _set(statuses: list[int], which: Iterable[int], found: Sequence[int]) -> None:
    for i, status in zip(which, found, strict=True):
        statuses[i] = status


def _wanted(extents: Rows, to: Destinations) -> tuple[Numbers, Numbers]:
    """Where the range of each row begins in its object, and its bytes."""
    if to.ranges is None:
        return np.zeros(len(extents), np.uint64), extents["length"]
    ranges = np.array(to.ranges, dtype=np.uint64).reshape(-1, 2)
    return ranges[:, 0], ranges[:, 1]


def _fits(extents: Rows, to: Destinations) -> npt.NDArray[np.bool_]:
    """Is each range inside its object and its room large enough? Before any byte moves."""
    rooms = np.array(Pieces(to.pointers, to.sizes, to.ends).totals(), dtype=np.uint64)
    starts, nbytes = _wanted(extents, to)
    lengths = extents["length"]
    inside = (starts <= lengths) & (nbytes <= lengths - np.minimum(starts, lengths))
    return np.asarray(inside & (nbytes <= rooms))


def _spread(
    extents: Rows, to: Destinations, ends: Sequence[int]
) -> tuple[npt.NDArray[np.int64], Numbers, Numbers]:
    """Of every piece: its row, where it begins in the payload, and its bytes."""
    starts, lefts = (column.tolist() for column in _wanted(extents, to))
    parts: list[tuple[int, int, int]] = []
    for row, (start, left) in enumerate(zip(starts, lefts, strict=True)):
        for piece in range(ends[row - 1] if row else 0, ends[row]):
            step = min(left, to.sizes[piece])
            parts.append((row, start, step))
            start, left = start + step, left - step  # noqa: PLW2901  (walks over the pieces)
    columns = np.array(parts, dtype=np.uint64).reshape(len(parts), 3)
    return columns[:, 0].astype(np.int64), columns[:, 1], columns[:, 2]


def _layout(reach: Reach, which: Sequence[int], extents: Rows, to: Destinations) -> _Flight:
    """Slices: n headers, the payload slices row by row, n headers again."""
    n = len(which)
    if to.ends is None:
        rows, (begins, nbytes) = np.arange(n), _wanted(extents, to)
    else:
        rows, begins, nbytes = _spread(extents, to, to.ends)
    parts = len(rows)
    headers = np.zeros((2 * n, EXTENT_HEADER_BYTES), dtype=np.uint8)
    slices = np.zeros(2 * n + parts, dtype=SLICE)
    slices["op"] = OP_READ
    slices["region"] = reach.segment.region
    slices["length"] = EXTENT_HEADER_BYTES
    places = headers.ctypes.data + np.arange(2 * n, dtype=np.uint64) * EXTENT_HEADER_BYTES
    for at, local in ((slice(0, n), places[:n]), (slice(n + parts, None), places[n:])):
        slices["remote_offset"][at] = extents["offset"]
        slices["local"][at] = local
    middle = slices[n : n + parts]
    middle["remote_offset"] = extents["offset"][rows] + begins + np.uint64(EXTENT_HEADER_BYTES)
    middle["local"], middle["length"] = _addresses(to.pointers), nbytes
    middle["flags"] = FLAG_CRC
    # Headers of the second look come after every payload of the batch: one fence is enough.
    slices["flags"][n + parts] |= FLAG_FENCE
    last = np.arange(1, n + 1) if to.ends is None else np.array(to.ends)
    return _Flight(reach, which, extents, to, headers, slices, last, None)


def _addresses(pointers: Sequence[Any]) -> Numbers:
    return np.frombuffer(ffi.buffer(ffi.new(_POINTERS, pointers)), np.uint64)


def _per_row(values: npt.NDArray[Any], ends: npt.NDArray[np.int64], fold: Any) -> npt.NDArray[Any]:
    """Fold the values of each row's slices; every row has at least one."""
    if len(values) == len(ends):
        return values
    return np.asarray(fold.reduceat(values, np.concatenate(([0], ends[:-1]))))


def _crcs(flight: _Flight, before: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """crc32c of each row's payload as it arrived; of a part, what its header says."""
    n = len(flight.which)
    middle = flight.slices[n:-n]
    to = flight.to
    if to.ranges is None and len(middle) == n:
        return np.ascontiguousarray(middle["crc"])
    crcs = np.ascontiguousarray(before[:, _CRC_AT]).view(np.uint32).reshape(n).copy()
    starts = [0, *flight.ends[:-1].tolist()]
    lengths = flight.extents["length"].tolist()
    wanted = _wanted(flight.extents, to)[1].tolist()
    for row, (first, last) in enumerate(zip(starts, flight.ends.tolist(), strict=True)):
        if wanted[row] != lengths[row]:
            continue
        crc = 0
        for part in middle[first:last]:
            piece = ffi.buffer(ffi.cast("char *", int(part["local"])), int(part["length"]))
            crc = memory.crc32c(piece, crc)
        crcs[row] = crc
    return crcs
