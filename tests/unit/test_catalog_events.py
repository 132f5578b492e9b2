"""Events: a mirror that follows them knows what the catalog knows, or is told that it does not."""

from __future__ import annotations

import random

from catalog_model import Driver

from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import EventPage, Events, Refused, Unmount
from mooncake_py.master.settings import CatalogSettings

PAGE = 4096 - 64


def busy(events_max: int, steps: int = 400) -> Driver:
    generator = random.Random(6)
    driver = Driver(CatalogSettings(events_max=events_max, objects_max=1 << 12))
    driver.mount("a", 40 * 4096)
    b = driver.mount("b", 40 * 4096)
    for step in range(steps):
        key = b"%d" % generator.randrange(60)
        action = generator.random()
        if action < 0.7:
            driver.put([key], PAGE, ttl_ms=generator.choice([0, 0, 900]))
        elif action < 0.8:
            driver.remove([key], force=True)
        else:
            driver.locate([key])
        driver.pass_time(100)
        if step == steps // 2:
            driver.apply(Unmount("b", 1, b))
    return driver


def page(driver: Driver, after: int, limit: int = 1000) -> EventPage:
    reply = driver.apply(Events(after, limit)).reply
    assert isinstance(reply, EventPage)
    return reply


def test_f46_a_mirror_that_replays_events_has_the_stores_keys() -> None:
    driver = busy(100_000)
    keys: set[bytes] = set()
    after, kinds = 0, set()
    while True:
        found = page(driver, after, 17)
        assert not found.gap or after == 0
        for event in found.events:
            assert event.sequence == after + 1, "numbers have no holes"
            after = event.sequence
            kinds.add(event.what)
            if event.what == "stored":
                assert event.key not in keys
                keys.add(event.key)
            else:
                keys.remove(event.key)
        if after == found.newest:
            break
    assert keys == set(driver.catalog.state.tenants.find("t").complete)  # type: ignore[union-attr]
    assert kinds >= {"stored", "evict", "remove", "ttl ended", "last node lost"}


def test_f46_the_log_is_bounded_and_a_gap_is_told() -> None:
    driver = busy(50)
    found = page(driver, 1)
    assert found.gap
    assert len(found.events) == 50
    assert [each.sequence for each in found.events] == list(
        range(found.newest - 49, found.newest + 1)
    )
    assert not page(driver, found.newest - 50).gap
    assert page(driver, found.newest - 51).gap
    assert page(driver, found.newest).events == []
    assert not page(driver, found.newest).gap
    assert page(driver, found.newest + 1).gap, "that number is not from this master"


def test_after_a_restart_a_mirror_is_told_to_begin_again() -> None:
    driver = busy(1000)
    newest = page(driver, 0).newest
    fresh = Catalog(driver.settings)
    fresh.restore(None, driver.log, driver.now_ms)
    fresh.begin_term(2)
    driver.catalog = fresh
    assert page(driver, newest).gap
    assert page(driver, newest).newest > newest
    assert not page(driver, page(driver, newest).newest).gap


def test_without_a_limit_nothing_is_kept() -> None:
    driver = busy(0, 20)
    assert page(driver, 0).events == []
    assert isinstance(driver.apply(Events(0, 0)).reply, Refused)
