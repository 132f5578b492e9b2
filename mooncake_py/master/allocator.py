"""Allocator of one segment: which ranges of its address space are free.

Rules. Everything is counted in units of 64 bytes (`EXTENT_ALIGN_BYTES`). Only *free* ranges
("holes") are stored; the owner of a taken range remembers it and gives it back whole. Two
neighbouring holes never exist: `give` merges at once, found through two maps (hole by start, hole
by end). Holes are filed by exact size, and sizes by class (32 classes an octave, so sizes of one
class differ by about 3 %); a bit map says which classes have holes.

One hole, the *tail* (at first the whole segment), is not filed, so that filling an empty segment is
counting up. `take` uses the exact size if there is one (KV pages repeat sizes, so that is the usual
case), else the best of the smallest fitting size of the same class, the smallest size of the next
class that has any, and the tail. It finds a hole whenever one is large enough. Cost: a few
dictionary operations, independent of the number of holes; only a class with very many distinct
sizes costs a walk over those sizes.

Not thread-safe; pure.
"""

from __future__ import annotations

from collections.abc import Iterable

UNIT_BYTES = 64
_MANTISSA_BITS = 5
_SMALL = 1 << (_MANTISSA_BITS + 1)
_LOOK_MAX = 32  # distinct sizes looked at before a larger class is preferred


def size_class(units: int) -> int:
    """Class of a size: exact below 64 units, then 32 classes an octave. Monotonic."""
    if units < _SMALL:
        return units
    shift = units.bit_length() - _MANTISSA_BITS - 1
    return (shift << _MANTISSA_BITS) + (units >> shift)


class Allocator:
    """Free ranges of `[0, units)`."""

    __slots__ = (
        "_by_class",
        "_by_size",
        "_classes",
        "_ends",
        "_starts",
        "_tail",
        "_tail_end",
        "free",
        "units",
    )

    def __init__(self, units: int) -> None:
        self.units = units
        self._clear()

    def _clear(self) -> None:
        self.free = self.units
        self._tail = 0  # start of the tail
        self._tail_end = self.units
        self._starts: dict[int, int] = {}  # start -> size
        self._ends: dict[int, int] = {}  # end -> start
        self._by_size: dict[int, dict[int, None]] = {}  # size -> starts
        self._by_class: dict[int, set[int]] = {}  # class -> sizes that have holes
        self._classes = 0  # bit c: class c has holes

    def take(self, units: int) -> int:
        """Start of a range of `units` that is now taken, or -1: no hole is large enough."""
        tail = self._tail_end - self._tail
        size = units if units in self._by_size else self._fit(units) if self._classes else -1
        if tail >= units and (size < 0 or units <= tail < size):
            start = self._tail
            self._tail = start + units
            self.free -= units
            return start
        if size < 0:
            return -1
        holes = self._by_size[size]
        start, _ = holes.popitem()  # the last: popitem alone stays O(1) after many deletions
        del self._starts[start]
        del self._ends[start + size]
        if not holes:
            self._forget_size(size)
        if size != units:
            self._file(start + units, size - units)
        self.free -= units
        return start

    def take_many(self, units: int, count: int) -> list[int]:
        """Up to `count` ranges of `units`; as many as `take` would find one after the other."""
        if not self._classes:
            found = min(count, (self._tail_end - self._tail) // units)
            start = self._tail
            self._tail = end = start + found * units
            self.free -= found * units
            return list(range(start, end, units))
        starts = []
        for _ in range(count):
            start = self.take(units)
            if start < 0:
                break
            starts.append(start)
        return starts

    def give(self, start: int, units: int) -> None:
        """Return a taken range. Merges with free neighbours."""
        self.free += units
        end = start + units
        size = self._starts.get(end)
        if size is not None:
            self._forget(end, size)
            end += size
        before = self._ends.get(start)
        if before is not None:
            self._forget(before, start - before)
            start = before
        if end == self._tail:
            self._tail = start
        elif start == self._tail_end:
            self._tail_end = end
        else:
            self._file(start, end - start)

    def claim(self, start: int, units: int) -> bool:
        """Take exactly this range; False: not all of it is free. Cheap in ascending order behind
        everything that is taken, else a walk over the holes."""
        end = start + units
        if self._tail <= start and end <= self._tail_end:
            before, self._tail = self._tail, end
            if before < start:
                self._file(before, start - before)
            self.free -= units
            return True
        for hole, size in self._starts.items():
            if hole <= start and end <= hole + size:
                break
        else:
            return False
        self._forget(hole, size)
        if hole < start:
            self._file(hole, start - hole)
        if end < hole + size:
            self._file(end, hole + size - end)
        self.free -= units
        return True

    def grow(self, units: int) -> None:
        """The address space has become larger."""
        start, added = self.units, units - self.units
        self.units = units
        self.give(start, added)

    def rebuild(self, taken: Iterable[tuple[int, int]]) -> None:
        """Start over with exactly these (start, units) ranges taken; they must not overlap."""
        self._clear()
        position = 0
        for start, units in sorted(taken):
            if start < position or start + units > self.units:
                raise ValueError(f"range {start}+{units} overlaps or lies outside")
            if start > position:
                self._file(position, start - position)
            self.free -= units
            position = start + units
        self._tail = position

    @property
    def largest(self) -> int:
        """Units of the largest hole."""
        tail = self._tail_end - self._tail
        if not self._classes:
            return tail
        return max(tail, *self._by_class[self._classes.bit_length() - 1])

    @property
    def hole_count(self) -> int:
        return len(self._starts) + (self._tail < self._tail_end)

    def holes(self) -> list[tuple[int, int]]:
        """(start, units) of every hole, in order."""
        tail = [(self._tail, self._tail_end - self._tail)] if self._tail < self._tail_end else []
        return sorted([*self._starts.items(), *tail])

    def _fit(self, units: int) -> int:
        """Size of a hole that holds `units`, or -1."""
        own = size_class(units)
        sizes = self._by_class.get(own, ())
        if len(sizes) <= _LOOK_MAX:
            fitting = [size for size in sizes if size >= units]
            if fitting:
                return min(fitting)
        larger = self._classes >> (own + 1)
        if larger:
            found = self._by_class[own + (larger & -larger).bit_length()]
            return min(found) if len(found) <= _LOOK_MAX else next(iter(found))
        return min((size for size in sizes if size >= units), default=-1)

    def _file(self, start: int, units: int) -> None:
        self._starts[start] = units
        self._ends[start + units] = start
        holes = self._by_size.get(units)
        if holes is None:
            self._by_size[units] = {start: None}
            own = size_class(units)
            sizes = self._by_class.get(own)
            if sizes is None:
                self._by_class[own] = {units}
                self._classes |= 1 << own
            else:
                sizes.add(units)
        else:
            holes[start] = None

    def _forget(self, start: int, units: int) -> None:
        del self._starts[start]
        del self._ends[start + units]
        holes = self._by_size[units]
        del holes[start]
        if not holes:
            self._forget_size(units)

    def _forget_size(self, units: int) -> None:
        del self._by_size[units]
        own = size_class(units)
        sizes = self._by_class[own]
        sizes.discard(units)
        if not sizes:
            del self._by_class[own]
            self._classes &= ~(1 << own)
