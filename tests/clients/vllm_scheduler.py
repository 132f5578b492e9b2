"""One vLLM engine without its model: its scheduler, its cache manager, and a connector's two sides.

A step is `Scheduler.schedule`, the connector's calls around a forward pass in the order in which
vLLM's model runner makes them, and `Scheduler.update_from_output`. The forward pass writes, for
every token that is to be computed, bytes that depend on the tokens up to there, so a block that
came from elsewhere is right when it has these bytes as well.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from types import SimpleNamespace
from typing import Any

import vllm_engine
from vllm_engine import BLOCK, HEADS, LAYERS, WIDTH

import torch  # isort: skip  # behind the shims
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker import kv_connector_model_runner_mixin as runner

BLOCKS = 64
MAX_TOKENS = 1_024
STEPS_MAX = 20_000  # of 1 ms while everything waits
_never = threading.Event()


def wait_ms(ms: float) -> None:
    _never.wait(ms / 1_000)


class Engine:
    """connector: its name in --kv-transfer-config. Close it."""

    def __init__(
        self,
        connector: str,
        role: str = "kv_both",
        *,
        blocks: int = BLOCKS,
        **extra: Any,
    ) -> None:
        names = [f"layers.{i}.attn" for i in range(LAYERS)]
        cache = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(names, vllm_engine.full())],
        )  # fmt: skip
        self.config = _config(connector, role, blocks, extra)
        init_none_hash(sha256)
        self.scheduler = Scheduler(
            self.config, cache, _Said(accept_tokens=lambda *_: True), block_size=BLOCK
        )
        self.worker = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, cache
        )
        size = (blocks, 2, BLOCK, HEADS, WIDTH)
        self.caches = {name: torch.zeros(size, dtype=torch.float16) for name in names}
        self.worker.register_kv_caches(self.caches)
        self.requests: dict[str, Request] = {}
        self.computed: dict[str, int] = {}  # tokens by the forward pass, by request
        self.preempted = 0

    def close(self) -> None:
        if self.scheduler.connector is not None:
            self.scheduler.connector.shutdown()
        self.worker.shutdown()

    # --- requests ---

    def add(self, name: str, prompt: list[int], tokens: int = 3, **params: Any) -> Request:
        """params: of the transfer, for prefill and decode on different engines."""
        given = SamplingParams(
            max_tokens=tokens, ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )  # fmt: skip
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(name, prompt, given, None, block_hasher=hasher)
        self.requests[name] = request
        self.computed[name] = 0
        self.scheduler.add_request(request)
        return request

    def run(self, *names: str) -> list[list[int]]:
        """Step until these requests are finished: the tokens of each."""
        waited = 0
        wanted = [self.requests[name] for name in names]
        while not all(RequestStatus.is_finished(each.status) for each in wanted):
            if not self.step():
                assert waited < STEPS_MAX, [each.status for each in wanted]
                waited += 1
                wait_ms(1)
        return [list(each.output_token_ids) for each in wanted]

    def settle(self) -> None:
        """Step until what was to be stored or sent is, as the engine does while it is idle."""
        for _ in range(STEPS_MAX):
            connector = self.scheduler.connector
            if not connector.has_pending_push_work() and not self.scheduler.has_requests():
                return
            self.step()
            wait_ms(1)
        raise AssertionError("work that does not end")

    def step(self) -> bool:
        """Whether any token was computed."""
        out = self.scheduler.schedule()
        self.preempted += len(out.preempted_req_ids or ())
        names = list(out.num_scheduled_tokens)
        runner.get_kv_transfer_group = lambda: self.worker
        runner.get_forward_context = lambda: None
        with runner.KVConnectorModelRunnerMixin._get_kv_connector_output(out) as connector:
            sampled = [self._forward(name, out.num_scheduled_tokens[name]) for name in names]
        places = {name: i for i, name in enumerate(names)}
        result = ModelRunnerOutput(names, places, sampled, kv_connector_output=connector)
        self.scheduler.update_from_output(out, result)
        return bool(names)

    # --- what a model does ---

    def _forward(self, name: str, count: int) -> list[int]:
        """Check what is said to be there, write the rest, and sample when the end is reached."""
        request = self.requests[name]
        tokens = list(request.all_token_ids)
        end = request.num_computed_tokens  # as the scheduler counts, with this step
        places = self._places(name, end)
        for at in range(end - count):
            self._check(name, places[at], tokens[: at + 1])
        for at in range(end - count, end):
            for layer, cache in enumerate(self.caches.values()):
                block, slot = places[at]
                cache[block, :, slot] = row(layer, tokens[: at + 1])
        self.computed[name] += count
        return [next_token(tokens)] if end == len(tokens) else []

    def _check(self, name: str, place: tuple[int, int], tokens: list[int]) -> None:
        block, slot = place
        for layer, cache in enumerate(self.caches.values()):
            there = cache[block, :, slot]
            assert torch.equal(there, row(layer, tokens)), (name, len(tokens) - 1, place)

    def _places(self, name: str, count: int) -> list[tuple[int, int]]:
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return [(blocks[at // BLOCK], at % BLOCK) for at in range(count)]


@functools.lru_cache(maxsize=65_536)
def _row(layer: int, tokens: tuple[int, ...]) -> torch.Tensor:
    seed = hashlib.sha256(repr((layer, tokens)).encode()).digest()
    noise = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
    return torch.rand((2, HEADS, WIDTH), generator=noise).half()


def row(layer: int, tokens: list[int]) -> torch.Tensor:
    """KV of the last of these tokens in one layer."""
    return _row(layer, tuple(tokens))


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 50_000


def answer(prompt: list[int], count: int = 3) -> list[int]:
    """What an engine without a cache would say."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


# --- what a server would be started with ---


class _Said(SimpleNamespace):
    """A part of vLLM's configuration; what is not said here is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


def _config(connector: str, role: str, blocks: int, extra: dict[str, Any]) -> Any:
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    return _Said(
        model_config=_Said(
            max_model_len=MAX_TOKENS, model="test/model", use_mla=False,
            get_num_layers=lambda _: LAYERS, get_total_num_kv_heads=lambda: HEADS,
        ),
        cache_config=cache,
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=256, max_model_len=MAX_TOKENS,
            is_encoder_decoder=False,
        ),
        observability_config=ObservabilityConfig(),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector, kv_role=role, kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
        compilation_config=_Said(static_forward_context={}),
        aux_output_config=_Said(enabled=False),
        ec_manager_config=_Said(get_encoder_cache_manager_obj=lambda: None),
        max_concurrent_batches=1,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        num_hash_lookahead_tokens=0,
        max_in_flight_tokens=256,
    )  # fmt: skip
