"""SGLang's own backend for upstream's store, unchanged, over mooncake_py.compat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang_engine import FULL, SWA, Engine

from mooncake_py.ops.cluster import Cluster


@pytest.fixture
def engine(cluster: Cluster) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(cfg: Any, tag: str, *, mla: bool = False, layout: str = "page_first") -> Engine:
        made = Engine(cfg, mla=mla)
        engines.append(made)
        config = {
            "master_server_address": cluster.address,
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 4 << 20,
            "extra_backend_tag": tag,
            "enable_group_semantics": True,
            "prefetch_threshold": 1,
        }
        return made.attach(config, backend="mooncake", hicache_mem_layout=layout)

    yield make
    for made in engines:
        store = made.backend.store
        made.doCleanups()
        store.close()


CASES = [
    (FULL, False, "page_first"),
    (FULL, False, "page_first_direct"),
    (FULL, True, "page_first"),
    (FULL, True, "layer_first"),
    (SWA, False, "page_first"),
]


@pytest.mark.parametrize(("cfg", "mla", "layout"), CASES)
def test_f68_a69_its_pages_come_back(
    engine: Callable[..., Engine], cfg: Any, mla: bool, layout: str
) -> None:
    tag = f"{cfg.label}-{mla}-{layout}"
    writer = engine(cfg, tag, mla=mla, layout=layout)
    assert type(writer.backend).__name__ == "MooncakeStore"
    assert type(writer.backend.store).__module__ == "mooncake_py.compat.store"
    tokens = writer.tokens(6)
    kv = writer.compute(tokens, seed=8)
    writer.back_up(tokens)
    reader = engine(cfg, tag, mla=mla, layout=layout)
    assert reader.prefetch(tokens) == len(tokens)
    assert all(map(torch.equal, reader.load(tokens), kv))
