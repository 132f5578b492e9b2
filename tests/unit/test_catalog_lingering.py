"""What a removal has to wait for: everything its key had that somebody may still read."""

from __future__ import annotations

import pytest
from catalog_model import Driver, place_rows

from mooncake_py.master.commands import Applied, Locate, Remove, Tick, Unmount
from mooncake_py.master.lease import LEASE_MARGIN_MS
from mooncake_py.master.membership import SUSPECT
from mooncake_py.master.records import Leases, decode, unpack
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.shadow import Shadow
from mooncake_py.master.stripes import part_key
from mooncake_py.model import EXTENT_ROW

KIB = 1 << 10
SETTINGS = CatalogSettings(stripe_min_bytes=16 * KIB, lease_ms=5_000, dead_ms=4_000)


@pytest.fixture
def driver() -> Driver:
    driver = Driver(SETTINGS)
    driver.mount("a", 1 << 20)
    return driver


def orders(applied: Applied) -> dict[int, int]:
    """generation -> until when somebody may read it."""
    return {
        EXTENT_ROW.unpack(effect.rows[at : at + EXTENT_ROW.size])[4]: effect.read_until_ms
        for effect in applied.effects
        for at in range(0, len(effect.rows), EXTENT_ROW.size)
    }


def generation_of(driver: Driver, key: bytes) -> int:
    return place_rows(driver.locate([key]))[0][4]


def remove(driver: Driver, *keys: bytes, **options: bool) -> Applied:
    return driver.apply(Remove("t", list(keys), force=True, **options))


def test_a08_what_nobody_has_located_is_waited_for_by_nobody(driver: Driver) -> None:
    driver.put([b"k"], 64)
    applied = remove(driver, b"k")
    assert set(orders(applied).values()) == {0}
    assert not applied.hold_until_ms
    assert not len(driver.catalog.state.lingering)


def test_a08_a_leased_object_is_read_until_its_node_is_told_or_its_lease_is_over(
    driver: Driver,
) -> None:
    driver.put([b"k", b"l"], 64)
    generation, until = generation_of(driver, b"k"), driver.now_ms + SETTINGS.lease_ms
    assert orders(remove(driver, b"k")) == {generation: until}
    assert orders(remove(driver, b"k")) == {generation: until}, "tried again"
    assert orders(driver.apply(Remove("t", [b"k"]))) == {generation: until}, "without force"
    assert not orders(driver.apply(Remove("u", [b"k"]))), "another tenant's key"
    driver.catalog.told(driver.catalog.state.members.at(0).segment_id, [generation])
    assert not orders(remove(driver, b"k"))
    generation = generation_of(driver, b"l")
    assert orders(remove(driver, b"l"))
    driver.pass_time(SETTINGS.lease_ms + LEASE_MARGIN_MS)
    assert not orders(remove(driver, b"l"))
    assert not len(driver.catalog.state.lingering)


def test_a08_the_old_value_of_an_upsert_ends_with_a_removal_of_its_key(driver: Driver) -> None:
    driver.put([b"k"], 64)
    old = generation_of(driver, b"k")
    driver.put([b"k"], 64, upsert=True)
    assert set(orders(remove(driver, b"k"))) == {old, old + 1}
    driver.catalog.told(driver.catalog.state.members.at(0).segment_id, [old, old + 1])
    driver.pass_time(SETTINGS.lease_ms + LEASE_MARGIN_MS)
    assert not orders(driver.apply(Tick())), "it is not unsealed twice"


def test_a08_an_expired_object_ends_with_a_removal_of_its_key(driver: Driver) -> None:
    driver.put([b"k"], 64, ttl_ms=1_000)
    generation = generation_of(driver, b"k")
    driver.pass_time(1_000)
    assert set(orders(remove(driver, b"k"))) == {generation}


@pytest.mark.parametrize("everything", [False, True])
def test_a08_no_part_of_a_striped_object_is_readable_after_its_removal(everything: bool) -> None:
    driver = Driver(SETTINGS)
    driver.mount("a", 256 * KIB)
    driver.mount("b", 256 * KIB)
    assert driver.put([b"large"], 400 * KIB) == [0]
    driver.locate([b"large"])
    table, tenant = driver.catalog.state.table, driver.catalog.state.tenants.find("t")
    assert tenant is not None
    keys = [b"large", part_key(b"large", 1)]
    generations = {table.generation[tenant.complete[key]] for key in keys}
    applied = remove(driver, all=True) if everything else remove(driver, b"large")
    found = orders(applied)
    assert generations <= set(found)
    assert set(found.values()) == {driver.now_ms + SETTINGS.lease_ms}
    assert set(orders(remove(driver, b"large"))) == set(found), "parts are their object's"


@pytest.mark.parametrize("pattern", [b"", b"k1"])
def test_a08_a_removal_of_all_reaches_what_has_ended_before(driver: Driver, pattern: bytes) -> None:
    driver.put([b"k1", b"x"], 64)
    ended = generation_of(driver, b"k1")
    other = generation_of(driver, b"x")
    remove(driver, b"k1", b"x")
    command = Remove("t", all=True, prefix=b"" if pattern else b"k", pattern=pattern)
    found = orders(driver.apply(command))
    assert ended in found
    assert other not in found


