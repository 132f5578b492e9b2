"""Where nodes find the bytes of a batch put, said in one of four ways, the cheapest that fits:

* in the message itself: small values;
* at an offset each of one registered region;
* as the bytes of one gather region, which is offered for the time of the call;
* as pieces, each of a region: values of several pieces that lie in registered memory, and values
  of which some do and some do not. What is registered nowhere is offered for the call.

Nothing is registered twice, and what was offered for the call is read by nobody after the `with`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mooncake_py._native import ffi
from mooncake_py._native.offering import Offer, addresses_of
from mooncake_py.clock import Deadline
from mooncake_py.store.buffers import Pieces
from mooncake_py.store.regions import RegionBook
from mooncake_py.transfer import TransferEngine
from mooncake_py.wire.rows import PULL_PIECE

INLINE_VALUE_MAX_BYTES = 16 << 10  # below, copying into the message costs less than a region
INLINE_BATCH_MAX_BYTES = 64 << 10  # a batch with more is read by the node instead

_ADDRESS = ffi.typeof("uintptr_t")
_AT_START = np.zeros(1, dtype=np.uint64)

Numbers = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Sources:
    """Value i lies at `offsets[i]` of a region or of the inline bytes; or it is the pieces from
    `offsets[i]` up to `ends[i]`."""

    offsets: Numbers
    region: int = 0
    inline: bytes = b""
    pieces: npt.NDArray[np.void] | None = None  # PULL_PIECE
    ends: npt.NDArray[np.int64] | None = None
    offer: Offer | None = None  # withdrawn when the call ends
    deadline: Deadline | None = None  # of the call

    def of(
        self,
        keys: npt.NDArray[np.int64] | slice,
        starts: Numbers | None = None,
        lengths: Numbers | None = None,
    ) -> tuple[bytes, bytes]:
        """(one number a key, pieces): what a node needs for these keys and no more. starts,
        lengths: a range of each value that is meant."""
        if starts is not None and lengths is not None:
            if self.pieces is None:
                return (self.offsets[keys] + starts).tobytes(), b""
            parts = zip(np.arange(len(self.offsets))[keys], starts, lengths, strict=True)
            return self._cut([(int(key), int(start), int(size)) for key, start, size in parts])
        if self.pieces is None or self.ends is None:
            return self.offsets[keys].tobytes(), b""
        if isinstance(keys, slice):
            keys = np.arange(len(self.offsets))[keys]
        if len(keys) == len(self.offsets) and (np.diff(keys) == 1).all():
            return self.offsets.tobytes(), self.pieces.tobytes()
        starts, ends = self.offsets[keys].astype(np.int64), self.ends[keys]
        counts = ends - starts
        firsts = np.cumsum(counts) - counts
        which = np.arange(int(counts.sum())) + np.repeat(starts - firsts, counts)
        return firsts.astype(np.uint64).tobytes(), self.pieces[which].tobytes()

    def _cut(self, parts: list[tuple[int, int, int]]) -> tuple[bytes, bytes]:
        """The same for parts: (key, where in its value, bytes)."""
        assert self.pieces is not None
        assert self.ends is not None
        firsts: list[int] = []
        found: list[tuple[int, int, int, int]] = []
        for key, skip, left in parts:
            firsts.append(len(found))
            for offset, length, region, _ in self.pieces[
                int(self.offsets[key]) : int(self.ends[key])
            ].tolist():
                step = min(length - skip, left)
                if step > 0:
                    found.append((offset + skip, step, region, 0))
                    left -= step  # noqa: PLW2901  (walks over the pieces)
                skip = max(0, skip - length)  # noqa: PLW2901
        pieces = np.array(found, dtype=PULL_PIECE)
        return np.array(firsts, dtype=np.uint64).tobytes(), pieces.tobytes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Withdraw what was offered for this call."""
        if self.offer is not None:
            self.offer.close(self.deadline.left_ms() if self.deadline is not None else 0)


def sources_of(
    pieces: Pieces,
    sizes: Sequence[int],
    regions: RegionBook,
    engine: TransferEngine,
    deadline: Deadline,
) -> Sources:
    """For a call with this deadline. Raises what registering raises."""
    found = _sources_of(pieces, sizes, regions, engine)
    found.deadline = deadline
    return found


def _sources_of(
    pieces: Pieces, sizes: Sequence[int], regions: RegionBook, engine: TransferEngine
) -> Sources:
    if len(sizes) == 1 and pieces.ends is None:
        one = _one(pieces.pointers[0], sizes[0], regions)
        if one is not None:
            return one
    totals = np.array(sizes, dtype=np.uint64)
    offsets = np.zeros(len(totals), dtype=np.uint64)
    np.cumsum(totals[:-1], out=offsets[1:])
    total = int(offsets[-1]) + int(totals[-1])
    if total <= INLINE_BATCH_MAX_BYTES and max(pieces.sizes) <= INLINE_VALUE_MAX_BYTES:
        inline = b"".join(map(ffi.buffer, pieces.pointers, pieces.sizes))
        return Sources(offsets, inline=inline)
    addresses = addresses_of(pieces.pointers)
    lengths = totals if pieces.ends is None else np.array(pieces.sizes, dtype=np.uint64)
    if pieces.ends is None:
        region = regions.find(int(addresses.min()), int((addresses + totals).max()))
        if region is not None:
            return Sources(addresses - np.uint64(region.address), region=region.id)
    filled = lengths > 0
    ids, inside = regions.find_each(addresses, lengths)
    known = ids > 0
    if not known.any():
        offer = Offer(engine.native, addresses[filled], lengths[filled])
        return Sources(offsets, region=offer.id, offer=offer)
    return _scattered(pieces, engine, (addresses, lengths, filled), (ids, inside))


def _one(pointer: Any, nbytes: int, regions: RegionBook) -> Sources | None:
    """The short way for one value that is small, or lies in registered memory."""
    if nbytes <= INLINE_VALUE_MAX_BYTES:
        return Sources(_AT_START, inline=ffi.buffer(pointer, nbytes)[:])
    address = int(ffi.cast(_ADDRESS, pointer))
    region = regions.find(address, address + nbytes)
    if region is None:
        return None
    return Sources(np.array([address - region.address], dtype=np.uint64), region=region.id)


def _scattered(
    pieces: Pieces,
    engine: TransferEngine,
    memory: tuple[Numbers, Numbers, npt.NDArray[np.bool_]],
    places: tuple[npt.NDArray[np.uint32], Numbers],
) -> Sources:
    addresses, lengths, filled = memory
    ids, inside = places
    strange = filled & (ids == 0)
    offer = None
    if strange.any():
        offer = Offer(engine.native, addresses[strange], lengths[strange])
        ids[strange] = offer.id
        inside[strange] = np.cumsum(lengths[strange]) - lengths[strange]
    rows = np.zeros(len(addresses), dtype=PULL_PIECE)
    rows["offset"], rows["length"], rows["region"] = inside, lengths, ids
    count = np.arange(1, len(rows) + 1) if pieces.ends is None else np.array(pieces.ends)
    kept = np.concatenate([[0], np.cumsum(filled)])  # pieces of no bytes are not sent
    ends = kept[count]
    starts = np.concatenate([[0], ends[:-1]]).astype(np.uint64)
    return Sources(starts, pieces=rows[filled], ends=ends, offer=offer)
