"""Remove and list: exactly what was asked for, and an honest account of it."""

from __future__ import annotations

import random

import pytest
from catalog_model import Driver, check_invariants, place_rows

from mooncake_py.errors import ObjectLeased, UsageError
from mooncake_py.master.commands import List, Listed, PutEnd, PutStart, Refused, Remove, Unseal
from mooncake_py.model import EXTENT_ROW

LEASED = ObjectLeased.code


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.mount("a", 1 << 20)
    return driver


def test_a08_removal_is_idempotent_and_durable_before_the_answer(driver: Driver) -> None:
    driver.put([b"k"], 64)
    applied = driver.apply(Remove("t", [b"k", b"absent", b"k"]))
    assert list(applied.reply.status) == [0, 0, 0]  # type: ignore[union-attr]
    assert applied.reply.removed == 1  # type: ignore[union-attr]
    assert applied.durable_first
    assert driver.apply(Remove("t", [b"k"])).durable_first, "its record may be on its way"
    assert driver.apply(Remove("nobody", [b"k"])).durable_first
    assert driver.exists([b"k"]) == [0]


def test_a08_removed_extents_are_unsealed_on_their_node(driver: Driver) -> None:
    driver.put([b"k"], 64)
    ((_, segment_id, offset, length, generation),) = place_rows(driver.locate([b"k"]))
    (effect,) = driver.apply(Remove("t", [b"k"], force=True)).effects
    assert isinstance(effect, Unseal)
    assert effect.segment_id == segment_id
    row = EXTENT_ROW.unpack(effect.rows)
    assert row[2:5] == (offset, length, generation)


def test_a08_f19_a_leased_object_stays_unless_forced(driver: Driver) -> None:
    driver.put([b"k"], 64)
    driver.locate([b"k"])
    assert list(driver.remove([b"k"]).status) == [LEASED]
    assert driver.exists([b"k"]) == [1]
    place = place_rows(driver.locate([b"k"]))[0]
    assert list(driver.remove([b"k"], force=True).status) == [0]
    driver.put([b"next"], 64)
    assert place_rows(driver.locate([b"next"]))[0][2] != place[2], "readers were promised it"
    driver.pass_time(driver.settings.lease_ms)
    driver.put([b"later"], 64)
    check_invariants(driver.catalog)


def test_hard_pinned_objects_need_force(driver: Driver) -> None:
    driver.put([b"k"], 64, hard_pin=True)
    assert list(driver.remove([b"k"]).status) == [LEASED]
    assert list(driver.remove([b"k"], force=True).status) == [0]


def test_a08_f19_removal_of_all_counts_what_went_and_what_stayed(driver: Driver) -> None:
    driver.put([b"a/%d" % i for i in range(10)], 64)
    driver.put([b"b/%d" % i for i in range(5)], 64)
    driver.locate([b"a/3"])
    reply = driver.remove([], all=True, prefix=b"a/")
    assert (reply.removed, reply.kept) == (9, 1)
    assert driver.exists([b"a/3"]) == [1]
    assert driver.exists([b"b/%d" % i for i in range(5)]) == [1] * 5
    assert driver.remove([], all=True, force=True).removed == 6


def test_a09_removal_never_reaches_another_tenant(driver: Driver) -> None:
    driver.put([b"k"], 64)
    granted = driver.apply(PutStart("other", [b"k"], [64], bytes(16))).reply
    driver.apply(PutEnd("other", [b"k"], granted.generations))  # type: ignore[union-attr]
    before = driver.catalog.state.tenants.find("other")
    assert before is not None
    used = before.used_bytes
    assert driver.remove([], all=True, force=True).removed == 1
    assert before.used_bytes == used
    assert len(before.complete) == 1


def test_a09_a_scope_that_cannot_be_meant_is_refused_before_anything_changes(
    driver: Driver,
) -> None:
    driver.put([b"k"], 64)
    for command in (Remove("t", [b"k"], all=True), Remove("t", [], prefix=b"k")):
        reply = driver.apply(command).reply
        assert isinstance(reply, Refused)
        assert reply.code == UsageError.code
    assert driver.exists([b"k"]) == [1]


def test_f48_listing_pages_through_all_keys_in_order(driver: Driver) -> None:
    generator = random.Random(2)
    keys = sorted({b"%x" % generator.randrange(1 << 20) for _ in range(300)})
    shuffled = list(keys)
    generator.shuffle(shuffled)
    driver.put(shuffled, 10)
    found: list[bytes] = []
    while True:
        page = driver.apply(List("t", b"", found[-1] if found else b"", 7)).reply
        assert isinstance(page, Listed)
        found += page.keys
        assert list(page.lengths) == [10] * len(page.keys)
        assert list(page.replicas) == [1] * len(page.keys)
        if not page.more:
            break
    assert found == keys
    page = driver.apply(List("t", b"a", b"", 1000)).reply
    assert isinstance(page, Listed)
    assert list(page.keys) == [key for key in keys if key.startswith(b"a")]


def test_f48_a_listing_goes_on_while_keys_come_and_go(driver: Driver) -> None:
    driver.put([b"k%03d" % i for i in range(100)], 10)
    found: list[bytes] = []
    for step in range(100):
        page = driver.apply(List("t", b"k", found[-1] if found else b"", 9)).reply
        assert isinstance(page, Listed)
        found += page.keys
        if not page.more:
            break
        driver.remove([b"k%03d" % (99 - step), b"k%03d" % step])
        driver.put([b"k%03d.new" % step], 10)
    assert found == sorted(set(found))
    kept = {b"k%03d" % i for i in range(12, 88)}
    assert kept <= set(found), "what was there all the time is seen"
    again = driver.apply(List("t", b"k", b"", 1000)).reply
    assert isinstance(again, Listed)
    assert sum(key.endswith(b".new") for key in again.keys) >= 9, "a new listing sees all"
    tenant = driver.catalog.state.tenants.find("t")
    assert tenant is not None
    driver.apply(List("t", b"k", b"k0", 10))
    assert tenant.listings
    driver.pass_time(120_000)
    assert not tenant.listings


def test_listing_changes_nothing_and_bounds_its_page(driver: Driver) -> None:
    driver.put([b"k"], 64)
    assert isinstance(driver.apply(List("t", limit=0)).reply, Refused)
    assert driver.apply(List("nobody")).reply == Listed((), (), (), False)
    assert driver.catalog.state.tenants.find("nobody") is None
