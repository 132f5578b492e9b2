"""Large objects over several holes: one fate, one name, every rule of the catalog part by part."""

from __future__ import annotations

from catalog_model import Driver, check_invariants, grant_rows, picture

from mooncake_py.errors import (
    OK,
    Backpressure,
    LeaseExpired,
    ObjectExists,
    OutOfSpace,
    QuotaExceeded,
    UsageError,
)
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import (
    CopyObjects,
    Drain,
    Events,
    Granted,
    List,
    Listed,
    PutStart,
    Reserve,
    Reserved,
    SetQuota,
    Status,
    Statuses,
    StatusInfo,
    Unmount,
)
from mooncake_py.master.records import unpack
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.shadow import Shadow
from mooncake_py.master.stripes import part_key
from mooncake_py.model import EXTENT_ROW, PART_ROW, reserved_key

KIB = 1 << 10
S = CatalogSettings(objects_max=1 << 14, stripe_min_bytes=16 * KIB, events_max=100)


def two_small_nodes() -> Driver:
    driver = Driver(S)
    driver.mount("a", 256 * KIB)
    driver.mount("b", 256 * KIB)
    return driver


def part_rows(driver: Driver, key: bytes) -> list[tuple[int, ...]]:
    """(key index, segment, offset, length, generation, start) of every part."""
    located = driver.locate([key])
    assert located.status == bytes([OK]), located.status
    assert not located.placements
    return list(PART_ROW.iter_unpack(located.parts))


def test_f05_an_object_larger_than_any_segment_is_striped_and_visible_as_a_whole() -> None:
    driver = two_small_nodes()
    granted = driver.start([b"large"], 400 * KIB)
    assert list(granted.status) == [OK]
    rows = [row for rows in granted.rows for row in EXTENT_ROW.iter_unpack(rows)]
    assert {row[0] for row in rows} == {0}
    assert len({row[4] for row in rows}) == len(rows), "every part has its own generation"
    sizes = [row[3] for row in sorted(rows, key=lambda row: row[4])]  # in order of generation
    assert sum(sizes) == 400 * KIB
    assert len(granted.part_rows) == len(rows) - 1
    assert driver.exists([b"large"]) == [0]
    check_invariants(driver.catalog)
    assert driver.end([b"large"], list(granted.generations)) == [OK]
    assert driver.end([b"large"], list(granted.generations)) == [OK], "a second time is harmless"
    assert driver.exists([b"large"]) == [1]
    found = part_rows(driver, b"large")
    assert [row[3] for row in found] == sizes
    assert [row[5] for row in found] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert driver.put([b"large"], 10) == [ObjectExists.code]
    check_invariants(driver.catalog)


def test_a_fragmented_cluster_stripes_before_it_evicts() -> None:
    driver = Driver(CatalogSettings(objects_max=1 << 14, stripe_min_bytes=16 * KIB, lease_ms=1))
    driver.mount("a", 1024 * KIB)
    names = [b"%d" % i for i in range(15)]
    driver.put(names, 60 * KIB)
    driver.remove(names[::2])
    driver.pass_time(100)
    evictions = driver.catalog.state.counters["evictions"]
    assert driver.put([b"large"], 200 * KIB) == [OK]
    assert driver.catalog.state.counters["evictions"] == evictions
    assert driver.exists(names[1::2]) == [1] * 7
    assert len(part_rows(driver, b"large")) >= 2


def test_a_stripe_ends_as_a_whole_and_gives_everything_back() -> None:
    for end in ("revoke", "expire", "fail", "remove", "remove all", "evict", "node"):
        driver = two_small_nodes()
        granted = driver.start([b"large"], 400 * KIB)
        generations = list(granted.generations)
        if end == "revoke":
            assert driver.revoke([b"large"], generations) == [OK]
        elif end == "expire":
            driver.pass_time(S.grant_ttl_ms)
        elif end == "fail":
            failed = [(0, granted.segment_ids[1])]
            assert driver.end([b"large"], generations, failed=failed) == [LeaseExpired.code]
        else:
            assert driver.end([b"large"], generations) == [OK]
            if end == "remove":
                driver.remove([b"large"])
            elif end == "remove all":
                assert driver.remove([], all=True).removed == 1
            elif end == "evict":
                assert driver.put([b"other"], 300 * KIB) == [OK]
            else:
                driver.apply(Unmount("a", 1, granted.segment_ids[0]))
        check_invariants(driver.catalog)
        assert driver.exists([b"large"]) == [0], end
        driver.pass_time(S.grant_ttl_ms + S.grant_margin_ms + S.lease_ms + 200)
        left = 300 * KIB + 64 * 20 if end == "evict" else 0
        assert driver.used_bytes() <= left, end
        check_invariants(driver.catalog)


def test_a_listing_and_the_events_show_the_whole_under_its_key() -> None:
    driver = two_small_nodes()
    driver.put([b"large"], 400 * KIB)
    driver.put([b"small"], 10)
    listed = driver.apply(List("t")).reply
    assert isinstance(listed, Listed)
    assert (listed.keys, listed.lengths) == ([b"large", b"small"], [400 * KIB, 10])
    page = driver.apply(Events()).reply
    assert [each.key for each in page.events] == [b"large", b"small"]  # type: ignore[union-attr]
    reply = driver.apply(PutStart("t", [b"\xfe"], [1], bytes(16))).reply
    assert isinstance(reply, Granted)
    assert list(reply.status) == [UsageError.code], "keys of parts are nobody's to name"