def test_a08_nobody_can_be_told_of_what_a_lost_node_holds_so_leases_are_waited_for() -> None:
    driver = Driver(SETTINGS)
    segment_id = driver.mount("a", 1 << 20)
    driver.put([b"k"], 64)
    driver.locate([b"k"], lease_ms=60_000)
    until = driver.now_ms + 60_000
    driver.apply(Unmount("a", 1, segment_id))
    applied = remove(driver, b"k")
    assert not orders(applied)
    assert applied.hold_until_ms == until
    driver.pass_time(10_000)
    assert remove(driver, b"k").hold_until_ms == until, "it is forgotten, and may be read"


def test_a08_a_suspect_node_may_be_read_from_and_is_told() -> None:
    driver = Driver(SETTINGS)
    driver.mount("a", 1 << 20)
    driver.put([b"k"], 64)
    generation = generation_of(driver, b"k")
    driver.pass_time(SETTINGS.suspect_ms + 100, alive=False)
    assert driver.catalog.state.members.at(0).state == SUSPECT
    assert set(orders(remove(driver, b"k"))) == {generation}


class Term:
    """A master that begins with this log."""

    def __init__(self, log: list[bytes]) -> None:
        self.driver = Driver(SETTINGS)
        self.driver.catalog.restore(None, log, self.driver.now_ms)
        self._log = log + self.driver.catalog.begin_term(len(log) + 1, self.driver.now_ms)
        self.driver.mount("a", 1 << 20)

    @property
    def log(self) -> list[bytes]:
        return self._log + self.driver.log

    def former_leases_ms(self) -> int:
        """For how long the master before it may have given leases."""
        lingering = self.driver.catalog.state.lingering
        return max(0, lingering.former_lease(1) - self.driver.now_ms)


def test_a08_leases_of_a_former_master_are_no_longer_than_those_it_gave() -> None:
    term = Term([])
    driver = term.driver
    driver.put([b"k"], 64)
    driver.locate([b"k"])
    assert Term(term.log).former_leases_ms() == SETTINGS.lease_ms
    asked = driver.apply(Locate("t", [b"k"], lease_ms=30_000))
    assert asked.durable_first, "nobody has it before the log knows"
    assert len(asked.records) == 1
    again = driver.apply(Locate("t", [b"k"], lease_ms=30_000))
    assert again.durable_first, "it may be on its way still"
    assert not again.records
    assert Term(term.log).former_leases_ms() == 30_000
    driver.pass_time(29_000)
    assert Term(term.log).former_leases_ms() == 30_000, "it does not know when that was"
    driver.pass_time(SETTINGS.lease_max_ms)
    assert Term(term.log).former_leases_ms() == SETTINGS.lease_ms


def test_a08_what_no_record_tells_of_may_be_read_until_its_node_tells_or_leases_end() -> None:
    first = Term([])
    log = first.log  # a put that comes now is acknowledged, read, and lost with its record
    driver = Driver(SETTINGS)
    driver.catalog.restore(None, log, driver.now_ms)
    driver.catalog.begin_term(2, driver.now_ms)
    until = driver.now_ms + SETTINGS.lease_ms
    assert remove(driver, b"k").hold_until_ms == until
    driver.pass_time(SETTINGS.suspect_ms + 100, alive=False)
    driver.mount("a", 1 << 20, incarnation=2)  # without what it had
    assert remove(driver, b"k").hold_until_ms == until, "its memory may be mapped"
    driver.pass_time(100)
    assert remove(first.driver, b"k").hold_until_ms == 0, "there was no master before"
    durable = Driver(SETTINGS)
    durable.catalog.restore(None, log, durable.now_ms)
    durable.catalog.begin_term(2, durable.now_ms, durable_puts=True)
    assert remove(durable, b"k").hold_until_ms == 0, "nobody was told of what has no record"


@pytest.mark.parametrize("how", ["older release", "damaged"])
def test_a08_a_log_that_does_not_tell_of_leases_may_have_had_any(how: str) -> None:
    term = Term([])
    driver = term.driver
    driver.put([b"k"], 64)
    log = term.log
    of_leases = [each for each in log if isinstance(decode(each), Leases)]
    assert of_leases
    if how == "damaged":
        log.append(of_leases[0][:-1] + b"?")
    else:
        log = [each for each in log if each not in of_leases]
    assert Term(log).former_leases_ms() == SETTINGS.lease_max_ms


def test_a08_a_snapshot_and_a_shadow_know_of_long_leases_too() -> None:
    driver = Term([]).driver
    driver.put([b"k"], 64)
    driver.locate([b"k"], lease_ms=30_000)
    packed = driver.catalog.snapshot(driver.now_ms)
    shadow = Shadow(SETTINGS)
    shadow.feed(unpack(packed))
    assert shadow.state.lingering.longest_ms == 30_000
    fresh = Driver(SETTINGS).catalog
    fresh.restore(packed, [], driver.now_ms)
    assert fresh.state.lingering.longest_ms == 30_000


def test_a08_leases_of_a_former_master_are_waited_for(driver: Driver) -> None:
    driver.put([b"k"], 64)
    driver.catalog.begin_term(7, driver.now_ms)
    until = driver.now_ms + SETTINGS.lease_max_ms
    assert set(orders(remove(driver, b"k")).values()) == {until}
    driver.put([b"k"], 64)
    driver.catalog.state.lingering.told(driver.catalog.state.members.at(0).segment_id, range(9))
    assert set(orders(remove(driver, b"k")).values()) == {0}, "no former master's object"
