"""Copies, moves, drains, repair and heat: decided by the catalog, carried out by nodes."""

from __future__ import annotations

import struct

import pytest
from catalog_model import Driver, check_invariants, picture, place_rows

from mooncake_py.errors import (
    OK,
    Backpressure,
    ChecksumMismatch,
    LeaseExpired,
    ObjectNotFound,
    OutOfSpace,
)
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import (
    CopyObjects,
    Drain,
    DrainInfo,
    Heartbeat,
    Refused,
    Report,
    Statuses,
    Tasks,
    Tick,
    Unmount,
)
from mooncake_py.master.objects import PLACE_BITS
from mooncake_py.master.records import unpack
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.shadow import Shadow
from mooncake_py.wire.answers import placements
from mooncake_py.wire.v1 import master_pb2 as pb

KIB = 1 << 10
S = CatalogSettings(objects_max=1 << 14)


def keys(count: int, letter: str = "k") -> list[bytes]:
    return [b"%s%d" % (letter.encode(), i) for i in range(count)]


def drain(driver: Driver, what: str, cancel: bool = False) -> DrainInfo:
    reply = driver.apply(Drain(what, cancel)).reply
    assert isinstance(reply, DrainInfo), reply
    return reply


def copy(driver: Driver, names: list[bytes], to: str, source: str = "") -> list[int]:
    reply = driver.apply(CopyObjects("t", names, to, source)).reply
    assert isinstance(reply, Statuses), reply
    return list(reply.status)


def homes(driver: Driver, key: bytes) -> set[str]:
    """Nodes of the key's replicas, as a reader is told."""
    members = driver.catalog.state.members.by_id
    return {members[row[1]].node for row in place_rows(driver.locate([key]))}


def emptied(driver: Driver, what: str) -> DrainInfo:
    """Drain to the end: what the last answer said."""
    for _ in range(200):
        info = drain(driver, what)
        if info.state != "running":
            return info
        driver.pass_time(S.tick_ms)
        driver.work_off()
        check_invariants(driver.catalog)
    raise AssertionError("the drain does not end")


def test_f33_what_moved_is_still_named_by_the_generation_of_its_put() -> None:
    driver = Driver(S)
    driver.mount("a", 512 * KIB)
    driver.put([b"k", b"stays"])
    driver.mount("b", 512 * KIB)
    asked = [b"none", b"k", b"stays"]
    before = driver.locate(asked)
    assert before.objects == b"", "it needs no word of its own"
    (own, other) = [row[4] for row in place_rows(before)]
    copy(driver, [b"k"], "b", "a")
    driver.work_off()
    assert copy(driver, [b"k"], "b", "a") == [OK]
    after = driver.locate(asked)
    assert [row[4] == own for row in place_rows(after)] == [False, False], "a replica of its own"
    assert after.objects == struct.pack("<3Q", 0, own, other)
    reply = pb.LocateReply(status=after.status, placements=after.placements, objects=after.objects)
    plain = pb.LocateReply(status=before.status, placements=before.placements)
    assert placements([(0, plain)]).objects().tolist() == [0, own, other]
    assert placements([(0, plain), (3, reply)]).objects().tolist() == [0, own, other] * 2


# --- drain --------------------------------------------------------------------------------------


def test_f37_a_drain_moves_all_objects_and_its_report_adds_up() -> None:
    driver = Driver(S)
    driver.mount("a", 512 * KIB)
    names = keys(50)
    driver.put(names)
    driver.mount("b", 512 * KIB)
    driver.mount("c", 512 * KIB)
    driver.put(keys(5, "both"), replica_count=2)
    here = sum("a" in homes(driver, key) for key in names + keys(5, "both"))
    info = emptied(driver, "a")
    assert info.state == "done"
    assert info.moved + info.dropped == here
    assert info.moved_bytes >= 50 * 4096
    assert (info.ended, info.failed, info.left, info.left_bytes) == (0, 0, 0, 0)
    for key in names:
        assert homes(driver, key) <= {"b", "c"}
    for key in keys(5, "both"):
        assert homes(driver, key) == {"b", "c"}, "a move keeps the count of replicas"
    check_invariants(driver.catalog)


