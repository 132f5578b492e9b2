"""Records: every kind reads back as written, and damage costs only what it hit."""

from __future__ import annotations

import pytest
from catalog_model import Driver, check_invariants, picture
from hypothesis import given
from hypothesis import strategies as st

from mooncake_py.master import records
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import Granted, Heartbeat, Mount, PutEnd, PutStart, Refused
from mooncake_py.master.keys import CompleteKeys
from mooncake_py.master.objects import READ
from mooncake_py.master.settings import CatalogSettings

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
text = st.text(max_size=20).filter(lambda each: "\ud800" not in each)
pairs = st.lists(st.tuples(u64, u64), max_size=5)


@st.composite
def grants(draw: st.DrawFn) -> records.GrantFields:
    count = draw(st.integers(0, 5))

    def column(values: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(st.lists(values, min_size=count, max_size=count)))

    replicas = column(st.integers(0, 3))
    total = 2 * sum(replicas)
    return records.GrantFields(
        now_ms=draw(u64),
        expires_ms=draw(u64),
        tenant=draw(text),
        soft_pin_ms=draw(u64),
        ttl_ms=draw(u64),
        hard_pin=draw(st.booleans()),
        keys=draw(st.lists(st.binary(max_size=30), min_size=count, max_size=count)),
        generations=column(u64),
        lengths=column(u64),
        replicas=replicas,
        extents=tuple(draw(st.lists(u64, min_size=total, max_size=total))),
        groups=column(u32) if draw(st.booleans()) else (),
        complete=draw(st.booleans()),
    )


generations = st.lists(u64, max_size=5).map(tuple)
any_record = st.one_of(
    st.builds(records.Marks, u64, u64),
    st.builds(records.SegmentFields, u64, text, u64, text, u32, u64, text),
    st.builds(records.Gone, u64),
    grants(),
    st.builds(records.Commits, u64, generations, pairs),
    st.builds(records.Drops, u64, u64, generations),
    st.builds(records.Lost, u64, pairs),
    st.builds(records.QuotaFields, text, u64, u64, st.none() | st.integers(0, 2)),
    st.builds(records.Resting, st.lists(st.tuples(u64, u64, u64, u64), max_size=4)),
)


@given(any_record)
def test_every_record_reads_back_as_written(record: records.Record) -> None:
    assert records.decode(records.encode(record)) == record


