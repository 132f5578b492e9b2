"""One process of an inference service: a model, its pages, and what is said to it line by line.

Started by serve.py with its settings as JSON in the command line; answers a line of JSON for each.

    {"do": "serve", "tokens": [...], "new": 8}             prefill and decode here
    {"do": "prefill", "tokens": [...], "room": 5}          and write the pages into a decode replica
    {"do": "decode", "tokens": [...], "new": 8, "room": 5, "prefill": "p0"}   with pages from there
    {"do": "report"}
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from decoder import LAYERS, MODEL_NAME, PAGE, SHAPE, Decoder, pages_of

from mooncake_py.errors import MooncakeError, OutOfSpace
from mooncake_py.hicache.kv_pages import KvPages
from mooncake_py.hicache.page_keys import PageFormat
from mooncake_py.hicache.page_store import PageStore
from mooncake_py.hicache.settings import HiCacheSettings
from mooncake_py.hicache.tier_options import TierOptions
from mooncake_py.hicache.tier_request import Load, Request
from mooncake_py.hicache.tiered_cache import TieredCache
from mooncake_py.pd import (
    DecodeRank,
    KvLayout,
    KvPool,
    Outgoing,
    PrefillRank,
    find_instance,
    publish_rank,
)

CALL_MS = 20_000
KEY_PREFIX = PageFormat(
    model=MODEL_NAME, revision="", pool="kv", dtype="float32", layout="object",
    page_tokens=PAGE, page_bytes=SHAPE.page_bytes,
).prefix()  # fmt: skip
LAYOUT = KvLayout(LAYERS, PAGE, SHAPE.head_count, SHAPE.head_dim * 4, model=MODEL_NAME)


def hand_over_pool(pool: KvPages) -> KvPool:
    """The engine's pages, as the hand-over sees them: a buffer a layer and plane."""
    planes = pool.tensor.flatten(0, 1)
    return KvPool(LAYOUT, [plane.numpy().view("u1").reshape(-1) for plane in planes])


