"""Eviction: who goes, who stays, when, and at what cost."""

from __future__ import annotations

import random

import pytest
from catalog_model import Driver, check_invariants

from mooncake_py.errors import OK, ObjectExists, OutOfSpace
from mooncake_py.master.commands import Heartbeat, Locate, PutStart
from mooncake_py.master.eviction import Links, Lru
from mooncake_py.master.objects import LONG_LEASE, SOFT_PIN, ObjectTable
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.model import extent_bytes

SPACE = OutOfSpace.code
PAGE = 4096 - 64
SEGMENT = 100 * 4096
LEASE = CatalogSettings().lease_ms


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.mount("a", SEGMENT)
    return driver


def names(first: int, count: int) -> list[bytes]:
    return [b"%05d" % i for i in range(first, first + count)]


def test_a13_f17_three_times_the_capacity_is_written_without_a_failure(driver: Driver) -> None:
    high = driver.settings.evict_high_ratio * SEGMENT
    for i in range(0, 300, 3):
        assert driver.put(names(i, 3), PAGE) == [0, 0, 0]
        assert driver.used_bytes() <= high + 4096
        driver.now_ms += 1
    check_invariants(driver.catalog)
    present = driver.exists(names(0, 300))
    survivors = [i // 3 for i, there in enumerate(present) if there]
    victims = [i // 3 for i, there in enumerate(present) if not there]
    assert max(victims) <= min(survivors), "the youngest batches are left"
    assert sum(present) >= 90


def test_a19_the_tail_of_a_chain_goes_before_its_middle(driver: Driver) -> None:
    """After evicting 30 % of chained data nearly all that is left is a usable prefix."""
    chains = [[b"%d/%d" % (chain, page) for page in range(9)] for chain in range(10)]
    for chain in chains:
        assert not any(driver.put(chain, PAGE))
        driver.now_ms += 1
    generator = random.Random(4)
    for chain in generator.sample(chains, 10):
        driver.locate(chain)
        driver.now_ms += 1
    driver.now_ms += LEASE
    assert not any(driver.put(names(0, 32), PAGE))
    left = usable = 0
    for chain in chains:
        present = driver.exists(chain)
        left += sum(present)
        usable += present.index(0) if 0 in present else len(present)
    assert left == 90 - 27
    assert usable == left, "no hole in any chain"


def test_f17_victims_were_accessed_before_every_survivor(driver: Driver) -> None:
    generator = random.Random(1)
    assert not any(driver.put(names(0, 95), PAGE))
    accessed = dict.fromkeys(names(0, 95), driver.now_ms)
    for _ in range(300):
        driver.now_ms += 1
        key = generator.choice(list(accessed))
        driver.locate([key])
        accessed[key] = driver.now_ms
    driver.now_ms += LEASE
    assert not any(driver.put(names(1000, 40), PAGE))
    present = driver.exists(list(accessed))
    survivors = [accessed[key] for key, there in zip(accessed, present, strict=True) if there]
    victims = [accessed[key] for key, there in zip(accessed, present, strict=True) if not there]
    assert len(victims) == 40
    assert max(victims) <= min(survivors)


def test_the_tick_evicts_from_the_high_to_the_low_watermark(driver: Driver) -> None:
    assert not any(driver.put(names(0, 95), PAGE))
    driver.pass_time(1000)
    assert driver.used_bytes() == 95 * 4096, "at the watermark nothing goes"
    assert not any(driver.put(names(95, 1), PAGE))
    driver.catalog.state.evicting = True
    driver.pass_time(1000)
    assert driver.used_bytes() == 90 * 4096


def test_eviction_frees_what_was_asked_and_not_much_more(driver: Driver) -> None:
    assert not any(driver.put(names(0, 95), PAGE))
    before = driver.used_bytes()
    assert driver.put([b"large"], 10 * 4096 - 64) == [0]
    assert driver.used_bytes() == before


def test_leased_objects_stay_until_their_lease_ends(driver: Driver) -> None:
    assert not any(driver.put(names(0, 95), PAGE))
    driver.locate(names(0, 95))
    assert driver.start([b"x"], 40 * 4096).status[0] == SPACE
    driver.now_ms += LEASE - 1
    assert driver.start([b"x"], 40 * 4096).status[0] == SPACE
    driver.now_ms += 1
    assert driver.start([b"x"], 40 * 4096).status[0] == 0


def test_a15_a_full_pool_takes_puts_again_once_leases_have_ended(driver: Driver) -> None:
    driver.put(names(0, 95), PAGE)
    driver.apply(Locate("t", names(0, 95), lease_ms=driver.settings.lease_max_ms))
    assert set(driver.put(names(200, 50), PAGE)) == {0, SPACE}
    driver.pass_time(driver.settings.lease_max_ms + driver.settings.grant_ttl_ms)
    assert not any(driver.put(names(300, 80), PAGE))
    check_invariants(driver.catalog)


def test_a14_a_long_lease_at_the_cold_end_does_not_hide_what_may_go(driver: Driver) -> None:
    assert not any(driver.put(names(0, 95), PAGE))
    driver.apply(Locate("t", names(0, 10), lease_ms=60_000))
    driver.now_ms += 1
    driver.locate(names(10, 85))
    driver.now_ms += LEASE
    assert not any(driver.put(names(100, 80), PAGE))
    assert driver.exists(names(0, 10)) == [1] * 10
    driver.pass_time(60_000)
    assert not any(driver.put(names(200, 95), PAGE))
    assert driver.exists(names(0, 10)) == [0] * 10, "every pin has an end"


def test_f18_hard_pins_survive_five_overwrites(driver: Driver) -> None:
    assert driver.put(names(0, 5), PAGE, hard_pin=True) == [0] * 5
    for i in range(100, 600, 5):
        assert not any(driver.put(names(i, 5), PAGE))
    assert driver.exists(names(0, 5)) == [1] * 5


def test_f18_c11_soft_pins_go_last_and_end_on_time(driver: Driver) -> None:
    assert driver.put(names(0, 5), PAGE, soft_pin_ms=30_000) == [0] * 5
    for i in range(100, 600, 5):
        assert not any(driver.put(names(i, 5), PAGE))
    assert driver.exists(names(0, 5)) == [1] * 5
    assert driver.put([b"everything"], SEGMENT - 64) == [0], "nothing else is left"
    assert driver.exists(names(0, 5)) == [0] * 5
    driver.remove([b"everything"], force=True)
    assert driver.put(names(0, 5), PAGE, soft_pin_ms=30_000) == [0] * 5
    driver.pass_time(30_000)
    for i in range(600, 700, 5):
        assert not any(driver.put(names(i, 5), PAGE))
    assert driver.exists(names(0, 5)) == [0] * 5


def test_ttl_ends_on_time(driver: Driver) -> None:
    driver.put([b"k"], PAGE, ttl_ms=2_000)
    driver.pass_time(1_900)
    assert driver.exists([b"k"]) == [1]
    driver.now_ms += 100
    assert list(driver.locate([b"k"]).status) == [10], "not given out, also before the tick"
    driver.pass_time(100)
    assert driver.exists([b"k"]) == [0]
    assert driver.used_bytes() == 0


def test_objects_on_a_suspect_node_do_not_go_for_space_elsewhere() -> None:
    driver = Driver()
    driver.mount("a", SEGMENT)
    first = [key for i in range(80) for key in names(i, 1) if driver.put([key], PAGE) == [0]]
    b = driver.mount("b", SEGMENT)
    for _ in range(12):  # only b heartbeats: a is suspect
        driver.now_ms += 100
        driver.beat(("b", 1, b))
        driver.pass_time(1, alive=False)
    assert not any(code for i in range(100, 300) for code in driver.put(names(i, 1), PAGE))
    driver.beat_all()
    assert driver.exists(first) == [1] * 80


def test_objects_of_a_node_that_is_back_go_for_space_at_once() -> None:
    driver = Driver()
    a, b = driver.mount("a", SEGMENT), driver.mount("b", 20 * 4096)
    driver.apply(Heartbeat("b", 1, b, draining=True))
    assert driver.put(names(0, 90), PAGE) == [0] * 90
    driver.apply(Heartbeat("b", 1, b))
    driver.apply(Heartbeat("a", 1, a, draining=True))
    assert SPACE in driver.put(names(100, 40), PAGE)
    driver.apply(Heartbeat("a", 1, a))
    assert driver.put(names(200, 60), PAGE) == [0] * 60


def test_the_table_of_objects_is_bounded_and_evicts_at_its_limit() -> None:
    driver = Driver(CatalogSettings(objects_max=1 << 12))
    driver.mount("a", 1 << 30)
    for i in range(0, 10_000, 1000):
        assert not any(driver.put(names(i, 1000), 0))
    assert len(driver.catalog.state.table) <= 1 << 12
    assert driver.exists(names(9000, 1000)) == [1] * 1000
    assert driver.exists(names(0, 1)) == [0]
    check_invariants(driver.catalog)


class Touched:
    """Counts what eviction looks at."""

    def __init__(self, values: object) -> None:
        self.values = values
        self.count = 0

    def __getitem__(self, index: int) -> int:
        self.count += 1
        return self.values[index]  # type: ignore[index,no-any-return]

    def __setitem__(self, index: int, value: int) -> None:
        self.values[index] = value  # type: ignore[index]


def test_eviction_looks_at_what_it_evicts_not_at_all_objects() -> None:
    costs = []
    for count in (2_000, 60_000):
        table = ObjectTable(1 << 16)
        order = Lru(table, Links(1 << 16, 3), LEASE)
        for i in range(count):
            order.add(table.add(b"%d" % i, i + 1, 64, 0, 0), i)
        order.touch(range(count // 2), count)
        table.flags = Touched(table.flags)  # type: ignore[assignment]
        table.stamp = Touched(table.stamp)  # type: ignore[assignment]
        for _ in range(100):
            slot = order.victim(count + 1)
            order.remove(slot)
            table.drop(slot)
        costs.append(table.flags.count + table.stamp.count)  # type: ignore[attr-defined]
    assert costs[0] == costs[1]


class PlainLru:
    """The obvious order: sort by last access, look at everything."""

    def __init__(self) -> None:
        self.stamp: dict[int, int] = {}
        self.lease: dict[int, int] = {}
        self.soft: dict[int, int] = {}

    def allowed(self, now_ms: int) -> list[int]:
        free = [slot for slot in self.stamp if self.lease.get(slot, 0) <= now_ms]
        return [slot for slot in free if self.soft.get(slot, 0) <= now_ms] or free

    def oldest(self, now_ms: int) -> list[int]:
        allowed = self.allowed(now_ms)
        first = min((self.stamp[slot] for slot in allowed), default=0)
        return [slot for slot in allowed if self.stamp[slot] == first]


@pytest.mark.parametrize("mixed", [False, True])
def test_lru_agrees_with_sorting_by_last_access(mixed: bool) -> None:
    """Exactly when all leases are alike; with pins and long leases the one that goes was allowed
    to, and one goes whenever any may."""
    generator = random.Random(5)
    table, plain = ObjectTable(1 << 12), PlainLru()
    order = Lru(table, Links(1 << 12, 3), 50)
    now = 0
    for step in range(6_000):
        now += generator.randrange(12)
        action = generator.random()
        live = list(plain.stamp)
        if action < 0.4 or not live:
            slot = table.add(b"%d" % step, step + 1, 64, 0, 0)
            if mixed and generator.random() < 0.1:
                table.flags[slot] |= SOFT_PIN
                table.soft_pins[slot] = plain.soft[slot] = now + 200
            order.add(slot, now)
            plain.stamp[slot] = now
        elif action < 0.7:
            slot = generator.choice(live)
            length = 50
            if mixed and generator.random() < 0.2:
                length = 300
                table.leases[slot] = max(now + length, table.leases.get(slot, 0))
                table.flags[slot] |= LONG_LEASE
            order.touch([slot], now)
            plain.stamp[slot] = now
            plain.lease[slot] = max(plain.lease.get(slot, 0), now + length)
        else:
            slot = order.victim(now)
            expected = plain.allowed(now) if mixed else plain.oldest(now)
            assert slot in (expected or [-1])
            if slot >= 0:
                order.remove(slot)
                table.drop(slot)
                for book in (plain.stamp, plain.lease, plain.soft):
                    book.pop(slot, None)


def test_a04_part_of_a_batch_may_find_no_space_and_says_which(driver: Driver) -> None:
    assert not any(driver.put(names(0, 50), PAGE))
    driver.locate(names(0, 50))
    granted = driver.apply(
        PutStart("t", names(100, 80), [PAGE] * 80, bytes(16 * 80), random=3)
    ).reply
    status = list(granted.status)  # type: ignore[union-attr]
    assert status.count(0) == 50
    assert status == [0] * 50 + [SPACE] * 30, "what fits, in order: no holes in a prefix"


def test_room_is_counted_with_headers() -> None:
    driver = Driver(CatalogSettings(evict_high_ratio=1.0))
    driver.mount("a", 10 * extent_bytes(PAGE))
    assert driver.start(names(0, 11), PAGE).status == bytes(10) + bytes([SPACE])


def test_a13_what_was_just_stored_is_spared_while_all_older_objects_are_being_read() -> None:
    settings = CatalogSettings(
        objects_max=1 << 14, evict_high_ratio=1.0, evict_low_ratio=1.0, spare_ms=500
    )
    driver = Driver(settings)
    driver.mount("a", 64 * 1024)
    old = [b"old%d" % i for i in range(10)]
    driver.put(old, 4096)
    driver.pass_time(2_000)
    driver.locate(old)
    driver.put([b"new%d" % i for i in range(5)], 4096)
    assert driver.put([b"more"], 4096) == [OutOfSpace.code], "its client comes again"
    assert driver.exists([b"new%d" % i for i in range(5)]) == [1] * 5
    driver.pass_time(settings.spare_ms + 100)
    assert driver.put([b"more"], 4096) == [OK], "but nothing is kept for ever"
    assert sum(driver.exists([b"new%d" % i for i in range(5)])) == 4


def test_a13_what_somebody_wanted_to_put_again_is_spared_as_if_it_were_new() -> None:
    settings = CatalogSettings(
        objects_max=1 << 14, evict_high_ratio=1.0, evict_low_ratio=1.0, spare_ms=500
    )
    driver = Driver(settings)
    driver.mount("a", 2 * 4096)
    driver.put([b"read", b"again"], 4096 - 64)
    driver.pass_time(2_000)
    driver.locate([b"read"])
    assert driver.start([b"again"], 4096 - 64).status == bytes([ObjectExists.code])
    assert driver.put([b"more"], 4096 - 64) == [SPACE], "it was wanted a moment ago"
    assert driver.exists([b"again"]) == [1]
    driver.pass_time(settings.spare_ms)
    driver.locate([b"read"])
    assert driver.put([b"more"], 4096 - 64) == [OK]
    assert driver.exists([b"read", b"again"]) == [1, 0]


def test_a13_one_lease_and_many_puts_keep_no_space_from_writers() -> None:
    driver = Driver(CatalogSettings(objects_max=1 << 14, evict_high_ratio=1.0, evict_low_ratio=1.0))
    driver.mount("a", 64 * 1024)
    driver.put([b"old"], 4096)
    driver.locate([b"old"])
    for i in range(60):
        assert driver.put([b"new%d" % i], 4096) == [OK]
    assert driver.exists([b"old", b"new0", b"new59"]) == [1, 0, 1]


def test_a33_one_put_evicts_a_bounded_number_of_objects() -> None:
    driver = Driver(CatalogSettings(objects_max=1 << 14))
    driver.mount("a", 1 << 20)
    for part in range(3):
        driver.put([b"%d-%d" % (part, i) for i in range(2_600)], 64)
    evictions = driver.catalog.state.counters["evictions"]
    assert driver.put([b"large"], 900 << 10) == [OutOfSpace.code]
    assert driver.catalog.state.counters["evictions"] - evictions == 4_096
    assert driver.put([b"large"], 900 << 10) == [OK], "the next attempt goes on from there"


def test_f60_a_full_table_of_objects_evicts_for_new_ones_or_refuses_them() -> None:
    driver = Driver(CatalogSettings(objects_max=1 << 12))
    driver.mount("a", 64 << 20)
    for part in range(5):
        assert not any(driver.put([b"%d-%d" % (part, i) for i in range(2_000)], 8))
    assert len(driver.catalog.state.table) <= 1 << 12
    present = [key for part in range(5) for key in [b"%d-%d" % (part, i) for i in range(2_000)]]
    for start in range(0, len(present), 4_000):
        driver.locate(present[start : start + 4_000])
    status = driver.put([b"late%d" % i for i in range(100)], 8)
    assert status[-1] == OutOfSpace.code, "all are leased, and the table is full"
    check_invariants(driver.catalog)
    driver.pass_time(LEASE + 1_000)
    assert not any(driver.put([b"later%d" % i for i in range(100)], 8))
