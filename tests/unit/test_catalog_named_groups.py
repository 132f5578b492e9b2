"""Groups by name: objects of several puts that have one fate (groups.py)."""

from __future__ import annotations

import pytest
from catalog_model import Driver, check_invariants

from mooncake_py.errors import OK, ObjectLeased
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import Granted, PutEnd, PutStart, Remove, Statuses, Unmount
from mooncake_py.master.groups import MEMBERS_MAX
from mooncake_py.master.shadow import Shadow
from mooncake_py.model import Group, ReplicaPolicy

PAGE = 4096 - 64
SEGMENT = 100 * 4096


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.mount("a", SEGMENT)
    return driver


def group(name: str, follows: bool = False, tenant: str = "t") -> int:
    return Group(name, follows).number(tenant)


def put(
    driver: Driver,
    keys: list[bytes],
    numbers: list[int],
    tenant: str = "t",
    policy: ReplicaPolicy | None = None,
    upsert: bool = False,
) -> None:
    command = PutStart(
        tenant, keys, [PAGE] * len(keys), bytes(16 * len(keys)), policy or ReplicaPolicy(),
        groups=numbers, random=len(driver.log) * 0x9E3779B97F4A7C15 % 2**64, upsert=upsert,
    )  # fmt: skip
    granted = driver.apply(command).reply
    assert isinstance(granted, Granted)
    assert not any(granted.status)
    ended = driver.apply(PutEnd(tenant, keys, list(granted.generations))).reply
    assert isinstance(ended, Statuses)
    assert not any(ended.status)


def fill(driver: Driver, first: int, last: int) -> None:
    for i in range(first, last):
        assert driver.put([b"%d" % i], PAGE) == [OK]
        driver.now_ms += 1


def test_a18_members_of_several_puts_are_evicted_together(driver: Driver) -> None:
    for i in range(20):
        put(driver, [b"side/%d" % i], [group(f"{i}")])
    for i in range(20):
        put(driver, [b"kv/%d" % i], [group(f"{i}")])
        driver.now_ms += 1
    fill(driver, 0, 75)
    present = [driver.exists([b"kv/%d" % i, b"side/%d" % i]) for i in range(20)]
    assert [1, 1] in present
    assert [0, 0] in present
    assert all(both in ([0, 0], [1, 1]) for both in present), present
    check_invariants(driver.catalog)


def test_a18_what_follows_ends_with_the_page_and_may_end_before_it(driver: Driver) -> None:
    put(driver, [b"window", b"state"], [group("p", follows=True)] * 2)
    put(driver, [b"kv"], [group("p")])
    driver.remove([b"window"])
    assert driver.exists([b"kv", b"window", b"state"]) == [1, 0, 1]
    driver.remove([b"kv"])
    assert driver.exists([b"kv", b"state"]) == [0, 0]
    assert driver.used_bytes() == 0
    check_invariants(driver.catalog)


def test_a18_a_cold_follower_goes_alone_while_its_page_is_in_use(driver: Driver) -> None:
    put(driver, [b"window"], [group("p", follows=True)])
    put(driver, [b"kv", b"indexer"], [group("p")] * 2)
    for _ in range(3):
        fill(driver, 0, 0)
        driver.now_ms += driver.settings.lease_ms + 1
        driver.locate([b"kv", b"indexer"])
    fill(driver, 0, 120)
    assert driver.exists([b"kv", b"indexer", b"window"]) == [1, 1, 0]


def test_a18_a_group_is_as_old_as_its_latest_use(driver: Driver) -> None:
    put(driver, [b"kv", b"indexer"], [group("p")] * 2)
    fill(driver, 0, 60)
    driver.now_ms += 1
    driver.locate([b"kv"])
    driver.now_ms += driver.settings.lease_ms + 1
    fill(driver, 60, 130)
    assert driver.exists([b"0", b"30"]) == [0, 0]
    assert driver.exists([b"kv", b"indexer"]) == [1, 1], "older objects go before"
    fill(driver, 130, 330)
    assert driver.exists([b"kv", b"indexer"]) == [0, 0], "and it goes in its turn"
    check_invariants(driver.catalog)


def test_a18_a_lease_or_a_pin_of_a_leader_protects_the_group(driver: Driver) -> None:
    put(driver, [b"indexer"], [group("p")])
    put(driver, [b"kv"], [group("p")])
    put(driver, [b"pinned"], [group("q")], policy=ReplicaPolicy(hard_pin=True))
    put(driver, [b"mate"], [group("q")])
    driver.locate([b"kv"])
    assert list(driver.remove([b"indexer"]).status) == [ObjectLeased.code]
    fill(driver, 0, 300)
    assert driver.exists([b"kv", b"indexer", b"pinned", b"mate"]) == [1, 1, 1, 1]
    driver.now_ms += driver.settings.lease_ms + 1
    fill(driver, 300, 500)
    assert driver.exists([b"kv", b"indexer", b"pinned", b"mate"]) == [0, 0, 1, 1]
    check_invariants(driver.catalog)