class Replica:
    """settings: name, device_pages, host_pages, master ("" without L3), options of the tiers, and
    role: "whole", "prefill" or "decode" (these two with the bootstrap's url)."""

    def __init__(self, settings: dict[str, Any], stack: ExitStack) -> None:
        self.name, self.url = settings["name"], settings.get("bootstrap", "")
        self.model = Decoder()
        self.device = KvPages(SHAPE, settings["device_pages"])
        self.cache: TieredCache | None = None
        self.prefill_rank: PrefillRank | None = None
        self.decode_rank: DecodeRank | None = None
        if settings["role"] == "decode":
            self.decode_rank = stack.enter_context(DecodeRank(hand_over_pool(self.device)))
            return
        if settings["role"] == "prefill":
            self.prefill_rank = stack.enter_context(PrefillRank(hand_over_pool(self.device)))
            address = self.prefill_rank.address
            publish_rank(self.url, self.name, LAYOUT, address, timeout_ms=CALL_MS)
        self.cache = stack.enter_context(self._cache(settings, stack))

    def _cache(self, settings: dict[str, Any], stack: ExitStack) -> TieredCache:
        options = TierOptions(**{"prefetch_tokens_min": 2 * PAGE} | settings.get("options", {}))
        host_pages, store = settings["host_pages"], None
        host = KvPages(SHAPE, host_pages, layout="page_first") if host_pages else None
        if settings.get("master"):
            store = PageStore(HiCacheSettings(master=settings["master"]))
            stack.callback(store.close)
            memory = store.alloc(host_pages * SHAPE.page_bytes)  # which nodes map: one copy
            stack.callback(memory.close)
            host = KvPages(SHAPE, host_pages, layout="page_first", memory=memory.view())
        return TieredCache(
            self.device, host, store, key_prefix=KEY_PREFIX if store else "", options=options
        )

    def do(self, line: dict[str, Any]) -> dict[str, Any]:
        verbs: dict[str, Callable[..., dict[str, Any]]] = {
            "serve": self.serve, "prefill": self.prefill, "decode": self.decode,
            "report": self.report,
        }  # fmt: skip
        return verbs[line.pop("do")](**line)

    def serve(self, tokens: list[int], new: int) -> dict[str, Any]:
        assert self.cache is not None
        began = time.perf_counter()
        with self.cache.begin(tokens) as request:
            logits = self._prefill(request, tokens)
            first_s = time.perf_counter() - began
            request.extend(pages_of(len(tokens) + new) - len(request.device_pages))
            text, last, gaps = self._generate(request.device_pages, tokens, logits, new)
            request.commit(text)
            tiers = request.tier_pages
        return {
            "logits": logits.tolist(), "first_s": first_s, "tiers": tiers,
            "text": text, "last": last.tolist(), "gaps_s": gaps,
        }  # fmt: skip

    def prefill(self, tokens: list[int], room: int) -> dict[str, Any]:
        assert self.cache is not None
        began = time.perf_counter()
        with self.cache.begin(tokens) as request:
            logits = self._prefill(request, tokens, room)
            request.commit(tokens)
            tiers = request.tier_pages
        first_s = time.perf_counter() - began
        return {"logits": logits.tolist(), "first_s": first_s, "tiers": tiers}

    def _prefill(self, request: Request, tokens: list[int], room: int | None = None) -> Any:
        """Logits of the last token; with a room, every layer is handed over once it is complete."""
        assert self.cache is not None
        request.wait()
        load: Load | None = None
        with suppress(OutOfSpace):  # then more is computed
            load = request.load()
        cached = request.cached_tokens
        request.extend(pages_of(len(tokens)) - len(request.device_pages))
        outgoing: Outgoing | None = None
        if room is not None:
            assert self.prefill_rank is not None
            outgoing = self.prefill_rank.send(room, request.device_pages)

        def before(layer: int) -> None:
            if load is not None:
                load.wait_layer(layer)

        def after(layer: int) -> None:
            if outgoing is not None:
                outgoing.write_layer(layer, timeout_ms=CALL_MS)

        began = time.perf_counter()
        try:
            pages = request.device_pages
            logits = self.model.prefill(self.device, pages, tokens, cached, before, after)
            if outgoing is not None:
                outgoing.finish(timeout_ms=CALL_MS)
        except BaseException:
            if outgoing is not None:
                outgoing.abort()
            raise
        computed = pages_of(len(tokens)) - cached // PAGE
        self.cache.report.break_even.computed(computed, time.perf_counter() - began)
        return logits

    def decode(self, tokens: list[int], new: int, room: int, prefill: str) -> dict[str, Any]:
        """The first token is chosen here, by recomputing the last token of the prompt."""
        assert self.decode_rank is not None
        instance = find_instance(self.url, prefill, timeout_ms=CALL_MS)
        pages = self.device.take(pages_of(len(tokens) + new))
        if pages is None:
            raise OutOfSpace("no pages are free on the device")
        try:
            prompt = pages[: pages_of(len(tokens))]
            incoming = self.decode_rank.receive(room, prompt, instance, timeout_ms=CALL_MS)
            incoming.wait(timeout_ms=CALL_MS)
            logits = self.model.decode(self.device, pages, tokens[-1], len(tokens) - 1)
            text, last, gaps = self._generate(pages, tokens, logits, new)
        finally:
            self.device.give_back(pages)
        return {"text": text, "last": last.tolist(), "gaps_s": gaps}

    def _generate(
        self, pages: list[int], tokens: list[int], logits: Any, new: int
    ) -> tuple[list[int], Any, list[float]]:
        text, gaps = list(tokens), []
        for _ in range(new):
            text.append(int(logits.argmax()))
            began = time.perf_counter()
            logits = self.model.decode(self.device, pages, text[-1], len(text) - 1)
            gaps.append(time.perf_counter() - began)
        return text, logits, gaps

    def report(self) -> dict[str, Any]:
        if self.cache is None:
            return {"rows": []}
        self.cache.flush(timeout_ms=CALL_MS)
        even = self.cache.report.break_even
        return {
            "rows": list(self.cache.report.rows()),
            "fetch_s": even.fetch_s, "compute_s": even.compute_s,
        }  # fmt: skip


def main() -> None:
    with ExitStack() as stack:
        replica = Replica(json.loads(sys.argv[1]), stack)
        print(json.dumps({"ready": replica.name}), flush=True)
        for line in sys.stdin:
            try:
                said = replica.do(json.loads(line))
            except MooncakeError as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
