"""Whose KV bytes lie where: shapes of one rank's pages, and which rank sends which heads to whom.

Memory of one rank: for every layer and plane a buffer of pages, each
`[page_tokens][heads of this rank][head_bytes]`, tokens in order. Planes are keys and values, or the
one latent of MLA, which every rank holds whole (`head_count` 1).

Ranks of tensor parallelism divide the heads evenly. Where there are more ranks than heads, each
head is held by several ranks, neighbours first, as engines replicate it. `partners` pairs two such
divisions: every head of every decode rank comes from exactly one prefill rank. Both sides compute
it from the two layouts, so the hand-shake needs no table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mooncake_py.errors import UsageError
from mooncake_py.transfer import Memory, make_slices
from mooncake_py.transfer.slices import Slices

if TYPE_CHECKING:
    from mooncake_py._native.memory import Buffer

COUNT_MAX = 1 << 20
DIVISION_MAX = 4_096  # heads, ranks: pairing them costs their product at worst
_DIVISION = ("rank", "rank_count")  # may differ between the two sides


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one rank's KV memory. Raises UsageError for what cannot be."""

    layer_count: int
    page_tokens: int
    head_count: int  # of the whole model, not of the rank; MLA: 1
    head_bytes: int  # of one head of one token in one plane
    plane_count: int = 2  # keys and values; MLA: 1
    dtype: str = ""  # two ranks that name different ones refuse each other
    model: str = ""  # likewise: whatever else makes bytes incompatible
    rank: int = 0
    rank_count: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "str":
                if not isinstance(value, str) or len(value) > 256:
                    raise UsageError(f"{field.name} is a text of at most 256", got=value)
            elif type(value) is not int or not 0 <= value <= COUNT_MAX:
                raise UsageError(f"{field.name} is from 0 to {COUNT_MAX}", got=value)
        if max(self.head_count, self.rank_count) > DIVISION_MAX:
            raise UsageError("too many heads or ranks", most=DIVISION_MAX)
        least = min(self.layer_count, self.page_tokens, self.head_count, self.head_bytes)
        if not 1 <= self.plane_count <= 2 or least < 1 or self.rank >= self.rank_count:
            raise UsageError("a layout has layers, tokens, heads, bytes, and rank < rank_count")
        big, small = max(self.head_count, self.rank_count), min(self.head_count, self.rank_count)
        if big % small:
            raise UsageError(
                "heads are divided evenly over ranks, or ranks over heads",
                head_count=self.head_count,
                rank_count=self.rank_count,
            )

    @property
    def heads(self) -> range:
        """The model's heads that this rank holds."""
        if self.head_count >= self.rank_count:
            each = self.head_count // self.rank_count
            return range(self.rank * each, (self.rank + 1) * each)
        head = self.rank * self.head_count // self.rank_count
        return range(head, head + 1)

    @property
    def token_bytes(self) -> int:
        return len(self.heads) * self.head_bytes

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.token_bytes

    def of_rank(self, rank: int) -> KvLayout:
        return dataclasses.replace(self, rank=rank)

    def check_meets(self, other: KvLayout) -> None:
        """UsageError naming every field that keeps the two from exchanging pages."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in _DIVISION]
        differ = {
            name: (getattr(self, name), getattr(other, name))
            for name in names
            if getattr(self, name) != getattr(other, name)
        }
        if differ:
            raise UsageError(
                "the layouts of the two sides differ", **differ,
                remedy="start both with the same model, dtype and page size",
            )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, given: object) -> KvLayout:
        """Raises UsageError for anything that is not a layout."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(given, dict) or set(given) != names:
            raise UsageError("this is no KV layout", got=str(given)[:200])
        return cls(**given)


def partners(prefill: KvLayout, decode: KvLayout) -> dict[int, dict[int, range]]:
    """Decode rank -> prefill rank -> the heads it sends; of the two layouts the ranks themselves do
    not matter. A prefill rank that nobody needs is listed with no heads under one decode rank, so
    that it learns of every room."""
    table: dict[int, dict[int, range]] = {}
    used: set[int] = set()
    holders = _holders(prefill)
    for rank in range(decode.rank_count):
        sources: dict[int, range] = {}
        for head in decode.of_rank(rank).heads:
            # Replicas share the work: neighbours on one side ask neighbours on the other.
            source = holders[head][rank % len(holders[head])]
            known = sources.get(source)
            sources[source] = range(known.start if known else head, head + 1)
        used.update(sources)
        table[rank] = sources
    for idle in set(range(prefill.rank_count)) - used:
        table[idle % decode.rank_count][idle] = range(0)
    return table


def _holders(layout: KvLayout) -> list[list[int]]:
    holders: list[list[int]] = [[] for _ in range(layout.head_count)]
    for rank in range(layout.rank_count):
        for head in layout.of_rank(rank).heads:
            holders[head].append(rank)
    return holders


