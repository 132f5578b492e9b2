"""Heartbeats go on whatever a node is busy with."""

from __future__ import annotations

import threading

import pytest
from daemons import status

from mooncake_py import StoreClient
from mooncake_py.errors import MooncakeError
from mooncake_py.ops.cluster import Cluster, ClusterOptions

VALUE = bytes(8 << 20)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a20_a_node_that_is_busy_with_data_stays_alive(transport: str) -> None:
    """Three clients write and read as fast as they can, values that fill the node's pull threads;
    meanwhile a node joins, which populates and registers a large segment."""
    options = ClusterOptions(node_count=1, segment_bytes=256 << 20)
    with Cluster(options) as cluster:
        done = threading.Event()
        moved = [0, 0, 0]

        def work(number: int) -> None:
            with StoreClient(cluster.address, transports=(transport,)) as store:
                while not done.is_set():
                    key = f"{number}/{moved[number]}"
                    try:
                        store.put(key, VALUE)
                        assert store.get(key) == VALUE
                    except MooncakeError:
                        continue  # no room, with everything leased: not what this is about
                    moved[number] += 1

        workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for worker in workers:
            worker.start()
        try:
            cluster.start_node()
            before = sum(moved)
            while sum(moved) < before + 60:
                told = status(cluster)
                assert {segment.state for segment in told.segments} == {"alive"}
        finally:
            done.set()
            for worker in workers:
                worker.join(60)
        assert status(cluster).counters["suspects"] == 0
