"""The client's side of reads from disks: the node brings objects into its staging memory, and they
are read there like any others.

    rows on a disk --NODE_FETCH--> rows in staging --mapped or one-sided read--> bytes --> done

One request carries at most `ROWS_MAX` rows. Rows for which staging had no room are asked for again
once those before them have been read and let go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from mooncake_py import errors
from mooncake_py._native.reading import Destinations
from mooncake_py.clock import Deadline
from mooncake_py.errors import MooncakeError
from mooncake_py.store.remote import select
from mooncake_py.store.segments import Reach, SegmentDirectory
from mooncake_py.wire.node import FETCH_KIND, FetchReply, FetchRequest
from mooncake_py.wire.rows import EXTENT

ROWS_MAX = 64
_DONE_MS = 1_000  # for a message that nobody answers
_BUSY = -errors.Backpressure.code
_STALE = errors.LeaseExpired.code

ReadRows = Callable[[bytes, Destinations, Deadline], list[int] | None]
"""Read rows in memory; a status each, native sign, or None: all good."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One call: all rows of it, where they go, and a status each, which changes in place."""

    rows: np.ndarray
    to: Destinations
    statuses: list[int]
    deadline: Deadline


class DiskFetcher:
    """Any thread may use it."""

    def __init__(self, directory: SegmentDirectory, read: ReadRows) -> None:
        self._directory = directory
        self._read = read

    def read(
        self,
        rows: np.ndarray,
        which: Sequence[int],
        to: Destinations,
        statuses: list[int],
        deadline: Deadline,
    ) -> None:
        """Read these rows, which are on disks; `statuses` changes in place. Never raises for what
        nodes do."""
        job = _Job(rows, to, statuses, deadline)
        groups: dict[int, list[int]] = {}
        for at in which:
            statuses[at] = _BUSY
            groups.setdefault(int(rows["segment_index"][at]), []).append(at)
        for index, mine in groups.items():
            try:
                reach = self._directory.reach(self._directory.segment(index), deadline)
                self._read_of(reach, index, mine, job)
            except MooncakeError as error:
                for at in mine:
                    if statuses[at] == _BUSY:
                        statuses[at] = -error.code

    def _read_of(self, reach: Reach, index: int, which: list[int], job: _Job) -> None:
        left = which
        while left:
            asked = left[:ROWS_MAX]
            staged, codes = self._fetch(reach, job.rows[asked], job.deadline)
            staged["segment_index"] = index
            good = np.flatnonzero(codes == errors.OK).tolist()
            for at, code in zip(asked, codes.tolist(), strict=True):
                job.statuses[at] = -code
            if good:
                self._read_staged(reach, staged[good], [asked[n] for n in good], job)
            busy = [at for at in asked if job.statuses[at] == _BUSY]
            if (busy and not good) or job.deadline.passed():
                return
            left = busy + left[ROWS_MAX:]

    def _fetch(
        self, reach: Reach, rows: np.ndarray, deadline: Deadline
    ) -> tuple[np.ndarray, np.ndarray]:
        """Staged rows, and one code each."""
        request = FetchRequest(reach.segment.segment_id, rows.tobytes(), deadline.left_ms())
        try:
            answer = reach.peer.request(FETCH_KIND, request.encode(), timeout_ms=deadline.left_ms())
        except errors.PeerUnreachable:
            self._directory.forget(reach)
            raise
        reply = FetchReply.decode(answer)
        if reply.code != errors.OK:
            raise errors.error_of(reply.code, reply.cause)
        codes = np.frombuffer(reply.status, dtype=np.uint8).copy()
        staged = np.frombuffer(reply.rows, EXTENT).copy()
        if not len(codes) == len(staged) == len(rows):
            raise errors.InternalError("a node answered other rows than were asked for")
        codes[(codes == errors.OK) & (staged["length"] != rows["length"])] = _STALE
        return staged, codes

    def _read_staged(self, reach: Reach, staged: np.ndarray, which: list[int], job: _Job) -> None:
        try:
            found = self._read(staged.tobytes(), select(job.to, which), job.deadline)
            for n, at in enumerate(which):
                job.statuses[at] = found[n] if found else 0
        finally:
            serials = staged["generation"].tobytes()
            done = FetchRequest(reach.segment.segment_id, b"", 0, serials)
            with suppress(MooncakeError):  # the node finds out by itself a little later
                reach.peer.send(FETCH_KIND, done.encode(), timeout_ms=_DONE_MS)
