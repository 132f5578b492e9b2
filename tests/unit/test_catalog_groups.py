"""Groups: objects that are useless alone come, stay and go together."""

from __future__ import annotations

import pytest
from catalog_model import Driver, check_invariants, picture

from mooncake_py.errors import OK, OutOfSpace
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import Granted, Mount, PutStart, Unmount
from mooncake_py.master.shadow import Shadow

PAGE = 4096 - 64
SEGMENT = 100 * 4096


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.mount("a", SEGMENT)
    return driver


def start(driver: Driver, keys: list[bytes], numbers: list[int], length: int = PAGE) -> Granted:
    command = PutStart(
        "t", keys, [length] * len(keys), bytes(16 * len(keys)), groups=numbers, random=9
    )
    reply = driver.apply(command).reply
    assert isinstance(reply, Granted)
    return reply


def put(driver: Driver, keys: list[bytes], numbers: list[int]) -> None:
    granted = start(driver, keys, numbers)
    assert not any(granted.status)
    assert not any(driver.end(keys, list(granted.generations)))


def test_a18_c13_a_group_is_present_when_all_its_members_are(driver: Driver) -> None:
    keys = [b"k", b"v", b"alone"]
    granted = start(driver, keys, [1, 1, 0])
    generations = list(granted.generations)
    driver.end([b"k", b"alone"], [generations[0], generations[2]])
    assert driver.exists(keys) == [0, 0, 1]
    assert list(driver.locate(keys).status) == [10, 10, 0]
    driver.end([b"v"], [generations[1]])
    assert driver.exists(keys) == [1, 1, 1]
    assert list(driver.locate(keys).status) == [0, 0, 0]
    check_invariants(driver.catalog)


def test_a18_eviction_takes_whole_groups(driver: Driver) -> None:
    for i in range(24):
        put(driver, [b"%d/%s" % (i, part) for part in (b"k", b"v", b"x", b"y")], [7] * 4)
        driver.now_ms += 1
    for i in range(100, 110):
        assert driver.put([b"%d" % i], PAGE) == [0]
    for i in range(24):
        present = driver.exists([b"%d/%s" % (i, part) for part in (b"k", b"v", b"x", b"y")])
        assert present in ([0] * 4, [1] * 4)
    assert driver.exists([b"0/k"]) == [0]
    assert driver.exists([b"23/k"]) == [1]
    check_invariants(driver.catalog)


def test_a18_a_lease_of_one_member_protects_all(driver: Driver) -> None:
    put(driver, [b"k", b"v"], [1, 1])
    driver.now_ms += 1
    driver.locate([b"k"])
    for i in range(300):
        assert driver.put([b"%d" % i], PAGE) == [0]
    assert driver.exists([b"k", b"v"]) == [1, 1]
    assert list(driver.remove([b"v"]).status) == [12]
    driver.now_ms += driver.settings.lease_ms
    for i in range(300, 600):
        assert driver.put([b"%d" % i], PAGE) == [0]
    assert driver.exists([b"k", b"v"]) == [0, 0], "the protection ends"


def test_a18_the_end_of_one_member_is_the_end_of_all(driver: Driver) -> None:
    put(driver, [b"k", b"v"], [1, 1])
    driver.remove([b"k"])
    assert driver.exists([b"k", b"v"]) == [0, 0]
    assert driver.used_bytes() == 0
    check_invariants(driver.catalog)


def test_a18_a_member_that_is_never_written_takes_the_others_with_it(driver: Driver) -> None:
    granted = start(driver, [b"k", b"v"], [1, 1])
    driver.end([b"k"], [granted.generations[0]])
    driver.pass_time(driver.settings.grant_ttl_ms + driver.settings.grant_margin_ms)
    assert driver.used_bytes() == 0
    assert list(start(driver, [b"k", b"v"], [1, 1]).status) == [0, 0]
    check_invariants(driver.catalog)


def test_a18_a_revoked_member_makes_the_other_commit_fail(driver: Driver) -> None:
    granted = start(driver, [b"k", b"v"], [1, 1])
    driver.revoke([b"k"], [granted.generations[0]])
    assert driver.end([b"v"], [granted.generations[1]]) == [33]
    check_invariants(driver.catalog)


def test_a18_a_group_that_does_not_fit_as_a_whole_is_not_granted() -> None:
    driver = Driver()
    driver.mount("a", 10 * 4096)
    granted = start(driver, [b"%d" % i for i in range(12)], [1] * 8 + [2] * 3 + [0])
    space = OutOfSpace.code
    assert list(granted.status) == [0] * 8 + [space] * 4
    assert driver.used_bytes() == 8 * 4096
    check_invariants(driver.catalog)


