"""vLLM's own store connector over mooncake_py.compat: sending, receiving and lookup threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_engine as vllm
from daemons import wait_until

from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.store.client import StoreClient

Make = Callable[..., vllm.Worker]
KINDS = {
    "full": (vllm.full(),),
    "latent": (vllm.latent(),),
    "window beside full": (vllm.full(), vllm.window()),
}


@pytest.fixture
def make(cluster: Cluster, tmp_path: Path) -> Iterator[Make]:
    workers: list[vllm.Worker] = []

    def start(specs: Any = KINDS["full"], address: str = "", **named: Any) -> vllm.Worker:
        workers.append(vllm.Worker(tmp_path, address or cluster.address, specs, **named))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(map(torch.equal, left, right))


@pytest.mark.parametrize("kind", ["full", "latent"])
def test_f68_vllms_blocks_come_back(make: Make, kind: str) -> None:
    writer = make(KINDS[kind], cache_prefix=kind)
    assert type(writer.worker.store).__module__ == "mooncake_py.compat.store"
    keys, blocks = vllm.hashes(8), [3, 1, 4, 5, 9, 2, 6, 8]
    writer.fill(blocks, seed=1)
    written = writer.bytes_of(blocks)
    assert writer.save("a", keys, blocks)
    reader = make(KINDS[kind], cache_prefix=kind)
    assert reader.lookup([*keys, *vllm.hashes(1, start=99)]) == 8 * vllm.BLOCK
    there = [10, 11, 12, 20, 21, 22, 30, 31]
    reader.load("b", keys, there)
    assert not reader.failed
    assert equal(reader.bytes_of(there), written)


def test_f68_vllms_groups_of_layers_come_back_as_one(make: Make, cluster: Cluster) -> None:
    """Group semantics on: what belongs to one stretch of the prompt has one fate."""
    named = {"cache_prefix": "groups", "enable_group_semantics": "true"}
    writer = make(KINDS["window beside full"], **named)
    assert writer.worker._supports_group_ids
    keys, blocks = vllm.hashes(4, start=500), [1, 2, 3, 4]
    writer.fill(blocks, seed=2)
    written = writer.bytes_of(blocks)
    assert writer.save("a", keys, blocks)
    reader = make(KINDS["window beside full"], **named)
    assert reader.lookup(keys) == 4 * vllm.BLOCK
    reader.load("b", keys, [5, 6, 7, 8])
    found = reader.bytes_of([5, 6, 7, 8])
    assert equal(found[: vllm.LAYERS], written[: vllm.LAYERS])
    assert equal([each[-1:] for each in found], [each[-1:] for each in written])  # the window
    with StoreClient(cluster.address) as store:
        (last,) = [info.key for info in store.list() if f"group:1@{keys[3].hex()}" in info.key]
        assert last.startswith("groups@")


def test_f68_what_a_second_request_shares_is_stored_once(make: Make) -> None:
    worker = make(cache_prefix="shared")
    keys = vllm.hashes(6, start=600)
    worker.fill([1, 2, 3, 4, 5, 6], seed=3)
    assert worker.save("a", keys[:4], [1, 2, 3, 4])
    worker.worker.get_kv_connector_stats()
    assert worker.save("b", keys, [1, 2, 3, 4, 5, 6])
    puts = worker.worker.get_kv_connector_stats().data["save_put"]
    assert [each["num_keys"] for each in puts] == [2]


def test_f68_ranks_read_their_own_heads_and_a_hit_needs_all_of_them(make: Make) -> None:
    first = make(cache_prefix="ranks", rank=(0, 2))
    keys = vllm.hashes(3, start=700)
    first.fill([1, 2, 3], seed=4)
    assert first.save("a", keys, [1, 2, 3])
    assert first.lookup(keys) == 0
    second = make(cache_prefix="ranks", rank=(1, 2))
    second.fill([1, 2, 3], seed=5)
    assert second.save("a", keys[:2], [1, 2])
    assert first.lookup(keys) == 2 * vllm.BLOCK
    second.load("b", keys[:2], [7, 8])
    assert equal(second.bytes_of([7, 8]), second.bytes_of([1, 2]))


def test_f68_a_block_that_is_gone_is_reported_by_its_number(make: Make, cluster: Cluster) -> None:
    worker = make(cache_prefix="gone")
    keys = vllm.hashes(4, start=800)
    worker.fill([1, 2, 3, 4], seed=6)
    assert worker.save("a", keys, [1, 2, 3, 4])
    with StoreClient(cluster.address) as store:
        (key,) = [info.key for info in store.list() if keys[2].hex() in info.key]
        store.remove(key, force=True)
    worker.load("b", keys, [11, 12, 13, 14])
    assert worker.failed == {13}
    assert equal(worker.bytes_of([11, 12, 14]), worker.bytes_of([1, 2, 4]))
    assert worker.lookup(keys) == 2 * vllm.BLOCK


def test_f68_a_full_store_pauses_the_request_and_no_thread_ends(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-200 is vLLM's sign for it; a store without a node has no room either."""
    monkeypatch.setattr("mooncake_py.compat.calls.PUT_MS", 300)
    with Cluster(ClusterOptions(node_count=0, segment_bytes=32 << 20)) as empty:
        worker = make(address=empty.address)
        sender = worker.worker.kv_send_thread
        worker.fill([1, 2], seed=7)
        assert not worker.save("a", vllm.hashes(2, start=900), [1, 2])
        assert sender._store_pressure_active
        worker.finish("a")
        empty.start_node()
        assert worker.save("b", vllm.hashes(2, start=950), [1, 2])
        assert not sender._store_pressure_active
        assert sender.is_alive()
        worker.close()


