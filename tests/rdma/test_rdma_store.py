"""The store over RDMA: nodes pull puts and clients pull gets by one-sided READ.

Some of the store's own tests, with a node at one end of the cable and the client at the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from rdma_ports import PORTS
from test_store import (
    test_a03_one_outcome_a_key_in_order,
    test_a05_empty_missing_and_failed_are_three_answers,
    test_a07_small_target_is_refused_before_anything_is_written,
    test_f01_random_objects_come_back_in_another_client,
    test_f03_caller_buffers_as_sources_and_targets,
    test_f07_a_second_put_says_exists_and_changes_nothing,
)
from test_store_scattered import shared

from mooncake_py import StoreClient
from mooncake_py.ops.cluster import Cluster, ClusterOptions

__all__ = [
    "test_a03_one_outcome_a_key_in_order",
    "test_a05_empty_missing_and_failed_are_three_answers",
    "test_a07_small_target_is_refused_before_anything_is_written",
    "test_f01_random_objects_come_back_in_another_client",
    "test_f03_caller_buffers_as_sources_and_targets",
    "test_f07_a_second_put_says_exists_and_changes_nothing",
]

MIB = 1 << 20
NEAR = f"rdma:{PORTS[0]}" if PORTS else "rdma"
FAR = f"rdma:{PORTS[1]}" if len(PORTS) > 1 else "rdma"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    options = ClusterOptions(
        node_count=2, segment_bytes=96 * MIB, node_arguments=["--transports", f"shm,{FAR},tcp"]
    )
    with Cluster(options) as running:
        yield running


@pytest.fixture
def store(cluster: Cluster) -> Iterator[StoreClient]:
    with StoreClient(cluster.address, transports=(NEAR,)) as client:
        yield client
        client.remove([info.key for info in client.list()], force=True, timeout_ms=60_000)


def _carried(client: StoreClient) -> list[dict[str, int]]:
    peers = client._engine.describe()["peers"]
    return [path for peer in peers for path in peer["paths"]]


def test_a_client_of_rdma_alone_calls_the_master_over_the_hot_lane(store: StoreClient) -> None:
    """The master has no device to offer; what objects travel by does not concern calls."""
    store.put("key", b"value")
    lane = store._master._peer
    assert lane is not None, "calls go over gRPC"
    assert lane.transport in ("shm", "tcp")


def test_f22_puts_and_gets_travel_by_the_devices(store: StoreClient) -> None:
    """What is put is read by the node's device, and what is got by ours: not over the socket."""
    value = np.random.default_rng(5).bytes(4 * MIB)
    with store.alloc(8 * MIB) as memory:
        view = memory.view()
        view[: len(value)] = value
        store.put("registered", view[: len(value)])
        target = view[4 * MIB :]
        assert store.get("registered", into=target) == len(value)
        assert bytes(target) == value
        peers = store._engine.describe()["peers"]
        assert all(peer["transport"] == "rdma" for peer in peers), peers
        assert sum(path["bytes_read"] for path in _carried(store)) >= len(value)
        # The put's bytes left by the device as well: the control connection carried few.
        by_socket = sum(peer["bytes_out"] for peer in peers)
        assert by_socket < MIB, peers
    store.put("plain", value)
    assert store.get("plain") == value


def test_f03_of_a_memfd_that_became_shorter_the_device_holds_what_was_there(
    store: StoreClient,
) -> None:
    """It was given pages, not a file: no error, no crash, and no bytes of anybody else."""
    memory, fd = shared(4 * MIB, seals=False)
    view = memoryview(memory)
    before = bytes(view[-200_000:])
    registered = store.register(view, fd=fd)
    os.ftruncate(fd, 2 * MIB)
    assert store.put_batch(["kept", "cut"], [view[:200_000], view[-200_000:]]) == [None, None]
    assert store.get("cut") == before
    registered.close()
    os.ftruncate(fd, 4 * MIB)
    os.close(fd)


def test_a08_a_master_without_a_device_tells_nodes_of_rdma_alone_of_removals() -> None:
    """What is removed under a lease may be read until its node is told, or for a minute here: more
    than the call has."""
    options = ClusterOptions(
        node_count=1,
        segment_bytes=32 * MIB,
        node_arguments=["--transports", FAR],
        master_arguments=["--set=lease_ms=60000"],
    )
    with (
        Cluster(options) as running,
        StoreClient(running.address, transports=(NEAR,), timeout_ms=20_000) as client,
    ):
        client.put("key", b"value")
        assert client.get("key") == b"value"
        assert client.remove("key", force=True) is None
        assert not client.exists("key")