def test_f37_every_object_can_be_read_at_every_step_of_a_drain() -> None:
    driver = Driver(S)
    driver.mount("a", 512 * KIB)
    names = keys(60)
    driver.put(names)
    driver.mount("b", 512 * KIB)
    while drain(driver, "a").state == "running":
        assert driver.exists(names) == [1] * 60
        driver.pass_time(S.tick_ms)
        driver.work_off(limit=7)
        assert list(driver.locate(names).status) == [OK] * 60
    assert driver.exists(names) == [1] * 60


def test_f37_a_drain_says_what_finds_no_place() -> None:
    driver = Driver(S)
    driver.mount("a", 512 * KIB)
    driver.put(keys(60))
    driver.mount("b", 64 * KIB)
    info = emptied(driver, "a")
    assert info.state == "stuck"
    assert info.left > 0
    assert info.moved + info.left == 60
    assert driver.exists(keys(60)) == [1] * 60
    driver.mount("c", 512 * KIB)
    driver.pass_time(2 * S.tick_ms)
    assert emptied(driver, "a").state == "done", "it goes on when there is room again"


@pytest.mark.parametrize("handed", [0, 3])
def test_a32_f38_a_drain_does_not_wait_for_a_neighbour_that_has_just_died(handed: int) -> None:
    """It says that there is no place as soon as the neighbour is suspect; a third one is used."""
    driver = Driver(S)
    a = driver.mount("a", 512 * KIB)
    driver.put(keys(20))
    b = driver.mount("b", 512 * KIB)
    assert drain(driver, "a").state == "running"
    driver.pass_time(S.tick_ms)
    driver.fetch_tasks(b, [], handed)
    assert len(driver.catalog.state.tasks.running) == 20
    died_ms = driver.now_ms
    while drain(driver, "a").state == "running":
        driver.now_ms += S.tick_ms
        driver.apply(Heartbeat("a", 1, a))
        driver.apply(Tick())
        assert driver.now_ms < died_ms + S.suspect_ms + 5 * S.tick_ms
    assert (drain(driver, "a").state, drain(driver, "a").left) == ("stuck", 20)
    assert not driver.catalog.state.tasks.running
    check_invariants(driver.catalog)
    driver.mount("c", 512 * KIB)
    driver.pass_time(2 * S.tick_ms)
    assert emptied(driver, "a").state == "done"


def test_a_drain_goes_by_segment_and_can_be_cancelled() -> None:
    driver = Driver(S)
    a = driver.mount("a", 512 * KIB)
    b = driver.mount("b", 512 * KIB)
    drain(driver, str(a))
    assert {each.segment_id for each in driver.catalog.state.members.placeable} == {b}
    driver.beat_all()
    assert {each.segment_id for each in driver.catalog.state.members.placeable} == {b}
    assert drain(driver, "a", cancel=True).state == "cancelled"
    assert len(driver.catalog.state.members.placeable) == 2
    reply = driver.apply(Drain("nobody")).reply
    assert isinstance(reply, Refused)
    assert reply.code == ObjectNotFound.code


def test_f38_a_node_that_says_it_leaves_is_drained() -> None:
    driver = Driver(S)
    a = driver.mount("a", 512 * KIB)
    driver.put(keys(10))
    driver.mount("b", 512 * KIB)
    driver.apply(Heartbeat("a", 1, a, draining=True))
    driver.apply(Heartbeat("b", 1, 2))
    for _ in range(5):
        driver.now_ms += S.tick_ms
        driver.apply(Heartbeat("a", 1, a, draining=True))
        driver.pass_time(0)
        emptied(driver, "a")
    driver.apply(Unmount("a", 1, a))
    assert driver.exists(keys(10)) == [1] * 10
    assert homes(driver, b"k0") == {"b"}


def test_a_put_that_runs_on_a_draining_node_is_moved_once_it_is_committed() -> None:
    driver = Driver(S)
    driver.mount("a", 512 * KIB)
    granted = driver.start([b"late"])
    driver.mount("b", 512 * KIB)
    assert drain(driver, "a").state == "running"
    driver.pass_time(3 * S.tick_ms)
    assert driver.end([b"late"], list(granted.generations)) == [OK]
    assert emptied(driver, "a").state == "done"
    assert homes(driver, b"late") == {"b"}


# --- copies -------------------------------------------------------------------------------------