def test_a18_a_lost_node_takes_whole_groups() -> None:
    driver = Driver()
    a = driver.mount("a", SEGMENT)
    driver.mount("b", SEGMENT)
    keys = [b"%d" % i for i in range(64)]
    put(driver, keys, [1 + i // 2 for i in range(64)])
    half = start(driver, [b"x%d" % i for i in range(64)], [1] * 64)
    driver.apply(Unmount("a", 1, a))
    present = driver.exists(keys)
    assert all(present[i] == present[i + 1] for i in range(0, 64, 2))
    driver.pass_time(100)
    assert driver.exists(keys) == present
    assert set(driver.end([b"x%d" % i for i in range(64)], list(half.generations))) == {33}
    check_invariants(driver.catalog)


def test_groups_outlive_a_restart(driver: Driver) -> None:
    put(driver, [b"k", b"v"], [1, 1])
    granted = start(driver, [b"m", b"n"], [5, 5])
    driver.end([b"m"], [granted.generations[0]])
    for snapshot in (b"", driver.catalog.snapshot(driver.now_ms)):
        fresh = Catalog(driver.settings)
        fresh.restore(snapshot, [] if snapshot else driver.log, driver.now_ms)
        assert picture(fresh) == picture(driver.catalog)
        check_invariants(fresh)
    driver.catalog = fresh
    assert driver.exists([b"k", b"v", b"m", b"n"]) == [1, 1, 0, 0]
    driver.end([b"n"], [granted.generations[1]])
    assert driver.exists([b"m", b"n"]) == [1, 1]


def test_a18_a_group_that_lost_a_member_with_its_node_does_not_come_back_in_part() -> None:
    """The master ends before it has ended the others: whoever reads its records ends them."""
    driver = Driver()
    segments = {node: driver.mount(node, 8192) for node in ("a", "b")}
    keys = [b"k%d" % i for i in range(8)]
    granted = driver.start(keys, 1400, groups=[1] * 8)  # more than one node holds
    assert driver.end(keys, list(granted.generations)) == [OK] * 8
    assert len(granted.segment_ids) == 2, "members on both nodes"
    driver.apply(Unmount("a", 1, segments["a"]))
    again, shadow, follower = Catalog(driver.settings), Shadow(driver.settings), Driver()
    again.restore(None, driver.log, driver.now_ms)
    shadow.feed(driver.log)
    assert follower.catalog.take_over(shadow, driver.now_ms) is not None
    for catalog in (again, follower.catalog):
        driver.catalog = catalog
        assert driver.exists(keys) == [0] * 8
        assert len(catalog.state.table) == 0
        check_invariants(catalog)


def read_back(driver: Driver) -> tuple[Catalog, Catalog]:
    """By who reads all records, and by who has followed them."""
    again, followed, shadow = (
        Catalog(driver.settings), Catalog(driver.settings), Shadow(driver.settings),
    )  # fmt: skip
    report = again.restore(None, driver.log, driver.now_ms)
    assert report.extents_overlapping == 0
    shadow.feed(driver.log)
    assert followed.take_over(shadow, driver.now_ms) is not None
    return again, followed


def two_nodes_with_a_group(keys: list[bytes], commit: bool) -> tuple[Driver, int]:
    """More than one node holds; what is on `a` is lost with it."""
    driver = Driver()
    segments = {node: driver.mount(node, 8192) for node in ("a", "b")}
    granted = driver.start(keys, 1400, groups=[1] * len(keys))
    assert len(granted.segment_ids) == 2, "members on both nodes"
    if commit:
        assert driver.end(keys, list(granted.generations)) == [OK] * len(keys)
    driver.apply(Unmount("a", 1, segments["a"]))
    return driver, segments["b"]


def test_a18_what_is_left_of_a_group_in_writing_ends_whoever_takes_over() -> None:
    keys = [b"k%d" % i for i in range(8)]
    driver, _ = two_nodes_with_a_group(keys, commit=False)
    again, followed = read_back(driver)
    assert picture(followed)["grants"] == picture(again)["grants"] == {}
    for catalog in (again, followed):
        assert not catalog.state.open_grants
        check_invariants(catalog)


def test_a18_the_space_of_what_ended_with_a_group_is_granted_again_and_read_back() -> None:
    """Else whoever follows the records sees it claimed twice, and must read them all again."""
    keys = [b"k%d" % i for i in range(8)]
    driver, segment_b = two_nodes_with_a_group(keys, commit=True)
    driver.catalog, _ = read_back(driver)
    driver.log += driver.catalog.begin_term(2, driver.now_ms)
    driver.apply(Mount("b", 1, "b:1", 1, 8192, "b", segment_b))
    driver.pass_time(driver.settings.lease_ms + 1)
    assert set(driver.put([b"new%d" % i for i in range(5)], 1400)) == {OK}
    again, followed = read_back(driver)
    assert picture(followed)["objects"] == picture(again)["objects"] != {}
    check_invariants(followed)
