"""A snapshot that is made in slices is, with the records since its beginning, the whole truth."""

from __future__ import annotations

from itertools import pairwise

import pytest
from catalog_model import Driver, check_invariants, picture
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_py.clock import stopwatch_ns
from mooncake_py.master import records
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import Tick, Unmount
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.shadow import Shadow

MIB = 1 << 20


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a30_whatever_happens_between_the_slices_nothing_is_lost(data: st.DataObject) -> None:
    driver = Driver(settings=CatalogSettings(objects_max=1 << 14, lease_ms=300))
    driver.mount("a", MIB)
    driver.mount("b", MIB)
    keys = [b"k%d" % i for i in range(12)]
    driver.put(keys[:9], replica_count=2)
    base = len(driver.log)
    slices = driver.catalog.slices(driver.now_ms)
    more = True
    while more:
        for _ in range(data.draw(st.integers(0, 3))):
            some = data.draw(st.lists(st.sampled_from(keys), unique=True, max_size=4))
            action = data.draw(
                st.sampled_from(["put", "start", "remove", "locate", "time", "group"])
            )
            if action == "put":
                driver.put(some, replica_count=data.draw(st.integers(1, 2)))
            elif action == "start":
                driver.start(some)
            elif action == "remove":
                driver.remove(some, force=True)
            elif action == "locate":
                driver.locate(some)
            else:
                driver.pass_time(200)
        more = slices.step(data.draw(st.integers(1, 4)))
    driver.catalog.apply(Tick(0), driver.now_ms)
    snapshot, log = bytes(slices.packed), driver.log[base:]
    fresh = Catalog(driver.settings)
    report = fresh.restore(snapshot, log, driver.now_ms)
    assert report.damaged_records == report.extents_overlapping == 0
    assert picture(fresh)["objects"] == picture(driver.catalog)["objects"]
    assert picture(fresh)["grants"] == picture(driver.catalog)["grants"]
    check_invariants(fresh)
    shadow = Shadow(driver.settings)
    shadow.feed(records.unpack(snapshot))
    shadow.feed(log)
    follower = Catalog(driver.settings)
    assert follower.take_over(shadow, driver.now_ms) is not None
    assert picture(follower)["objects"] == picture(driver.catalog)["objects"]


def test_a30_no_slice_takes_long() -> None:
    driver = Driver(settings=CatalogSettings(objects_max=1 << 17))
    driver.mount("a", 1 << 30)
    for at in range(0, 40_000, 1_000):
        driver.put([b"page/%08d" % i for i in range(at, at + 1_000)], 64)
    slices = driver.catalog.slices(driver.now_ms)
    times = []
    more = True
    while more:
        began = stopwatch_ns()
        more = slices.step()
        times.append((stopwatch_ns() - began) / 1e6)
    assert len(times) > 40_000 // 512
    assert sorted(times)[len(times) // 2] < 5  # ms; the median: other processes take turns, too


def with_graves() -> Driver:
    """A new cluster, in which segments of a lost one may come to light, lost all that it had."""
    driver = Driver(settings=CatalogSettings(objects_max=1 << 14))
    first = driver.catalog.begin_term(7, driver.now_ms, driver.now_ms + 3_600_000)
    driver.log += first
    segment_id = driver.mount("a", 16 * MIB)
    keys = [b"page/%05d" % i for i in range(3_000)]
    driver.put(keys, 64)
    driver.remove(keys[:1_000], force=True)
    driver.apply(Unmount("a", 1, segment_id))
    for _ in range(10):
        driver.apply(Tick())
    assert len(driver.catalog.state.table) == 0
    return driver


def test_a30_graves_are_written_down_a_few_a_slice() -> None:
    """They were written when a snapshot began, all of them, and a call waited for that."""
    driver = with_graves()
    assert driver.catalog.state.unrecorded.grave_count == 3_000
    slices = driver.catalog.slices(driver.now_ms)
    assert len(slices.packed) < 1_000
    steps = [len(slices.packed)]
    while slices.step():
        steps.append(len(slices.packed))
    assert len(steps) >= 3_000 // 512
    longest = max(b - a for a, b in pairwise(steps))
    assert longest < len(slices.packed) / 4
    shadow = Shadow(driver.settings)
    shadow.feed(records.unpack(bytes(slices.packed)))
    restored = [Catalog(driver.settings), Catalog(driver.settings)]
    restored[0].restore(bytes(slices.packed), [], driver.now_ms)
    assert restored[1].take_over(shadow, driver.now_ms) is not None
    for catalog in restored:
        graves = dict(catalog.state.unrecorded.graves())
        assert graves == dict(driver.catalog.state.unrecorded.graves())


def test_f60_graves_are_bounded_whatever_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evictions and losses dig them as well as removals."""
    monkeypatch.setattr("mooncake_py.master.catalog.GRAVES_MAX", 2_999)
    driver = with_graves()
    assert driver.catalog.state.unrecorded.grave_count == 0
    assert not driver.catalog.state.unrecorded.open
