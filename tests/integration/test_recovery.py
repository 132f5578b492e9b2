"""A master that lost its records, or the last of them, and nodes that still hold the objects."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import send, status, wait_until

import mooncake_py.store.client as client_module
from mooncake_py import StoreClient
from mooncake_py.clock import SystemClock
from mooncake_py.config import split_address
from mooncake_py.master.client import MasterClient
from mooncake_py.model import ReplicaPolicy
from mooncake_py.ops.cluster import Cluster, ClusterOptions

COUNT = 600
# Records stay in the master's memory much longer than a put takes: what is killed has none of them.
LINGER = ("--set", "commit_linger_ms=20s")


def value_of(key: str) -> bytes:
    return (key.encode() * 700)[: 4_096 + len(key)]


def kill_master(cluster: Cluster) -> int:
    port = split_address(cluster.address)[1]
    send(cluster.master, signal.SIGKILL)
    wait_until(lambda: cluster.master.child.exit_code() is not None)
    return port


def forget(cluster: Cluster) -> None:
    """Somebody deletes the database."""
    found = list(Path(cluster.folder).glob("metadata*"))
    assert found
    for file in found:
        file.unlink()


def told(cluster: Cluster, count: int) -> None:
    """Every node has told what it holds, and this master knows so many objects."""

    def done() -> bool:
        now = status(cluster)
        alive = [each for each in now.segments if each.state == "alive"]
        return now.objects == count and len(alive) == len(cluster.nodes)

    wait_until(done)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    options = ClusterOptions(node_count=2, segment_bytes=32 << 20, master_arguments=LINGER)
    with Cluster(options) as running:
        yield running


def test_f64_a_deleted_database_is_restored_from_the_nodes(cluster: Cluster) -> None:
    keys = [f"page/{i}" for i in range(COUNT)]
    kept, removed = keys[: COUNT // 2], keys[COUNT // 2 :]
    with StoreClient(cluster.address) as client:
        assert not any(client.put_batch(keys, [value_of(key) for key in keys]))
        client.put("other", b"of no page")
        assert not any(client.remove(removed))  # type: ignore[arg-type]
    port = kill_master(cluster)
    forget(cluster)
    cluster.start_master(port)
    told(cluster, len(kept) + 1)
    said = [path.read_text() for path in Path(cluster.folder).glob("master*.stderr")]
    assert any("are lost with it" in text for text in said)
    with StoreClient(cluster.address) as client:
        assert client.get_batch(kept) == [value_of(key) for key in kept]
        assert client.exists(removed) == [False] * len(removed)
        assert sorted(info.key for info in client.list("page/")) == sorted(kept)
        assert client.remove(kept[0], force=True) is None
        client.put(kept[0], b"anew")
        assert client.get(kept[0]) == b"anew"


def test_f11_killed_at_once_the_embedded_master_loses_nothing_acknowledged(
    cluster: Cluster,
) -> None:
    keys = [f"page/{i}" for i in range(COUNT)]
    with StoreClient(cluster.address) as client:
        assert not any(client.put_batch(keys, [value_of(key) for key in keys]))
        port = kill_master(cluster)  # none of these records was durable
        cluster.start_master(port)
        told(cluster, COUNT)
        assert client.get_batch(keys) == [value_of(key) for key in keys]


def test_f11_a_put_is_there_when_the_next_master_comes_later_than_its_grant_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record of its beginning was durable, that of its end was not when the master was killed:
    the disk was full just then, or the linger not over."""
    ttl_ms, linger_ms = 2_000, 500
    arguments = [f"--set=grant_ttl_ms={ttl_ms}", "--set=grant_margin_ms=1000"]
    arguments += [f"--set=commit_linger_ms={linger_ms}"]
    options = ClusterOptions(segment_bytes=32 << 20, master_arguments=arguments)
    with Cluster(options) as cluster:

        class Master(MasterClient):
            def put_start(self, *given: Any, **options: Any) -> Any:
                before = status(cluster).counters["metadata_records_total"]
                grants = super().put_start(*given, **options)
                wait_until(lambda: status(cluster).counters["metadata_records_total"] > before)
                return grants

        monkeypatch.setattr(client_module, "MasterClient", Master)
        with StoreClient(cluster.address) as client:
            client.put("k", value_of("k"), policy=ReplicaPolicy(replica_count=2))
            ended_ms = SystemClock().now_ms()
            port = kill_master(cluster)
            assert SystemClock().now_ms() < ended_ms + linger_ms
            wait_until(lambda: SystemClock().now_ms() > ended_ms + ttl_ms)
            cluster.start_master(port)
            told(cluster, 1)
            assert client.get("k") == value_of("k")


def test_f64_objects_that_were_moved_come_back_from_where_they_are(cluster: Cluster) -> None:
    keys = [f"page/{i}" for i in range(40)]
    with StoreClient(cluster.address) as client:
        assert not any(client.put_batch(keys, [value_of(key) for key in keys]))
    leaves = cluster.nodes.pop()
    assert leaves.child.stop(20_000) == 0  # drained: its objects are copies elsewhere now
    port = kill_master(cluster)
    forget(cluster)
    cluster.start_master(port)
    told(cluster, len(keys))
    with StoreClient(cluster.address) as client:
        assert client.get_batch(keys) == [value_of(key) for key in keys]
