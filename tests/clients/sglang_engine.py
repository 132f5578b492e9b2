"""One SGLang engine without its model: radix tree, controller, host pools, storage threads.

`Engine` is SGLang's own test kit with our backend attached by name, as `--hicache-storage-backend
dynamic` does it. Requests are token sequences; KV is a number that depends on the token's place.
"""

from __future__ import annotations

import json
import unittest
from array import array
from typing import Any

import cpu_device  # noqa: F401 - first: it makes SGLang importable
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig, ComponentType
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

__all__ = ["FULL", "SWA", "Engine", "backend_config", "get_storage_hash_str"]

FULL = CacheConfig(page_size=16, num_layers=4)
SWA = CacheConfig(
    page_size=16, num_layers=6, full_attention_layer_ids=(2, 5), kv_size=512,
    components=(ComponentType.FULL, ComponentType.SWA), sliding_window_size=16,
)  # fmt: skip


def backend_config(address: str, **extra: Any) -> dict[str, Any]:
    return {
        "backend_name": "mooncake_py",
        "module_path": "mooncake_py.hicache",
        "class_name": "HiCacheBackend",
        "interface_v1": 1,
        "model": "test/model",
        "master": address,
        "prefetch_threshold": 1,
        **extra,
    }


class Engine(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """Close it with `doCleanups`."""

    __test__ = False  # a kit, although unittest made it

    def __init__(self, cfg: CacheConfig, *, mla: bool = False) -> None:
        super().__init__("runTest")
        self.cfg = cfg
        fixtures.MHATokenToKVPool = _mla_pool if mla else MHATokenToKVPool
        self.cache, self.allocator, self.requests = fixtures.build_fixture(self.cfg)
        self.count = 0

    def runTest(self) -> None:
        """Only there because unittest asks for it."""

    def attach(
        self,
        config: dict[str, Any],
        rank: tuple[int, int] = (0, 1),
        backend: str = "dynamic",
        **arguments: Any,
    ) -> Engine:
        """rank: (this one, of how many); there are no others, so nothing is agreed with them."""
        here = {f"{kind}_rank": rank[0] for kind in ("tp", "attn_tp", "moe_tp")}
        sizes = {f"{kind}_size": rank[1] for kind in ("tp", "attn_tp", "moe_tp")}
        self._enter(get_parallel().override(**here, **sizes, pp_rank=0, pp_size=1))
        options = {
            "hicache_mem_layout": "page_first",
            "hicache_write_policy": "write_through",
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_io_backend": "kernel",
            **arguments,
        }
        server = ServerArgs(
            model_path="dummy",
            page_size=self.cfg.page_size,
            hicache_storage_backend=backend,
            hicache_storage_backend_extra_config=json.dumps(config),
            **options,
        )
        server._mamba_cache_chunk_size = max(64, self.cfg.page_size)
        set_global_server_args_for_scheduler(server)
        self.cache.init_hicache(server, self.cache.cache_init_params)
        self.addCleanup(self._detach)
        self.addCleanup(self.cache.release_host_resources)
        self.cache.load_back_threshold = 0
        controller = self.controller
        for entry in controller.mem_pool_host.entries:
            entry.host_pool.pin_memory = False  # of the pages that the generic calls make
        controller.prefetch_capacity_limit = max(
            controller.prefetch_capacity_limit, controller.mem_pool_host.size
        )
        return self

    def _enter(self, context: Any) -> None:
        context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)

    def _detach(self) -> None:
        fixtures.atexit.unregister(self.cache.shutdown)
        self.controller.detach_storage_backend()

    @property
    def controller(self) -> Any:
        return self.cache.cache_controller

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    # --- requests ---

    def tokens(self, pages: int, start: int = 1) -> list[int]:
        return self._make_seq(start, pages)

    def compute(self, tokens: list[int], seed: int) -> list[torch.Tensor]:
        """Insert a request whose KV is computed here, and answer that KV."""
        self._insert(self.cache, self.allocator, self.requests, tokens)
        rows = self.rows(tokens)
        for number, buffer in enumerate(self.device_buffers()):
            shape = (len(rows), *buffer.shape[1:])
            noise = torch.Generator().manual_seed(seed * 1000 + number)
            buffer[rows] = torch.rand(shape, generator=noise).to(buffer.dtype)
        return self.kv(tokens)

    def rows(self, tokens: list[int]) -> torch.Tensor:
        found = fixtures.match_prefix(self.cache, tokens)
        return self.cache.path_device_indices(found.last_device_node)

    def kv(self, tokens: list[int]) -> list[torch.Tensor]:
        rows = self.rows(tokens)
        return [buffer[rows].clone() for buffer in self.device_buffers()]

    def device_buffers(self) -> list[torch.Tensor]:
        pool = self._get_full_kv_pool(self.allocator)
        buffers = getattr(pool, "kv_buffer", None)
        return list(buffers) if buffers is not None else [*pool.k_buffer, *pool.v_buffer]

    def back_up(self, tokens: list[int]) -> None:
        """Device to host to store, and wait for SGLang's backup thread."""
        leaf = fixtures.match_prefix(self.cache, tokens).last_device_node
        self._backup_node(self.cache, leaf)
        self._write_path_to_l3(self.cache, leaf)
        self._flush_l3_backups(self.cache)

    def prefetch(self, tokens: list[int]) -> int:
        """Store to host by SGLang's prefetch threads; answers the tokens found there then."""
        self.count += 1
        request = CacheRequestHandle(f"request-{self.count}", 0)
        root = self.cache.root_node_handle()
        self.cache.prefetch_from_storage(request, root, array("q", tokens), None, None)
        self._run_prefetch_to_completion(self.cache, request)
        return int(fixtures.match_prefix(self.cache, tokens).host_hit_length)

    def load(self, tokens: list[int]) -> list[torch.Tensor]:
        """Host to device, and the KV that is there then."""
        found = fixtures.match_prefix(self.cache, tokens)
        self._load_back_node(self.cache, found.last_host_node)
        return self.kv(tokens)


def _mla_pool(**arguments: Any) -> MLATokenToKVPool:
    for name in ("head_num", "head_dim"):
        arguments.pop(name)
    return MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=32, **arguments)
