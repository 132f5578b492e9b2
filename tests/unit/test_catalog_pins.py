"""Pins after the put, deadlines taken over from another object, and what recomputing costs."""

from __future__ import annotations

import pytest
from catalog_model import Driver, check_invariants, picture

from mooncake_py.errors import OK, ObjectLeased, ObjectNotFound, QuotaExceeded, UsageError
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import Pin, Refused, Statuses
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.shadow import Shadow

SEGMENT = 1 << 20
NBYTES = 32 << 10  # 31 of them fill the segment
MISS, QUOTA = ObjectNotFound.code, QuotaExceeded.code
POLICIES = pytest.mark.parametrize("policy", ["lru", "s3fifo", "cost"])


def driver_of(policy: str = "lru", **settings: object) -> Driver:
    driver = Driver(CatalogSettings(objects_max=1 << 12, eviction=policy, **settings))  # type: ignore[arg-type]
    driver.mount("a", SEGMENT)
    return driver


def pin(driver: Driver, keys: list[bytes], soft_pin_ms: int = 0, hard: bool = False) -> list[int]:
    applied = driver.apply(Pin("t", keys, soft_pin_ms, hard))
    assert isinstance(applied.reply, Statuses), applied.reply
    assert applied.durable_first or OK not in applied.reply.status
    check_invariants(driver.catalog)
    return list(applied.reply.status)


