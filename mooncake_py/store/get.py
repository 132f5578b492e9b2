"""A batch get: one Locate, then one read per segment, replicas tried until the deadline.

Every key carries its own list of replicas. A round takes the next replica of each key that is
still open, reads all keys of one segment in one native call (mapped) or one batch (engine), and
judges each by header and checksum. What failed goes to the next round with its next replica; a key
with none left becomes a miss (its placement was stale or its node is gone) or, when memory
contradicted its own checksum, an integrity error. Failed placements are reported to the master
once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mooncake_py import errors
from mooncake_py._native import memory
from mooncake_py.clock import Deadline
from mooncake_py.errors import MooncakeError
from mooncake_py.master.client import Placements, Segment
from mooncake_py.model import EXTENT_HEADER_BYTES
from mooncake_py.store.segments import Reach, SegmentDirectory
from mooncake_py.transfer import FLAG_CRC, FLAG_FENCE, SLICE, TransferEngine
from mooncake_py.wire.rows import EXTENT

Rows = npt.NDArray[np.void]  # of PLACEMENT or EXTENT
Statuses = npt.NDArray[np.int32]
Addresses = npt.NDArray[np.uint64]

_MISS = errors.ObjectNotFound.code


@dataclass(slots=True)
class BrokenPlacement:
    """A replica that could not be read: for the report to the master."""

    key_index: int
    generation: int
    segment_id: int
    code: int


@dataclass(slots=True)
class Targets:
    """Where each key's bytes go: parallel to the keys. A key that is not `wanted` is left out."""

    addresses: Addresses
    sizes: Addresses  # bytes that fit
    wanted: npt.NDArray[np.bool_]


@dataclass(slots=True)
class ReadResult:
    """`codes[i]` of key i: 0 when its target holds the object."""

    codes: npt.NDArray[np.int64]
    broken: list[BrokenPlacement] = field(default_factory=list)


class BatchReader:
    """Reads located objects into targets. Stateless between calls, so any thread may use it."""

    def __init__(self, engine: TransferEngine, directory: SegmentDirectory) -> None:
        self._engine = engine
        self._directory = directory

    def read(self, placements: Placements, targets: Targets, deadline: Deadline) -> ReadResult:
        """Fill the targets. Raises nothing for a single key's failure."""
        result = ReadResult(np.full(len(targets.wanted), _MISS, dtype=np.int64))
        pending = placements.rows[targets.wanted[placements.rows["key_index"]]]
        while len(pending):
            keys = pending["key_index"]
            if deadline.passed():
                result.codes[keys] = errors.TransferTimeout.code
                break
            # Rows of a key lie together; its first row is this round's replica.
            first = np.ones(len(keys), dtype=bool)
            np.not_equal(keys[1:], keys[:-1], out=first[1:])
            self._round(placements.segments, pending[first], targets, deadline, result)
            rest = pending[~first]
            pending = rest[result.codes[rest["key_index"]] != errors.OK]
        return result

    def _round(
        self,
        segments: Sequence[Segment],
        rows: Rows,
        targets: Targets,
        deadline: Deadline,
        result: ReadResult,
    ) -> None:
        at = rows["segment_index"]
        for index in np.unique(at) if (at != at[0]).any() else at[:1]:
            segment = segments[int(index)]
            mine = rows[at == index]
            codes = -self._read_segment(segment, mine, targets, deadline).astype(np.int64)
            result.codes[mine["key_index"]] = codes
            for row in np.flatnonzero(codes):
                key, generation = int(mine["key_index"][row]), int(mine["generation"][row])
                result.broken.append(
                    BrokenPlacement(key, generation, segment.segment_id, int(codes[row]))
                )

    def _read_segment(
        self, segment: Segment, rows: Rows, targets: Targets, deadline: Deadline
    ) -> Statuses:
        """One status a row, native sign. Never raises for what the peer or network does."""
        statuses = np.zeros(len(rows), dtype=np.int32)
        try:
            reach = self._directory.reach(segment, deadline)
        except MooncakeError as error:
            statuses[:] = -error.code
            return statuses
        extents = _extent_rows(rows)
        addresses = targets.addresses[rows["key_index"]]
        mapping = reach.mapping
        if mapping is not None:
            sizes = targets.sizes[rows["key_index"]]
            memory.extent_read(mapping.base, mapping.nbytes, extents, addresses, sizes, statuses)
        else:
            self._read_remote(reach, extents, addresses, statuses, deadline)
        return statuses

    def _read_remote(
        self,
        reach: Reach,
        extents: Rows,
        addresses: Addresses,
        statuses: Statuses,
        deadline: Deadline,
    ) -> None:
        """Three slices an object: header, payload with its crc, header again."""
        n = len(extents)
        headers = np.zeros((2, n, EXTENT_HEADER_BYTES), dtype=np.uint8)
        slices = np.zeros((n, 3), dtype=SLICE)
        slices["region"] = reach.segment.region
        slices["length"] = EXTENT_HEADER_BYTES
        slices["remote_offset"] = extents["offset"][:, None]
        step = np.arange(n, dtype=np.uint64) * np.uint64(EXTENT_HEADER_BYTES)
        slices["local"][:, 0] = np.uint64(headers[0].ctypes.data) + step
        slices["local"][:, 1] = addresses
        slices["local"][:, 2] = np.uint64(headers[1].ctypes.data) + step
        slices["remote_offset"][:, 1] += np.uint64(EXTENT_HEADER_BYTES)
        slices["length"][:, 1] = extents["length"]
        slices["flags"][:, 1] = FLAG_CRC
        # Headers of the second look come after every payload of the batch: one fence is enough.
        flat = np.concatenate((slices[:, :2].reshape(-1), slices[:, 2]))
        flat["flags"][2 * n] |= FLAG_FENCE
        try:
            self._engine.read(reach.peer, flat, timeout_ms=deadline.left_ms())
        except MooncakeError as error:
            self._judge_broken_batch(reach, error, flat, statuses)
        crcs = np.ascontiguousarray(flat["crc"][1 : 2 * n : 2])
        memory.extent_verify(headers[0], headers[1], extents, crcs, statuses)

    def _judge_broken_batch(
        self, reach: Reach, error: MooncakeError, flat: Rows, statuses: Statuses
    ) -> None:
        n = len(statuses)
        of_slices = flat["status"]
        worst = np.minimum(
            of_slices[: 2 * n].reshape(n, 2).min(axis=1), of_slices[2 * n :]
        )  # statuses are negative
        np.copyto(statuses, worst)
        if not worst.any():
            statuses[:] = -error.code  # the batch never started
        if isinstance(error, errors.PeerUnreachable):
            self._directory.forget(reach)


def _extent_rows(placements: Rows) -> Rows:
    rows = np.zeros(len(placements), dtype=EXTENT)
    for name in ("key_index", "segment_index", "offset", "length", "generation"):
        rows[name] = placements[name]
    return rows
