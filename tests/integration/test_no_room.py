"""A put that cannot find room says so soon, and with its cause; one that may find some waits."""

from __future__ import annotations

import pytest

from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.errors import OutOfSpace
from mooncake_py.model import ReplicaPolicy
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.store.client import StoreClient

MIB = 1 << 20
TIMEOUT_MS = 60_000
SOON_MS = 15_000  # a quarter of the deadline: a machine under load is slow, too


def test_c07_what_can_never_fit_is_said_long_before_the_deadline() -> None:
    options = ClusterOptions(node_count=0, segment_bytes=16 * MIB)
    with Cluster(options) as cluster, StoreClient(cluster.address, timeout_ms=TIMEOUT_MS) as store:
        soon = Deadline(SOON_MS, SystemClock())
        with pytest.raises(OutOfSpace, match="no node is mounted"):
            store.put("first", b"value")
        cluster.start_node()
        store.put("first", b"value")
        with pytest.raises(OutOfSpace, match="larger than all memory of the cluster"):
            store.put("large", bytes(32 * MIB))
        strict = ReplicaPolicy(replica_count=2, strict=True)
        with pytest.raises(OutOfSpace, match="strictly, and 1 node is alive"):
            store.put("strict", b"value", policy=strict)
        small, large = store.put_batch(["small", "huge"], [b"x", bytes(32 * MIB)])
        assert small is None
        assert isinstance(large, OutOfSpace)
        assert not soon.passed()
