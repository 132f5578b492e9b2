"""The calls of SGLang's storage interface, each read as SGLang reads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sglang_pools as pools
import torch
from daemons import calls
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang_engine import backend_config

from mooncake_py.errors import MasterUnavailable, UsageError
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.store.client import StoreClient

LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    options = ClusterOptions(segment_bytes=96 << 20, master_arguments=("--metrics", "127.0.0.1:0"))
    with Cluster(options) as running:
        yield running


@pytest.fixture
def backend(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Any] = []

    def make(pool: Any, extra: Any = None, config: Any = pools.config, **fields: Any) -> Any:
        given = {"tag": request.node.name, **(extra or {})}
        made.append(pools.backend(config(backend_config(cluster.address, **given), **fields), pool))
        return made[-1]

    yield make
    for each in made:
        each.close()


def moved(writer: Any, reader: Any, source: Any, target: Any, count: int = 6) -> None:
    keys = pools.hashes(count)
    from_pages, to_pages = list(range(count)), list(range(10, 10 + count))
    assert writer.batch_set_v1(keys, pools.indices(from_pages)) == [True] * count
    assert reader.batch_exists([*keys, "f" * 64]) == count
    assert reader.batch_get_v1([*keys, "f" * 64], pools.indices([*to_pages, 30])) == [
        *[True] * count,
        False,
    ]
    for one, other in zip(from_pages, to_pages, strict=True):
        assert torch.equal(pools.page(source, one), pools.page(target, other))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transports", ["local,shm,tcp", "tcp"])
def test_f27_pages_go_from_pool_to_pool(backend: Make, layout: str, transports: str) -> None:
    source, target = pools.mha_pool(layout), pools.mha_pool(layout)
    pools.fill(target, seed=2)
    ways = {"transports": transports}
    moved(backend(source, ways), backend(target, ways), source, target)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_f27_a_pool_in_shared_memory_goes_through_its_descriptor(
    backend: Make, layout: str
) -> None:
    source = pools.mha_pool(layout, allocator="shm")
    target = pools.mha_pool(layout, allocator="shm")
    assert source.fd is not None
    pools.fill(target, seed=2)
    shm = {"allocator": "shm"}
    moved(backend(source, shm), backend(target, shm), source, target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", [pools.config, pools.old_config])
def test_f27_the_generic_calls_and_those_in_place_share_their_pages(
    backend: Make, layout: str, config: Any
) -> None:
    """So a release that only knows the generic calls reads what another wrote, and back."""
    pool = pools.mha_pool(layout)
    plain, fast = backend(pool, config=config), backend(pool, config=config)
    keys = pools.hashes(4)
    pages = [pools.page(pool, number) for number in range(4)]
    assert plain.batch_set(keys[:2], pages[:2])
    assert fast.batch_set_v1(keys[2:], pools.indices([2, 3])) == [True, True]
    assert plain.batch_exists(keys) == fast.batch_exists(keys) == 4
    assert fast.batch_get_v1(keys[:2], pools.indices([20, 21])) == [True, True]
    found = plain.batch_get([*keys, "f" * 64], [pool.get_dummy_flat_data_page() for _ in range(5)])
    assert found[4] is None
    assert all(map(torch.equal, found[:4], pages))
    assert torch.equal(pools.page(pool, 20), pages[0])
    assert plain.exists(keys[0])
    assert not plain.exists("f" * 64)
    assert torch.equal(plain.get(keys[1], pool.get_dummy_flat_data_page()), pages[1])
    assert plain.get("f" * 64, pool.get_dummy_flat_data_page()) is None
    assert plain.set("e" * 64, pages[3])
    assert torch.equal(plain.get("e" * 64), pages[3])


def test_a60_split_heads_are_read_by_every_degree(backend: Make) -> None:
    """Two ranks write for up to four; four ranks read, each its own heads."""
    fine = {"should_split_heads": True, "tp_lcm_size": 4, "tp_size": 2}
    keys = pools.hashes(3)
    coarse = [pools.mha_pool("page_head", heads=4) for _ in range(2)]
    for rank, pool in enumerate(coarse):
        pools.fill(pool, seed=rank + 5)
        writer = backend(pool, tp_rank=rank, **fine)
        assert writer.batch_set_v1(keys, pools.indices([0, 1, 2])) == [True] * 3
        assert writer.batch_exists(keys) == 3
        assert torch.equal(writer.get(keys[1]), pools.page(pool, 1))
    shape = (2, 1, 4, pools.PAGE, pools.LAYERS, pools.WIDTH)
    for rank in range(4):
        pool = pools.mha_pool("page_head", heads=2)
        reader = backend(pool, tp_rank=rank, tp_size=4)
        assert reader.batch_exists(keys) == 3
        assert reader.batch_get_v1(keys, pools.indices([5, 6, 7])) == [True] * 3
        whole = pools.page(coarse[rank // 2], 1).reshape(shape)
        mine = whole[:, :, rank % 2 * 2 : rank % 2 * 2 + 2]
        assert torch.equal(pools.page(pool, 6), mine.flatten())


def test_a60_ranks_of_heads_have_pages_of_their_own_and_latent_ones_share(backend: Make) -> None:
    pool = pools.mha_pool("page_first")
    keys = pools.hashes(2)
    first = backend(pool, tp_rank=0, tp_size=2)
    second = backend(pool, tp_rank=1, tp_size=2)
    assert first.batch_set_v1(keys, pools.indices([0, 1])) == [True, True]
    assert (first.batch_exists(keys), second.batch_exists(keys)) == (2, 0)


def side_transfers(keys: list[str], pages: list[int], **fields: Any) -> list[PoolTransfer]:
    return [
        PoolTransfer(name=name, keys=keys, host_indices=pools.indices(pages), **fields)
        for name in (PoolName.INDEXER, PoolName.SWA)
    ]


def test_f27_side_pools_say_how_far_a_prefix_can_be_restored(backend: Make) -> None:
    pool = pools.mha_pool("page_first")
    made = backend(pool)
    made.register_mem_host_pool_v2(pool, PoolName.KV)
    side = {name: pools.mha_pool("page_first") for name in (PoolName.INDEXER, PoolName.SWA)}
    for name, each in side.items():
        made.register_mem_host_pool_v2(each, name)
    made.on_host_pools_registered()
    keys = pools.hashes(8)
    assert made.batch_set_v1(keys[:6], pools.indices(list(range(6)))) == [True] * 6
    stored = made.batch_set_v2(
        [
            PoolTransfer(
                PoolName.INDEXER, keys=keys[:5], host_indices=pools.indices(list(range(5)))
            ),
            PoolTransfer(PoolName.SWA, keys=keys[2:4], host_indices=pools.indices([2, 3])),
            PoolTransfer(PoolName.DRAFT, keys=keys[:1], host_indices=pools.indices([0])),
        ]
    )
    assert stored == {
        PoolName.INDEXER: [True] * 5, PoolName.SWA: [True] * 2, PoolName.DRAFT: [False],
    }  # fmt: skip
    asked = [
        PoolTransfer(PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES),
        PoolTransfer(PoolName.SWA, keys=keys[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES),
    ]
    found = made.batch_exists_v2(keys, asked)
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.INDEXER: 5, PoolName.SWA: 4}
    assert found.restorable_prefix_pages == [4]
    assert found.kv_hit_pages == 4
    got = made.batch_get_v2(side_transfers(keys[2:5], [12, 13, 14]))
    assert got == {PoolName.INDEXER: [True] * 3, PoolName.SWA: [True, True, False]}
    assert torch.equal(pools.page(side[PoolName.SWA], 13), pools.page(side[PoolName.SWA], 3))
    unknown = made.batch_exists_v2(keys, [PoolTransfer(PoolName.MAMBA, keys=keys)])
    assert (unknown.kv_hit_pages, unknown.restorable_prefix_pages) == (0, [])


def test_a60_objects_of_one_page_have_one_fate(backend: Make, cluster: Cluster) -> None:
    pool = pools.mha_pool("page_first")
    made = backend(pool)
    for name in (PoolName.INDEXER, PoolName.SWA):
        made.register_mem_host_pool_v2(pools.mha_pool("page_first"), name)
    keys = pools.hashes(2)
    assert made.batch_set_v2(side_transfers(keys, [0, 1]))[PoolName.SWA] == [True, True]
    with StoreClient(cluster.address) as store:
        names = [info.key for info in store.list("hc1/") if keys[0] in info.key]
        mine = [name for name in names if store.exists(name) and "indexer" in name]
        store.remove(mine, force=True)
    assert made.batch_get_v2(side_transfers(keys, [4, 5])) == {
        PoolName.INDEXER: [False, True], PoolName.SWA: [False, True],
    }  # fmt: skip


def test_a60_objects_of_one_page_have_one_fate_whichever_call_wrote_them(
    backend: Make, cluster: Cluster
) -> None:
    """SGLang stores the side pools of a page first, and its KV in another call. The page ends with
    what every page needs; a window may go before it."""
    made = backend(pools.mha_pool("page_first"))
    for name in (PoolName.INDEXER, PoolName.SWA):
        made.register_mem_host_pool_v2(pools.mha_pool("page_first"), name)
    keys = pools.hashes(3)
    indexer, window = side_transfers(keys, [0, 1, 2])
    window.hit_policy = PoolHitPolicy.TRAILING_PAGES
    made.batch_set_v2([indexer, window])
    assert made.batch_set_v1(keys, pools.indices([0, 1, 2])) == [True] * 3
    prefixes = {name: each.prefixes[0] for name, each in made._pools.items()}
    with StoreClient(cluster.address) as store:
        for pool, page in (("indexer", 0), ("swa", 1), ("kv", 2)):
            store.remove(prefixes[pool] + keys[page], force=True)
        there = {
            pool: store.exists([prefixes[pool] + key for key in keys])
            for pool in ("kv", "indexer", "swa")
        }
    assert there == {
        "kv": [False, True, False], "indexer": [False, True, False], "swa": [False] * 3,
    }  # fmt: skip


def test_f31_a_prompt_is_one_question_which_also_serves_its_reads(
    backend: Make, cluster: Cluster
) -> None:
    made = backend(pools.mha_pool("page_first", tokens=8192))
    keys = pools.hashes(4096)
    for start in range(0, 4096, 512):
        assert all(made.batch_set_v1(keys[start : start + 512], pools.indices(list(range(512)))))
    verbs = ("Locate", "Exists", "PutStart", "Report")
    before = {verb: calls(cluster, verb) for verb in verbs}
    assert made.batch_exists(keys) == 4096
    for start in range(0, 1024, 128):
        pages = pools.indices(list(range(128)))
        assert made.batch_get_v1(keys[start : start + 128], pages) == [True] * 128
    spent = {verb: calls(cluster, verb) - before[verb] for verb in verbs}
    assert spent == {"Locate": 1, "Exists": 0, "PutStart": 0, "Report": 0}


def test_stats_are_of_sglangs_own_kind_and_drained(backend: Make) -> None:
    made = backend(pools.mha_pool("page_first"))
    keys = pools.hashes(4)
    made.batch_set_v1(keys, pools.indices([0, 1, 2, 3]))
    made.batch_get_v1(keys, pools.indices([0, 1, 2, 3]))
    stats = made.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [4])
    assert stats.backup_bandwidth[0] > 0
    stats.prefetch_stats = object()
    assert made.get_stats().backup_pgs == []
    silent = backend(pools.mha_pool("page_first"), enable_storage_metrics=False)
    assert silent.get_stats() is None


def test_clear_removes_this_deployments_pages_and_no_others(backend: Make) -> None:
    pool = pools.mha_pool("page_first")
    mine, others = backend(pool), backend(pool, {"tag": "another"})
    for each in (mine, others):
        each.batch_set_v1(pools.hashes(5), pools.indices(list(range(5))))
    mine.clear()
    assert (mine.batch_exists(pools.hashes(5)), others.batch_exists(pools.hashes(5))) == (0, 5)


def test_a62_a_page_of_another_size_is_a_miss_and_leaves_the_rest(backend: Make) -> None:
    pool = pools.mha_pool("page_first")
    made = backend(pool)
    keys = pools.hashes(3)
    made.batch_set_v1([keys[0], keys[2]], pools.indices([0, 2]))
    made._store._client.put(made._pools["kv"].prefixes[0] + keys[1], b"short")
    assert made.batch_get_v1(keys, pools.indices([7, 8, 9])) == [True, False, True]


def test_a59_it_does_not_start_without_knowing_what_the_bytes_are(
    backend: Make, cluster: Cluster
) -> None:
    pool = pools.mha_pool("page_first")
    with pytest.raises(UsageError, match="model's name"):
        backend(pool, {"model": None}, model_name=None)
    with pytest.raises(UsageError, match="names no setting"):
        backend(pool, {"mdel": "x"})
    made = backend(pool, is_mla_model=True, tp_size=2)
    with pytest.raises(UsageError, match="draft"):
        made.register_mem_host_pool_v2(pool, PoolName.DRAFT)
    bytes_pool = pools.mha_pool("page_first")
    bytes_pool.dtype = torch.uint8
    with pytest.raises(UsageError, match="kv_cache_dtype"):
        backend(bytes_pool)
    assert backend(bytes_pool, {"kv_cache_dtype": "fp8_e4m3"}) is not None


def test_a49_without_a_master_it_says_so_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(MasterUnavailable):
        pools.backend(
            pools.config(backend_config("127.0.0.1:9", start_ms=300)), pools.mha_pool("page_first")
        )
    assert time.monotonic() - start < 5


def test_a68_close_gives_the_pool_back_for_a_second_life(backend: Make) -> None:
    pool = pools.mha_pool("page_first")
    for life in range(3):
        made = backend(pool)
        keys = pools.hashes(2, start=life * 2)
        assert made.batch_set_v1(keys, pools.indices([0, 1])) == [True, True]
        made.close()
        made.close()
        assert made.batch_set_v1(keys, pools.indices([0, 1])) == [False, False]
        assert made.batch_get_v1(keys, pools.indices([0, 1])) == [False, False]
        assert made.batch_exists(keys) == 0
        assert not made.batch_set(keys, [pools.page(pool, 0)] * 2)
        assert made.batch_get(keys, [pool.get_dummy_flat_data_page()] * 2) == [None, None]
