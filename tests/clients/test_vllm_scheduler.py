"""vLLM's own scheduler and both sides of its store connector over mooncake_py.compat.

In every step each token's KV is compared with what the model would have written, so any block that
comes back wrong, or is read before it is there, fails the test that meets it.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_scheduler as vllm
from vllm_engine import BLOCK, alone

from mooncake_py.compat.store import MooncakeDistributedStore
from mooncake_py.ops.cluster import Cluster
from mooncake_py.store.client import StoreClient

Make = Callable[..., vllm.Engine]


@pytest.fixture
def engine(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    engines: list[vllm.Engine] = []
    file = tmp_path / "mooncake.json"
    given = {
        "mode": "standalone-store", "metadata_server": "", "protocol": "tcp", "device_name": "",
        "master_server_address": cluster.address, "global_segment_size": 0,
    }  # fmt: skip
    file.write_text(json.dumps(given))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    monkeypatch.setenv("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "127.0.0.1")
    alone()

    def make(prefix: str, **named: Any) -> vllm.Engine:
        port = f"{os.getpid()}_s{len(engines)}_{prefix}"
        made = vllm.Engine(
            "MooncakeStoreConnector", cache_prefix=prefix, lookup_rpc_port=port, **named
        )
        engines.append(made)
        return made

    yield make
    for made in engines:
        made.close()


def prompt(blocks: float, seed: int = 1) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(50_000) for _ in range(int(blocks * BLOCK))]


@pytest.mark.parametrize("lookup_async", [False, True])
def test_f68_vllms_scheduler_computes_only_what_no_engine_has(
    engine: Make, lookup_async: bool
) -> None:
    name = f"hit{lookup_async}"
    first, second = (engine(name, lookup_async=lookup_async) for _ in range(2))
    tokens = prompt(8.5)
    first.add("a", tokens)
    assert first.run("a") == [vllm.answer(tokens)]
    first.settle()
    longer = [*tokens[: 6 * BLOCK], *prompt(2, seed=2)]
    second.add("b", tokens)
    second.add("c", longer)
    assert second.run("b", "c") == [vllm.answer(tokens), vllm.answer(longer)]
    assert second.computed["b"] < 2 * BLOCK, "eight blocks came from the store"
    assert second.computed["c"] < 4 * BLOCK, "and the six that both prompts begin with"
    second.settle()
    third = engine(name, lookup_async=lookup_async)
    third.add("d", longer)
    assert third.run("d") == [vllm.answer(longer)]
    assert third.computed["d"] < 2 * BLOCK, "which the second engine has completed"


def test_f68_preempted_requests_of_vllm_end_as_if_nothing_had_been(engine: Make) -> None:
    """Too few blocks for all: vLLM takes them from requests that run, and these begin again."""
    made = engine("preempted", blocks=14)
    prompts = {f"r{i}": prompt(3, seed=10 + i) for i in range(4)}
    for name, tokens in prompts.items():
        made.add(name, tokens, 40)
    found = made.run(*prompts)
    assert made.preempted > 0
    assert found == [vllm.answer(tokens, 40) for tokens in prompts.values()]
    made.settle()


def test_f68_blocks_that_go_between_vllms_question_and_its_read_are_computed(
    engine: Make, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engine("gone"), engine("gone")
    tokens = prompt(6)
    first.add("a", tokens)
    first.run("a")
    first.settle()
    read = MooncakeDistributedStore.batch_get_into_multi_buffers

    def lose(self: Any, keys: list[str], *rest: Any) -> Any:
        with StoreClient(cluster.address) as store:
            store.remove(list(keys)[len(keys) // 2 :], force=True)
        return read(self, keys, *rest)

    monkeypatch.setattr(MooncakeDistributedStore, "batch_get_into_multi_buffers", lose)
    second.add("b", tokens)
    assert second.run("b") == [vllm.answer(tokens)]
    assert 2 * BLOCK < second.computed["b"] < len(tokens) + BLOCK


def test_f68_random_failures_cost_vllm_hits_and_no_byte(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of all calls fail, and all of them wait."""
    choose = random.Random(7)
    calls = {"failed": 0, "done": 0}

    def unlucky(name: str, wrong: Callable[[Any], Any]) -> None:
        call = getattr(MooncakeDistributedStore, name)

        def called(self: Any, keys: Any, *rest: Any) -> Any:
            vllm.wait_ms(choose.random() * 4)
            failed = choose.random() < 0.33
            calls["failed" if failed else "done"] += 1
            return wrong(keys) if failed else call(self, keys, *rest)

        monkeypatch.setattr(MooncakeDistributedStore, name, called)

    unlucky("batch_is_exist", lambda keys: [-900] * len(keys))
    unlucky("batch_put_from_multi_buffers", lambda keys: [-800] * len(keys))
    unlucky("batch_get_into_multi_buffers", lambda keys: [-704] * len(keys))
    engines = [engine("unlucky") for _ in range(2)]
    computed = 0
    for turn in range(12):
        tokens = [*prompt(3, seed=90), *prompt(2.5, seed=91 + turn // 3)]
        made = engines[turn % 2]
        if turn % 4 == 3:  # what the engine itself has is forgotten now and then
            made.scheduler.reset_prefix_cache()
        made.add(f"r{turn}", tokens)
        assert made.run(f"r{turn}") == [vllm.answer(tokens)]
        made.settle()
        computed += made.computed[f"r{turn}"]
    assert calls["failed"] > 5
    assert computed < 12 * 5.5 * BLOCK