def test_f05_a_reservation_is_committed_under_no_name_of_the_catalogs_own() -> None:
    driver = two_small_nodes()
    driver.put([b"large"], 300 * KIB)
    count = len(part_rows(driver, b"large"))
    reply = driver.apply(Reserve("t", 64, 2, random=7)).reply
    assert isinstance(reply, Reserved)
    first, second = (row[4] for rows in reply.rows for row in EXTENT_ROW.iter_unpack(rows))
    names = [part_key(b"large", count), reserved_key(second)]
    assert driver.end(names, [first, second], reserved=True) == [UsageError.code] * 2
    assert len(part_rows(driver, b"large")) == count
    assert driver.end([b"k"], [first], reserved=True) == [OK], "it is still there"
    check_invariants(driver.catalog)


def test_f44_the_parts_of_a_large_object_are_one_key_of_their_tenant() -> None:
    driver = two_small_nodes()
    driver.apply(SetQuota("t", keys_max=2))
    assert driver.put([b"large"], 400 * KIB) == [OK]
    assert len(part_rows(driver, b"large")) >= 2
    assert driver.put([b"small"], 10) == [OK]
    assert driver.put([b"third"], 10) == [QuotaExceeded.code]
    status = driver.apply(Status()).reply
    assert isinstance(status, StatusInfo)
    assert (status.objects, status.tenants[0].keys) == (2, 2)
    driver.remove([b"large"], force=True)
    assert driver.put([b"third"], 10) == [OK]
    check_invariants(driver.catalog)


def test_f37_a_copy_or_a_move_takes_every_part() -> None:
    driver = two_small_nodes()
    driver.put([b"large"], 400 * KIB)
    driver.mount("c", 1024 * KIB)

    def ask(source: str) -> int:
        command = CopyObjects("t", [b"large"], "c", source)
        for _ in range(8):
            reply = driver.apply(command).reply
            assert isinstance(reply, Statuses)
            if reply.status[0] != Backpressure.code:
                return reply.status[0]
            driver.work_off()
        raise AssertionError("it does not come to an end")

    def nodes_of(row: tuple[int, ...]) -> str:
        ids = driver.locate([b"large"]).segment_ids
        return driver.catalog.state.members.by_id[ids[row[1]]].node

    parts = len(part_rows(driver, b"large"))
    assert ask("a") == OK
    assert {nodes_of(row) for row in part_rows(driver, b"large")} == {"b", "c"}
    assert ask("a") == OK, "asked again, it is still so"
    assert ask("") == OK
    assert sum(nodes_of(row) == "c" for row in part_rows(driver, b"large")) == parts
    check_invariants(driver.catalog)


def test_a_lease_of_the_whole_keeps_every_part() -> None:
    driver = two_small_nodes()
    driver.put([b"large"], 400 * KIB)
    driver.locate([b"large"])
    assert driver.put([b"other"], 300 * KIB) == [OutOfSpace.code]
    driver.pass_time(S.lease_ms + S.tick_ms)
    assert driver.put([b"other"], 300 * KIB) == [OK]


def test_parts_are_drained_each_by_itself_and_survive_restarts() -> None:
    driver = two_small_nodes()
    driver.put([b"large"], 300 * KIB)
    driver.mount("c", 512 * KIB)
    driver.apply(Drain("a"))
    for _ in range(10):
        driver.pass_time(S.tick_ms)
        driver.work_off()
        check_invariants(driver.catalog)
    assert sum(row[3] for row in part_rows(driver, b"large")) == 300 * KIB
    nodes = driver.catalog.state.members
    assert all(each.used_units == 0 for each in nodes if each.node == "a")
    snapshot = driver.catalog.snapshot(driver.now_ms)
    for stored, log in ((None, driver.log), (snapshot, [])):
        again = Catalog(S)
        again.restore(stored, log, driver.now_ms)
        shadow = Shadow(S)
        shadow.feed([*unpack(stored or b""), *log])
        other = Catalog(S)
        assert other.take_over(shadow, driver.now_ms) is not None
        for catalog in (again, other):
            assert picture(catalog)["objects"] == picture(driver.catalog)["objects"]
            check_invariants(catalog)


def test_a_strict_wish_for_replicas_is_not_striped_and_one_group_holds_stripes_and_others() -> None:
    driver = two_small_nodes()
    assert driver.put([b"x"], 400 * KIB, replica_count=2, strict=True) == [OutOfSpace.code]
    command = PutStart("t", [b"big", b"side"], [300 * KIB, 100], bytes(32), groups=[7, 7], random=3)
    granted = driver.apply(command).reply
    assert isinstance(granted, Granted)
    assert list(granted.status) == [OK, OK]
    assert len(grant_rows(granted)) >= 3
    assert driver.end([b"big"], [granted.generations[0]]) == [OK]
    assert driver.exists([b"big", b"side"]) == [0, 0]
    assert driver.end([b"side"], [granted.generations[1]]) == [OK]
    assert driver.exists([b"big", b"side"]) == [1, 1]
    driver.remove([b"side"])
    assert driver.exists([b"big", b"side"]) == [0, 0]
    check_invariants(driver.catalog)


def test_fragmentation_can_be_seen_in_the_numbers_of_every_segment() -> None:
    """Much is free, and no piece of it is large."""
    driver = Driver(S)
    segment_id = driver.mount("a", 256 * KIB)
    keys = [b"%02d" % i for i in range(56)]
    assert not any(driver.put(keys, 4 * KIB - 64))
    driver.remove(keys[::2], force=True)
    info = driver.apply(Status()).reply
    assert isinstance(info, StatusInfo)
    assert info.used_bytes == 28 * 4 * KIB
    assert info.counters[f"largest_hole_bytes.{segment_id}"] == 32 * KIB
    driver.remove(keys[1::2], force=True)
    info = driver.apply(Status()).reply
    assert isinstance(info, StatusInfo)
    assert info.counters[f"largest_hole_bytes.{segment_id}"] == 256 * KIB
