"""What `mooncake.engine` knows of memory, on both sides: offered by peers, and its own."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from mooncake_py import errors
from mooncake_py.errors import UsageError
from mooncake_py.store.raw_memory import is_mapped
from mooncake_py.transfer import Peer

# One region that a peer offers, as it says it.
ROW = np.dtype([("address", "<u8"), ("nbytes", "<u8"), ("region", "<u4"), ("reserved", "<u4")])


PART_BYTES = 1 << 30
ITS_OWN_MS = 86_400_000  # to wait for what ends by itself, by a deadline of its own


class TransferOpcode(IntEnum):
    Read = 0
    Write = 1


@dataclass(slots=True)
class TransferNotify:
    """A word to the peer that comes after the data which it belongs to."""

    name: str = ""
    msg: str = ""


def notify_of(payload: bytes) -> TransferNotify | None:
    """What `[name, msg]` as JSON says; None: it is not one of ours."""
    try:
        name, text = json.loads(payload)
    except (ValueError, TypeError):
        return None
    return TransferNotify(str(name), str(text))


def rows_of(regions: Sequence[tuple[int, int, int]]) -> bytes:
    """(address, bytes, region) of what is offered, as peers are told it."""
    return np.array(sorted((*each, 0) for each in regions), dtype=ROW).tobytes()


def time_for(lengths: Any, timeout_ms: int) -> int:
    """For a transfer that nobody waits for part by part: the whole time for each part of it."""
    return timeout_ms * max(1, -(-sum(map(int, lengths)) // PART_BYTES))


def parts_of(local: Any, remote: Any, lengths: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The transfer in parts of at most PART_BYTES, each waited for by itself, so that the time of
    a very large call is bounded by its progress and not by its size."""
    if len(lengths) == 0:
        return
    if sum(lengths) <= PART_BYTES:
        yield local, remote, lengths
        return
    part: tuple[list[int], list[int], list[int]] = ([], [], [])
    room = PART_BYTES
    for here, there, nbytes in zip(local, remote, lengths, strict=True):
        moved = 0
        while moved < nbytes:
            take = min(nbytes - moved, room)
            for column, value in zip(part, (here + moved, there + moved, take), strict=True):
                column.append(value)
            moved, room = moved + take, room - take
            if room == 0:
                yield part
                part, room = ([], [], []), PART_BYTES
    if part[2]:
        yield part


@dataclass(slots=True)
class Remote:
    """A peer and what it offered when it was last asked: rows by address, ascending."""

    peer: Peer
    rows: list[tuple[int, int, int]]  # address, bytes, region

    def place(self, address: int, nbytes: int) -> tuple[int, int]:
        """(region, offset). Raises AccessRefused for what is not offered."""
        at = bisect_right(self.rows, (address, 1 << 64, 0)) - 1
        if at >= 0:
            start, size, region = self.rows[at]
            if address + nbytes <= start + size:
                return region, address - start
        raise errors.AccessRefused("the peer has not registered it", address=address)


def check_local(known: Sequence[tuple[int, int]], local: Any, lengths: Any) -> None:
    """Raises UsageError for memory that is not there: touching it would end this process.

    known: (address, bytes) of what is registered, which is not asked about again.
    """
    starts = np.asarray(local, dtype=np.uint64)
    ends = starts + np.asarray(lengths, dtype=np.uint64)
    if known:
        ordered = np.array(sorted(known), dtype=np.uint64)
        bases, limits = ordered[:, 0], ordered.sum(axis=1)
        at = np.maximum(np.searchsorted(bases, starts, side="right"), 1) - 1
        inside = (starts >= bases[at]) & (ends <= limits[at]) & (ends >= starts)
        starts, ends = starts[~inside], ends[~inside]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if not is_mapped(start, end - start):
            raise UsageError("this is no memory of this process", address=start)
