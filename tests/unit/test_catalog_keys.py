"""The packed keys of complete objects against dictionaries."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from catalog_model import Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_py.errors import UsageError
from mooncake_py.master.eviction import Links, Lru
from mooncake_py.master.objects import HARD_PIN, READ, ObjectTable
from mooncake_py.master.reads import _PLACEMENT
from mooncake_py.model import PLACEMENT_ROW

# Some of all lengths, some that differ in one byte, some that two tenants have.
KEYS = [b"%d" % i * length for i in range(6) for length in (1, 5, 64, 500, 4096)]
STEPS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(0, 1), st.integers(0, 3)), max_size=120
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_packed_keys_agree_with_dictionaries(steps: Sequence[tuple[bytes, int, int]]) -> None:
    table = ObjectTable(64)
    packed = [table.keys_of(number, f"t{number}") for number in range(2)]
    plain: list[dict[bytes, int]] = [{}, {}]
    for key, tenant, action in steps:
        slot = plain[tenant].get(key)
        if slot is not None and action:
            assert packed[tenant].leave(slot)
            assert not packed[tenant].leave(slot), "once only"
            table.drop(slot)
            del plain[tenant][key]
        elif slot is None:
            slot = plain[tenant][key] = table.add(key, 1, 64, 0, tenant)
            assert key not in packed[tenant], "it has a slot and cannot be found"
            packed[tenant].enter(slot)
        for mine, other in zip(packed, plain, strict=True):
            assert len(mine) == len(other)
            assert (key in mine) == (key in other)
            assert mine.get(key) == other.get(key)
    for mine, other in zip(packed, plain, strict=True):
        assert dict(mine.items()) == dict(other)
        assert list(mine.values()) == sorted(other.values()), "in the order of slots"
        assert mine.find_many(KEYS).tolist() == [other.get(key, -1) for key in KEYS]
        assert mine.has_each(KEYS) == bytes(key in other for key in KEYS)
        assert mine.has_any(KEYS[:2]) == any(key in other for key in KEYS[:2])
        assert mine.has_any(KEYS) == bool(other)
    live = table.live()
    expected = sorted(slot for other in plain for slot in other.values())
    assert live == expected
    assert table.key.many(live) == [table.key[slot] for slot in live]


def test_a_later_slot_with_the_same_key_is_found_instead() -> None:
    table = ObjectTable(8)
    keys = table.keys_of(0, "t")
    first, second = (table.add(b"k", 1, 64, 0, 0) for _ in range(2))
    keys.enter(first)
    keys.enter(second)
    assert (keys[b"k"], len(keys)) == (second, 1)
    assert not keys.leave(first), "it is not the one that is found"
    assert keys[b"k"] == second
    with pytest.raises(KeyError):
        keys[b"other"]


def test_a_key_that_is_too_long_is_refused_and_takes_no_slot() -> None:
    table = ObjectTable(8)
    with pytest.raises(UsageError):
        table.add(bytes(9_000), 1, 64, 0, 0)
    assert len(table) == 0
    assert table.add(b"k", 1, 64, 0, 0) == 0
    assert len(table) == 1


@pytest.mark.parametrize("pinned", [False, True])
def test_touching_many_is_touching_one_by_one(pinned: bool) -> None:
    """Column by column or not, also with some that are protected or named twice."""
    generator = random.Random(4)
    tables = [ObjectTable(1 << 12) for _ in range(2)]
    orders = [Lru(table, Links(1 << 12, 3), 50) for table in tables]
    for table, order in zip(tables, orders, strict=True):
        for i in range(300):
            slot = table.add(b"%d" % i, i + 1, 64, 0, 0)
            if pinned and i % 40 == 0:
                table.flags[slot] |= HARD_PIN
            order.add(slot, 1)
    for now in range(2, 40):
        some = [generator.randrange(300) for _ in range(generator.choice((3, 20, 100)))]
        some = some if now % 3 else list(dict.fromkeys(some))
        orders[0].touch(some, now)
        for slot in some:
            orders[1].touch([slot], now)
    for ends in range(200, 500):
        victims = [order.victim(ends) for order in orders]
        assert victims[0] == victims[1]
        if victims[0] < 0:
            break
        assert bool(tables[0].flags[victims[0]] & READ) == bool(tables[1].flags[victims[0]] & READ)
        assert tables[0].stamp[victims[0]] == tables[1].stamp[victims[0]]
        for table, order in zip(tables, orders, strict=True):
            order.remove(victims[0])
            table.drop(victims[0])
    assert orders[0]._unread == orders[1]._unread


def test_locating_many_answers_what_locating_one_by_one_does() -> None:
    driver = Driver()
    for node in ("a", "b", "c"):
        driver.mount(node, 1 << 20)
    keys = [b"k%d" % i for i in range(40)]
    assert not any(driver.put(keys))
    asked = [*keys[7:], b"none", *keys[:7]]
    for prefix in (False, True):
        many = driver.locate(asked, prefix=prefix)
        count = len(many.status)
        assert count == (34 if prefix else 41)
        rows = list(PLACEMENT_ROW.iter_unpack(many.placements))
        assert [row[0] for row in rows] == [i for i in range(count) if not many.status[i]]
        for index, entry, *where in rows:
            one = driver.locate(asked[index : index + 1])
            assert list(one.segment_ids) == [many.segment_ids[entry]]
            assert list(PLACEMENT_ROW.iter_unpack(one.placements)) == [(0, 0, *where)]
        seen = list(dict.fromkeys(row[1] for row in rows))
        assert seen == list(range(len(many.segment_ids))), "in the order of their appearance"


def test_columns_of_placements_are_the_rows_of_the_wire() -> None:
    row = (1, 2, 3, 4, 5)
    assert np.array([row], dtype=_PLACEMENT).tobytes() == PLACEMENT_ROW.pack(*row)
