"""SGLang's host pools, filled with noise, and a backend over them, without tree and controller."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cpu_device  # noqa: F401 - first: it makes SGLang importable
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _mha_host_inputs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE = 16
LAYERS, HEADS, WIDTH = 3, 4, 16


def mha_pool(
    layout: str, tokens: int = 1024, allocator: str = "default", heads: int = HEADS
) -> Any:
    """SGLang's own MHA host pool with noise in it."""
    device = MHATokenToKVPool(
        size=64, page_size=PAGE, dtype=torch.bfloat16, head_num=heads, head_dim=WIDTH,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    cls, info, named = _mha_host_inputs(device)
    named["write_back_staging"] = None
    pool = cls(
        info, 2.0, 0, PAGE, layout, pin_memory=False, allocator_type=allocator,
        host_token_capacity=tokens, **named,
    )  # fmt: skip
    fill(pool, seed=1)
    return pool


def fill(pool: Any, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape, generator=noise))


def config(extra: dict[str, Any], **fields: Any) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        **{
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
            "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": True,
            "is_page_first_layout": True, "model_name": "test/model", "extra_config": extra,
            **fields,
        }
    )  # fmt: skip


def old_config(extra: dict[str, Any], **fields: Any) -> Any:
    """As the first releases with a dynamic loader made it: six fields and nothing else."""
    return SimpleNamespace(
        tp_rank=0, tp_size=1, is_mla_model=False, is_page_first_layout=False,
        model_name="test/model", extra_config=extra, **fields,
    )  # fmt: skip


def backend(storage_config: Any, pool: Any) -> Any:
    made = StorageBackendFactory.create_backend("dynamic", storage_config, pool)
    made.register_mem_pool_host(pool)
    return made


def indices(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def page(pool: Any, number: int) -> torch.Tensor:
    return pool.get_data_page(number * PAGE).clone()


def hashes(count: int, start: int = 0) -> list[str]:
    return [f"{number:064x}" for number in range(start, start + count)]
