"""A read that takes longer than its leases keeps them."""

from __future__ import annotations

import signal
import threading

from daemons import calls, send, wait_until

from mooncake_py import StoreClient
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.store.renewal import LARGE_BYTES

MIB = 1 << 20
LEASE_MS = 300


def test_a12_leases_are_renewed_while_a_large_read_runs() -> None:
    """The node stands still in the middle, for as long as it takes to see three renewals."""
    arguments = ["--metrics", "127.0.0.1:0", "--set", f"lease_ms={LEASE_MS}"]
    options = ClusterOptions(node_count=1, segment_bytes=192 * MIB, master_arguments=arguments)
    with Cluster(options) as cluster, StoreClient(cluster.address, timeout_ms=60_000) as writer:
        keys = [f"a12/{i}" for i in range(6)]
        values = [bytes([i]) * (12 * MIB) for i in range(6)]
        assert sum(map(len, values)) > LARGE_BYTES
        assert writer.put_batch(keys, values) == [None] * 6
        with StoreClient(cluster.address, transports=("tcp",), timeout_ms=60_000) as reader:
            assert reader.get("a12/0", nbytes=1) == b"\0"  # it knows the way
            before = calls(cluster, "Locate")
            (node,) = cluster.nodes
            send(node, signal.SIGSTOP)
            found: list[object] = []
            thread = threading.Thread(target=lambda: found.extend(reader.get_batch(keys)))
            try:
                thread.start()
                wait_until(lambda: calls(cluster, "Locate") >= before + 4)
            finally:
                send(node, signal.SIGCONT)
            thread.join(60)
            assert found == values
            after = calls(cluster, "Locate")
            assert reader.get("a12/1", nbytes=8 * MIB) == values[1][: 8 * MIB]
            assert calls(cluster, "Locate") <= after + 1, "small reads ask for themselves only"
