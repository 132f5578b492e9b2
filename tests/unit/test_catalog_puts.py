"""Put start, end and revoke: who gets a grant, when it ends, what is visible."""

from __future__ import annotations

import pytest
from catalog_model import Driver, check_invariants, grant_rows, place_rows

from mooncake_py.errors import LeaseExpired, ObjectExists, OutOfSpace, QuotaExceeded, UsageError
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import Mount, PutStart, Refused, Status, StatusInfo
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.model import BATCH_MAX_KEYS, KEY_MAX_BYTES, ReplicaPolicy, extent_bytes

EXISTS, SPACE, EXPIRED = ObjectExists.code, OutOfSpace.code, LeaseExpired.code
KIB = 1024


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.mount("a", 1024 * KIB)
    return driver


def test_f06_an_object_is_visible_after_the_commit_and_not_before(driver: Driver) -> None:
    granted = driver.start([b"k"])
    assert driver.exists([b"k"]) == [0]
    assert list(driver.locate([b"k"]).status) == [10]
    assert driver.end([b"k"], list(granted.generations)) == [0]
    assert driver.exists([b"k"]) == [1]
    assert place_rows(driver.locate([b"k"])) == grant_rows(granted)


def test_a02_f07_a_second_put_is_told_that_the_key_exists(driver: Driver) -> None:
    first = driver.start([b"k"])
    assert list(driver.start([b"k"]).status) == [EXISTS], "another writer's grant runs"
    driver.end([b"k"], list(first.generations))
    second = driver.start([b"k"])
    assert list(second.status) == [EXISTS]
    assert list(second.generations) == [0]
    assert grant_rows(second) == []
    assert place_rows(driver.locate([b"k"]))[0][4] == first.generations[0]


def test_a02_a_duplicate_commit_of_the_same_put_is_ok(driver: Driver) -> None:
    granted = driver.start([b"k"])
    generations = list(granted.generations)
    assert driver.end([b"k"], generations) == [0]
    assert driver.end([b"k"], generations) == [0]
    assert driver.end([b"k"], [generations[0] + 1]) == [EXPIRED]
    check_invariants(driver.catalog)


def test_a03_a_batch_answers_per_key_in_order_also_for_repeated_keys(driver: Driver) -> None:
    driver.put([b"old"])
    granted = driver.start([b"x", b"old", b"x", b"", b"y"])
    assert list(granted.status) == [0, EXISTS, EXISTS, UsageError.code, 0]
    assert [bool(generation) for generation in granted.generations] == [1, 0, 0, 0, 1]
    assert [row[0] for row in grant_rows(granted)] == [0, 4]


def test_a01_f08_a_vanished_writer_frees_key_at_expiry_and_space_after_the_margin(
    driver: Driver,
) -> None:
    settings = driver.settings
    free = driver.catalog.state.members.at(0).allocator.free
    driver.start([b"k"])
    driver.now_ms += settings.grant_ttl_ms - 1
    assert list(driver.start([b"k"]).status) == [EXISTS]
    driver.now_ms += 1
    second = driver.start([b"k"])  # at expiry, although no tick has run
    assert list(second.status) == [0]
    driver.revoke([b"k"], list(second.generations))
    driver.pass_time(settings.grant_margin_ms - 1)
    first_rests = driver.catalog.state.members.at(0).allocator.free
    driver.pass_time(1)
    assert driver.catalog.state.members.at(0).allocator.free > first_rests
    driver.pass_time(settings.grant_ttl_ms + settings.grant_margin_ms)
    assert driver.catalog.state.members.at(0).allocator.free == free
    status = driver.apply(Status()).reply
    assert isinstance(status, StatusInfo)
    assert status.counters["grants_reclaimed"] == 1
    assert status.counters["grants_reclaimed_bytes"] == extent_bytes(4096)
    check_invariants(driver.catalog)


