"""Nodes come, fall silent, come back, and leave."""

from __future__ import annotations

import pytest
from catalog_model import Driver, check_invariants

from mooncake_py.errors import ObjectNotFound, TransferTimeout, UsageError
from mooncake_py.master.commands import (
    Drain,
    DrainInfo,
    Heartbeat,
    Mount,
    Mounted,
    Refused,
    Report,
    Tick,
    Unmount,
)
from mooncake_py.master.settings import CatalogSettings

KIB = 1024
S = CatalogSettings()


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.a = driver.mount("a", 64 * KIB)  # type: ignore[attr-defined]
    return driver


def state_of(driver: Driver, segment_id: int) -> str:
    segment = driver.catalog.segment(segment_id)
    return segment.state if segment is not None else "forgotten"


def test_a_second_mount_of_the_same_incarnation_keeps_segment_and_objects(driver: Driver) -> None:
    driver.put([b"k"])
    segment_id = driver.a  # type: ignore[attr-defined]
    for wish in (0, segment_id):
        command = Mount("a", 1, "a:1", 1, 64 * KIB, "a", wish)
        assert driver.apply(command).reply == Mounted(segment_id)
    assert driver.exists([b"k"]) == [1]
    check_invariants(driver.catalog)


def test_f16_a_new_incarnation_gets_a_new_segment_and_the_old_objects_are_gone(
    driver: Driver,
) -> None:
    driver.put([b"k", b"l"])
    old = driver.a  # type: ignore[attr-defined]
    driver.now_ms += S.suspect_ms
    new = driver.mount("a", 64 * KIB, incarnation=2)
    assert new > old
    assert driver.exists([b"k", b"l"]) == [0, 0]
    assert list(driver.locate([b"k"]).status) == [10]
    assert driver.put([b"k"]) == [0], "writable at once"
    driver.pass_time(S.tick_ms)
    assert driver.catalog.segment(old) is None
    check_invariants(driver.catalog)


def test_a24_a_living_name_is_refused_and_its_owner_keeps_working(driver: Driver) -> None:
    driver.put([b"k"])
    reply = driver.apply(Mount("a", 2, "elsewhere:1", 1, 64 * KIB, "b")).reply
    assert isinstance(reply, Refused)
    assert reply.code == UsageError.code
    assert "lives at a:1" in reply.cause
    assert driver.exists([b"k"]) == [1]
    driver.beat(("a", 1, driver.a))  # type: ignore[attr-defined]


