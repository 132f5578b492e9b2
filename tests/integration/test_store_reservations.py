"""Puts with reservations: one master call each, and nothing else about a put changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from daemons import calls, wait_until

from mooncake_py import StoreClient
from mooncake_py.errors import AccessRefused, ObjectExists, UsageError
from mooncake_py.master.client import MasterClient
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.transfer import TransferEngine
from mooncake_py.wire.node import PULL_KIND, PullReply, PullRequest

PAGE_BYTES = 20_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    options = ClusterOptions(segment_bytes=64 << 20, master_arguments=("--metrics", "127.0.0.1:0"))
    with Cluster(options) as running:
        yield running


def test_f04_puts_of_one_size_cost_one_master_call_each(cluster: Cluster) -> None:
    with StoreClient(cluster.address) as store:
        ends = calls(cluster, "PutEnd")
        for i in range(40):  # until a stock is there that lasts
            store.put(f"warm/{i}", b"w" * PAGE_BYTES)
        starts = calls(cluster, "PutStart")
        values = [bytes([i]) * PAGE_BYTES for i in range(200)]
        for i, value in enumerate(values):
            store.put(f"page/{i}", value)
        # A commit that is answered quickly is counted a moment later.
        wait_until(lambda: calls(cluster, "PutEnd") - ends == 240)
        assert calls(cluster, "PutStart") - starts < 100
        assert store.get_batch([f"page/{i}" for i in range(200)]) == values


def test_f07_the_first_writer_wins_also_between_reservations(cluster: Cluster) -> None:
    stores = [StoreClient(cluster.address) for _ in range(2)]
    for number, store in enumerate(stores):
        for i in range(20):
            store.put(f"mine/{number}/{i}", b"m" * PAGE_BYTES)
    won: list[tuple[int, int]] = []

    def write(number: int) -> None:
        for i in range(50):
            try:
                stores[number].put(f"ours/{i}", bytes([number + 1]) * PAGE_BYTES)
            except ObjectExists:
                continue
            won.append((i, number))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(i for i, _ in won) == list(range(50))
    for i, number in won:
        assert stores[1 - number].get(f"ours/{i}") == bytes([number + 1]) * PAGE_BYTES
    for store in stores:
        store.close()


def test_batches_of_one_size_use_them_too(cluster: Cluster) -> None:
    with StoreClient(cluster.address) as store:
        for turn in range(6):
            keys = [f"batch/{turn}/{i}" for i in range(32)]
            values = [bytes([turn + 1, i]) * 2_000 for i in range(32)]
            assert store.put_batch(keys, values) == [None] * 32
            assert store.get_batch(keys) == values
            again = store.put_batch([*keys[:3], keys[0]], [*values[:3], values[0]])
            assert all(isinstance(each, ObjectExists) for each in again)


def test_a42_reservations_of_a_master_that_is_gone_are_replaced(fresh_cluster: Cluster) -> None:
    with StoreClient(fresh_cluster.address, timeout_ms=20_000) as store:
        for i in range(20):
            store.put(f"before/{i}", b"b" * PAGE_BYTES)
        port = int(fresh_cluster.address.rpartition(":")[2])
        fresh_cluster.master.child.stop(10_000)
        fresh_cluster.start_master(port)
        for i in range(20):
            store.put(f"after/{i}", b"a" * PAGE_BYTES)
        assert store.get("after/0") == b"a" * PAGE_BYTES
        wait_until(lambda: store.exists("before/19") is True)


def test_a34_a_reservation_is_for_its_extent_only(cluster: Cluster) -> None:
    with TransferEngine() as engine, closing(MasterClient(cluster.address)) as master:
        found, lifetime_ms = master.reserve("default", 1000, 4, timeout_ms=5000)
        assert sum(each.row_count for each in found) == 4
        assert lifetime_ms > 0
        run = next(each for each in found if each.row_count > 1)
        first, second = run.cut(0, 1), run.cut(1, 2)
        peer = engine.open(first.segment.address, timeout_ms=5000)

        def pull(row: bytes, mac: bytes) -> PullReply:
            request = PullRequest(
                first.segment.segment_id, row, b"", 0, bytes(8), b"x" * 1000, 1000, row_macs=mac
            )
            return PullReply.decode(peer.request(PULL_KIND, request.encode(), timeout_ms=5000))

        assert pull(first.rows, second.macs).code == AccessRefused.code
        assert pull(first.rows, bytes(16)).code == AccessRefused.code
        assert pull(bytes(64), first.macs).code == AccessRefused.code
        assert pull(first.rows + second.rows, first.macs + first.macs).code != 0
        assert pull(first.rows, first.macs).status == b"\0"
        status = master.put_end(
            "default", [b"named"], first.generations(), reserved=True, timeout_ms=5000
        )
        assert status.tolist() == [0]
        with pytest.raises(UsageError):
            master.put_start("default", [b"\xff12345678"], [1], timeout_ms=5000)
    with StoreClient(cluster.address) as store:
        assert store.get("named") == b"x" * 1000
