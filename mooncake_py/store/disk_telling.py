"""What lies on a disk, told to a master whose records are lost (design/recovery.md).

Beside its bytes the index keeps of each object what the master must know to take it over: its name
with the deadlines of the put (wire/names.py), and the group. They are those of the extent in memory
from which it was offloaded. A master that knows the disk asks for nothing: it compares lists.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from mooncake_py._native.segment import OwnedSegment
from mooncake_py.errors import ObjectNotFound
from mooncake_py.master.client import MasterClient
from mooncake_py.model import MEMBERS_SHIFT, RESERVED_ROW
from mooncake_py.store.disk_files import DiskFiles
from mooncake_py.wire.inventory import Page
from mooncake_py.wire.rows import EXTENT, GENERATIONS

log = logging.getLogger(__name__)

PAGE = 512  # objects
CALL_MS = 3_000
_GROUP = struct.Struct("<QI")  # and how many members it has; then the name
_ALL = np.array([(1, (1 << 64) - 1)], dtype=GENERATIONS)


def told_of(segment: OwnedSegment, offset: int, generation: int) -> bytes:
    """What is to be told of the sealed extent at this offset; empty: it has no name."""
    found = segment.named(_ALL, offset, limit=1)
    if not len(found.rows) or not found.names:
        return b""
    row = found.rows[0]
    if int(row["offset"]) != offset or int(row["generation"]) != generation:
        return b""
    group = int(row["tag"])
    members = int(row["segment_index"]) >> MEMBERS_SHIFT
    if group == RESERVED_ROW:  # by now it is an object like any other
        group = members = 0
    return _GROUP.pack(group, members) + found.names


class DiskTeller:
    """`begin` after each mount, then `step` until it is False. One thread only.

    drop: called with generations that have ended, which are to be deleted.
    """

    def __init__(
        self, files: DiskFiles, master: MasterClient, drop: Callable[[Iterable[int]], None]
    ) -> None:
        self._files = files
        self._master = master
        self._drop = drop
        self._ranges: list[tuple[int, int]] | None = None
        self._after = self._told = self._ended = 0

    def begin(self, page: Page, unrecorded: np.ndarray | None) -> None:
        """`page`: who we are; None: this master knows what is here."""
        self._page = page
        self._ranges = None if unrecorded is None else unrecorded.tolist()
        self._after = self._told = self._ended = 0

    def step(self) -> bool:
        """Tell one page, if one is to be told. Raises MooncakeError: try again."""
        if self._ranges is None:
            return False
        objects = self._files.told(self._after, PAGE)
        wanted = [each for each in objects if self._owed(each[0])]
        rows, names, ends = _columns(wanted)
        page = replace(
            self._page, rows=rows, names=names, name_ends=ends, recorded=len(objects) < PAGE
        )
        try:
            ended = self._master.inventory(page, timeout_ms=CALL_MS).unseal["generation"].tolist()
        except ObjectNotFound:
            self._ranges = None  # it is not mounted there any more: the next mount asks again
            return False
        self._drop(ended)
        self._told += len(wanted)
        self._ended += len(ended)
        if objects:
            self._after = objects[-1][0]
        if page.recorded:
            self._ranges = None
            log.info(
                "the master knows what this disk holds: %d objects told, %d of them had ended",
                self._told, self._ended,
            )  # fmt: skip
        return True

    def _owed(self, generation: int) -> bool:
        return any(start <= generation < below for start, below in self._ranges or ())


def _columns(objects: Sequence[tuple[int, int, bytes, bytes]]) -> tuple[bytes, bytes, bytes]:
    """Rows, names and their ends of a page. A disk has no offsets: generations say all."""
    rows = np.zeros(len(objects), dtype=EXTENT)
    names, ends = bytearray(), np.zeros(len(objects), dtype="<u8")
    for at, (generation, length, digest, told) in enumerate(objects):
        rows[at]["generation"], rows[at]["length"] = generation, length
        rows[at]["digest"] = np.void(digest)
        if told:
            group, members = _GROUP.unpack_from(told)
            rows[at]["tag"], rows[at]["segment_index"] = group, members << MEMBERS_SHIFT
            names += told[_GROUP.size :]
        ends[at] = len(names)
    return rows.tobytes(), bytes(names), ends.tobytes()