def test_a18_each_is_seen_when_it_is_there_and_a_failed_put_ends_nobody(driver: Driver) -> None:
    put(driver, [b"side"], [group("p")])
    command = PutStart("t", [b"kv"], [PAGE], bytes(16), groups=[group("p")], random=9)
    granted = driver.apply(command).reply
    assert isinstance(granted, Granted)
    assert driver.exists([b"side", b"kv"]) == [1, 0]
    driver.revoke([b"kv"], list(granted.generations))
    assert driver.exists([b"side", b"kv"]) == [1, 0]
    put(driver, [b"side"], [group("p")], upsert=True)
    put(driver, [b"kv"], [group("p")])
    put(driver, [b"kv"], [group("p")], upsert=True)
    assert driver.exists([b"side", b"kv"]) == [1, 1], "a successor takes its place"
    driver.remove([b"side"])
    assert driver.exists([b"side", b"kv"]) == [0, 0]


def test_a18_names_are_of_a_tenant_and_groups_have_an_end(driver: Driver) -> None:
    put(driver, [b"mine"], [group("p")])
    put(driver, [b"theirs"], [group("p")], tenant="u")  # whatever number it claims
    driver.apply(Remove("u", [b"theirs"]))
    assert driver.exists([b"mine"]) == [1]
    big = Driver()
    big.mount("a", (MEMBERS_MAX + 100) * 4096)
    for start in range(0, MEMBERS_MAX + 8, 8):
        put(big, [b"%d" % i for i in range(start, start + 8)], [group("g")] * 8)
    big.remove([b"0"])
    left = [i for i in range(MEMBERS_MAX + 8) if big.exists([b"%d" % i]) == [1]]
    assert left == list(range(MEMBERS_MAX, MEMBERS_MAX + 8))
    check_invariants(big.catalog)


def test_a18_groups_by_name_leave_the_plain_questions_quick(driver: Driver) -> None:
    """As many as there are pages; a group of one put hides what is there while it is not whole."""
    put(driver, [b"kv"], [group("p")])
    groups = driver.catalog.state.groups
    assert (len(groups), groups.hiding) == (1, 0)
    put(driver, [b"k", b"v"], [1, 1])
    assert (len(groups), groups.hiding) == (2, 1)
    driver.remove([b"k"])
    assert (len(groups), groups.hiding) == (1, 0)


def two_nodes() -> Driver:
    driver = Driver()
    driver.mount("a", SEGMENT)
    driver.mount("b", SEGMENT)
    for i in range(32):
        put(driver, [b"side/%d" % i], [group(f"{i}")])
        put(driver, [b"window/%d" % i], [group(f"{i}", follows=True)])
        put(driver, [b"kv/%d" % i], [group(f"{i}")])
    return driver


def page(driver: Driver, i: int) -> list[int]:
    return driver.exists([b"kv/%d" % i, b"side/%d" % i, b"window/%d" % i])


def successors(driver: Driver) -> list[Catalog]:
    """A master that reads the records, one that reads a snapshot, and one that followed."""
    again, shadow, follower = Catalog(driver.settings), Shadow(driver.settings), Driver()
    again.restore(None, driver.log, driver.now_ms)
    shadow.feed(driver.log)
    assert follower.catalog.take_over(shadow, driver.now_ms) is not None
    snapshot = Catalog(driver.settings)
    snapshot.restore(driver.catalog.snapshot(driver.now_ms), [], driver.now_ms)
    return [again, snapshot, follower.catalog]


def test_a18_whoever_comes_after_the_master_knows_the_groups() -> None:
    driver = two_nodes()
    for catalog in successors(driver):
        assert len(catalog.state.groups) == 32
        driver.catalog = catalog
        driver.remove([b"window/3"], force=True)
        assert page(driver, 3) == [1, 1, 0]
        driver.remove([b"side/3"], force=True)
        assert page(driver, 3) == [0, 0, 0]
        assert sum(sum(page(driver, i)) for i in range(32)) == 31 * 3
        check_invariants(catalog)


def test_a18_a_lost_node_takes_the_pages_that_it_led() -> None:
    driver = two_nodes()
    segment = driver.catalog.state.members.at(0)
    driver.apply(Unmount(segment.node, segment.incarnation, segment.segment_id))
    unfinished = successors(driver)  # before it has ended the others
    driver.pass_time(100)
    pages = [page(driver, i) for i in range(32)]
    assert [0, 0, 0] in pages
    assert [1, 1, 1] in pages
    assert all(kv == side and window <= kv for kv, side, window in pages), pages
    check_invariants(driver.catalog)
    for catalog in (*successors(driver), unfinished[0], unfinished[2]):
        driver.catalog = catalog
        assert [page(driver, i) for i in range(32)] == pages
        check_invariants(catalog)
