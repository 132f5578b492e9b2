"""The allocator against a bit map, and how full it gets."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_py.master.allocator import Allocator, size_class


class Bitmap:
    """The obvious allocator's view: one flag a unit."""

    def __init__(self, units: int) -> None:
        self.taken = [False] * units

    def mark(self, start: int, units: int, taken: bool) -> None:
        assert all(flag is not taken for flag in self.taken[start : start + units])
        self.taken[start : start + units] = [taken] * units

    def holes(self) -> list[tuple[int, int]]:
        found, start = [], -1
        for i, taken in enumerate([*self.taken, True]):
            if not taken and start < 0:
                start = i
            elif taken and start >= 0:
                found.append((start, i - start))
                start = -1
        return found


def check(allocator: Allocator, bitmap: Bitmap) -> None:
    holes = bitmap.holes()
    assert allocator.holes() == holes, "holes, merged with their neighbours"
    assert allocator.free == sum(units for _, units in holes)
    assert allocator.largest == max((units for _, units in holes), default=0)
    assert allocator.hole_count == len(holes)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 90), st.integers(0, 99)), max_size=120))
def test_holes_are_exactly_what_is_not_taken(steps: list[tuple[bool, int, int]]) -> None:
    allocator, bitmap = Allocator(400), Bitmap(400)
    taken: list[tuple[int, int]] = []
    for give, units, pick in steps:
        if give and taken:
            start, size = taken.pop(pick % len(taken))
            allocator.give(start, size)
            bitmap.mark(start, size, False)
        else:
            fits = any(size >= units for _, size in bitmap.holes())
            start = allocator.take(units)
            assert (start >= 0) == fits, "found whenever a hole is large enough"
            if start >= 0:
                bitmap.mark(start, units, True)
                taken.append((start, units))
        check(allocator, bitmap)
    fresh = Allocator(400)
    fresh.rebuild(taken)
    check(fresh, bitmap)


@given(st.integers(1, 30), st.integers(0, 20), st.sets(st.integers(0, 19)))
def test_many_at_once_are_as_many_as_one_by_one(units: int, count: int, holes: set[int]) -> None:
    allocators = [Allocator(400), Allocator(400)]
    for allocator in allocators:
        for start in [allocator.take(20) for _ in range(20)]:
            if start // 20 in holes:
                allocator.give(start, 20)
    many = allocators[0].take_many(units, count)
    single = [allocators[1].take(units) for _ in range(count)]
    assert many == [start for start in single if start >= 0]
    assert allocators[0].holes() == allocators[1].holes()


def test_rebuild_refuses_overlaps_and_outside() -> None:
    with pytest.raises(ValueError, match="overlaps"):
        Allocator(10).rebuild([(0, 5), (4, 2)])
    with pytest.raises(ValueError, match="outside"):
        Allocator(10).rebuild([(8, 3)])


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_size_classes_keep_order(a: int, b: int) -> None:
    assert (size_class(a) <= size_class(b)) == (a <= b) or size_class(a) == size_class(b)


def churn(sizes: list[int], units: int, steps: int) -> float:
    """Fill, then replace random extents whenever nothing fits: the average share in use."""
    generator = random.Random(7)
    allocator = Allocator(units)
    taken: list[tuple[int, int]] = []
    shares = []
    for _ in range(steps):
        size = generator.choice(sizes)
        while (start := allocator.take(size)) < 0:
            shares.append(1 - allocator.free / units)
            which = generator.randrange(len(taken))
            taken[which], taken[-1] = taken[-1], taken[which]
            allocator.give(*taken.pop())
        taken.append((start, size))
    return sum(shares) / len(shares)


def test_page_sizes_fill_95_percent_under_churn() -> None:
    pages = [4097, 1025, 257]  # 256 KiB, 64 KiB and 16 KiB pages with their headers
    assert churn(pages, 500_000, 20_000) >= 0.95


def test_random_sizes_fill_84_percent_under_churn() -> None:
    generator = random.Random(3)
    sizes = [generator.randrange(16, 16_384) for _ in range(5_000)]  # 1 KiB to 1 MiB
    assert churn(sizes, 4_000_000, 20_000) >= 0.84


def test_every_hole_of_a_chequered_segment_can_be_filled() -> None:
    for holes in (1_000, 10_000):
        allocator = Allocator(holes * 4)
        starts = allocator.take_many(2, holes * 2)
        for start in starts[::2]:
            allocator.give(start, 2)
        assert allocator.hole_count == holes
        assert allocator.take(3) == -1
        assert len(allocator.take_many(2, holes)) == holes
        assert allocator.free == 0