@given(any_record, st.data())
def test_a_flipped_bit_or_a_cut_is_noticed(record: records.Record, data: st.DataObject) -> None:
    good = records.encode(record)
    at = data.draw(st.integers(0, len(good) * 8 - 1))
    bad = bytearray(good)
    bad[at // 8] ^= 1 << at % 8
    with pytest.raises(records.DamagedRecord):
        records.decode(bytes(bad))
    with pytest.raises(records.DamagedRecord):
        records.decode(good[: data.draw(st.integers(0, len(good) - 1))])


def test_records_of_a_newer_release_are_passed_over() -> None:
    driver = Driver()
    driver.mount("a", 1 << 20)
    driver.put([b"k"])
    newer = records._frame(200, b"something new")
    fresh = Catalog(driver.settings)
    report = fresh.restore(None, [newer, *driver.log], driver.now_ms)
    assert report.unknown_records == 1
    assert picture(fresh) == picture(driver.catalog)


def busy_driver() -> Driver:
    driver = Driver()
    driver.mount("a", 1 << 18)
    driver.mount("b", 1 << 18)
    for i in range(60):
        driver.put([b"k%d" % i, b"l%d" % i], 8000, replica_count=1 + i % 2)
        driver.pass_time(100)
        if i % 7 == 0:
            driver.start([b"open%d" % i], 500)
            driver.remove([b"k%d" % (i - 1)])
    return driver


def test_one_bad_record_never_loses_the_rest() -> None:
    driver = busy_driver()
    whole = picture(driver.catalog)["objects"]
    for at in range(len(driver.log)):
        damaged = list(driver.log)
        damaged[at] = damaged[at][:-1] + bytes([damaged[at][-1] ^ 1])
        fresh = Catalog(driver.settings)
        report = fresh.restore(None, damaged, driver.now_ms)
        assert report.damaged_records == 1
        check_invariants(fresh)
        kept = picture(fresh)["objects"]
        record = records.decode(driver.log[at])
        if isinstance(record, records.GrantFields):
            hit = set(record.generations)
            assert {what[2] for what in whole} - {what[2] for what in kept} <= hit  # type: ignore[attr-defined]
        elif isinstance(record, records.Drops | records.Lost):
            assert {what[2] for what in whole} <= {what[2] for what in kept}  # type: ignore[attr-defined]


def test_a25_f11_a_restart_brings_every_object_back_and_grants_go_on() -> None:
    driver = busy_driver()
    granted = driver.start([b"running"], 100)
    fresh = Catalog(driver.settings)
    report = fresh.restore(None, driver.log, driver.now_ms)
    assert report.objects == len(driver.catalog.state.table)
    assert picture(fresh) == picture(driver.catalog)
    driver.catalog = fresh
    assert driver.end([b"running"], list(granted.generations)) == [0]
    assert driver.exists([b"running"]) == [1]


def test_a25_a_restart_looks_at_all_objects_once_not_for_each_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    driver.mount("a", 1 << 20)
    names = [f"t{i}" for i in (4, 1, 7, 2)]
    for round_ in range(3):
        for name in names:
            keys = [b"%d/%d" % (round_, i) for i in range(5)]
            reply = driver.apply(PutStart(name, keys, [64] * 5, bytes(16 * 5))).reply
            assert isinstance(reply, Granted)
            driver.apply(PutEnd(name, keys, list(reply.generations)))
    expected = picture(driver.catalog)
    fresh = Catalog(driver.settings)
    with monkeypatch.context() as patch:
        patch.setattr(CompleteKeys, "_entries", None)  # which walks over all slots
        fresh.restore(driver.catalog.snapshot(driver.now_ms), [], driver.now_ms)
    assert picture(fresh) == expected
    table = fresh.state.table
    assert len(table) == 60
    assert all(table.flags[slot] & READ for slot in table.live()), "any may have been located"
    assert {table.stamp[slot] for slot in table.live()} == {driver.now_ms}
    check_invariants(fresh)


def test_generations_and_segment_ids_are_never_used_again_though_the_log_is_lost() -> None:
    driver = Driver()
    segments: set[int] = set()
    generations: set[int] = set()
    for term in range(1, 5):
        driver.catalog = Catalog(driver.settings)
        driver.catalog.restore(None, [], driver.now_ms)
        driver.catalog.begin_term(term)
        segment_id = driver.mount("a", 1 << 20, incarnation=term)
        fresh = set(driver.start([b"a", b"b"], 64).generations)
        assert segment_id > max(segments, default=0)
        assert min(fresh) > max(generations, default=0)
        segments.add(segment_id)
        generations |= fresh


def test_without_terms_generations_are_reserved_durably_before_they_are_handed_out() -> None:
    driver = Driver(CatalogSettings(generation_block=1 << 13, objects_max=1 << 14))
    driver.mount("a", 1 << 20)
    mark = 0
    for i in range(3 * (1 << 13) // 100):
        keys = [b"%d" % j for j in range(i * 100, i * 100 + 100)]
        applied = driver.apply(PutStart("t", keys, [0] * 100, bytes(1600)))
        for record in map(records.decode, applied.records):
            if isinstance(record, records.Marks):
                assert applied.durable_first
                mark = record.generation
        assert max(applied.reply.generations) < mark  # type: ignore[union-attr]


def test_a25_nothing_is_placed_after_a_restart_until_the_node_mounts_again() -> None:
    driver = Driver()
    segment_id = driver.mount("a", 1 << 20)
    driver.put([b"k"])
    fresh = Catalog(driver.settings)
    fresh.restore(None, driver.log, driver.now_ms)
    driver.catalog = fresh
    assert driver.exists([b"k"]) == [1]
    assert list(driver.start([b"l"]).status) == [20]
    assert isinstance(driver.apply(Heartbeat("a", 1, segment_id)).reply, Refused)
    driver.apply(Mount("a", 1, "a:1", 1, 1 << 20, "a", segment_id))
    assert driver.put([b"l"]) == [0]
    assert driver.exists([b"k", b"l"]) == [1, 1]


def test_a_snapshot_and_the_log_after_it_equal_the_whole_log() -> None:
    driver = busy_driver()
    position = len(driver.log)
    snapshot = driver.catalog.snapshot(driver.now_ms)
    assert len(snapshot) < sum(map(len, driver.log))
    driver.put([b"after"], 1000, ttl_ms=5000)
    driver.remove([b"l50"])
    fresh = Catalog(driver.settings)
    fresh.restore(snapshot, driver.log[position:], driver.now_ms)
    assert picture(fresh) == picture(driver.catalog)
    check_invariants(fresh)
