"""Tenants and their quotas: each policy to the letter, and nobody else notices."""

from __future__ import annotations

import pytest
from catalog_model import Driver, check_invariants

from mooncake_py.errors import OutOfSpace, QuotaExceeded
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import (
    Exists,
    PutEnd,
    PutStart,
    Refused,
    Remove,
    SetQuota,
    Status,
    StatusInfo,
    TenantInfo,
)
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.model import ReplicaPolicy

QUOTA = QuotaExceeded.code
PAGE = 4096 - 64
SEGMENT = 100 * 4096


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.mount("a", SEGMENT)
    return driver


def put(driver: Driver, tenant: str, keys: list[bytes], **policy: int) -> list[int]:
    count = len(keys)
    command = PutStart(
        tenant, keys, [PAGE] * count, bytes(16 * count), ReplicaPolicy(**policy), random=7
    )
    granted = driver.apply(command).reply
    driver.apply(PutEnd(tenant, keys, granted.generations))  # type: ignore[union-attr]
    driver.now_ms += 1
    return list(granted.status)  # type: ignore[union-attr]


def present(driver: Driver, tenant: str, keys: list[bytes]) -> int:
    return sum(driver.apply(Exists(tenant, keys)).reply.present)  # type: ignore[union-attr]


def info(driver: Driver, tenant: str) -> TenantInfo:
    status = driver.apply(Status()).reply
    assert isinstance(status, StatusInfo)
    return next(each for each in status.tenants if each.name == tenant)


def names(first: int, count: int) -> list[bytes]:
    return [b"%04d" % i for i in range(first, first + count)]


def test_f44_reject_refuses_what_is_beyond_and_only_that(driver: Driver) -> None:
    driver.apply(SetQuota("t", bytes_max=10 * 4096))
    assert put(driver, "t", names(0, 12)) == [0] * 10 + [QUOTA] * 2
    assert put(driver, "t", names(20, 1)) == [QUOTA]
    assert put(driver, "other", names(0, 20)) == [0] * 20
    driver.remove(names(0, 1))
    assert put(driver, "t", names(20, 2)) == [0, QUOTA]
    assert info(driver, "t").used_bytes == 10 * 4096
    assert info(driver, "t").counters["quota_refusals"] == 4
    check_invariants(driver.catalog)


def test_f44_a_quota_in_keys(driver: Driver) -> None:
    driver.apply(SetQuota("t", keys_max=3))
    assert put(driver, "t", names(0, 5)) == [0, 0, 0, QUOTA, QUOTA]


def test_f44_replicas_count_against_the_quota(driver: Driver) -> None:
    driver.mount("b", SEGMENT)
    driver.apply(SetQuota("t", bytes_max=4 * 4096))
    assert put(driver, "t", names(0, 3), replica_count=2) == [0, 0, QUOTA]


def test_f44_evict_own_takes_the_tenants_oldest_and_nobody_elses(driver: Driver) -> None:
    put(driver, "other", names(0, 30))
    driver.apply(SetQuota("t", bytes_max=10 * 4096, policy="evict_own"))
    for i in range(50):
        assert put(driver, "t", names(i, 1)) == [0]
        assert info(driver, "t").used_bytes <= 10 * 4096
    assert present(driver, "t", names(40, 10)) == 10
    assert present(driver, "other", names(0, 30)) == 30
    check_invariants(driver.catalog)


def test_f44_evict_own_never_breaks_a_promise(driver: Driver) -> None:
    driver.apply(SetQuota("t", bytes_max=4 * 4096, policy="evict_own"))
    assert put(driver, "t", names(0, 4)) == [0] * 4
    driver.locate(names(0, 4))
    assert put(driver, "t", names(10, 1)) == [QUOTA]
    driver.now_ms += driver.settings.lease_ms
    assert put(driver, "t", names(10, 1)) == [0]
    assert put(driver, "t", [b"x" * 10], replica_count=1) == [0]


def test_an_object_larger_than_the_quota_evicts_nothing(driver: Driver) -> None:
    driver.apply(SetQuota("t", bytes_max=4 * 4096, policy="evict_own"))
    put(driver, "t", names(0, 4))
    command = PutStart("t", [b"huge"], [5 * 4096], bytes(16))
    assert driver.apply(command).reply.status == bytes([QUOTA])  # type: ignore[union-attr]
    assert present(driver, "t", names(0, 4)) == 4


def test_f44_borrowers_use_what_is_idle_and_give_it_back_first(driver: Driver) -> None:
    driver.apply(SetQuota("t", bytes_max=10 * 4096, policy="borrow"))
    assert put(driver, "other", names(0, 20)) == [0] * 20
    assert put(driver, "t", names(0, 60)) == [0] * 60
    for i in range(100, 160):  # others want the space
        assert put(driver, "other", names(i, 1)) == [0]
    assert present(driver, "other", names(0, 20)) == 20, "older, but the borrower goes first"
    assert info(driver, "t").used_bytes >= 10 * 4096, "what is within the quota is its own"
    assert present(driver, "t", names(0, 60)) < 30
    check_invariants(driver.catalog)


