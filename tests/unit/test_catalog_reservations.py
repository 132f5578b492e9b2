"""Reservations: grants whose keys are named at the commit, and every way in which they end."""

from __future__ import annotations

import pytest
from catalog_model import Driver, check_invariants, picture

from mooncake_py.errors import LeaseExpired, ObjectExists, UsageError
from mooncake_py.master import records
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import PutEnd, Refused, Reserve, Reserved, SetQuota, Tick
from mooncake_py.master.shadow import Shadow
from mooncake_py.model import EXTENT_ROW, extent_bytes, reserved_key

EXISTS, EXPIRED = ObjectExists.code, LeaseExpired.code
KIB = 1024


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.mount("a", 1024 * KIB)
    return driver


def reserve(driver: Driver, count: int, length: int = 4096) -> list[int]:
    """Their generations."""
    reply = driver.apply(Reserve("t", length, count, random=7)).reply
    assert isinstance(reply, Reserved)
    rows = [row for rows in reply.rows for row in EXTENT_ROW.iter_unpack(rows)]
    assert all(row[3] == length and row[5] > driver.now_ms for row in rows)
    return [row[4] for row in rows]


def test_a_reservation_becomes_the_object_that_its_commit_names(driver: Driver) -> None:
    first, second, third = reserve(driver, 3)
    assert driver.exists([b"x", reserved_key(first)]) == [0, 0]
    assert driver.end([b"x", b"y"], [second, first], reserved=True) == [0, 0]
    assert driver.exists([b"x", b"y"]) == [1, 1]
    assert driver.end([b"x", b"y"], [second, first], reserved=True) == [0, 0], "asked twice"
    assert driver.end([b"z"], [second], reserved=True) == [EXPIRED], "it is used up"
    assert driver.end([b"z"], [third], reserved=True) == [0]
    check_invariants(driver.catalog)


def test_f07_a_taken_key_is_refused_at_the_commit_and_the_space_comes_back(driver: Driver) -> None:
    free = driver.catalog.state.members.at(0).allocator.free
    driver.put([b"old"])
    running = driver.start([b"running"])
    generations = reserve(driver, 3)
    keys = [b"old", b"running", b"new"]
    assert driver.end(keys, generations, reserved=True) == [EXISTS, EXISTS, 0]
    assert driver.end([b"running"], list(running.generations)) == [0], "the other writer's goes on"
    (twice, again) = reserve(driver, 2)
    assert driver.end([b"twin", b"twin"], [twice, again], reserved=True) == [0, EXISTS]
    driver.remove([b"old", b"running", b"new", b"twin"], force=True)
    driver.now_ms += driver.settings.grant_ttl_ms + driver.settings.grant_margin_ms + 1
    driver.beat_all()
    driver.apply(Tick())
    driver.apply(Tick())
    assert driver.catalog.state.members.at(0).allocator.free == free
    check_invariants(driver.catalog)


def test_f08_what_is_not_committed_in_time_ends_by_itself(driver: Driver) -> None:
    free = driver.catalog.state.members.at(0).allocator.free
    late, given_back = reserve(driver, 2)
    driver.revoke([reserved_key(given_back)], [given_back])
    driver.now_ms += driver.settings.grant_ttl_ms
    assert driver.end([b"k"], [late], reserved=True) == [EXPIRED]
    driver.now_ms += driver.settings.grant_margin_ms
    driver.beat_all()
    driver.apply(Tick())
    assert driver.catalog.state.members.at(0).allocator.free == free
    assert driver.exists([b"k"]) == [0]
    check_invariants(driver.catalog)


def test_reservations_evict_nothing_and_take_a_small_share(driver: Driver) -> None:
    total = len(reserve(driver, 1000)) * extent_bytes(4096)
    assert 0.9 * 64 * KIB < total <= 64 * KIB, "one part in sixteen"
    assert reserve(driver, 1) == []
    full = Driver()
    full.mount("a", 1024 * KIB)
    keys = [b"%d" % i for i in range(300)]
    full.put(keys)
    before = full.exists(keys)
    assert reserve(full, 8) == []
    assert full.exists(keys) == before


def test_a_tenant_with_a_quota_gets_none(driver: Driver) -> None:
    driver.apply(SetQuota("t", 1 << 20, 100))
    assert reserve(driver, 8) == []


def test_a20_records_bring_back_what_was_committed_and_no_reservation(driver: Driver) -> None:
    kept, named, unused = reserve(driver, 3)
    driver.put([b"plain"])
    snapshot = driver.catalog.snapshot(driver.now_ms)
    since = len(driver.log)
    assert driver.end([b"a", b"b"], [kept, named], reserved=True) == [0, 0]
    driver.remove([b"b"], force=True)
    for base, log in ((None, driver.log), (snapshot, driver.log[since:])):
        restored, taken = Catalog(driver.settings), Catalog(driver.settings)
        assert restored.restore(base, log, driver.now_ms).damaged_records == 0
        shadow = Shadow(driver.settings)
        shadow.feed([*records.unpack(base or b""), *log])
        assert taken.take_over(shadow, driver.now_ms) is not None
        for catalog in (restored, taken):
            assert picture(catalog)["objects"] == picture(driver.catalog)["objects"]
            assert not any(tenant.writing for tenant in catalog.state.tenants)
            command = PutEnd("t", [b"late"], [unused], reserved=True)
            assert catalog.apply(command, driver.now_ms).reply.status == bytes([EXPIRED])


def test_wrong_reservations_are_refused_as_a_whole(driver: Driver) -> None:
    (generation,) = reserve(driver, 1)
    for command in (
        Reserve("t", -1, 1), Reserve("t", 1 << 50, 1), Reserve("t", 1, 0), Reserve("t", 1, 1 << 20),
        PutEnd("t", [b"k"], [generation, 1], reserved=True),
        PutEnd("t", [b"k"], [generation], [(0, 1)], reserved=True),
    ):  # fmt: skip
        reply = driver.apply(command).reply
        assert isinstance(reply, Refused)
        assert reply.code == UsageError.code
    assert driver.end([b"other"], [generation], reserved=True) == [0]