def overwrite(driver: Driver, times: int = 3) -> None:
    """Put so many times what the segment holds."""
    for i in range(times * SEGMENT // NBYTES):
        driver.now_ms += 1
        driver.put([b"filler %d at %d" % (i, driver.now_ms)], NBYTES)
    check_invariants(driver.catalog)


def both_restored(driver: Driver) -> list[Catalog]:
    """As a restart reads the log, and as a standby that followed it takes over."""
    read = Catalog(driver.settings)
    read.restore(None, driver.log, driver.now_ms)
    shadow = Shadow(driver.settings)
    for record in driver.log:
        shadow.feed([record])
    followed = Catalog(driver.settings)
    assert followed.take_over(shadow, driver.now_ms) is not None
    for each in (read, followed):
        check_invariants(each)
    return [read, followed]


@POLICIES
def test_f18_a_pin_after_the_put_holds_and_ends_like_one_at_the_put(policy: str) -> None:
    driver = driver_of(policy)
    assert driver.put([b"soft", b"hard", b"plain"], NBYTES) == [0, 0, 0]
    assert pin(driver, [b"soft", b"absent"], 20_000) == [OK, MISS]
    assert pin(driver, [b"hard"], hard=True) == [OK]
    overwrite(driver)
    assert driver.exists([b"soft", b"hard", b"plain"]) == [1, 1, 0]
    assert list(driver.remove([b"hard"]).status) == [ObjectLeased.code]
    driver.pass_time(20_000)
    overwrite(driver)
    assert driver.exists([b"soft", b"hard"]) == [0, 1], "the soft one is over"
    assert pin(driver, [b"hard"]) == [OK]
    overwrite(driver)
    assert driver.exists([b"hard"]) == [0], "one like any other again"
    assert driver.catalog.state.hard_pinned_units == 0


@POLICIES
def test_a14_a_soft_pin_is_renewed_by_another_and_ended_before_its_time(policy: str) -> None:
    driver = driver_of(policy)
    assert driver.put([b"renewed", b"ended"], NBYTES, soft_pin_ms=2_000) == [0, 0]
    assert pin(driver, [b"renewed"], 30_000) == [OK]
    assert pin(driver, [b"ended"]) == [OK]
    driver.pass_time(3_000)
    overwrite(driver)
    assert driver.exists([b"renewed", b"ended"]) == [1, 0]
    assert pin(driver, [b"renewed"], 1_000) == [OK], "also to an earlier deadline"
    driver.pass_time(1_100)
    overwrite(driver)
    assert driver.exists([b"renewed"]) == [0]


def test_a14_thousands_of_renewals_leave_little_behind() -> None:
    driver = driver_of()
    driver.put([b"k"], NBYTES)
    tenant = driver.catalog.state.tenants.find("t")
    assert tenant is not None
    for _ in range(5_000):
        driver.now_ms += 1
        driver.catalog.apply(Pin("t", [b"k"], 3_600_000), driver.now_ms)
    assert len(tenant.pool._pins) + len(tenant._soft_ends) < 4 * 1_100
    assert tenant.soft_pinned_units(driver.now_ms) == 513


def test_a14_f18_pins_after_the_put_keep_within_the_same_shares() -> None:
    driver = driver_of(tenant_hard_pin_max_ratio=0.1, tenant_soft_pin_max_ratio=0.2)
    keys = [b"%d" % i for i in range(12)]
    driver.put(keys, NBYTES)
    assert pin(driver, keys, hard=True) == [OK] * 3 + [QUOTA] * 9
    assert pin(driver, keys[:3], hard=True) == [OK] * 3, "as it is already"
    assert pin(driver, keys[3:], 1_000) == [OK] * 6 + [QUOTA] * 3
    assert pin(driver, keys[:1], 1_000) == [QUOTA], "and stays as it is"
    assert driver.catalog.state.hard_pinned_units == 3 * 513
    assert pin(driver, keys[:2]) == [OK, OK]
    assert pin(driver, keys[9:], hard=True) == [OK, OK, QUOTA]
    refused = driver.apply(Pin("t", [b"0"], 1, True)).reply
    assert isinstance(refused, Refused)
    assert refused.code == UsageError.code


def test_a18_a_group_has_one_pin() -> None:
    driver = driver_of()
    assert driver.put([b"k", b"v", b"other"], NBYTES, groups=[1, 1, 0]) == [0, 0, 0]
    assert pin(driver, [b"v"], hard=True) == [OK]
    overwrite(driver)
    assert driver.exists([b"k", b"v", b"other"]) == [1, 1, 0]
    granted = driver.start([b"x", b"y"], NBYTES, groups=[1, 1])
    driver.end([b"x"], [granted.generations[0]])
    assert pin(driver, [b"x"], hard=True) == [MISS], "not whole yet"


def test_f18_pins_survive_a_restart_and_a_failover() -> None:
    driver = driver_of()
    driver.put([b"a", b"b", b"c", b"d"], NBYTES, soft_pin_ms=50_000)
    assert pin(driver, [b"a"], hard=True) == [OK]
    assert pin(driver, [b"b"]) == [OK]
    assert pin(driver, [b"c"], 9_000) == [OK]
    catalogs = both_restored(driver)
    again = Catalog(driver.settings)
    again.restore(driver.catalog.snapshot(driver.now_ms), [], driver.now_ms)
    for catalog in (*catalogs, again):
        assert picture(catalog)["objects"] == picture(driver.catalog)["objects"]
        tenant = catalog.state.tenants.find("t")
        assert tenant is not None
        slot = tenant.complete[b"c"]
        assert catalog.state.table.soft_pins[slot] == driver.now_ms + 9_000
        assert tenant.hard_pinned_units == 513


def test_f56_members_published_after_the_hint_inherit_its_deadline_and_end_with_it() -> None:
    driver = driver_of()
    driver.put([b"hint"], 64, soft_pin_ms=30_000, ttl_ms=60_000)
    born_ms = driver.now_ms
    for i in range(5):
        driver.pass_time(1_000)
        key = b"member %d" % i
        granted = driver.start([key], NBYTES, expires_with="hint", soft_pin_ms=1)
        passed_ms = driver.now_ms - born_ms
        assert granted.inherited_ms == (30_000 - passed_ms, 60_000 - passed_ms), "nodes keep them"
        assert driver.end([key], list(granted.generations)) == [0]
    driver.put([b"alone"], NBYTES, expires_with="no such object", ttl_ms=7_000)
    members = [b"hint", *(b"member %d" % i for i in range(5))]
    for catalog in (driver.catalog, *both_restored(driver)):
        table, tenant = catalog.state.table, catalog.state.tenants.find("t")
        assert tenant is not None
        slots = [tenant.complete[key] for key in members]
        assert {table.soft_pins[slot] for slot in slots} == {born_ms + 30_000}
        assert {table.ttls[slot] for slot in slots} == {born_ms + 60_000}
        assert table.ttls[tenant.complete[b"alone"]] == driver.now_ms + 7_000
    overwrite(driver)
    assert driver.exists(members) == [1] * 6
    driver.pass_time(born_ms + 59_900 - driver.now_ms)
    assert driver.exists(members) == [1] * 6, "nothing else wanted their space"
    driver.pass_time(200)
    assert driver.exists(members) == [0] * 6


def test_f55_what_is_dear_to_recompute_outlives_the_rest_where_cost_decides() -> None:
    driver = driver_of("cost")
    keys = [b"%d" % i for i in range(10)]
    driver.put(keys[:5], NBYTES, recompute_cost=20)
    driver.put(keys[5:], NBYTES)
    catalogs = [driver.catalog, *both_restored(driver)]
    for catalog in catalogs:
        driver.catalog = catalog
        driver.beat_all()
        for segment in catalog.state.members:
            segment.mounted = True
            catalog.state.members.set_state(segment, "alive")
        driver.pass_time(6_000)
        overwrite(driver, 2)
        assert driver.exists(keys) == [1] * 5 + [0] * 5
    refused = driver_of("cost")
    with pytest.raises(AssertionError, match="recompute_cost"):
        refused.put([b"k"], 64, recompute_cost=0)