class KvPool:
    """One rank's pages in memory: `buffers` in the order layer 0 plane 0, layer 0 plane 1, ...

    Each is a `Memory` or has the buffer protocol (torch: `tensor.view(torch.uint8).numpy()`), is
    contiguous, writable on the decode side, and holds the same whole number of pages. The pool
    keeps them alive. Raises UsageError. Thread-safe: nothing of it changes.
    """

    def __init__(self, layout: KvLayout, buffers: Sequence[Memory | Buffer]) -> None:
        expected = layout.layer_count * layout.plane_count
        if len(buffers) != expected:
            raise UsageError("one buffer a layer and plane", expected=expected, got=len(buffers))
        self.layout = layout
        self._arrays = [_array(buffer) for buffer in buffers]
        sizes = {array.size for array in self._arrays}
        nbytes = sizes.pop()
        if sizes or nbytes < layout.page_bytes or nbytes % layout.page_bytes:
            raise UsageError(
                "buffers hold the same whole number of pages",
                page_bytes=layout.page_bytes,
                buffer_bytes=sorted({nbytes, *sizes}),
            )
        self.page_count = nbytes // layout.page_bytes

    @property
    def buffers(self) -> list[Any]:
        return [array.data for array in self._arrays]

    def check_pages(self, pages: Sequence[int]) -> NDArray[np.int64]:
        """The pages as an array. UsageError: none, one twice, or one that does not exist."""
        try:
            array = np.asarray(pages, dtype=np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"pages are numbers: {error}") from error
        if array.ndim != 1 or not 1 <= array.size <= self.page_count:
            raise UsageError("a room has from 1 page to all", pages=array.size, of=self.page_count)
        if array.min() < 0 or array.max() >= self.page_count:
            raise UsageError("no such page", pages=(int(array.min()), int(array.max())),
                             of=self.page_count)  # fmt: skip
        if np.unique(array).size != array.size:
            raise UsageError("a page is named twice")
        return array

    def pieces(self, pages: NDArray[np.int64]) -> list[Any]:
        """Views that, one after the other, are the pages of all layers and planes in room order."""
        size = self.layout.page_bytes
        bounds = [(int(pages[a]) * size, (int(pages[a]) + b - a) * size) for a, b in _runs(pages)]
        return [array[start:end].data for array in self._arrays for start, end in bounds]

    def slices(self, layer: int, pages: NDArray[np.int64], part: range, target: Target) -> Slices:
        """Rows that write `target.heads` of `part` (positions in the room's `pages`) of one layer;
        `local` and `remote_offset` are set."""
        own, theirs = self.layout, target.layout
        positions = np.arange(part.start, part.stop, dtype=np.int64)
        rows = [
            self._plane(layer * own.plane_count + plane, pages, positions, target)
            for plane in range(own.plane_count)
        ]
        local, remote, length = (np.concatenate(column) for column in zip(*rows, strict=True))
        slices = make_slices(local.size)
        slices["region"] = target.region
        slices["local"], slices["length"] = local, length
        slices["remote_offset"] = remote + (
            layer * theirs.plane_count * pages.size * theirs.page_bytes
        )
        return slices

    def _plane(
        self,
        buffer: int,
        pages: NDArray[np.int64],
        positions: NDArray[np.int64],
        target: Target,
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
        own, theirs = self.layout, target.layout
        base = self._arrays[buffer].ctypes.data
        plane_start = buffer % own.plane_count * pages.size * theirs.page_bytes
        if own.heads == theirs.heads == target.heads:  # whole pages, neighbours in one slice
            runs = np.array(list(_runs(pages[positions])), dtype=np.int64)
            first, count = positions[runs[:, 0]], runs[:, 1] - runs[:, 0]
            local = base + pages[first] * own.page_bytes
            remote = plane_start + first * theirs.page_bytes
            length = count * own.page_bytes
        else:  # the heads of a token lie together, those of the next a stride further
            tokens = np.arange(own.page_tokens, dtype=np.int64)
            skip = (target.heads.start - own.heads.start) * own.head_bytes
            hole = (target.heads.start - theirs.heads.start) * own.head_bytes
            pages_at = pages[positions, None] * own.page_bytes
            local = (base + skip + pages_at + tokens * own.token_bytes).ravel()
            positions_at = positions[:, None] * theirs.page_bytes
            remote = (plane_start + hole + positions_at + tokens * theirs.token_bytes).ravel()
            length = np.full(local.size, len(target.heads) * own.head_bytes, dtype=np.int64)
        return local.astype(np.uint64), remote.astype(np.uint64), length.astype(np.uint64)


@dataclass(frozen=True, slots=True)
class Target:
    """A decode rank as one prefill rank sees it: its layout, its region, and what it wants."""

    layout: KvLayout
    region: int
    heads: range


def _array(buffer: Memory | Buffer) -> NDArray[np.uint8]:
    view: Any = buffer.view() if isinstance(buffer, Memory) else buffer
    try:
        return np.frombuffer(view, dtype=np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(f"not usable as pages: {error}") from error


def _runs(pages: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(first, end) positions of stretches whose pages are neighbours in memory."""
    ends = [*(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), int(pages.size)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