def test_a22_f15_a_silent_node_is_not_used_then_forgotten(driver: Driver) -> None:
    driver.put([b"k"])
    b = driver.mount("b", 64 * KIB)
    a = driver.a  # type: ignore[attr-defined]
    elapsed = 0
    while elapsed < S.suspect_ms + S.tick_ms:
        driver.now_ms += S.tick_ms
        elapsed += S.tick_ms
        driver.beat(("b", 1, b))
        driver.pass_time(0)
        driver.pass_time(1, alive=False)
    assert state_of(driver, a) == "suspect"
    assert driver.exists([b"k"]) == [0]
    for i in range(20):
        assert list(driver.start([b"n%d" % i], 64).segment_ids) == [b]
    driver.beat(("a", 1, a))
    assert state_of(driver, a) == "alive"
    assert driver.exists([b"k"]) == [1], "suspect is not forgotten"
    for _ in range(S.dead_ms // S.tick_ms + 2):
        driver.now_ms += S.tick_ms
        driver.beat(("b", 1, b))
        driver.pass_time(1, alive=False)
    assert state_of(driver, a) == "forgotten"
    reply = driver.apply(Heartbeat("a", 1, a)).reply
    assert isinstance(reply, Refused)
    assert reply.code == ObjectNotFound.code
    check_invariants(driver.catalog)


def test_a26_nodes_have_time_to_find_a_new_master(driver: Driver) -> None:
    """They may still be waiting for the former one, which was stopped."""
    driver.put([b"k"])
    driver.catalog.restore(None, driver.log, driver.now_ms)
    taken_over_ms = driver.now_ms
    while driver.now_ms < taken_over_ms + S.dead_ms // 2 - S.tick_ms:
        driver.pass_time(S.tick_ms, alive=False)
        assert driver.exists([b"k"]) == [1]
    for _ in range(3):
        driver.pass_time(S.tick_ms, alive=False)
    assert driver.exists([b"k"]) == [0]


def test_a20_a_node_that_waits_for_the_record_of_its_mount_is_not_silent(driver: Driver) -> None:
    driver.put([b"k"])
    a = driver.a  # type: ignore[attr-defined]
    driver.apply(Mount("a", 1, "a:1", 1, 64 * KIB, "a", a))
    driver.pass_time(S.dead_ms // 2 - S.tick_ms, alive=False)
    assert driver.exists([b"k"]) == [1]
    driver.beat(("a", 1, a))
    driver.pass_time(S.suspect_ms + S.tick_ms, alive=False)
    assert driver.exists([b"k"]) == [0], "one that has been heard is waited for no longer"


def test_a20_a_master_that_can_record_nothing_judges_no_node(driver: Driver) -> None:
    """It answers heartbeats with NotLeader, so nodes spend their time elsewhere."""
    driver.put([b"k"])
    a = driver.a  # type: ignore[attr-defined]
    for _ in range(3 * S.dead_ms // S.tick_ms):
        driver.now_ms += S.tick_ms
        assert driver.apply(Tick(0, bury=False)).records == []
        assert driver.exists([b"k"]) == [1]
    driver.apply(Tick())
    assert state_of(driver, a) == "suspect"
    driver.beat(("a", 1, a))
    assert driver.exists([b"k"]) == [1]
    check_invariants(driver.catalog)


def test_a_master_knows_whether_nodes_report_to_it(driver: Driver) -> None:
    assert driver.catalog.has_followers(driver.now_ms)
    b = driver.mount("b", 64 * KIB)
    elapsed = 0
    while elapsed <= S.suspect_ms + S.tick_ms:
        elapsed += S.tick_ms
        driver.now_ms += S.tick_ms
        driver.beat(("b", 1, b))
        driver.pass_time(0, alive=False)
    assert driver.catalog.has_followers(driver.now_ms), "one of two"
    driver.mount("c", 64 * KIB)
    for _ in range(S.dead_ms // S.tick_ms):
        driver.pass_time(S.tick_ms, alive=False)
        if driver.catalog.has_followers(driver.now_ms):
            assert sum(s.state == "alive" for s in driver.catalog.state.members) >= 1
    assert not driver.catalog.has_followers(driver.now_ms), "all are silent, or forgotten"
    assert not type(driver.catalog)().has_followers(driver.now_ms)


def test_a22_a_clean_exit_removes_entries_at_once(driver: Driver) -> None:
    driver.put([b"k"])
    granted = driver.start([b"open"])
    applied = driver.apply(Unmount("a", 1, driver.a))  # type: ignore[attr-defined]
    assert applied.records
    assert driver.exists([b"k"]) == [0]
    assert driver.end([b"open"], list(granted.generations)) == [33]
    check_invariants(driver.catalog)


def test_objects_of_a_lost_node_are_forgotten_a_few_a_tick() -> None:
    driver = Driver(CatalogSettings(reclaim_max=10, objects_max=1 << 14))
    a = driver.mount("a", 1024 * KIB)
    driver.put([b"%d" % i for i in range(100)], 64)
    driver.apply(Unmount("a", 1, a))
    assert driver.exists([b"5"]) == [0]
    counts = []
    for _ in range(11):
        counts.append(len(driver.catalog.state.table))
        driver.pass_time(S.tick_ms)
    assert counts == list(range(100, -1, -10))
    driver.pass_time(S.tick_ms)
    assert driver.catalog.segment(a) is None


def test_f14_a_replica_on_a_lost_node_leaves_the_other() -> None:
    driver = Driver()
    a, b = driver.mount("a", 64 * KIB), driver.mount("b", 64 * KIB)
    driver.put([b"k"], replica_count=2)
    driver.apply(Unmount("a", 1, a))
    assert list(driver.locate([b"k"]).segment_ids) == [b]
    driver.pass_time(S.tick_ms)
    assert list(driver.locate([b"k"]).segment_ids) == [b]
    check_invariants(driver.catalog)


def test_a_draining_node_is_read_but_gets_nothing_new(driver: Driver) -> None:
    driver.put([b"k"])
    driver.apply(Heartbeat("a", 1, driver.a, draining=True))  # type: ignore[attr-defined]
    assert driver.exists([b"k"]) == [1]
    assert list(driver.start([b"l"]).status) == [20]
    assert driver.exists([b"k"]) == [1], "nobody was evicted for it"


def test_a23_an_unreachable_placement_is_not_given_out_for_a_while(driver: Driver) -> None:
    driver.put([b"k"])
    segment_id = driver.a  # type: ignore[attr-defined]
    generation = driver.catalog.state.table.generation[0]
    driver.apply(Report("t", [b"k"], [generation], [segment_id], [30]))
    assert driver.exists([b"k"]) == [0]
    assert list(driver.locate([b"k"]).status) == [10]
    assert state_of(driver, segment_id) == "alive", "one client's word is not enough"
    driver.pass_time(S.doubt_ms + S.tick_ms)
    assert driver.exists([b"k"]) == [1]


def test_a23_what_was_late_for_one_reader_is_doubted_only_if_its_node_is_silent(
    driver: Driver,
) -> None:
    """The reader may have stood still itself."""
    driver.put([b"k"])
    segment_id = driver.a  # type: ignore[attr-defined]
    generation = driver.catalog.state.table.generation[0]
    late = Report("t", [b"k"], [generation], [segment_id], [TransferTimeout.code])
    driver.apply(late)
    assert driver.exists([b"k"]) == [1]
    driver.now_ms += 2 * S.heartbeat_ms + 1
    driver.apply(late)
    assert driver.exists([b"k"]) == [0]


def test_a_report_and_a_missed_heartbeat_make_a_node_suspect(driver: Driver) -> None:
    driver.put([b"k"])
    segment_id = driver.a  # type: ignore[attr-defined]
    generation = driver.catalog.state.table.generation[0]
    driver.now_ms += 2 * S.heartbeat_ms + 1
    driver.apply(Report("t", [b"k"], [generation], [segment_id], [31]))
    assert state_of(driver, segment_id) == "suspect"


def test_f43_a_damaged_replica_ends_and_late_reports_do_not() -> None:
    driver = Driver()
    segments = {driver.mount("a", 64 * KIB), driver.mount("b", 64 * KIB)}
    driver.put([b"k"], replica_count=2)
    generation = driver.catalog.state.table.generation[0]
    bad = min(segments)
    assert not driver.apply(Report("t", [b"k"], [generation - 1], [bad], [32])).records
    assert driver.apply(Report("t", [b"k"], [generation], [bad], [32])).records
    assert set(driver.locate([b"k"]).segment_ids) == segments - {bad}
    applied = driver.apply(Report("t", [b"k"], [generation], [max(segments)], [33]))
    assert applied.effects, "the node unseals"
    assert driver.exists([b"k"]) == [0]
    check_invariants(driver.catalog)


def test_a21_contradicting_times_are_refused() -> None:
    with pytest.raises(UsageError, match="suspect_ms must not exceed dead_ms"):
        Driver(CatalogSettings(suspect_ms=5000, dead_ms=4000))


def test_a16_f39_a_new_empty_node_takes_at_most_its_share_at_first() -> None:
    driver = Driver()
    for name in "abc":
        driver.mount(name, 1024 * KIB)
    key = 0

    def put_for(ms: int) -> dict[int, int]:
        nonlocal key
        granted: dict[int, int] = {}
        for _ in range(ms // 100):
            driver.pass_time(100)
            for _ in range(4):
                reply = driver.start([b"%d" % key], 1024)
                key += 1
                driver.end([b"%d" % (key - 1)], list(reply.generations))
                granted[reply.segment_ids[0]] = granted.get(reply.segment_ids[0], 0) + 1
        return granted

    put_for(40_000)
    new = driver.mount("d", 1024 * KIB)
    first = put_for(S.slow_start_ms)
    assert 0 < first[new] <= sum(first.values()) / 4
    then = put_for(S.slow_start_ms)
    assert then[new] > sum(then.values()) / 4, "afterwards it catches up"


def test_a_cluster_of_new_nodes_is_used_at_once_and_evenly() -> None:
    driver = Driver()
    for name in "abc":
        driver.mount(name, 1024 * KIB)
    for i in range(150):
        driver.put([b"%d" % i], 1024)
    used = [each.used_units for each in driver.catalog.state.members]
    assert max(used) < 1.3 * min(used)


def test_a22_silence_while_the_master_itself_stood_still_proves_nothing(driver: Driver) -> None:
    driver.put([b"k"])
    segment_id = driver.a  # type: ignore[attr-defined]
    driver.now_ms += 2 * S.dead_ms
    driver.apply(Tick(excused_ms=2 * S.dead_ms))
    assert state_of(driver, segment_id) == "alive"
    assert driver.exists([b"k"]) == [1]
    driver.now_ms += S.suspect_ms
    driver.apply(Tick())
    assert state_of(driver, segment_id) == "suspect", "its own silence counts"
    driver.now_ms += S.dead_ms
    driver.apply(Tick(excused_ms=10))
    assert driver.exists([b"k"]) == [0]


def test_a_node_that_is_away_cannot_be_drained_and_says_so(driver: Driver) -> None:
    mounted = driver.apply(Mount("b", 1, "b:1", 1, 64 * KIB, "b", keeps=True)).reply
    assert isinstance(mounted, Mounted)
    driver.apply(Unmount("b", 1, mounted.segment_id, returns=True))
    assert state_of(driver, mounted.segment_id) == "away"
    refused = driver.apply(Drain("b")).reply
    assert isinstance(refused, Refused)
    assert "is away: nothing can be moved off it" in refused.cause
    assert isinstance(driver.apply(Drain("b", cancel=True)).reply, DrainInfo)