def test_a01_f08_a_commit_after_expiry_is_refused_and_changes_nothing(driver: Driver) -> None:
    granted = driver.start([b"k"])
    driver.now_ms += driver.settings.grant_ttl_ms
    assert driver.end([b"k"], list(granted.generations)) == [EXPIRED]
    assert driver.exists([b"k"]) == [0]
    check_invariants(driver.catalog)


def test_a01_a_key_in_writing_can_be_removed_and_its_commit_is_refused(driver: Driver) -> None:
    granted = driver.start([b"k"])
    assert list(driver.remove([b"k"]).status) == [0]
    assert driver.end([b"k"], list(granted.generations)) == [EXPIRED]
    again = driver.start([b"k"])
    assert list(again.status) == [0]
    assert again.generations[0] > granted.generations[0]
    assert grant_rows(again)[0][2] != grant_rows(granted)[0][2], "the node may still be writing"


def test_a_stale_commit_cannot_complete_a_newer_put(driver: Driver) -> None:
    old = driver.start([b"k"])
    driver.revoke([b"k"], list(old.generations))
    new = driver.start([b"k"])
    assert driver.end([b"k"], list(old.generations)) == [EXPIRED]
    assert driver.exists([b"k"]) == [0]
    assert driver.revoke([b"k"], list(old.generations)) == [0]
    assert driver.end([b"k"], list(new.generations)) == [0]


def test_revoked_space_rests_until_no_node_can_be_writing(driver: Driver) -> None:
    granted = driver.start([b"k"], 900 * KIB)
    driver.revoke([b"k"], list(granted.generations))
    assert list(driver.start([b"k"], 900 * KIB).status) == [SPACE]
    driver.pass_time(driver.settings.grant_ttl_ms + driver.settings.grant_margin_ms)
    assert list(driver.start([b"k"], 900 * KIB).status) == [0]


def test_replicas_that_failed_are_dropped_and_without_any_the_put_fails() -> None:
    driver = Driver()
    a, b = driver.mount("a", 64 * KIB), driver.mount("b", 64 * KIB)
    granted = driver.start([b"k"], replica_count=2)
    assert driver.end([b"k"], list(granted.generations), failed=[(0, a)]) == [0]
    assert [row[1] for row in place_rows(driver.locate([b"k"]))] == [b]
    granted = driver.start([b"l"], replica_count=2)
    assert driver.end([b"l"], list(granted.generations), failed=[(0, a), (0, b)]) == [EXPIRED]
    assert driver.exists([b"l"]) == [0]
    check_invariants(driver.catalog)


def test_f13_a17_replicas_lie_on_distinct_nodes_and_the_answer_says_how_many() -> None:
    driver = Driver()
    driver.mount("a", 64 * KIB)
    assert len(grant_rows(driver.start([b"one"], replica_count=2))) == 1
    assert list(driver.start([b"strict"], replica_count=2, strict=True).status) == [SPACE]
    driver.mount("b", 64 * KIB)
    for i in range(8):
        rows = grant_rows(driver.start([b"k%d" % i], 64, replica_count=2, strict=True))
        assert len({row[1] for row in rows}) == 2
    check_invariants(driver.catalog)


def test_f13_a17_replicas_prefer_distinct_failure_domains() -> None:
    driver = Driver()
    domains = {}
    for name, domain in (("a", "r1"), ("b", "r1"), ("c", "r1"), ("d", "r2"), ("e", "")):
        mount = Mount(name, 1, f"{name}:1", 1, 1024 * KIB, name, 0, domain)
        segment_id = driver.apply(mount).reply.segment_id  # type: ignore[union-attr]
        domains[segment_id] = domain
    for i in range(30):
        rows = grant_rows(driver.start([b"two%d" % i], 64, replica_count=2))
        two = sorted(domains[row[1]] for row in rows)
        assert two in (["", "r1"], ["", "r2"], ["r1", "r2"])
    for i in range(30):
        rows = grant_rows(driver.start([b"four%d" % i], 64, replica_count=4, strict=True))
        four = sorted(domains[row[1]] for row in rows)
        assert four == ["", "r1", "r1", "r2"], "what is left over is on nodes of a domain twice"


