"""Objects that lie in several parts, on the reader's side.

The entry of such an object (placement_cache.py) holds the rows of all its parts in order, replicas
of a part together, nearest first; `tag` of a row is 1 + where in the object its payload begins.
A read takes of every part what the wanted range has of it, each into its piece of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake_py._native import ffi
from mooncake_py._native.reading import Destinations
from mooncake_py.wire.answers import Grants, Placements
from mooncake_py.wire.rows import EXTENT

Rows = npt.NDArray[np.void]
_TAG = slice(EXTENT.itemsize - 8, EXTENT.itemsize)
_WHOLE = bytes(8)


def is_striped(entry: bytes) -> bool:
    """Are these the rows of parts, and not of replicas of the whole?"""
    return bool(entry) and entry[_TAG] != _WHOLE


def object_length(entry: bytes) -> int:
    """Bytes of the object that these rows are of; 0 for no rows."""
    if not entry:
        return 0
    rows = np.frombuffer(entry, EXTENT)
    if not is_striped(entry):
        return int(rows["length"][0])
    return int((rows["tag"] - np.uint64(1) + rows["length"]).max())


@dataclass(slots=True)
class PartRead:
    """What is wanted of one part: `rows` of its replicas, a range of its payload, and where to."""

    rows: list[bytes]
    start: int
    nbytes: int
    pointers: list[object]
    sizes: list[int]
    code: int = 0


def plan_parts(entry: bytes, to: Destinations) -> list[PartRead] | None:
    """Reads of the parts that the range touches, `to` being the place of the one object; None: the
    range is outside it, or the room too small."""
    rows = np.frombuffer(entry, EXTENT)
    length = object_length(entry)
    first, nbytes = (0, length) if to.ranges is None else to.ranges[0]
    if first + nbytes > length or nbytes > sum(to.sizes):
        return None
    starts = (rows["tag"] - np.uint64(1)).tolist()
    found: list[PartRead] = []
    for start in sorted(set(starts)):
        mine = [at for at, each in enumerate(starts) if each == start]
        end = start + int(rows["length"][mine[0]])
        begin, stop = max(first, start), min(first + nbytes, end)
        if begin < stop:
            pointers, sizes = _cut(to, begin - first, stop - begin)
            of_part = [rows[at : at + 1].tobytes() for at in mine]
            found.append(PartRead(of_part, begin - start, stop - begin, pointers, sizes))
    return found


def _cut(to: Destinations, skip: int, nbytes: int) -> tuple[list[object], list[int]]:
    """The pieces of the target behind its first `skip` bytes, up to `nbytes`."""
    pointers: list[object] = []
    sizes: list[int] = []
    for pointer, size in zip(to.pointers, to.sizes, strict=True):
        if skip < size and nbytes > 0:
            step = min(size - skip, nbytes)
            pointers.append(ffi.cast("char *", pointer) + skip)
            sizes.append(step)
            nbytes -= step
            skip = 0
        else:
            skip = max(0, skip - size)
    return pointers, sizes


def destinations(parts: Sequence[PartRead]) -> Destinations:
    """All of these in one read."""
    ends: list[int] = []
    pointers: list[object] = []
    sizes: list[int] = []
    for part in parts:
        pointers += part.pointers
        sizes += part.sizes
        ends.append(len(pointers))
    return Destinations(pointers, sizes, ends, [(each.start, each.nbytes) for each in parts])


def parts_of(grants: Grants) -> dict[int, tuple[int, int]]:
    """Of grants for parts: generation -> (where in the value its payload begins, number). Parts of
    a key have rising generations, in order; the first one's is that of the key. Empty: there is
    none."""
    rows = sum(len(grant.rows) for grant in grants.grants) // EXTENT.itemsize
    if rows <= np.count_nonzero(grants.generations):
        return {}
    lengths: dict[int, dict[int, int]] = {}  # by key: generation -> bytes
    striped = False
    for grant in grants.grants:
        table = grant.table()
        keys = table["key_index"].astype(np.int64) + grant.key_base
        striped |= bool((table["generation"] != grants.generations[keys]).any())
        columns = (keys.tolist(), table["generation"].tolist(), table["length"].tolist())
        for key, generation, length in zip(*columns, strict=True):
            lengths.setdefault(key, {})[generation] = length
    found: dict[int, tuple[int, int]] = {}
    for of_key in lengths.values() if striped else ():
        start = 0
        for number, generation in enumerate(sorted(of_key)):
            found[generation] = (start, number)
            start += of_key[generation]
    return found


def with_parts(extents: np.ndarray, placements: Placements, indices: Sequence[int]) -> np.ndarray:
    """The rows of objects in one piece, and those of parts, in the order of keys."""
    rows = placements.parts
    parts = np.zeros(len(rows), dtype=EXTENT)
    for name in ("key_index", "offset", "length", "generation"):
        parts[name] = rows[name]
    parts["segment_index"] = np.array(indices, "<u4")[rows["segment_index"]]
    parts["tag"] = rows["start"] + np.uint64(1)
    joined = np.concatenate([extents, parts])
    ordered: np.ndarray = joined[np.argsort(joined["key_index"], kind="stable")]
    return ordered
