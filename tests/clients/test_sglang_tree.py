"""SGLang's tree, controller and threads with our backend: what goes in comes out, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang_engine import FULL, Engine, backend_config

from mooncake_py.ops.cluster import Cluster

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
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
