"""Nobody waits long for the owner thread: what may be much is done in steps of bounded size.

Steps are counted in what they end, not in time, so that the tests mean the same on every machine.
"""

from __future__ import annotations

import pytest
from catalog_model import Driver, check_invariants

from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import (
    Again,
    Done,
    Granted,
    Heartbeat,
    List,
    Listed,
    PutStart,
    Refused,
    Remove,
    SetQuota,
    Statuses,
    Tick,
)
from mooncake_py.master.settings import CatalogSettings

STEP = 10
SETTINGS = CatalogSettings(step_max=STEP, objects_max=1 << 14)


@pytest.fixture
def driver() -> Driver:
    driver = Driver(SETTINGS)
    driver.mount("a", 8 << 20)
    return driver


def names(prefix: str, count: int) -> list[bytes]:
    return [f"{prefix}{i:04d}".encode() for i in range(count)]


def tick(driver: Driver) -> bool:
    """One tick now; does it say that it left work?"""
    reply = driver.apply(Tick()).reply
    assert isinstance(reply, Done)
    return reply.more


def ended(driver: Driver) -> float:
    return driver.catalog.state.counters["grants_reclaimed"]


def test_a01_many_grants_that_expire_at_once_end_in_bounded_steps(driver: Driver) -> None:
    one_put, many_puts = names("a", 55), names("b", 30)
    driver.start(one_put, 64)
    for key in many_puts:
        driver.start([key], 64)
    driver.now_ms += SETTINGS.grant_ttl_ms
    driver.beat_all()
    before, steps = ended(driver), 0
    while tick(driver):
        steps += 1
        assert ended(driver) - before <= STEP
        before = ended(driver)
        check_invariants(driver.catalog)
    assert steps >= 85 // STEP
    assert driver.catalog.state.open_grants == 0


def test_a01_an_expired_grant_that_no_tick_has_reached_is_over_all_the_same(
    driver: Driver,
) -> None:
    keys = names("a", 40)
    granted = driver.start(keys, 64)
    driver.now_ms += SETTINGS.grant_ttl_ms
    driver.beat_all()
    assert tick(driver)
    assert driver.catalog.state.open_grants > 0
    assert all(driver.end(keys, list(granted.generations)))
    assert driver.put(keys, 64) == [0] * 40, "the keys are free"
    while tick(driver):
        pass
    assert driver.exists(keys) == [1] * 40, "the steps that were left do not touch the successors"
    check_invariants(driver.catalog)


def test_f08_extents_that_rested_are_freed_in_bounded_steps(driver: Driver) -> None:
    keys = names("a", 45)
    driver.revoke(keys, list(driver.start(keys, 64).generations))
    resting = driver.catalog.state.resting
    assert len(resting) == 45
    driver.now_ms += SETTINGS.grant_ttl_ms + SETTINGS.grant_margin_ms
    while tick(driver):
        assert len(resting) % STEP == 5
        check_invariants(driver.catalog)
    assert len(resting) == 0


def test_f18_objects_whose_time_ends_together_end_in_bounded_steps(driver: Driver) -> None:
    keys = names("a", 35)
    driver.put(keys, 64, ttl_ms=100)
    driver.now_ms += 100
    assert tick(driver)
    assert len(driver.catalog.state.table) == 25
    assert driver.exists(keys) == [0] * 35, "nobody sees those that are left"
    while tick(driver):
        pass
    assert len(driver.catalog.state.table) == 0


def remove_all(driver: Driver, prefix: bytes = b"", force: bool = False) -> list[Statuses]:
    """The answers of all its calls."""
    replies, cursor = [], b""
    while not replies or cursor:
        reply = driver.apply(Remove("t", (), force, True, prefix, b"", cursor)).reply
        assert isinstance(reply, Statuses)
        replies.append(reply)
        cursor = reply.cursor
        check_invariants(driver.catalog)
    return replies


def test_f19_a_removal_of_all_goes_in_steps_and_lets_others_in_between(driver: Driver) -> None:
    driver.put(names("a", 57), 64)
    driver.put(names("b", 20), 64)
    driver.locate([b"a0003"])
    driver.start(names("ag", 13), 64)
    replies = remove_all(driver, b"a")
    assert all(each.removed + each.kept <= STEP for each in replies)
    assert sum(each.removed for each in replies) == 56
    assert sum(each.kept for each in replies) == 1
    assert driver.exists(names("b", 20)) == [1] * 20
    assert driver.catalog.state.open_grants == 0


def test_f19_a_removal_of_all_ends_although_others_keep_putting(driver: Driver) -> None:
    driver.put(names("a", 100), 64)
    running = driver.start([b"running"], 64)
    first = driver.apply(Remove("t", (), False, True)).reply
    assert isinstance(first, Statuses)
    assert driver.end([b"running"], list(running.generations)) != [0]
    cursor, calls, young = first.cursor, 1, []
    while cursor:
        young.append(b"young%d" % calls)
        assert driver.put(young[-1:], 64) == [0]
        reply = driver.apply(Remove("t", (), False, True, b"", b"", cursor)).reply
        assert isinstance(reply, Statuses)
        cursor, calls = reply.cursor, calls + 1
        assert calls < 30
    assert driver.exists(young) == [1] * len(young), "what came after the removal began stays"
    assert driver.exists(names("a", 100)) == [0] * 100