def test_f37_copy_and_move_are_asked_for_until_they_are_so() -> None:
    driver = Driver(S)
    driver.mount("a", 512 * KIB)
    driver.put([b"x"])
    driver.mount("b", 512 * KIB)
    driver.mount("c", 512 * KIB)
    assert copy(driver, [b"x", b"none"], "b") == [Backpressure.code, ObjectNotFound.code]
    assert copy(driver, [b"x"], "b") == [Backpressure.code]
    (task,) = driver.work_off()
    assert (task.name.tenant, task.name.key, task.length) == ("t", b"x", 4096)
    assert copy(driver, [b"x"], "b") == [OK]
    assert homes(driver, b"x") == {"a", "b"}
    rows = place_rows(driver.locate([b"x"]))
    assert len({generation for *_, generation in rows}) == 2, "a copy has its own generation"
    copy(driver, [b"x"], "c", "a")
    driver.work_off()
    assert copy(driver, [b"x"], "c", "a") == [OK]
    assert homes(driver, b"x") == {"b", "c"}
    check_invariants(driver.catalog)


def test_a_copy_of_an_object_that_ended_or_was_replaced_is_not_committed() -> None:
    for end in ("remove", "upsert"):
        driver = Driver(S)
        driver.mount("a", 512 * KIB)
        driver.put([b"x"])
        b = driver.mount("b", 512 * KIB)
        copy(driver, [b"x"], "b")
        (task,) = driver.fetch_tasks(b, [], 8).copies
        if end == "remove":
            driver.remove([b"x"])
        else:
            driver.remove([b"x"])
            driver.put([b"x"], 100)
        driver.fetch_tasks(b, [(task.generation, OK)], 0)
        check_invariants(driver.catalog)
        assert not driver.catalog.state.tasks.running
        if end == "upsert":
            assert driver.locate([b"x"]).status == b"\0"
            assert all(row[3] == 100 for row in place_rows(driver.locate([b"x"])))


def test_a_copy_that_fails_or_is_never_reported_gives_its_space_back() -> None:
    driver = Driver(S)
    driver.mount("a", 512 * KIB)
    driver.put([b"x"])
    b = driver.mount("b", 512 * KIB)
    used = driver.used_bytes()
    copy(driver, [b"x"], "b")
    driver.work_off(code=ChecksumMismatch.code)
    assert driver.used_bytes() == used
    assert driver.catalog.state.counters["copies_failed"] == 1
    copy(driver, [b"x"], "b")
    (task,) = driver.fetch_tasks(b, [], 1).copies
    driver.pass_time(S.grant_ttl_ms + S.grant_margin_ms + S.tick_ms)
    assert driver.used_bytes() == used
    driver.fetch_tasks(b, [(task.generation, OK)], 0)
    assert homes(driver, b"x") == {"a"}, "a late report changes nothing"
    check_invariants(driver.catalog)


def test_copies_to_a_node_that_is_gone_end_with_it() -> None:
    driver = Driver(S)
    driver.mount("a", 512 * KIB)
    driver.put(keys(5))
    b = driver.mount("b", 512 * KIB)
    copy(driver, keys(5), "b")
    driver.fetch_tasks(b, [], 3)
    driver.apply(Unmount("b", 1, b))
    assert not driver.catalog.state.tasks.running
    driver.pass_time(S.tick_ms)
    check_invariants(driver.catalog)
    reply = driver.apply(Tasks("b", 1, b)).reply
    assert isinstance(reply, Refused)


def test_a_damaged_copy_is_reported_by_its_own_generation() -> None:
    driver = Driver(S)
    driver.mount("a", 512 * KIB)
    driver.put([b"x"])
    b = driver.mount("b", 512 * KIB)
    copy(driver, [b"x"], "b")
    driver.work_off()
    rows = place_rows(driver.locate([b"x"]))
    first, second = (next(row for row in rows if row[1] == each) for each in (1, b))
    driver.apply(Report("t", [b"x"], [first[4]], [b], [LeaseExpired.code]))
    assert homes(driver, b"x") == {"a", "b"}, "the generation is not that of this replica"
    driver.apply(Report("t", [b"x"], [second[4]], [b], [LeaseExpired.code]))
    assert homes(driver, b"x") == {"a"}
    check_invariants(driver.catalog)


