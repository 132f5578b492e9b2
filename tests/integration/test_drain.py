"""Nodes that leave, are emptied, or die: their objects go elsewhere while reads go on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from daemons import send, status, wait_until

from mooncake_py import ReplicaPolicy, StoreClient
from mooncake_py.ops.cluster import Cluster, ClusterOptions

MIB = 1 << 20
COUNT = 300
KEYS = [f"drain/{i}" for i in range(COUNT)]
VALUES = [bytes([i % 251]) * (20_000 + 400 * (i % 100)) for i in range(COUNT)]


@pytest.fixture
def three() -> Iterator[Cluster]:
    arguments = ["--set", "lease_ms=300", "--set", "dead_ms=1500"]
    options = ClusterOptions(node_count=3, segment_bytes=32 * MIB, master_arguments=arguments)
    with Cluster(options) as cluster:
        yield cluster


def mooncake(cluster: Cluster, *words: str) -> tuple[int, dict[str, object]]:
    command = [sys.executable, "-m", "mooncake_py.ops.cli", *words]
    command += ["--master", cluster.address, "--json"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.stdout, done.stderr.decode()
    return done.returncode, json.loads(done.stdout)


class Reader:
    """Reads everything again and again, until the end of its `with`; remembers what was wrong."""

    def __init__(self, cluster: Cluster, transport: str) -> None:
        self.store = StoreClient(cluster.address, transports=(transport,))
        self.rounds = 0
        self.wrong: list[object] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        while not self._done.is_set():
            got = self.store.get_batch(KEYS)
            self.wrong += [o for o, value in zip(got, VALUES, strict=True) if o != value]
            self.rounds += 1

    def some_more(self) -> None:
        until = self.rounds + 3
        wait_until(lambda: self.rounds >= until, 30_000)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(30)
        self.store.close()


def used(cluster: Cluster) -> dict[str, int]:
    return {each.node: each.used_bytes for each in status(cluster).segments}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_f37_f38_nodes_are_drained_and_stopped_while_every_read_succeeds(
    three: Cluster, transport: str
) -> None:
    with StoreClient(three.address) as store:
        assert store.put_batch(KEYS, VALUES) == [None] * COUNT
    with Reader(three, transport) as reader:
        reader.some_more()
        total = sum(used(three).values())
        code, report = mooncake(three, "drain", "node-0")
        assert code == 0
        assert report["state"] == "done"
        assert report["left"] == report["left_bytes"] == report["failed"] == 0
        assert report["moved"] > 0
        reader.some_more()
        left = used(three)
        assert left.pop("node-0") == 0
        assert sum(left.values()) == total
        send(three.nodes[1], signal.SIGTERM)
        wait_until(lambda: three.nodes[1].child.exit_code() == 0)
        reader.some_more()
        assert "node-1" not in used(three)
        said = (three.folder / "node-1.stderr").read_text()
        assert re.search(r"drained: moved=[1-9]\d* .* left=0 left_bytes=0$", said, re.MULTILINE)
        assert sum(used(three).values()) == total
    assert reader.wrong == []


def test_a32_a31_a_node_that_leaves_does_not_wait_for_a_neighbour_that_was_killed() -> None:
    arguments = ["--set", "lease_ms=300", "--set", "dead_ms=10m", "--set", "away_ms=20m"]
    options = ClusterOptions(
        node_count=2,
        segment_bytes=32 * MIB,
        master_arguments=arguments,
        node_arguments=["--drain-ms", "600000"],
    )
    with Cluster(options) as cluster:
        with StoreClient(cluster.address) as store:
            assert store.put_batch(KEYS, VALUES) == [None] * COUNT
        send(cluster.nodes[1], signal.SIGKILL)
        send(cluster.nodes[0], signal.SIGTERM)
        wait_until(lambda: cluster.nodes[0].child.exit_code() == 0)
        said = (cluster.folder / "node-0.stderr").read_text()
        assert re.search(r"drained: .* left=[1-9]\d* .*: no place elsewhere$", said, re.MULTILINE)


def test_f37_what_finds_no_place_makes_a_drain_fail(three: Cluster) -> None:
    with StoreClient(three.address) as store:
        store.put_batch(KEYS, VALUES)
        mooncake(three, "drain", "node-1")
        mooncake(three, "drain", "node-2")
        code, report = mooncake(three, "drain", "node-0")
        assert (code, report["state"]) == (1, "stuck")
        assert report["left"] == COUNT
        assert report["moved"] == 0
        assert store.get(KEYS[5]) == VALUES[5]
        code, report = mooncake(three, "drain", "node-1", "--cancel")
        assert (code, report["state"]) == (0, "cancelled")
        assert mooncake(three, "drain", "node-0")[0] == 0
        assert store.get_batch(KEYS) == VALUES


def test_f37_single_objects_are_copied_and_moved(three: Cluster) -> None:
    with StoreClient(three.address) as store:
        store.put("one", b"1" * 3_000_000)
        (home,) = (node for node, nbytes in used(three).items() if nbytes)
        others = [f"node-{i}" for i in range(3) if f"node-{i}" != home]
        assert mooncake(three, "copy", "one", "--to", others[0]) == (0, {"there": 1, "failed": {}})
        assert next(store.list("one")).replicas == 2
        code, _ = mooncake(three, "copy", "one", "--to", others[1], "--move-from", home)
        assert code == 0
        wait_until(lambda: used(three)[home] == 0)
        assert store.get("one") == b"1" * 3_000_000
        code, report = mooncake(three, "copy", "none", "--to", others[0])
        assert (code, report["failed"]) == (1, {"none": "ObjectNotFound"})


def test_f36_replicas_on_a_node_that_was_killed_come_back(three: Cluster) -> None:
    with StoreClient(three.address) as store:
        policy = ReplicaPolicy(replica_count=2, strict=True)
        assert store.put_batch(KEYS, VALUES, policy=policy) == [None] * COUNT
        three.nodes[2].child.kill()
        wait_until(lambda: len(used(three)) == 2)
        wait_until(lambda: {info.replicas for info in store.list()} == {2}, 30_000)
        assert store.get_batch(KEYS) == VALUES
        send(three.nodes[0], signal.SIGKILL)
        assert store.get_batch(KEYS) == VALUES
