"""What the client remembers of placements, and for how long."""

from __future__ import annotations

import numpy as np

from mooncake_py.store.placement_cache import AVOID_MS, PlacementCache
from mooncake_py.wire.rows import EXTENT

ROW = b"r" * EXTENT.itemsize


def learn(cache: PlacementCache, names: list[bytes], rows: bytes = ROW) -> None:
    cache.arrive(cache.depart(), names, [rows] * len(names))


def test_f32_what_was_learnt_is_found_until_forgotten() -> None:
    cache = PlacementCache()
    learn(cache, [b"a", b"b"])
    assert cache.find([b"a", b"c", b"b", b"a"]) == [ROW, None, ROW, ROW]
    cache.forget([b"a", b"never"])
    assert cache.find([b"a", b"b"]) == [None, ROW]
    cache.clear()
    assert cache.find([b"b"]) == [None]


def test_f32_a_miss_is_not_remembered() -> None:
    cache = PlacementCache()
    cache.arrive(cache.depart(), [b"a", b"b"], [b"", ROW])
    assert cache.find([b"a", b"b"]) == [None, ROW]


def test_f32_the_cache_is_bounded_and_keeps_the_newest() -> None:
    cache = PlacementCache(entries_max=100)
    for i in range(1000):
        learn(cache, [b"%d" % i])
        assert len(cache) <= 102
    assert cache.find([b"999", b"0"]) == [ROW, None]
    learn(cache, [b"many-%d" % i for i in range(5000)])
    assert len(cache) <= 102
    assert cache.find([b"many-4999", b"many-0"]) == [ROW, None]


def test_f32_an_answer_on_its_way_does_not_bring_back_what_was_forgotten() -> None:
    cache = PlacementCache()
    flight = cache.depart()
    cache.forget([b"removed"])
    cache.arrive(flight, [b"removed", b"kept"], [ROW, ROW])
    assert cache.find([b"removed", b"kept"]) == [None, ROW]


def test_a23_a_broken_placement_is_avoided_for_a_while() -> None:
    cache = PlacementCache()
    rows = np.zeros(3, EXTENT)
    rows["generation"] = [7, 7, 8]
    rows["segment_index"] = [0, 1, 0]
    assert cache.usable(rows, 1000) is None
    cache.avoid(7, 1, 1000)
    usable = cache.usable(rows, 1000)
    assert usable is not None
    assert usable.tolist() == [True, False, True]
    assert cache.usable(rows, 1000 + AVOID_MS) is None
