"""`--numa-node` of a real node: what it is bound to is said, and is so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.store.client import StoreClient
from mooncake_py.transfer.topology import parse, read_snapshot

NODES = parse(read_snapshot()).nodes
ROOT = Path(__file__).resolve().parents[2]


def test_a47_an_impossible_domain_does_not_start() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mooncake_py.store.node", "--numa-node", "99"], text=True,
        capture_output=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "--numa-node 99: this machine has no such memory domain" in done.stderr


@pytest.mark.skipif(not NODES, reason="this machine does not say what memory domains it has")
def test_a47_a_forced_domain_is_said_and_holds_for_all_threads() -> None:
    index, cpus = NODES[0].index, set(NODES[0].cpus) & os.sched_getaffinity(0)
    options = ClusterOptions(
        node_count=1,
        segment_bytes=16 << 20,
        node_arguments=["--numa-node", str(index), "--log-level", "info"],
    )
    with Cluster(options) as cluster, StoreClient(cluster.address) as store:
        store.put("k", b"page")
        child = cluster.nodes[0].child
        tasks = [int(each) for each in os.listdir(f"/proc/{child.pid}/task")]
        assert all(os.sched_getaffinity(each) == cpus for each in tasks)
        said = child._stderr_path.read_text()
        assert f"memory and threads: domain {index}, as asked for" in said
