"""One rank of a tiered cache in a process of its own, for test_tier_ranks.py: a line of commands
in, a line of JSON out.

python tier_rank.py RANK RANK_COUNT FILE_OF_THE_RENDEZVOUS DEVICE_PAGES HOST_PAGES SEED
serve NUMBER PAGES | pressure COUNT | forget | capacity
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mooncake_py.errors import MooncakeError, OutOfSpace
from mooncake_py.hicache.kv_pages import KvPages, KvShape
from mooncake_py.hicache.tier_options import TierOptions
from mooncake_py.hicache.tier_ranks import TorchRanks
from mooncake_py.hicache.tiered_cache import TieredCache

SHAPE = KvShape(layer_count=2, page_tokens=4, head_count=1, head_dim=4)
CALL_MS = 20_000


class LosingStore:
    """This rank's L3: forgets one object in twenty at each look."""

    def __init__(self, chance: random.Random) -> None:
        self.objects: dict[str, bytes] = {}
        self.chance = chance

    def leading(self, keys: Sequence[str]) -> int:
        for key in keys:
            if self.chance.random() < 0.05:
                self.objects.pop(key, None)
        return next((i for i, key in enumerate(keys) if key not in self.objects), len(keys))

    def get(
        self, keys: Sequence[str], targets: Sequence[list[memoryview]], sizes: Sequence[int]
    ) -> list[bool]:
        for key, (view,) in zip(keys, targets, strict=True):
            view[:] = self.objects[key]
        return [True] * len(keys)

    def put(self, keys: Sequence[str], values: Sequence[list[memoryview]]) -> list[bool]:
        for key, (view,) in zip(keys, values, strict=True):
            self.objects[key] = bytes(view)
        return [True] * len(keys)


class Engine:
    def __init__(self, device: int, host: int, seed: int) -> None:
        self.ranks = TorchRanks(timeout_ms=CALL_MS)
        self.chance = random.Random(seed)
        self.store = LosingStore(random.Random(seed))
        self.cache = TieredCache(
            KvPages(SHAPE, device), KvPages(SHAPE, host, layout="page_first"), self.store,
            key_prefix="test/", agree=self.ranks.agree,
            options=TierOptions(prefetch_tokens_min=1, prefetch_policy="wait_complete"),
        )  # fmt: skip

    def value(self, number: int, page: int) -> float:
        return number * 100 + page + self.ranks.rank / 4  # every rank has heads of its own

    def serve(self, number: int, pages: int) -> dict[str, Any]:
        """What of it was cached, and whether all ranks could go on."""
        tokens = [number * 1_000 + i for i in range(pages * SHAPE.page_tokens + 1)]
        with self.cache.begin(tokens) as request:
            waited = request.wait() // SHAPE.page_tokens
            load = request.load()
            cached = request.cached_tokens // SHAPE.page_tokens
            load.wait(timeout_ms=CALL_MS)
            for page in range(cached):
                held = self.cache.device.layer(0)[request.device_pages[page]]
                assert (held == self.value(number, page)).all()
            able = 1
            try:
                request.extend(pages - len(request.device_pages))
            except OutOfSpace:
                able = 0  # of this rank; the others hear of it, and leave the request as well
            if self.ranks.agree(able):
                for page in range(cached, pages):
                    for layer in range(SHAPE.layer_count):
                        place = self.cache.device.layer(layer)[request.device_pages[page]]
                        place[:] = self.value(number, page)
                request.commit(tokens)
        self.cache.flush(timeout_ms=CALL_MS)
        return {"cached": cached, "waited": waited, "able": able}

    def pressure(self, count: int) -> dict[str, Any]:
        """Requests under random pressure that differs between ranks; their order does not."""
        order = random.Random(3)
        found = []
        for _ in range(count):
            if self.chance.random() < 0.3:
                self.cache.clear()
            free = self.cache.device.page_count - self.chance.randrange(2, 9)
            held = self.cache.device.take(min(free, self.cache.device.free_count)) or []
            answer = self.serve(order.randrange(4), order.randrange(1, 7))
            found.append([answer["waited"], answer["cached"]])
            self.cache.device.give_back(held)
        return {"cached": found}

    def do(self, verb: str, *given: int) -> dict[str, Any]:
        if verb == "forget":
            self.cache.clear()
            self.store.objects.clear()
            return {}
        if verb == "capacity":
            assert self.cache.host is not None
            capacity = self.ranks.capacity(self.cache.device, self.cache.host)
            return {"tokens": [capacity.device_tokens, capacity.host_tokens], "text": str(capacity)}
        return {"serve": self.serve, "pressure": self.pressure}[verb](*given)


def main() -> None:
    rank, count, meeting, device, host, seed = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(count),
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    engine = Engine(int(device), int(host), int(seed))
    print(json.dumps({"ready": rank}), flush=True)
    for line in sys.stdin:
        verb, *given = line.split()
        try:
            said = engine.do(verb, *map(int, given))
        except MooncakeError as error:
            said = {"error": type(error).__name__}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