def test_copies_and_what_objects_want_outlive_the_master() -> None:
    driver = Driver(S)
    driver.mount("a", 512 * KIB)
    driver.put(keys(6))
    driver.mount("b", 512 * KIB)
    driver.mount("c", 512 * KIB)
    driver.put([b"two"], replica_count=2)
    copy(driver, keys(3), "b")
    copy(driver, keys(6)[3:], "b", "a")
    driver.work_off()
    before, copied = picture(driver.catalog), set(driver.catalog.state.table.copied.values())
    assert len(copied) == 6
    snapshot = driver.catalog.snapshot(driver.now_ms)
    for stored, log in ((None, driver.log), (snapshot, [])):
        again = Catalog(S)
        report = again.restore(stored, log, driver.now_ms)
        assert report.extents_overlapping == 0
        shadow = Shadow(S)
        shadow.feed([*unpack(stored or b""), *log])
        other = Catalog(S)
        assert other.take_over(shadow, driver.now_ms) is not None
        for catalog in (again, other):
            assert picture(catalog)["objects"] == before["objects"]
            assert set(catalog.state.table.copied.values()) == copied
            assert list(catalog.state.table.wanted.values()) == [2]
            assert catalog.state.next_generation > max(copied)
            check_invariants(catalog)


# --- repair -------------------------------------------------------------------------------------


def four_nodes(driver: Driver) -> dict[str, int]:
    return {name: driver.mount(name, 1024 * KIB) for name in "abcd"}


def short_of(driver: Driver, names: list[bytes]) -> int:
    return sum(len(homes(driver, key)) < 2 for key in names)


def test_f36_after_a_node_died_every_object_gets_its_replica_back() -> None:
    driver = Driver(S)
    nodes = four_nodes(driver)
    names = keys(80)
    driver.put(names, replica_count=2)
    driver.apply(Unmount("a", 1, nodes["a"]))
    driver.pass_time(S.tick_ms)
    assert short_of(driver, names) > 0
    for _ in range(20):
        driver.work_off()
        driver.pass_time(S.tick_ms)
        check_invariants(driver.catalog)
    assert short_of(driver, names) == 0
    assert driver.catalog.state.counters["copied_bytes_repair"] > 0


def test_f36_repair_respects_its_rate() -> None:
    rate = 1 << 20
    driver = Driver(CatalogSettings(objects_max=1 << 14, repair_bytes_per_s=rate))
    nodes = {name: driver.mount(name, 16_384 * KIB) for name in "abcd"}
    for part in range(4):
        driver.put(keys(100, f"p{part}-"), 32 * KIB, replica_count=2)
    driver.pass_time(2_000)
    driver.apply(Unmount("a", 1, nodes["a"]))
    for second in range(1, 4):
        for _ in range(10):
            driver.pass_time(S.tick_ms)
            driver.work_off()
        copied = driver.catalog.state.counters["copied_bytes_repair"]
        assert copied <= (second + 1) * rate + 64 * KIB, "a second's worth may have been saved up"
        assert copied >= (second - 1) * rate
    assert driver.catalog.state.tasks.short


def test_f36_the_hottest_objects_are_repaired_first() -> None:
    driver = Driver(CatalogSettings(objects_max=1 << 14, repair_bytes_per_s=1 << 20))
    nodes = {name: driver.mount(name, 4096 * KIB) for name in "abc"}
    names = keys(60)
    driver.put(names, 60 * KIB, replica_count=2)
    hot = names[::6]
    driver.now_ms += 10
    driver.locate(hot)
    driver.apply(Unmount("a", 1, nodes["a"]))
    driver.pass_time(S.tick_ms)
    for node in ("b", "c"):
        order = [task.name.key for task in driver.fetch_tasks(nodes[node], [], 64).copies]
        ranks = [key in hot for key in order]
        assert ranks == sorted(ranks, reverse=True)
        assert True in ranks


def test_f36_an_object_that_got_too_few_replicas_gets_them_when_a_node_comes() -> None:
    driver = Driver(S)
    driver.mount("a", 512 * KIB)
    driver.put([b"x"], replica_count=2)
    assert homes(driver, b"x") == {"a"}
    driver.mount("b", 512 * KIB)
    driver.pass_time(2_000)
    driver.work_off()
    assert homes(driver, b"x") == {"a", "b"}


