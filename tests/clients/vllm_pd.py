"""A vLLM engine of one role, joined by vLLM's own MooncakeConnector; also as a process of its own.

    python vllm_pd.py kv_producer|kv_consumer

Prints a line of JSON (where its bootstrap is, and its engine's id), then reads requests from its
input, one JSON object a line, and prints `{"name": ..., "tokens": [...]}` when one is done.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import vllm_scheduler as vllm  # first: the shims

import torch  # isort: skip
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as mooncake
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm_engine import BLOCK


class _Backend(CPUAttentionBackend):
    @staticmethod
    def get_supported_kernel_block_sizes(spec: Any = None) -> list[Any]:
        return [MultipleOf(BLOCK)]


def _alone() -> None:
    """What a GPU, a model's layers and a process group would say."""
    mooncake.get_tensor_model_parallel_rank = lambda: 0
    mooncake.get_tensor_model_parallel_world_size = lambda: 1
    mooncake.get_pp_group = lambda: SimpleNamespace(rank_in_group=0)
    mooncake.get_current_attn_backends = lambda *_: [_Backend]
    mooncake.get_ip = lambda: "127.0.0.1"
    mooncake.current_platform.set_device = lambda *_: None
    torch.accelerator.current_device_index = lambda: 0


class Engine(vllm.Engine):
    def __init__(self, role: str, **named: Any) -> None:
        _alone()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(port)
        super().__init__("MooncakeConnector", role, mooncake_protocol="tcp", **named)
        self.where = {
            "remote_bootstrap_addr": f"http://127.0.0.1:{port}",
            "remote_engine_id": self.config.kv_transfer_config.engine_id,
        }

    @property
    def transfers(self) -> Any:
        """The engine that moves the bytes."""
        return self.worker.connector_worker.engine

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def prefill(self, name: str, prompt: list[int]) -> None:
        self.add(name, prompt, 1, do_remote_decode=True, transfer_id=name)

    def decode(self, name: str, prompt: list[int], tokens: int, where: dict[str, str]) -> None:
        self.add(name, prompt, tokens, do_remote_prefill=True, transfer_id=name, **where)


def main() -> None:
    engine = Engine(sys.argv[1])
    print(json.dumps(engine.where), flush=True)
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    told: set[str] = set()
    while True:
        while not lines.empty():
            asked = json.loads(lines.get())
            getattr(engine, asked.pop("do"))(**asked)
        if not engine.step():
            vllm.wait_ms(1)
        for name, request in engine.requests.items():
            if name not in told and vllm.RequestStatus.is_finished(request.status):
                told.add(name)
                print(
                    json.dumps({"name": name, "tokens": list(request.output_token_ids)}), flush=True
                )


if __name__ == "__main__":
    main()
