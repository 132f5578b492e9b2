"""A prefill rank in a process of its own, for test_pd.py: one line of commands in, one line out.

python pd_peer.py BOOTSTRAP_URL INSTANCE RANK RANK_COUNT TRANSPORT
send ROOM PAGE...   | layer N | finish | abort  -> "ok" or the name of the error
"""

from __future__ import annotations

import sys

import numpy as np

from mooncake_py.errors import MooncakeError
from mooncake_py.pd import KvLayout, KvPool, Outgoing, PrefillRank, publish_rank
from mooncake_py.transfer import EngineOptions

LAYERS, TOKENS, HEADS, HEAD_BYTES, PAGES = 4, 16, 8, 64, 32
CALL_MS = 10_000


def layout(rank: int = 0, rank_count: int = 1) -> KvLayout:
    return KvLayout(LAYERS, TOKENS, HEADS, HEAD_BYTES, rank=rank, rank_count=rank_count)


def model_bytes() -> np.ndarray:
    """[layer, plane, page, token, head, byte] of the whole model, the same in every process."""
    shape = (LAYERS, 2, PAGES, TOKENS, HEADS, HEAD_BYTES)
    return np.random.default_rng(11).integers(0, 256, shape, dtype=np.uint8)


def filled_pool(shape: KvLayout) -> KvPool:
    held = model_bytes()[:, :, :, :, shape.heads.start : shape.heads.stop]
    return KvPool(shape, [np.ascontiguousarray(held[i // 2, i % 2]) for i in range(LAYERS * 2)])


def main() -> None:
    url, name, rank, count, transport = sys.argv[1:]
    shape = layout(int(rank), int(count))
    options = EngineOptions(listen="127.0.0.1:0", transports=(transport,))
    with PrefillRank(filled_pool(shape), options) as prefill:
        publish_rank(url, name, shape, prefill.address, timeout_ms=CALL_MS)
        outgoing: Outgoing | None = None
        for line in sys.stdin:
            verb, *given = line.split()
            try:
                if verb == "send":
                    outgoing = prefill.send(int(given[0]), [int(page) for page in given[1:]])
                elif outgoing and verb == "layer":
                    outgoing.write_layer(int(given[0]), timeout_ms=CALL_MS)
                elif outgoing and verb == "finish":
                    outgoing.finish(timeout_ms=CALL_MS)
                elif outgoing and verb == "abort":
                    outgoing.abort("because")
                print("ok", flush=True)
            except MooncakeError as error:
                print(type(error).__name__, flush=True)


if __name__ == "__main__":
    main()
