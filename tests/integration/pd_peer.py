"""A rank of a hand-over in a process of its own, for the tests: a line of commands in, a line out.

python pd_peer.py ROLE BOOTSTRAP_URL INSTANCE RANK RANK_COUNT WAY      (WAY: shm, tcp, rdma:DEVICE)
prefill:  send ROOM PAGE... | layer N | layers FIRST LAST | finish | abort | cut | sent
decode:   receive ROOM PAGE... | wait | abort
Answers "ok", a number, or the name of the error.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from mooncake_py.errors import MooncakeError
from mooncake_py.pd import (
    DecodeRank,
    Incoming,
    KvLayout,
    KvPool,
    Outgoing,
    PrefillRank,
    find_instance,
    publish_rank,
)
from mooncake_py.transfer import EngineOptions, Rdma

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


def empty_memory(shape: KvLayout) -> list[np.ndarray]:
    return [np.zeros(PAGES * shape.page_bytes, np.uint8) for _ in range(LAYERS * 2)]


def options_of(way: str) -> EngineOptions:
    name, _, device = way.partition(":")
    rdma = Rdma(devices=(device,)) if device else Rdma()
    return EngineOptions(listen="127.0.0.1:0", transports=(name,), rdma=rdma)


class Prefill:
    def __init__(self, url: str, name: str, shape: KvLayout, way: str) -> None:
        self.rank = PrefillRank(filled_pool(shape), options_of(way))
        publish_rank(url, name, shape, self.rank.address, timeout_ms=CALL_MS)
        self.outgoing: Outgoing | None = None
        self.sent = 0  # bytes given to the engine, whatever became of them
        submit = self.rank.engine.submit

        def counted(peer, slices, **more):  # type: ignore[no-untyped-def]
            self.sent += int(slices["length"].sum())
            return submit(peer, slices, **more)

        self.rank.engine.submit = counted  # type: ignore[method-assign]

    def do(self, verb: str, given: list[int]) -> object:
        if verb == "send":
            self.outgoing = self.rank.send(given[0], given[1:])
            return "ok"
        assert self.outgoing is not None
        if verb == "layer":
            self.outgoing.write_layer(given[0], timeout_ms=CALL_MS)
        elif verb == "layers":
            for layer in range(given[0], given[1] + 1):
                self.outgoing.write_layer(layer, timeout_ms=CALL_MS)
        elif verb == "finish":
            self.outgoing.finish(timeout_ms=CALL_MS)
        elif verb == "abort":
            self.outgoing.abort("because")
        elif verb == "cut":
            for offered in self.outgoing._offers.values():
                address = offered.offer.address
                self.rank.engine.open(address, timeout_ms=CALL_MS).close()
        elif verb == "sent":
            return self.sent
        return "ok"


class Decode:
    def __init__(self, url: str, name: str, shape: KvLayout, way: str) -> None:
        self.url, self.name = url, name
        self.rank = DecodeRank(KvPool(shape, empty_memory(shape)), options_of(way))
        self.incoming: Incoming | None = None

    def do(self, verb: str, given: list[int]) -> object:
        if verb == "receive":
            instance = find_instance(self.url, self.name, timeout_ms=CALL_MS)
            self.incoming = self.rank.receive(given[0], given[1:], instance, timeout_ms=CALL_MS)
            return "ok"
        assert self.incoming is not None
        if verb == "wait":
            began = time.monotonic()
            try:
                self.incoming.wait(timeout_ms=CALL_MS)
            except MooncakeError as error:
                return f"{type(error).__name__} after {time.monotonic() - began:.2f} s"
        elif verb == "abort":
            self.incoming.abort()
        return "ok"


def main() -> None:
    role, url, name, rank, count, way = sys.argv[1:]
    shape = layout(int(rank), int(count))
    peer: Prefill | Decode = (Prefill if role == "prefill" else Decode)(url, name, shape, way)
    print("ready", flush=True)
    with peer.rank:
        for line in sys.stdin:
            verb, *given = line.split()
            try:
                print(peer.do(verb, [int(each) for each in given]), flush=True)
            except MooncakeError as error:
                print(type(error).__name__, flush=True)


if __name__ == "__main__":
    main()
