"""The cost-aware policy: what is cheap to lose for the space it takes goes first."""

from __future__ import annotations

import random

import pytest
from catalog_model import Driver, check_invariants

from mooncake_py.master.commands import SetQuota
from mooncake_py.master.settings import CatalogSettings

PAGE = 4096 - 64
SETTINGS = CatalogSettings(
    eviction="cost", lease_ms=10, evict_high_ratio=1.0, evict_low_ratio=1.0, objects_max=1 << 12
)


@pytest.fixture
def driver() -> Driver:
    driver = Driver(SETTINGS)
    driver.mount("a", 100 * 4096)
    return driver


def names(prefix: str, count: int) -> list[bytes]:
    return [f"{prefix}{i:03d}".encode() for i in range(count)]


def use(driver: Driver, keys: list[bytes], times: int = 1) -> None:
    for _ in range(times):
        driver.locate(keys)
        driver.now_ms += SETTINGS.lease_ms


def test_f17_what_was_used_often_stays_before_a_scan(driver: Driver) -> None:
    hot = names("hot", 20)
    assert not any(driver.put(hot, PAGE))
    use(driver, hot, 4)
    for i in range(150):
        assert not any(driver.put([b"scan%d" % i], PAGE))
    assert driver.exists(hot) == [1] * 20
    check_invariants(driver.catalog)


def test_f17_what_was_used_often_and_long_ago_is_overtaken(driver: Driver) -> None:
    old = names("old", 50)
    assert not any(driver.put(old, PAGE))
    use(driver, old, 3)
    for round_ in range(20):
        young = names(f"r{round_}-", 60)
        driver.put(young, PAGE)
        use(driver, young)
    assert sum(driver.exists(old)) == 0


def test_f17_a_large_object_goes_before_small_ones_of_equal_use(driver: Driver) -> None:
    small = names("small", 30)
    assert not any(driver.put(small, 1024 - 64))
    assert not any(driver.put([b"large"], 80 * 4096 - 64))
    assert not any(driver.put([b"next"], 20 * 4096 - 64))
    assert driver.exists([b"large"]) == [0], "although the small ones are older"
    assert driver.exists(small) == [1] * 30


def test_a19_the_tail_of_a_chain_goes_before_its_middle(driver: Driver) -> None:
    chain = names("chain", 90)
    assert not any(driver.put(chain, PAGE))
    use(driver, chain)
    assert not any(driver.put(names("new", 40), PAGE, strict=True))
    present = driver.exists(chain)
    assert 0 < sum(present) < 90
    assert present == sorted(present, reverse=True)


def test_leases_and_pins_are_kept(driver: Driver) -> None:
    assert not any(driver.put([b"hard"], PAGE, hard_pin=True))
    assert not any(driver.put([b"soft"], PAGE, soft_pin_ms=1_000_000))
    assert not any(driver.put(names("plain", 98), PAGE))
    driver.locate([b"plain000"])
    for i in range(120):
        assert not any(driver.put([b"new%d" % i], PAGE))
    assert driver.exists([b"hard", b"soft", b"plain000"]) == [1, 1, 1]
    driver.now_ms += SETTINGS.lease_ms
    assert not any(driver.put([b"big"], 99 * 4096 - 64))
    assert driver.exists([b"hard", b"soft", b"plain000"]) == [1, 0, 0]
    check_invariants(driver.catalog)


def test_the_victim_is_the_lowest_of_all_ranks_and_entries_stay_few(driver: Driver) -> None:
    """Random use, against a look at everything."""
    generator = random.Random(8)
    state = driver.catalog.state
    driver.apply(SetQuota("t", keys_max=80, policy="evict_own"))
    for step in range(4_000):
        driver.now_ms += SETTINGS.lease_ms
        keys = [b"%d" % generator.randrange(140) for _ in range(2)]
        if generator.random() < 0.3:
            driver.remove(keys, force=True)
        elif generator.random() < 0.5:
            driver.locate(keys)
        else:
            driver.put(keys, generator.choice([100, 1000, PAGE]))
        tenant = state.tenants.find("t")
        assert tenant is not None
        pool = tenant.pool
        late = driver.now_ms + SETTINGS.lease_ms
        if tenant.complete and step % 20 == 0:
            wanted = min(tenant.complete.values(), key=lambda slot: pool._ranks[slot][:2])  # type: ignore[attr-defined]
            assert pool.victim(late) == wanted
        assert len(pool._heap) <= 2 * 140 + 1024 + 2  # type: ignore[attr-defined]
    check_invariants(driver.catalog)
