"""One side of SGLang's prefill/decode hand-over without a model: its manager over our engine.

As a program it is a decode side that is told what to do:

    python sglang_pd.py BOOTSTRAP_ADDRESS

It answers a line a command: `receive ROOM PAGE...` waits for these pages and answers how that ended
and their digest; `accept ROOM PAGE...` only announces where they are to go; `turn ADDRESS` goes to
another prefill side. Such a one is

    python sglang_pd.py prefill PORT

A line `ROOM COUNT PAGE...` has it send these pages of COUNT, and answer their digest.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from typing import Any

os.environ.setdefault("MOONCAKE_PROTOCOL", "tcp")

import cpu_device  # noqa: F401 - first: it makes SGLang importable
import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed.device_communicators import mooncake_transfer_engine
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

__all__ = ["KVPoll", "Side", "conn"]

LAYERS = 4
PAGES = 64
PAGE_BYTES = 64 << 10  # of one layer's keys or values
AUX_BYTES = 256
PATIENCE_S = 60
_PARALLEL = ("tp", "attn_tp", "moe_tp", "pp", "attn_cp", "attn_dp", "attn_dcp", "dp")


class Side:
    """mode: `prefill` or `decode`. bootstrap_port: of the prefill's bootstrap server."""

    def __init__(self, mode: str, bootstrap_port: int) -> None:
        server = ServerArgs(
            model_path="dummy", host="127.0.0.1", page_size=16, disaggregation_mode=mode,
            disaggregation_bootstrap_port=bootstrap_port,
            disaggregation_transfer_backend="mooncake",
        )  # fmt: skip
        set_global_server_args_for_scheduler(server)
        self._parallel = get_parallel().override(**alone())
        self._parallel.__enter__()
        mooncake_transfer_engine._mooncake_transfer_engine = (
            mooncake_transfer_engine.MooncakeTransferEngine("127.0.0.1", gpu_id=0)
        )
        self.memory = torch.zeros((2 * LAYERS, PAGES, PAGE_BYTES), dtype=torch.uint8)
        self.aux = torch.zeros((8, AUX_BYTES), dtype=torch.uint8)
        self.manager = conn.MooncakeKVManager(self._arguments(), DisaggregationMode(mode), server)

    def _arguments(self) -> KVArgs:
        made = KVArgs()
        planes = list(self.memory)
        values: dict[str, Any] = {
            "engine_rank": 0, "gpu_id": 0, "ib_device": "", "page_size": 16, "pp_rank": 0,
            "kv_data_ptrs": [each.data_ptr() for each in planes],
            "kv_data_lens": [each.nbytes for each in planes],
            "kv_item_lens": [PAGE_BYTES] * len(planes),
            "kv_layer_ids": [], "kv_cache_dtype_str": "auto", "kv_head_num": 2,
            "total_kv_head_num": 2, "system_dp_rank": 0, "prefill_start_layer": 0,
            "prefill_end_layer": LAYERS, "aux_data_ptrs": [self.aux.data_ptr()],
            "aux_data_lens": [self.aux.nbytes], "aux_item_lens": [AUX_BYTES],
            "is_hybrid_mla_backend": False, "mla_compression_ratios": None,
            "swa_kv_cache_layout": None, "rust_http_port": None,
        }  # fmt: skip
        for name in ("types", "data_ptrs", "data_lens", "item_lens", "layer_ids"):
            values[f"state_{name}"] = []
        for name in ("dim_per_tensor", "slice_outer_counts", "conv_shard_groups"):
            values[f"state_{name}"] = []
        for name, value in values.items():
            setattr(made, name, value)
        return made

    def fill(self, pages: list[int], seed: int) -> None:
        random = torch.manual_seed(seed)
        size = (2 * LAYERS, len(pages), PAGE_BYTES)
        self.memory[:, pages] = torch.randint(0, 256, size, generator=random).byte()

    def digest(self, pages: list[int], aux: int) -> str:
        found = hashlib.sha256(self.memory[:, pages].numpy().tobytes())
        found.update(self.aux[aux].numpy().tobytes())
        return found.hexdigest()

    def sender(self, address: str, room: int, pages: int, aux: int) -> Any:
        made = conn.MooncakeKVSender(self.manager, address, room)
        made.init(pages, aux)
        return made

    def receiver(self, address: str, room: int, pages: list[int], aux: int) -> Any:
        end = time.monotonic() + PATIENCE_S
        while not self.manager.try_ensure_parallel_info(address):
            assert time.monotonic() < end
        made = conn.MooncakeKVReceiver(self.manager, address, room)
        made.init(0)
        made.send_metadata(np.array(pages, dtype=np.int32), aux, [])
        return made


def alone() -> dict[str, Any]:
    """The one rank of a server without parallelism."""
    return {
        **{f"{axis}_rank": 0 for axis in _PARALLEL},
        **{f"{axis}_size": 1 for axis in _PARALLEL},
        "pp_group": None,
    }


def outcome(side: Any, wanted: tuple[Any, ...] = (), timeout_s: float = PATIENCE_S) -> Any:
    """How it ended, or the first of `wanted` that it came to."""
    pause, end = threading.Event(), time.monotonic() + timeout_s
    while (state := side.poll()) not in (KVPoll.Success, KVPoll.Failed, *wanted):
        assert time.monotonic() < end, f"still {state} after {timeout_s} s"
        pause.wait(0.005)
    return state


def main() -> None:
    if sys.argv[1] == "prefill":
        _prefill(int(sys.argv[2]))
    else:
        _decode(sys.argv[1])


def _prefill(port: int) -> None:
    server = conn.MooncakeKVBootstrapServer("127.0.0.1", port)
    side = Side("prefill", port)
    print("ready", flush=True)
    for line in sys.stdin:
        room, count, *given = (int(each) for each in line.split())
        side.fill(given, seed=room)
        side.aux[room % 8] = room
        sender = side.sender(f"127.0.0.1:{port}", room, count, room % 8)
        assert outcome(sender, (KVPoll.WaitingForInput,)) == KVPoll.WaitingForInput
        sender.send(np.array(given, dtype=np.int32))
        if len(given) == count:
            assert outcome(sender) == KVPoll.Success
        print("end", side.digest(given, room % 8), flush=True)
    server.close()


def _decode(address: str) -> None:
    side = Side("decode", int(address.rsplit(":", 1)[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        command, room, *given = line.split()
        if command == "turn":  # to another prefill side
            address = room
            continue
        pages = [int(each) for each in given]
        aux = int(room) % 8
        made = side.receiver(address, int(room), pages, aux)
        if command == "receive":
            state = outcome(made)
            made.clear()
            print("end", "done" if state == KVPoll.Success else "failed", flush=True)
            print("end", side.digest(pages, aux), flush=True)
        else:
            print("end accepted", flush=True)


if __name__ == "__main__":
    main()
