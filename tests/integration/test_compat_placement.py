"""Upstream's calls about where objects lie: copy, move, mounting by call, masters found by etcd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from daemons import wait_until
from disks import MEMORY, SIZE, cold, fill
from disks import options as disk_options
from etcd_cluster import EtcdCluster, needs_etcd
from masters import Masters

from mooncake_py.compat.lifecycle import master_of
from mooncake_py.compat.store import (
    MooncakeDistributedStore,
    ReplicateConfig,
    TaskStatus,
    TaskType,
)
from mooncake_py.errors import UsageError
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.store.client import StoreClient

MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(ClusterOptions(node_count=2, segment_bytes=16 * MIB)) as running:
        yield running


@pytest.fixture
def store(cluster: Cluster) -> Iterator[MooncakeDistributedStore]:
    made = MooncakeDistributedStore()
    assert made.setup("127.0.0.1", "", 0, MIB, "tcp", "", cluster.address) == 0
    yield made
    made.remove_all(force=True)
    assert made.close() == 0


def nodes_of(store: MooncakeDistributedStore, key: str) -> set[str]:
    """Asked by a client that remembers nothing."""
    assert store._options is not None
    with StoreClient(store._options.master_server_addr) as fresh:
        return {each.node for each in fresh.explain(key).replicas}


def placed(store: MooncakeDistributedStore, key: str, node: str) -> None:
    config = ReplicateConfig()
    config.preferred_segment = node
    assert store.put(key, b"page" * 1000, config) == 0
    assert nodes_of(store, key) == {node}


def test_f50_descriptors_say_on_which_nodes_and_tiers_an_object_is(
    store: MooncakeDistributedStore, cluster: Cluster, tmp_path: Path
) -> None:
    config = ReplicateConfig()
    config.replica_num = 2
    assert store.put("two", b"page" * 1000, config) == 0
    nodes = nodes_of(store, "two")
    assert len(nodes) == 2
    found = store.get_replica_desc("two")
    assert {each.transport_endpoint for each in found} == nodes
    assert store.get_hostname() not in nodes
    for each in found:
        assert each.is_memory_replica()
        assert each.get_memory_descriptor().buffer_descriptor.size == 4000
        with pytest.raises(RuntimeError, match="in memory"):
            each.get_disk_descriptor()
    keys = [f"k{i}" for i in range(2 * MEMORY // SIZE)]
    with Cluster(disk_options(tmp_path)) as tiers, StoreClient(tiers.address) as client:
        fill(tiers, client, keys)
        on_disk = cold(tiers, keys)
        other = MooncakeDistributedStore()
        assert other.setup("127.0.0.1", "", 0, MIB, "tcp", "", tiers.address) == 0
        descriptors = other.batch_get_replica_desc(on_disk[:3])
        assert len(descriptors) == 3
        for (each,) in descriptors.values():
            assert (each.is_local_disk_replica(), each.is_memory_replica()) == (True, False)
            assert each.get_disk_descriptor().object_size == SIZE
            with pytest.raises(RuntimeError, match="on a disk"):
                each.get_memory_descriptor()
        assert other.close() == 0


def finished(store: MooncakeDistributedStore, task: str) -> TaskStatus:
    def status() -> TaskStatus:
        answer, code = store.query_task(task)
        assert code == 0
        assert answer is not None
        assert answer.last_updated_at_ms_epoch >= answer.created_at_ms_epoch > 1_500_000_000_000
        return answer.status

    wait_until(lambda: status() != TaskStatus.PROCESSING, 20_000)
    return status()


def test_f50_objects_are_copied_and_moved_by_tasks(
    store: MooncakeDistributedStore, cluster: Cluster
) -> None:
    one, two = (node.fields["name"] for node in cluster.nodes)
    placed(store, "copied", one)
    task, code = store.create_copy_task("copied", [two])
    assert code == 0
    assert finished(store, task) == TaskStatus.SUCCESS
    assert nodes_of(store, "copied") == {one, two}
    placed(store, "moved", one)
    task, code = store.create_move_task("moved", one, two)
    assert code == 0
    assert finished(store, task) == TaskStatus.SUCCESS
    answer, _ = store.query_task(task)
    assert answer is not None
    assert (answer.id, answer.type, answer.message) == (task, TaskType.REPLICA_MOVE, "")
    wait_until(lambda: nodes_of(store, "moved") == {two}, 20_000)
    assert store.get("moved") == b"page" * 1000


def test_f50_tasks_that_cannot_be_have_their_codes(
    store: MooncakeDistributedStore, cluster: Cluster
) -> None:
    node = cluster.nodes[0].fields["name"]
    assert store.create_copy_task("absent", [node]) == ("", -704)
    placed(store, "there", node)
    assert store.create_copy_task("there", ["no such node"]) == ("", -704)
    assert store.create_copy_task("there", []) == ("", -600)
    assert store.create_copy_task("there", cast(Any, 7)) == ("", -600)
    assert store.create_move_task("there", node, node) == ("", -600)
    assert store.create_move_task("there", "", node) == ("", -600)
    assert store.query_task("never") == (None, -1400)
    assert MooncakeDistributedStore().create_copy_task("there", [node]) == ("", -600)
    task, _ = store.create_copy_task("there", [node])  # it is there already
    assert finished(store, task) == TaskStatus.SUCCESS


def test_f50_memory_is_offered_and_taken_back_by_call(
    store: MooncakeDistributedStore, cluster: Cluster, tmp_path: Path
) -> None:
    made = store.allocate_and_mount_segment(2 * MIB)
    assert (made["ret"], made["allocated_size"]) == (0, 2 * MIB)
    (name,) = made["segment_ids"]
    placed(store, "mine", name)
    assert store.unmount_and_free_segment([name], 20) == 0
    assert store.get("mine") == b"page" * 1000, "it went to another node in the grace period"
    assert store.unmount_segment([name]) == -101

    path = str(tmp_path / "segment")
    made = store.mount_segment(path, 2 * MIB)
    assert made["ret"] == 0
    (name,) = made["segment_ids"]
    placed(store, "in a file", name)
    assert store.unmount_segment(name) == 0
    assert store.mount_segment(path, 2 * MIB)["segment_ids"] == [name]
    wait_until(lambda: store.get("in a file") == b"page" * 1000, 10_000)
    assert store.mount_segment(path, 2 * MIB)["ret"] == -600, "it is mounted"
    assert store.mount_segment(path, 2 * MIB, 4096)["ret"] == -600
    assert store.mount_segment("", 2 * MIB)["ret"] == -600
    assert store.mount_segment(path, cast(Any, "x"))["ret"] == -600
    assert store.allocate_and_mount_segment(0)["ret"] == -600
    assert store.allocate_and_mount_segment(2 * MIB, "nvlink")["ret"] == -600
    assert MooncakeDistributedStore().allocate_and_mount_segment(MIB)["ret"] == -600


def test_f50_addresses_of_masters_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert master_of("a:1,b:2") == master_of("a:1;b:2") == "a:1,b:2"
    assert master_of("etcd://a:1;http://b:2") == "etcd://a:1;b:2/mooncake_cluster"
    assert master_of("etcd://a:1,b:2/mine") == "etcd://a:1,b:2/mine"
    monkeypatch.setenv("MC_METADATA_CLUSTER_ID", "other/")
    assert master_of("etcd://a:1") == "etcd://a:1/other"
    for text in ("redis://a:1", "k8s://ns/lease"):
        with pytest.raises(UsageError, match="not found by"):
            master_of(text)


@needs_etcd
def test_f50_f12_the_leader_is_found_by_etcd_and_so_is_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client knows etcd's address alone; the leader is killed."""
    with (
        EtcdCluster(tmp_path / "etcd") as etcd,
        Masters(tmp_path, etcd, 2, node_count=1) as masters,
    ):
        store = MooncakeDistributedStore()
        monkeypatch.setenv("MC_METADATA_CLUSTER_ID", "mooncake")
        address = etcd.address("").rstrip("/").replace(",", ";")
        offered = 2 * MIB  # by a node in this process, which finds the master in the same way
        assert store.setup("127.0.0.1", "", offered, MIB, "tcp", "", address) == 0
        try:
            assert store.put("before", b"1") == 0
            leader = masters.leader()
            assert leader is not None
            masters.kill(leader)
            wait_until(lambda: store.put("after", b"2") == 0, 30_000)
            assert store.get_batch(["before", "after"]) == [b"1", b"2"]
        finally:
            store.close()
        nobody = MooncakeDistributedStore()
        monkeypatch.setattr("mooncake_py.compat.lifecycle.SETUP_MS", 500)
        assert nobody.setup("127.0.0.1", "", 0, MIB, "tcp", "", address + "/elsewhere") == -900
        assert nobody.setup("127.0.0.1", "", 0, MIB, "tcp", "", "redis://a:1") == -600