def test_f19_a_removal_goes_on_with_the_next_master(driver: Driver) -> None:
    """Slots are others there, so it looks at all of them again; what is younger stays."""
    keys = names("a", 60)
    driver.put(keys[30:], 64)
    driver.put(keys[:30], 64)
    first = driver.apply(Remove("t", (), False, True)).reply
    assert isinstance(first, Statuses)
    fresh = Catalog(SETTINGS)
    fresh.restore(None, driver.log, driver.now_ms)
    fresh.begin_term(2)
    driver.catalog = fresh
    driver.pass_time(SETTINGS.lease_ms + 1)
    driver.mount("b", 1 << 20)
    assert driver.put([b"young"], 64) == [0]
    cursor, removed = first.cursor, first.removed
    while cursor:
        reply = driver.apply(Remove("t", (), False, True, b"", b"", cursor)).reply
        assert isinstance(reply, Statuses)
        cursor, removed = reply.cursor, removed + reply.removed
    assert removed == 60
    assert driver.exists([*keys, b"young"]) == [0] * 60 + [1]


def test_a_cursor_that_no_answer_gave_is_refused_or_harmless(driver: Driver) -> None:
    driver.put([b"k"], 64)
    for command in (
        Remove("t", [b"k"], cursor=bytes(24)),
        Remove("t", (), False, True, b"", b"", b"short"),
    ):
        assert isinstance(driver.apply(command).reply, Refused)
    far = Remove("t", (), False, True, b"", b"", b"\xff" * 24)
    reply = driver.apply(far).reply
    assert isinstance(reply, Statuses)
    assert not reply.cursor


def test_f44_a_quota_far_below_what_is_held_is_enforced_in_bounded_steps(driver: Driver) -> None:
    driver.put(names("a", 100), 64)
    driver.apply(SetQuota("t", keys_max=20, policy="evict_own"))
    table = driver.catalog.state.table
    before = len(table)
    reply = driver.apply(PutStart("t", [b"new"], [64], bytes(16))).reply
    assert isinstance(reply, Granted)
    assert before - len(table) <= STEP
    steps = 0
    while True:
        before = len(table)
        more = tick(driver)
        steps += 1
        assert before - len(table) <= STEP
        if not more:
            break
    assert steps >= 7
    assert len(table) == 20
    assert driver.put([b"new"], 64) == [0]


def test_a16_a_heartbeat_between_two_steps_is_answered(driver: Driver) -> None:
    (segment,) = driver.catalog.state.members
    driver.start(names("a", 100), 64)
    driver.now_ms += SETTINGS.grant_ttl_ms
    driver.beat_all()
    while tick(driver):
        beat = Heartbeat(segment.node, segment.incarnation, segment.segment_id)
        assert driver.apply(beat).reply == Done()


def test_f19_a_removal_by_pattern_takes_what_matches_in_bounded_steps(driver: Driver) -> None:
    long = b"x" * 1000
    keys = [long + b"/%d" % i for i in range(500)]
    driver.put(keys, 64)
    driver.start([long + b"/7-writing"], 64)
    cursor, calls, removed = b"", 0, 0
    while not calls or cursor:
        reply = driver.apply(Remove("t", (), False, True, b"", b"(x+)+/\\d*7$", cursor)).reply
        assert isinstance(reply, Statuses)
        cursor, calls, removed = reply.cursor, calls + 1, removed + reply.removed
    assert calls >= 5, "a call looks at about a hundred keys of a thousand bytes"
    assert removed == 50
    assert driver.exists(keys) == [int(not key.endswith(b"7")) for key in keys]
    assert driver.catalog.state.open_grants == 1
    check_invariants(driver.catalog)


def test_f19_a_pattern_that_is_none_is_refused_before_anything_changes(driver: Driver) -> None:
    driver.put([b"k"], 64)
    for command in (
        Remove("t", (), False, True, b"", b"(k"),
        Remove("t", [b"k"], pattern=b"k"),
    ):
        assert isinstance(driver.apply(command).reply, Refused)
    assert driver.exists([b"k"]) == [1]


def test_f48_a_listing_of_many_keys_goes_in_steps_and_misses_none() -> None:
    driver = Driver(CatalogSettings(objects_max=1 << 16))
    driver.mount("a", 64 << 20)
    keys = [b"%05d" % (i * 7919 % 20_000) for i in range(20_000)]
    for start in range(0, 20_000, 4_000):
        driver.put(keys[start : start + 4_000], 8)
    found: list[bytes] = []
    steps, more = 0, True
    while more:
        reply = driver.apply(List("t", b"0", found[-1] if found else b"", 3_000)).reply
        steps += 1
        if isinstance(reply, Again):
            driver.remove([b"%05d" % (9_000 + steps)])
            continue
        assert isinstance(reply, Listed)
        found += reply.keys
        more = reply.more
    gone = set(keys) - {key for key in keys if driver.exists([key]) == [1]}
    assert [key for key in found if key not in gone] == sorted(
        key for key in keys if key.startswith(b"0") and key not in gone
    )
    assert steps >= 4 + 2