def test_f68_a_master_that_dies_costs_vllm_hits_and_no_thread(
    fresh_cluster: Cluster, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake_py.compat.calls.PUT_MS", 1_000)
    worker = make(address=fresh_cluster.address)
    keys = vllm.hashes(2, start=1_000)
    worker.fill([1, 2], seed=8)
    assert worker.save("a", keys, [1, 2])
    port = int(fresh_cluster.address.rsplit(":", 1)[1])
    fresh_cluster.master.child.kill()
    fresh_cluster.master.child.wait(5_000)
    start = time.monotonic()
    assert worker.lookup(vllm.hashes(2, start=1_100)) == 0
    assert not worker.save("b", vllm.hashes(2, start=1_200), [1, 2])
    worker.load("c", vllm.hashes(2, start=1_300), [5, 6])
    assert worker.failed == {5, 6}
    assert time.monotonic() - start < 60
    fresh_cluster.start_master(port)
    number = iter(range(2_000, 3_000))
    wait_until(lambda: worker.save(f"r{(n := next(number))}", vllm.hashes(1, start=n), [1]), 30_000)
    alive = [thread.name for thread in threading.enumerate() if "KVCacheStore" in thread.name]
    assert len(alive) >= 2


def test_f68_reset_forgets_everything(fresh_cluster: Cluster, make: Make) -> None:
    worker = make(address=fresh_cluster.address)
    keys = vllm.hashes(3)
    worker.fill([1, 2, 3], seed=9)
    assert worker.save("a", keys, [1, 2, 3])
    assert worker.lookup(keys) == 3 * vllm.BLOCK
    client = vllm.worker.LookupKeyClient(worker.config)
    assert client.reset()
    client.close()
    assert worker.lookup(keys) == 0


def test_f68_an_embedded_segment_and_a_tenant(fresh_cluster: Cluster, make: Make) -> None:
    """`mode` embedded: each rank offers memory; a tenant sees its own keys only."""
    settings = {"mode": "embedded", "global_segment_size": "32mb", "tenant_id": "blue"}
    worker = make(address=fresh_cluster.address, settings=settings, blocks=8)
    keys = vllm.hashes(2)
    worker.fill([1, 2], seed=10)
    assert worker.save("a", keys, [1, 2])
    assert worker.lookup(keys) == 2 * vllm.BLOCK
    other = make(address=fresh_cluster.address, blocks=8)
    assert other.lookup(keys) == 0
