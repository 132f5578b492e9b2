"""Under load etcd does not grow, and who slept through a compaction still follows."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from etcd_cluster import EtcdCluster, needs_etcd
from masters import CLOCK, Load, Masters, T, until

from mooncake_py import StoreClient
from mooncake_py.master.etcd import EtcdClient
from mooncake_py.wire.etcd import pb

pytestmark = needs_etcd

SNAPSHOT_BYTES = 64 << 10
SNAPSHOTS = 12


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


def snapshots(client: EtcdClient) -> set[bytes]:
    request = pb.RangeRequest(
        key=b"/mooncake/snapshot/", range_end=b"/mooncake/snapshot0", keys_only=True
    )
    return {kv.key for kv in client.range(request, T).kvs if kv.key.endswith(b"/0000")}


def log_nbytes(client: EtcdClient) -> int:
    request = pb.RangeRequest(key=b"/mooncake/log/", range_end=b"/mooncake/log0")
    return sum(len(kv.value) for kv in client.range(request, T).kvs)


def test_truncation_and_compaction_bound_etcd_under_load_and_a_sleeper_catches_up(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    options = ["--set", f"snapshot_record_bytes={SNAPSHOT_BYTES}"]
    with (
        Masters(tmp_path, etcd, 2, node_count=1, options=options) as masters,
        closing(etcd.client()) as client,
    ):
        leader = masters.leader()
        assert leader is not None
        load = Load(masters.address, writers=2)
        seen: set[bytes] = set()
        sizes: list[tuple[int, int]] = []

        def enough() -> bool:
            fresh = snapshots(client) - seen
            if fresh:
                seen.update(fresh)
                sizes.append((client.status(T).db_in_use_nbytes, log_nbytes(client)))
            return len(seen) >= SNAPSHOTS

        try:
            load.wait_for_success_after(CLOCK.now_ms(), 10_000)
            masters.signal(1 - leader, signal.SIGSTOP)  # sleeps through several compactions
            until(enough, 90_000, f"{SNAPSHOTS} snapshots")
            masters.signal(1 - leader, signal.SIGCONT)
            load.wait_for_success_after(CLOCK.now_ms(), T)
            killed_ms = CLOCK.now_ms()
            masters.kill(leader)
            load.wait_for_success_after(killed_ms, 10_000)
        finally:
            load.stop()
        with StoreClient(masters.address) as reader:
            load.check(reader)
        assert len(snapshots(client)) <= 3, "snapshots are not removed"
        assert max(log for _, log in sizes) <= 4 * SNAPSHOT_BYTES, "the log is not truncated"
        early, late = sizes[: SNAPSHOTS // 2], sizes[SNAPSHOTS // 2 :]
        in_use = max(size for size, _ in early), max(size for size, _ in late)
        grown = len(load.acknowledged) * 300  # the snapshots themselves hold more objects
        print(f"{len(load.acknowledged)} puts; in use early, late: {in_use}; log {sizes[-1][1]}")
        assert in_use[1] <= 2 * in_use[0] + grown
