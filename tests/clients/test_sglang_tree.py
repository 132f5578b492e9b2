"""SGLang's tree, controller and threads with our backend: what goes in comes out, byte for byte."""

from __future__ import annotations

import itertools
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from daemons import wait_until
from sglang_engine import FULL, SWA, Engine, backend_config, get_storage_hash_str

from mooncake_py.errors import MooncakeError
from mooncake_py.ops.cluster import Cluster
from mooncake_py.store.client import StoreClient

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
WRITES = ("write_through", "write_through_selective", "write_back")
PREFETCHES = ("best_effort", "wait_complete", "timeout")
Make = Callable[..., Engine]


@pytest.fixture
def engine(cluster: Cluster) -> Iterator[Make]:
    engines: list[Engine] = []

    def make(cfg: Any = FULL, *, mla: bool = False, config: Any = None, **arguments: Any) -> Engine:
        made = Engine(cfg, mla=mla)
        engines.append(made)
        return made.attach(backend_config(cluster.address, **(config or {})), **arguments)

    yield make
    for made in engines:
        made.doCleanups()


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(map(torch.equal, left, right))


def round_trip(engine: Make, pages: int = 4, **arguments: Any) -> None:
    writer = engine(**arguments)
    tokens = writer.tokens(pages)
    kv = writer.compute(tokens, seed=7)
    writer.back_up(tokens)
    reader = engine(**arguments)
    assert reader.prefetch(tokens) == len(tokens)
    assert equal(reader.load(tokens), kv)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_f27_a69_pages_come_back_in_every_layout(engine: Make, layout: str) -> None:
    round_trip(engine, hicache_mem_layout=layout, config={"tag": layout})


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_f27_a69_pages_of_latent_attention_come_back(engine: Make, layout: str) -> None:
    round_trip(engine, mla=True, hicache_mem_layout=layout, config={"tag": "mla" + layout})


@pytest.mark.parametrize("transports", ["tcp", "shm"])
def test_f27_a69_pages_come_back_by_every_way(engine: Make, transports: str) -> None:
    round_trip(engine, config={"tag": "way" + transports, "transports": transports})


def test_f27_a69_without_the_calls_in_place_pages_come_back_too(engine: Make) -> None:
    round_trip(engine, config={"tag": "generic", "interface_v1": 0})


def test_f27_a_sliding_window_comes_back_with_its_pool(engine: Make) -> None:
    round_trip(engine, cfg=SWA, pages=6, config={"tag": "swa"})


def test_f27_of_a_conversation_four_fifths_are_found_after_a_flush(engine: Make) -> None:
    """A system prompt of four pages and six turns of one, each asked of an engine whose own tiers
    are empty."""
    named = {"config": {"tag": "turns"}}
    asked = found = 0
    for turn in range(6):
        reader, writer = engine(**named), engine(**named)
        tokens = writer.tokens(5 + turn)
        if turn:
            found += reader.prefetch(tokens)
            asked += len(tokens)
        writer.compute(tokens, seed=1)
        writer.back_up(tokens)
    assert found / asked > 0.8


@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize("write", WRITES)
def test_a69_every_policy_writes_what_it_reads(engine: Make, write: str, prefetch: str) -> None:
    """`best_effort` takes what has arrived when it looks, so only whole prefixes are promised."""
    named = {
        "hicache_write_policy": write,
        "hicache_storage_prefetch_policy": prefetch,
        "config": {"tag": write + prefetch},
    }
    writer = engine(**named)
    tokens = writer.tokens(3)
    kv = writer.compute(tokens, seed=5)
    writer.back_up(tokens)
    reader = engine(**named)
    found = reader.prefetch(tokens)
    assert found % reader.cfg.page_size == 0
    if prefetch != "best_effort":
        assert found == len(tokens)
    if found:
        assert equal(reader.load(tokens[:found]), [layer[:found] for layer in kv])


def test_f27_only_what_is_missing_is_fetched_and_a_hole_ends_it(
    engine: Make, cluster: Cluster
) -> None:
    writer = engine(config={"tag": "hole"})
    tokens = writer.tokens(6)
    kv = writer.compute(tokens, seed=3)
    writer.back_up(tokens)
    with StoreClient(cluster.address) as store:
        (prefix,) = writer.backend._pools["kv"].prefixes
        hashes = get_storage_hash_str(array("q", tokens), None, page_size=writer.cfg.page_size)
        assert store.exists([prefix + each for each in hashes]) == [True] * 6
        store.remove(prefix + hashes[4], force=True)
    reader = engine(config={"tag": "hole"})
    assert reader.prefetch(tokens) == 4 * reader.cfg.page_size
    kept = 4 * reader.cfg.page_size
    assert equal(reader.load(tokens[:kept]), [layer[:kept] for layer in kv])


def threads(made: Engine) -> list[threading.Thread]:
    controller = made.controller
    return [
        controller.prefetch_thread,
        controller.prefetch_io_aux_thread,
        controller.prefetch_sync_thread,
        controller.backup_thread,
    ]


UNLUCKY = [  # write policy, prefetch policy, layout, latent attention
    ("write_through", "wait_complete", "page_first", False),
    ("write_through_selective", "timeout", "layer_first", False),
    ("write_back", "best_effort", "page_first_direct", False),
    ("write_through", "timeout", "page_head", False),
    ("write_back", "wait_complete", "layer_first", True),
]
if os.environ.get("MOONCAKE_CLIENTS_LONG"):  # all that SGLang has; some minutes
    UNLUCKY = [
        case
        for case in itertools.product(WRITES, PREFETCHES, LAYOUTS, (False, True))
        if not (case[3] and case[2] == "page_head")  # heads are what latent attention has none of
    ]


