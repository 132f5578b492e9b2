"""What a store of metadata holds does not grow with the number of puts, only with that of objects.

A day of operations is pressed together: the real catalog decides, the real stores keep its records,
and the clock moves by itself. Memory is full after the first tenth; from then on each put evicts
another object. MOONCAKE_DAY_PUTS is how many there are (20,000,000: a day at 230 a second).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from etcd_cluster import EtcdCluster, needs_etcd

from mooncake_py.clock import ManualClock, SystemClock
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import Command, Granted, Heartbeat, Mount, PutEnd, PutStart, Tick
from mooncake_py.master.embedded import EmbeddedStore
from mooncake_py.master.etcd_store import EtcdStore
from mooncake_py.master.metadata import MetadataStore
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.model import extent_bytes

PUTS = int(os.environ.get("MOONCAKE_DAY_PUTS", "60000"))
BATCH = 250
OBJECTS = PUTS // 10  # that memory has room for
LENGTH = 4_096
SNAPSHOT_BYTES = 6 * PUTS  # of records: a dozen snapshots or so
T = 20_000
SETTINGS = CatalogSettings(objects_max=1 << 20, lease_ms=1, spare_ms=0)


class Day:
    """A master without its threads: what it decides is durable before it goes on."""

    def __init__(self, store: MetadataStore) -> None:
        self.store = store
        self.clock = ManualClock()
        loaded = store.load()
        self.catalog = Catalog(SETTINGS)
        self.snapshots = self._nbytes = 0
        self.sequence = store.append(self.catalog.begin_term(loaded.term, self.clock.now_ms()))
        self._do(Mount("n", 1, "n:1", 1, OBJECTS * extent_bytes(LENGTH), "n"))
        self.clock.advance(SETTINGS.recovery_ms)  # a new log may be one cut short until then
        self._do(Heartbeat("n", 1, next(iter(self.catalog.state.members.by_id))))
        self._do(Tick())

    def _do(self, command: Command) -> object:
        applied = self.catalog.apply(command, self.clock.now_ms())
        if applied.records:
            self.sequence = self.store.append(applied.records)
            self._nbytes += sum(map(len, applied.records))
        if self._nbytes >= SNAPSHOT_BYTES:
            snapshot = self.catalog.snapshot(self.clock.now_ms())
            self.store.write_snapshot(snapshot, self.sequence)
            self._nbytes = 0
            self.snapshots += 1
        return applied.reply

    def put(self, first: int) -> None:
        keys = [b"page/%020d_0_k" % number for number in range(first, first + BATCH)]
        granted = self._do(PutStart("t", keys, [LENGTH] * BATCH, bytes(16 * BATCH)))
        assert isinstance(granted, Granted)
        assert granted.status == bytes(BATCH)
        self._do(PutEnd("t", keys, granted.generations))
        self.clock.advance(100)
        self._do(Heartbeat("n", 1, next(iter(self.catalog.state.members.by_id))))
        self._do(Tick())


def sizes_of(store: MetadataStore, size: Callable[[], int]) -> list[int]:
    """After each tenth of the day; then nothing happens, and nothing grows."""
    day, sizes = Day(store), []
    for at in range(0, PUTS, BATCH):
        day.put(at)
        if at + BATCH in range(0, PUTS + 1, PUTS // 10):
            sizes.append(size())
    assert day.snapshots >= 6
    for _ in range(200):
        day._do(Tick())
    print(f"{PUTS} puts, {OBJECTS} objects, {day.snapshots} snapshots; bytes: {sizes}")
    return sizes


def judge(sizes: list[int]) -> None:
    early, late = sizes[3:6], sizes[6:]
    assert max(late) <= 1.25 * max(early), "it grows with the number of puts"


def test_f11_a_day_of_puts_leaves_the_embedded_database_as_large_as_its_objects(
    tmp_path: Path,
) -> None:
    path = tmp_path / "master.db"
    store = EmbeddedStore(str(path))
    with closing(store):
        judge(sizes_of(store, lambda: sum(each.stat().st_size for each in tmp_path.iterdir())))


@needs_etcd
@pytest.mark.timeout(120 + PUTS // 500)
def test_f11_a_day_of_puts_leaves_etcd_as_large_as_its_objects(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path / "etcd") as etcd, closing(etcd.client()) as client:
        store = EtcdStore(etcd.address("mooncake"), clock=SystemClock())
        with closing(store):
            judge(sizes_of(store, lambda: client.status(T).db_in_use_nbytes))