def test_a_quota_outlives_a_restart_and_can_be_ended(driver: Driver) -> None:
    applied = driver.apply(SetQuota("t", bytes_max=4096, keys_max=9, policy="borrow"))
    assert applied.durable_first
    for snapshot in (b"", driver.catalog.snapshot(driver.now_ms)):
        fresh = Catalog(driver.settings)
        fresh.restore(snapshot, [] if snapshot else driver.log, driver.now_ms)
        tenant = fresh.state.tenants.find("t")
        assert tenant is not None
        assert tenant.quota == driver.catalog.state.tenants.find("t").quota  # type: ignore[union-attr]
        assert tenant in fresh.state.tenants.borrowers
    driver.apply(SetQuota("t", remove=True))
    assert put(driver, "t", names(0, 5)) == [0] * 5
    assert info(driver, "t").policy == ""


def test_a_tenant_with_a_quota_is_not_forgotten_when_empty(driver: Driver) -> None:
    driver.apply(SetQuota("t", keys_max=1))
    put(driver, "fleeting", names(0, 1))
    driver.catalog.state.tenants.find("fleeting")
    driver.pass_time(100)
    driver.apply(PutStart("u", [b"k"], [0], bytes(16)))
    driver.pass_time(60_000)
    assert driver.catalog.state.tenants.find("t") is not None
    assert driver.catalog.state.tenants.find("fleeting") is not None
    assert driver.catalog.state.tenants.find("u") is None, "its grant ended, it owns nothing"


def test_tenants_come_and_go_without_leaving_anything() -> None:
    driver = Driver()
    driver.mount("a", SEGMENT)
    for i in range(300):
        assert put(driver, f"tenant{i}", [b"k"]) == [0]
        driver.apply(SetQuota(f"tenant{i}", remove=True))
    for _ in range(200):
        assert put(driver, "late", [b"%d" % driver.now_ms]) == [0]
    driver.pass_time(60_000)
    assert len(driver.catalog.state.tenants) == 1
    check_invariants(driver.catalog)


def test_a_wrong_policy_is_refused(driver: Driver) -> None:
    assert isinstance(driver.apply(SetQuota("t", policy="steal")).reply, Refused)
    assert isinstance(driver.apply(SetQuota("t" * 500)).reply, Refused)
    assert OutOfSpace.code != QUOTA


def test_f18_a_tenant_pins_no_more_than_its_share_and_leaves_the_rest_to_others() -> None:
    driver = Driver(CatalogSettings(tenant_hard_pin_max_ratio=0.1, objects_max=1 << 12))
    driver.mount("a", SEGMENT)
    assert put(driver, "greedy", names(0, 15), hard_pin=True) == [0] * 10 + [QUOTA] * 5
    assert put(driver, "modest", names(0, 5), hard_pin=True) == [0] * 5
    assert info(driver, "greedy").counters["hard_pinned_bytes"] == 10 * 4096
    driver.apply(Remove("greedy", names(0, 3), force=True))
    assert put(driver, "greedy", names(20, 4), hard_pin=True) == [0] * 3 + [QUOTA]
    check_invariants(driver.catalog)
    fresh = Catalog(driver.settings)
    fresh.restore(None, driver.log, driver.now_ms)
    check_invariants(fresh)
    tenant = fresh.state.tenants.find("greedy")
    assert tenant is not None
    assert tenant.hard_pinned_units == 10 * 64


def test_a14_f18_one_tenant_soft_pins_only_its_share_and_every_pin_ends() -> None:
    driver = Driver(CatalogSettings(objects_max=1 << 14, tenant_soft_pin_max_ratio=0.25))
    driver.mount("a", 1 << 20)
    assert driver.put([b"a", b"b"], 100 << 10, soft_pin_ms=5_000) == [0, 0]
    assert driver.put([b"c"], 100 << 10, soft_pin_ms=5_000) == [QuotaExceeded.code]
    assert driver.put([b"d"], 100 << 10) == [0], "without a pin there is room"
    driver.remove([b"a"])
    assert driver.put([b"c"], 100 << 10, soft_pin_ms=5_000) == [0], "it ended with its object"
    assert driver.put([b"e"], 100 << 10, soft_pin_ms=5_000) == [QuotaExceeded.code]
    status = driver.apply(Status()).reply
    assert isinstance(status, StatusInfo)
    assert status.tenants[0].counters["soft_pinned_bytes"] >= 200 << 10
    driver.pass_time(5_100)
    assert driver.put([b"e"], 100 << 10, soft_pin_ms=5_000) == [0]
    check_invariants(driver.catalog)
