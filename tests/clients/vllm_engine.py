"""One vLLM worker without its model: the store connector's worker, threads and lookup server.

What a GPU, a model's configuration or a process group would give is said here; everything else is
vLLM's own code. KV caches are tensors on the CPU.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import shims

shims.install()
# What a chat server needs of vLLM, and the newest packages for it; the connectors do not.
shims.hide("vllm.parser", "vllm.tool_parsers", "vllm.reasoning", "vllm.entrypoints")

import torch  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (  # noqa: E402
    data,
    worker,
)
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

__all__ = ["FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "Worker", "full", "hashes"]

BLOCK = 16  # tokens
LAYERS = 2  # of each group
HEADS, WIDTH = 2, 32
_ports = itertools.count(1)
_jobs = itertools.count(1)


class _Event:
    """All that a CPU has to record is recorded."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


if not torch.cuda.is_available():
    torch.cuda.Event = _Event  # type: ignore[misc,assignment]  # vLLM fences its copies with it


def full(**more: Any) -> Any:
    given = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": WIDTH}
    return FullAttentionSpec(**given, dtype=torch.float16, **more)


def latent() -> Any:
    return MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float16)


def window() -> Any:
    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float16,
        sliding_window=BLOCK,
    )  # fmt: skip


def hashes(count: int, start: int = 0) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(start, start + count)]


def alone(rank: tuple[int, int] = (0, 1)) -> None:
    """What a process group would say. rank: (this one, of how many)."""
    worker.get_tensor_model_parallel_rank = lambda: rank[0]
    worker.get_tensor_model_parallel_world_size = lambda: rank[1]
    worker.get_pcp_group = worker.get_dcp_group = lambda: SimpleNamespace(world_size=1)


class Worker:
    """rank: (this one, of how many). specs: one attention kind a group. Close it."""

    def __init__(
        self,
        folder: Path,
        address: str,
        specs: tuple[Any, ...],
        rank: tuple[int, int] = (0, 1),
        blocks: int = 32,
        settings: dict[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        file = folder / "mooncake.json"
        given = {
            "mode": "standalone-store", "metadata_server": "", "master_server_address": address,
            "protocol": "tcp", "device_name": "", "global_segment_size": 0, **(settings or {}),
        }  # fmt: skip
        file.write_text(json.dumps(given))
        os.environ["MOONCAKE_CONFIG_PATH"] = str(file)
        os.environ["MOONCAKE_REQUESTER_LOCAL_HOSTNAME"] = "127.0.0.1"
        alone(rank)
        names = [[f"{group}.{i}" for i in range(LAYERS)] for group in range(len(specs))]
        groups = [KVCacheGroupSpec(*pair) for pair in zip(names, specs, strict=True)]
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.config = _vllm_config(rank, blocks, extra)
        self.worker = worker.MooncakeStoreWorker(self.config, cache)
        del os.environ["MOONCAKE_CONFIG_PATH"]  # other engines read it, too
        self.caches = {
            name: torch.zeros((blocks, spec.page_size_bytes), dtype=torch.uint8)
            for group, spec in zip(names, specs, strict=True)
            for name in group
        }
        self.worker.register_kv_caches(self.caches)
        self.groups = len(specs)
        self.failed: set[int] = set()

    def fill(self, blocks: list[int], seed: int) -> None:
        random = torch.manual_seed(seed)
        for cache in self.caches.values():
            size = (len(blocks), cache.shape[1])
            cache[blocks] = torch.randint(0, 256, size, generator=random).byte()

    def bytes_of(self, blocks: list[int]) -> list[torch.Tensor]:
        return [cache[blocks].clone() for cache in self.caches.values()]

    def save(self, name: str, keys: list[bytes], blocks: list[int]) -> bool:
        """Through the sending thread. Whether all of it was stored."""
        meta = data.MooncakeStoreConnectorMetadata({name}, set())
        length = len(keys) * BLOCK
        meta.add_request(
            data.ReqMeta(
                name,
                length,
                tuple(blocks for _ in range(self.groups)),
                keys,
                can_save=True,
                store_job_id=next(_jobs),
                prefill_end_tokens=length,
                num_prompt_tokens=length,
            )
        )
        self.worker.wait_for_save(meta)
        sender = self.worker.kv_send_thread
        sender.request_queue.join()
        return bool(sender._saved_offset.get(name, 0) == length)

    def finish(self, name: str) -> None:
        meta = data.MooncakeStoreConnectorMetadata(set(), set())
        self.worker.get_finished({name}, meta)

    def lookup(self, keys: list[bytes]) -> int:
        """Tokens that could be loaded, asked through vLLM's own socket."""
        client = worker.LookupKeyClient(self.config)
        try:
            tokens = len(keys) * BLOCK + 1  # one more, which is always computed
            return int(client.lookup("asked", tokens, keys).hit_length)
        finally:
            client.close()

    def load(self, name: str, keys: list[bytes], blocks: list[int]) -> None:
        """Through the receiving threads; `failed` has the blocks that could not be had."""
        meta = data.MooncakeStoreConnectorMetadata({name}, set())
        length = len(keys) * BLOCK
        spec = data.LoadSpec(0, length, can_load=True)
        tables = tuple(blocks for _ in range(self.groups))
        meta.add_request(data.ReqMeta(name, length, tables, keys, load_spec=spec))
        self.worker.start_load_kv(meta)
        self.worker.recv_request_queue.join()
        self.failed = self.worker.get_block_ids_with_load_errors()

    def close(self) -> None:
        self.worker.close()


def _vllm_config(rank: tuple[int, int], blocks: int, extra: dict[str, Any]) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="test/model", enable_sleep_mode=False, enable_cumem_allocator=False,
            get_num_layers=lambda _: LAYERS, get_total_num_kv_heads=lambda: HEADS * rank[1],
        ),
        parallel_config=SimpleNamespace(
            data_parallel_index=0, pipeline_parallel_size=1, rank=rank[0], world_size=rank[1],
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
        ),
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_both",
            kv_connector_extra_config={
                "lookup_rpc_port": f"{os.getpid()}_{next(_ports)}", "load_async": True, **extra
            },
        ),
        cache_config=SimpleNamespace(
            block_size=BLOCK, prefix_match_unit=None, enable_prefix_caching=True,
            num_gpu_blocks=blocks, mamba_cache_mode="none",
        ),
        kv_events_config=None,
        speculative_config=None,
    )  # fmt: skip