def test_a17_a_restarted_master_knows_domains_when_nodes_have_mounted_again() -> None:
    driver = Driver()
    ids = {}
    nodes = {"a": "r1", "b": "r1", "c": "r2"}
    for _ in range(2):
        for name, domain in nodes.items():
            known = ids.get(name, 0)
            mount = Mount(name, 1, f"{name}:1", 1, 1024 * KIB, name, known, domain)
            ids[name] = driver.apply(mount).reply.segment_id  # type: ignore[union-attr]
        for i in range(20):
            key = b"%d/%d" % (i, len(driver.log))
            rows = grant_rows(driver.start([key], 64, replica_count=2, strict=True))
            assert ids["c"] in {row[1] for row in rows}
        fresh = Catalog(driver.settings)
        fresh.restore(None, driver.log, driver.now_ms)
        driver.catalog = fresh


def test_a17_replicas_prefer_distinct_hosts() -> None:
    driver = Driver()
    one = {driver.mount("a", 64 * KIB, host_id="h1"), driver.mount("b", 64 * KIB, host_id="h1")}
    other = driver.mount("c", 64 * KIB, host_id="h2")
    for i in range(10):
        used = {row[1] for row in grant_rows(driver.start([b"%d" % i], 64, replica_count=2))}
        assert other in used
        assert len(used & one) == 1


def test_local_and_preferred_nodes_are_used_first() -> None:
    driver = Driver()
    segments = {node: driver.mount(node, 64 * KIB) for node in "abc"}
    reply = driver.apply(PutStart("t", [b"x"], [64], bytes(16), host_id="b", random=5)).reply
    assert list(reply.segment_ids) == [segments["b"]]  # type: ignore[union-attr]
    policy = ReplicaPolicy(preferred_nodes=("c",))
    reply = driver.apply(
        PutStart("t", [b"y"], [64], bytes(16), policy, host_id="b", random=5)
    ).reply
    assert list(reply.segment_ids) == [segments["c"]]  # type: ignore[union-attr]


def test_a16_segments_of_different_sizes_fill_in_proportion() -> None:
    driver = Driver()
    driver.mount("small", 1024 * KIB)
    driver.mount("large", 4096 * KIB)
    for i in range(500):
        driver.put([b"%d" % i], 4032)
    small, large = (each.used_units / each.allocator.units for each in driver.catalog.state.members)
    assert abs(small - large) < 0.1


def test_placement_by_chance_does_not_look_at_what_is_free() -> None:
    """As many new objects on the full half of a cluster as on the empty one, replicas apart."""
    shares = {}
    for placement in ("free", "random"):
        driver = Driver(CatalogSettings(placement=placement, slow_start_ms=0, objects_max=1 << 12))
        full = driver.mount("full", 1024 * KIB)
        assert not any(driver.put([b"old %d" % i for i in range(120)], 4032))
        empty = driver.mount("empty", 1024 * KIB)
        new = {full: 0, empty: 0}
        for i in range(100):
            reply = driver.start([b"new %d" % i], 64)
            new[reply.segment_ids[0]] += 1
            assert driver.end([b"new %d" % i], list(reply.generations)) == [0]
        assert len(driver.start([b"two"], 64, replica_count=2, strict=True).segment_ids) == 2
        shares[placement] = new[empty]
    assert 60 < shares["free"] <= 100
    assert 35 < shares["random"] < 65
    with pytest.raises(UsageError, match="must be free or random"):
        CatalogSettings(placement="round").validate()


