"""Nodes whose memory is a file: killed, replaced, refused, and found again with their objects."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from daemons import send, status, wait_until

from mooncake_py import StoreClient
from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.ops.child import Child
from mooncake_py.ops.cluster import Cluster, ClusterOptions

COUNT = 400
SEGMENT = "24MiB"
REJOIN_MS = 3_000
Start = Callable[..., Child]


def value_of(key: str) -> bytes:
    return (key.encode() * 900)[: 8_192 + len(key)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(ClusterOptions(node_count=0, master_arguments=("--set", "dead_ms=2s"))) as running:
        yield running


@pytest.fixture
def start(cluster: Cluster) -> Iterator[Start]:
    """`start(file)` runs a node on this file and answers once it is ready, or has ended."""
    children: list[Child] = []

    def run(file: Path, *arguments: str, nbytes: str = SEGMENT) -> Child:
        options = ["--master", cluster.address, "--segment-file", str(file)]
        options += ["--segment-bytes", nbytes, *arguments]
        child = Child(f"warm-{len(children)}", "mooncake_py.store.node", options, cluster.folder)
        children.append(child)
        child.line(30_000)
        return child

    yield run
    for child in children:
        child.kill()


def send_signal(child: Child, number: signal.Signals) -> None:
    os.kill(child.pid, number)


def ended(child: Child) -> None:
    wait_until(lambda: child.exit_code() is not None)


def fill(cluster: Cluster, keys: Sequence[str]) -> None:
    with StoreClient(cluster.address) as client:
        assert not any(client.put_batch(keys, [value_of(key) for key in keys]))


@pytest.mark.parametrize("folder", ["tmpfs", "disk"])
def test_f40_f16_a_killed_node_comes_back_with_its_objects(
    cluster: Cluster, start: Start, tmp_path: Path, folder: str
) -> None:
    file = (Path("/dev/shm") if folder == "tmpfs" else tmp_path) / f"{tmp_path.name}-{folder}"
    keys = [f"page/{i}" for i in range(COUNT)]
    try:
        node = start(file)
        fill(cluster, keys)
        with StoreClient(cluster.address) as client:
            assert client.get_batch(keys[:50]) == [value_of(key) for key in keys[:50]]
            assert not any(client.remove(keys[-20:], force=True))  # type: ignore[arg-type]
            send_signal(node, signal.SIGKILL)
            ended(node)
            before = status(cluster).segments[0]
            rejoining = Deadline(REJOIN_MS, SystemClock())
            again = start(file)
            assert again.exit_code() is None, again.complaint()
            kept = keys[:-20]
            # Placements that the client still has name the former incarnation.
            assert client.get_batch(kept[:50]) == [value_of(key) for key in kept[:50]]
            assert client.get_batch(kept) == [value_of(key) for key in kept]
            assert not rejoining.passed()
            assert client.exists(keys[-20:]) == [False] * 20
            after = status(cluster).segments[0]
            assert after.segment_id == before.segment_id
            assert after.nbytes == before.nbytes
            assert after.incarnation != before.incarnation
            client.put("new", b"after")
            assert client.get("new") == b"after"
    finally:
        for each in file.parent.glob(file.name + "*"):
            each.unlink()


def test_a30_a31_an_upgrade_takes_longer_than_death_and_loses_nothing(
    cluster: Cluster, start: Start, tmp_path: Path
) -> None:
    keys = [f"page/{i}" for i in range(COUNT)]
    node = start(tmp_path / "segment")
    fill(cluster, keys)
    send_signal(node, signal.SIGTERM)
    ended(node)
    assert node.exit_code() == 0
    with StoreClient(cluster.address) as client:
        assert not any(client.exists(keys))  # at once: it said that it leaves
        wait_until(lambda: status(cluster).segments[0].state == "away")
        assert client.remove(keys[0]) is None  # while the node is away
        start(tmp_path / "segment")
        assert client.get_batch(keys[1:]) == [value_of(key) for key in keys[1:]]
        assert not client.exists(keys[0])


def test_f64_f40_master_and_node_may_both_have_lost_their_memory(
    cluster: Cluster, start: Start, tmp_path: Path
) -> None:
    keys = [f"page/{i}" for i in range(COUNT)]
    node = start(tmp_path / "segment")
    fill(cluster, keys)
    send_signal(node, signal.SIGKILL)
    port = int(cluster.address.rpartition(":")[2])
    send(cluster.master, signal.SIGKILL)
    wait_until(lambda: cluster.master.child.exit_code() is not None)
    for each in Path(cluster.folder).glob("metadata*"):
        each.unlink()
    cluster.start_master(port)
    start(tmp_path / "segment")
    wait_until(lambda: status(cluster).objects == COUNT)
    with StoreClient(cluster.address) as client:
        assert client.get_batch(keys) == [value_of(key) for key in keys]


def test_a24_files_that_are_not_ours_are_refused_and_left_alone(
    cluster: Cluster, start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "segment"
    node = start(file)
    second = start(file)
    ended(second)
    assert "belongs to a node that runs" in second.complaint()
    assert node.exit_code() is None
    send_signal(node, signal.SIGTERM)
    ended(node)
    smaller = start(file, nbytes="8MiB")
    ended(smaller)
    assert "more than --segment-bytes" in smaller.complaint()
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"a letter to my mother" * 1000)
    other = start(foreign)
    ended(other)
    assert "is not the segment of a node" in other.complaint()
    assert foreign.read_bytes().startswith(b"a letter")
    larger = start(file, nbytes="48MiB")
    assert larger.exit_code() is None, larger.complaint()
    assert status(cluster).capacity_bytes == 48 << 20


def test_f40_a_node_that_cannot_write_down_its_mount_tries_again(
    cluster: Cluster, start: Start, tmp_path: Path
) -> None:
    """Whatever goes wrong with its files, its heartbeats go on."""
    file = tmp_path / "segment"
    node = start(file)
    fill(cluster, ["k"])
    obstacle = tmp_path / "segment.json.new"
    obstacle.mkdir()
    port = int(cluster.address.rpartition(":")[2])
    send(cluster.master, signal.SIGKILL)
    wait_until(lambda: cluster.master.child.exit_code() is not None)
    cluster.start_master(port)
    log = Path(cluster.folder) / f"{node.name}.stderr"
    wait_until(lambda: "a heartbeat failed" in log.read_text())
    obstacle.rmdir()
    with StoreClient(cluster.address) as client:
        wait_until(lambda: client.exists("k"))
        assert client.get("k") == value_of("k")


def test_f40_damaged_bytes_are_not_adopted(cluster: Cluster, start: Start, tmp_path: Path) -> None:
    file = tmp_path / "segment"
    keys = [f"page/{i}" for i in range(COUNT)]
    node = start(file)
    fill(cluster, keys)
    send_signal(node, signal.SIGKILL)
    ended(node)
    data = bytearray(file.read_bytes())
    at = data.index(value_of(keys[7])[:64]) + 500
    data[at] ^= 1
    file.write_bytes(data)
    start(file)

    def gone() -> bool:
        return status(cluster).objects == COUNT - 1

    wait_until(gone)
    with StoreClient(cluster.address) as client:
        assert not client.exists(keys[7])
        others = keys[:7] + keys[8:]
        assert client.get_batch(others) == [value_of(key) for key in others]
