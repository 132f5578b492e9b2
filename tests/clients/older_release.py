"""Our backend loaded by an older SGLang, over that release's own factory and host pools.

    PYTHONPATH=WHERE_IT_LIES:... python older_release.py MASTER

Prints one line a layout: the calls that were made, then `equal`. A process of its own because a
release cannot be imported beside another one.
"""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import shims

shims.install()

import psutil  # noqa: E402
import torch  # noqa: E402
from transformers.models.auto import configuration_auto  # noqa: E402

# Models that the newer transformers knows itself are registered by releases that came before it.
_register = configuration_auto.CONFIG_MAPPING.register
configuration_auto.CONFIG_MAPPING.register = lambda name, kind, exist_ok=False: _register(
    name, kind, exist_ok=True
)

from sglang.srt.mem_cache import hicache_storage, memory_pool_host  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402

PAGE, COUNT = 16, 6
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
DEVICE = SimpleNamespace(
    head_num=4, head_dim=16, layer_num=3, store_dtype=torch.bfloat16, dtype=torch.bfloat16,
    size=64, start_layer=0, end_layer=3, device="cpu", page_size=PAGE,
)  # fmt: skip


def host_pool(layout: str) -> Any:
    """Releases want 10 GB to spare for a pool of any size, so they are told of more memory."""
    plenty = SimpleNamespace(available=1 << 40, total=1 << 40)
    memory_pool_host.psutil = SimpleNamespace(virtual_memory=lambda: plenty)
    assert psutil
    made = memory_pool_host.MHATokenToKVPoolHost(
        DEVICE, 4.0, 0, PAGE, layout, pin_memory=False, device="cpu"
    )
    noise = torch.Generator().manual_seed(3)
    made.kv_buffer.copy_(torch.rand(made.kv_buffer.shape, generator=noise))
    return made


def config(extra: dict[str, Any], layout: str) -> Any:
    """With the fields that this release has."""
    known = inspect.signature(hicache_storage.HiCacheStorageConfig).parameters
    fields = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": True,
        "is_page_first_layout": layout != "layer_first", "model_name": "test/model",
        "extra_config": extra,
    }  # fmt: skip
    return hicache_storage.HiCacheStorageConfig(**{k: v for k, v in fields.items() if k in known})


def pages_of(pool: Any) -> list[torch.Tensor]:
    return [pool.get_data_page(number * PAGE).flatten().clone() for number in range(COUNT)]


def round_trip(address: str, layout: str) -> list[str]:
    pool = host_pool(layout)
    extra = {
        "backend_name": "mooncake_py", "module_path": "mooncake_py.hicache",
        "class_name": "HiCacheBackend", "interface_v1": 1, "master": address, "tag": "older",
    }  # fmt: skip
    made = StorageBackendFactory.create_backend("dynamic", config(extra, layout), pool)
    assert isinstance(made, hicache_storage.HiCacheStorage)
    made.register_mem_pool_host(pool)
    keys = [f"{number:064x}" for number in range(COUNT)]
    before, used = pages_of(pool), ["generic"]
    assert made.batch_exists(keys) == 0
    assert made.batch_set(keys[:2], before[:2])
    assert made.batch_exists(keys) == 2
    assert all(made.batch_set(keys[2:], before[2:]) for _ in range(2))
    targets = [torch.zeros_like(page) for page in before]
    found = made.batch_get(keys, targets)
    assert all(map(torch.equal, found, before))
    assert made.exists(keys[0])
    assert torch.equal(made.get(keys[0], torch.zeros_like(before[0])), before[0])
    if hasattr(hicache_storage.HiCacheStorage, "batch_get_v1"):
        used.append("v1")
        indices = torch.arange(COUNT * PAGE)
        more = [f"{number:064x}" for number in range(100, 100 + COUNT)]
        assert all(made.batch_set_v1(more, indices))
        pool.kv_buffer.zero_()
        assert all(made.batch_get_v1(more, indices))
        assert all(map(torch.equal, pages_of(pool), before))
    if hasattr(hicache_storage.HiCacheStorage, "batch_exists_v2"):
        used.append("v2")
        pool_of_none = hicache_storage.PoolTransfer(name="unheard_of", keys=keys)
        answer = made.batch_exists_v2(keys, [pool_of_none])
        assert answer.kv_hit_pages == 0
        assert made.batch_exists_v2(keys, []).kv_hit_pages == COUNT
    made.clear()
    assert made.batch_exists(keys) == 0
    made.close()
    return used


if __name__ == "__main__":
    for each in LAYOUTS:
        try:
            host_pool(each)
        except ValueError as error:  # a layout that this release does not know yet
            print(each, "unknown:", error)
            continue
        print(each, *round_trip(sys.argv[1], each), "equal", flush=True)