def test_a06_limits_are_refused_before_anything_is_reserved(driver: Driver) -> None:
    long = b"k" * (KEY_MAX_BYTES + 1)
    assert list(driver.start([long]).status) == [UsageError.code]
    assert driver.put([b"k" * KEY_MAX_BYTES], 64) == [0]
    assert driver.put([b"\0\n/%\xff"], 0) == [0]
    many = [b"%d" % i for i in range(BATCH_MAX_KEYS + 1)]
    reply = driver.apply(PutStart("t", many, [1] * len(many), bytes(16 * len(many)))).reply
    assert isinstance(reply, Refused)
    assert reply.code == UsageError.code
    assert isinstance(driver.apply(PutStart("t" * 200, [b"a"], [1], bytes(16))).reply, Refused)
    check_invariants(driver.catalog)


def test_an_object_larger_than_any_segment_evicts_nobody(driver: Driver) -> None:
    driver.put([b"small"])
    assert driver.put([b"huge"], 2048 * KIB) == [SPACE]
    assert driver.exists([b"small"]) == [1]


def test_c11_hard_pins_have_a_limit(driver: Driver) -> None:
    assert driver.put([b"a"], 400 * KIB, hard_pin=True) == [0]
    assert driver.put([b"b"], 400 * KIB, hard_pin=True) == [QuotaExceeded.code]
    driver.remove([b"a"], force=True)
    assert driver.put([b"b"], 400 * KIB, hard_pin=True) == [0]


def test_tenants_have_their_own_keys(driver: Driver) -> None:
    driver.put([b"k"])
    reply = driver.apply(PutStart("other", [b"k"], [64], bytes(16))).reply
    assert list(reply.status) == [0]  # type: ignore[union-attr]
    check_invariants(driver.catalog)


def upsert(driver: Driver, keys: list[bytes], length: int = 4096) -> list[int]:
    count = len(keys)
    command = PutStart("t", keys, [length] * count, bytes(16 * count), random=3, upsert=True)
    granted = driver.apply(command).reply
    assert not any(granted.status), granted  # type: ignore[union-attr]
    return list(granted.generations)  # type: ignore[union-attr]


def test_f35_c12_the_old_value_is_found_until_the_new_one_is_committed(driver: Driver) -> None:
    driver.put([b"k"], 100)
    old = place_rows(driver.locate([b"k"]))
    generations = upsert(driver, [b"k"], 200)
    assert place_rows(driver.locate([b"k"])) == old
    assert list(driver.start([b"k"]).status) == [EXISTS], "one writer at a time"
    assert driver.end([b"k"], generations) == [0]
    new = place_rows(driver.locate([b"k"]))
    assert new[0][3:] == (200, generations[0])
    assert driver.put([b"next"], 100) == [0]
    assert place_rows(driver.locate([b"next"]))[0][2] != old[0][2], "its readers hold a lease"
    check_invariants(driver.catalog)


def test_f35_a_failed_replacement_keeps_the_old_value(driver: Driver) -> None:
    driver.put([b"k"], 100)
    old = place_rows(driver.locate([b"k"]))
    generations = upsert(driver, [b"k"], 200)
    driver.revoke([b"k"], generations)
    assert place_rows(driver.locate([b"k"])) == old
    generations = upsert(driver, [b"k"], 200)
    driver.pass_time(driver.settings.grant_ttl_ms)
    assert driver.end([b"k"], generations) == [EXPIRED]
    assert place_rows(driver.locate([b"k"])) == old
    check_invariants(driver.catalog)


def test_an_upsert_of_an_absent_key_is_a_put_and_a_removal_ends_both(driver: Driver) -> None:
    assert driver.end([b"k"], upsert(driver, [b"k"])) == [0]
    generations = upsert(driver, [b"k"])
    assert list(driver.remove([b"k"]).status) == [0]
    assert driver.end([b"k"], generations) == [EXPIRED]
    assert driver.exists([b"k"]) == [0]
    check_invariants(driver.catalog)