def test_repair_never_makes_others_go() -> None:
    driver = Driver(S)
    nodes = {name: driver.mount(name, 256 * KIB) for name in "abc"}
    driver.put(keys(20), 8 * KIB, replica_count=2)
    driver.apply(Unmount("a", 1, nodes["a"]))
    driver.put(keys(40, "fill"), 8 * KIB)
    evictions = driver.catalog.state.counters["evictions"]
    for _ in range(20):
        driver.pass_time(S.tick_ms)
        driver.work_off()
    assert driver.catalog.state.counters["evictions"] == evictions


# --- heat ---------------------------------------------------------------------------------------


def test_f51_a_hot_key_gains_a_replica_within_a_window_and_loses_it_after_cooling() -> None:
    settings = CatalogSettings(
        objects_max=1 << 14, hot_copies_max=1, hot_window_ms=1_000, hot_min=10
    )
    driver = Driver(settings)
    driver.mount("a", 1024 * KIB)
    driver.mount("b", 1024 * KIB)
    names = keys(50)
    driver.put(names)
    driver.pass_time(1_100)
    for _ in range(20):
        driver.locate([names[7]])
    driver.locate(names)
    driver.pass_time(1_100)
    driver.work_off()
    assert homes(driver, names[7]) == {"a", "b"}
    for key in (names[6], names[8]):
        assert len(homes(driver, key)) == 1
    driver.pass_time(5_000)
    assert len(homes(driver, names[7])) == 1
    check_invariants(driver.catalog)


def test_f51_a_key_that_alone_is_read_is_hot_and_of_two_alike_neither() -> None:
    """The mean is that of the others: with few keys none could be ten times the mean of all."""
    settings = CatalogSettings(
        objects_max=1 << 14, hot_copies_max=1, hot_window_ms=1_000, hot_min=10
    )
    driver = Driver(settings)
    driver.mount("a", 1024 * KIB)
    driver.mount("b", 1024 * KIB)
    driver.put(keys(50))
    driver.pass_time(1_100)
    for _ in range(20):
        driver.locate([b"k1"])
        driver.locate([b"k2"])
    driver.pass_time(1_100)
    assert not driver.work_off()
    driver.pass_time(9_000)
    for _ in range(20):
        driver.locate([b"k3"])
    driver.pass_time(1_100)
    driver.work_off()
    assert [len(homes(driver, key)) for key in (b"k1", b"k2", b"k3")] == [1, 1, 2]


def test_f51_heat_is_off_unless_it_is_asked_for() -> None:
    driver = Driver(S)
    driver.mount("a", 1024 * KIB)
    driver.mount("b", 1024 * KIB)
    driver.put(keys(50))
    for _ in range(100):
        driver.locate([b"k1"])
    driver.pass_time(2 * S.hot_window_ms)
    assert not driver.work_off()


# --- bounded ------------------------------------------------------------------------------------


def test_a33_grants_of_a_lost_node_end_a_few_a_tick_and_cannot_be_committed_meanwhile() -> None:
    driver = Driver(CatalogSettings(objects_max=1 << 14, reclaim_max=10))
    a = driver.mount("a", 4096 * KIB)
    granted = driver.start(keys(100))
    driver.apply(Unmount("a", 1, a))
    assert driver.catalog.state.open_grants == 100, "nothing of this is done at once"
    driver.mount("b", 4096 * KIB)
    assert driver.end([b"k50"], [granted.generations[50]]) == [LeaseExpired.code]
    assert list(driver.start([b"k60"]).status) == [OK], "a new writer need not wait for that"
    for left in (88, 78, 68):
        driver.pass_time(S.tick_ms)
        assert driver.catalog.state.open_grants == left + 1
    driver.pass_time(20 * S.tick_ms)
    assert driver.catalog.state.open_grants == 1
    assert all(each.segment_id != a for each in driver.catalog.state.members)
    check_invariants(driver.catalog)


def test_copies_that_find_no_place_say_so() -> None:
    driver = Driver(S)
    driver.mount("a", 512 * KIB)
    driver.put([b"x"], 100 * KIB)
    driver.mount("b", 64 * KIB)
    assert copy(driver, [b"x"], "b") == [OutOfSpace.code]
    reply = driver.apply(CopyObjects("t", [b"x"], "a", "a")).reply
    assert isinstance(reply, Refused)
    table = driver.catalog.state.table
    assert table.places(0)[0] >> PLACE_BITS == 0