@pytest.mark.parametrize(("write", "prefetch", "layout", "mla"), UNLUCKY)
def test_a66_a69_injected_failures_and_delays_lose_hits_and_nothing_else(
    engine: Make,
    monkeypatch: pytest.MonkeyPatch,
    write: str,
    prefetch: str,
    layout: str,
    mla: bool,
) -> None:
    """SGLang's own switches: a third of the calls fail, all of them wait. MOONCAKE_CLIENTS_LONG=1:
    the product of all write policies, prefetch policies, layouts and kinds of attention."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.02")
    named = {
        "hicache_write_policy": write,
        "hicache_storage_prefetch_policy": prefetch,
        "hicache_mem_layout": layout,
        "config": {"tag": f"unlucky {write} {prefetch} {layout} {mla}"},
        "mla": mla,
    }
    writer, reader = engine(**named), engine(**named)
    free = reader.controller.mem_pool_host.available_size()
    found = 0
    for number in range(12):
        tokens = writer.tokens(1, start=1000 * number)
        kv = writer.compute(tokens, seed=number)
        writer.back_up(tokens)
        hit = reader.prefetch(tokens)
        found += hit
        if hit:
            assert equal(reader.load(tokens), kv)
    assert found < 12 * writer.cfg.page_size
    assert found > 0 or prefetch == "best_effort"  # which takes what is there when it looks
    assert all(thread.is_alive() for made in (writer, reader) for thread in threads(made))

    def released() -> bool:
        """What was given up comes back once its batch has ended."""
        reader.cache.check_hicache_events()
        return reader.controller.mem_pool_host.available_size() == free - found

    wait_until(released)
    assert reader.controller.prefetch_tokens_occupied == 0


def test_f27_a65_a_store_that_dies_costs_hits_and_no_thread(fresh_cluster: Cluster) -> None:
    """Within the settings' time; afterwards it is taken up again without a restart."""
    config = backend_config(
        fresh_cluster.address, exists_ms=200, get_ms=300, put_ms=300, pause_ms=200
    )
    made = Engine(FULL).attach(config)
    try:
        tokens = made.tokens(2)
        made.compute(tokens, seed=1)
        made.back_up(tokens)
        port = int(fresh_cluster.address.rsplit(":", 1)[1])
        fresh_cluster.master.child.kill()
        fresh_cluster.master.child.wait(5_000)
        start = time.monotonic()
        backend = made.backend
        assert backend.batch_exists(["0" * 64]) == 0
        assert time.monotonic() - start < 2
        start = time.monotonic()
        assert made.prefetch(made.tokens(2, start=5000)) == 0
        more = made.tokens(2, start=9000)
        made.compute(more, seed=2)
        made.back_up(more)
        assert time.monotonic() - start < 8
        assert all(thread.is_alive() for thread in threads(made))
        fresh_cluster.start_master(port)
        wait_until(lambda: made.backend.batch_exists(["0" * 64]) == 0 and stores(made))
    finally:
        made.doCleanups()


def stores(made: Engine) -> bool:
    key = f"{time.monotonic_ns():064x}"
    indices = torch.arange(made.cfg.page_size)
    return made.backend.batch_set_v1([key], indices) == [True]


def test_a68_attached_and_detached_while_the_engine_lives(engine: Make, cluster: Cluster) -> None:
    made = engine(config={"tag": "twice"})
    tokens = made.tokens(2)
    kv = made.compute(tokens, seed=4)
    made.back_up(tokens)
    for life in range(2):
        made.controller.detach_storage_backend()
        assert made.backend is None
        config = backend_config(cluster.address, tag="twice")
        config.pop("prefetch_threshold")
        made.controller.attach_storage_backend(
            "dynamic",
            prefetch_threshold=1,
            storage_backend_extra_config=config,
            host_pools=made.controller.mem_pool_host.entries,
        )
        key = get_storage_hash_str(array("q", tokens), None, page_size=made.cfg.page_size)
        assert made.backend.batch_exists(key) == 2, life
    reader = engine(config={"tag": "twice"})
    assert reader.prefetch(tokens) == len(tokens)
    assert equal(reader.load(tokens), kv)


def test_a68_what_cannot_be_attached_leaves_the_engine_as_it_was(engine: Make) -> None:
    made = engine(config={"tag": "rollback"})
    made.controller.detach_storage_backend()
    for wrong in ({"mastr": "x"}, {"master": "127.0.0.1:9", "start_ms": 200}):
        with pytest.raises(MooncakeError):
            made.controller.attach_storage_backend(
                "dynamic", storage_backend_extra_config={**backend_config("127.0.0.1:9"), **wrong}
            )
        assert made.backend is None
        assert not made.controller.enable_storage


def test_a60_latent_attention_is_written_by_one_rank_and_read_by_all(engine: Make) -> None:
    named = {"mla": True, "config": {"tag": "ranks"}}
    first = engine(**named, rank=(0, 2))
    tokens = first.tokens(3)
    kv = first.compute(tokens, seed=6)
    first.back_up(tokens)
    second = engine(**named, rank=(1, 2))
    assert second.controller.backup_skip
    assert not first.controller.backup_skip
    assert second.prefetch(tokens) == len(tokens)
    assert equal(second.load(tokens), kv)


def test_a60_ranks_of_heads_read_their_own_pages_only(engine: Make) -> None:
    named = {"config": {"tag": "heads"}}
    first = engine(**named, rank=(0, 2))
    tokens = first.tokens(2)
    first.compute(tokens, seed=6)
    first.back_up(tokens)
    assert engine(**named, rank=(1, 2)).prefetch(tokens) == 0
    assert engine(**named, rank=(0, 2)).prefetch(tokens) == len(tokens)
