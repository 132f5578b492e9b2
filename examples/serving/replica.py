"""One process of an inference service: a model, its pages, and what is said to it line by line.

Started by service.py with its settings as JSON in the command line; answers each line with one.

    {"do": "serve", "tokens": [...], "new": 8}             prefill and decode here
    {"do": "prefill", "tokens": [...], "room": 5}          and write the pages into a decode replica
    {"do": "decode", "tokens": [...], "new": 8, "room": 5, "prefill": "p0"}   with pages from there
    {"do": "measure", "pages": [4, 16]}                    fetching against computing, by length
    {"do": "settle"}                                       what was computed is stored
    {"do": "report"}

With "mark": "asked" or "layer" it stops once on the way (the store has just been asked; half of the
layers are computed), says {"mark": ...}, and goes on with the next line it hears: there somebody is
killed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from decoder import LAYERS, PAGE, Decoder, model_name, pages_of

from mooncake_py.errors import MooncakeError, OutOfSpace
from mooncake_py.hicache.kv_pages import KvPages
from mooncake_py.hicache.page_keys import PageFormat
from mooncake_py.hicache.page_store import PageStore
from mooncake_py.hicache.settings import HiCacheSettings
from mooncake_py.hicache.tier_options import BreakEven, TierOptions
from mooncake_py.hicache.tier_request import Request
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
from mooncake_py.transfer import EngineOptions, Rdma

CALL_MS = 20_000


class Replica:
    """settings: name, attention, layout (of the host pool), device_pages, host_pages, master (""
    without L3), options of the tiers; role: "whole", "prefill" or "decode" (these two with the
    bootstrap's url, and the transports of the hand-over)."""

    def __init__(self, settings: dict[str, Any], stack: ExitStack) -> None:
        self.name, self.url = settings["name"], settings.get("bootstrap", "")
        self.model = Decoder(settings["attention"])
        self.model_name = model_name(settings["attention"])
        self.shape = self.model.shape
        self.device = KvPages(self.shape, settings["device_pages"])
        self.cache: TieredCache | None = None
        self.prefill_rank: PrefillRank | None = None
        self.decode_rank: DecodeRank | None = None
        self._mark = ""
        if settings["role"] == "decode":
            self.decode_rank = stack.enter_context(DecodeRank(*self._hand_over(settings)))
            return
        if settings["role"] == "prefill":
            self.prefill_rank = stack.enter_context(PrefillRank(*self._hand_over(settings)))
            layout, address = self.prefill_rank.pool.layout, self.prefill_rank.address
            publish_rank(self.url, self.name, layout, address, timeout_ms=CALL_MS)
        self.cache = stack.enter_context(self._cache(settings, stack))

    def _hand_over(self, settings: dict[str, Any]) -> tuple[KvPool, EngineOptions]:
        """The engine's pages, as the hand-over sees them: a buffer a layer and plane."""
        shape = self.shape
        layout = KvLayout(
            LAYERS, PAGE, shape.head_count, shape.head_dim * 4, plane_count=shape.plane_count,
            model=self.model_name,
        )  # fmt: skip
        planes = self.device.tensor.flatten(0, 1)
        pool = KvPool(layout, [plane.numpy().view("u1").reshape(-1) for plane in planes])
        names, _, device = settings["transports"].partition(":")
        rdma = Rdma(devices=(device,)) if device else Rdma()
        ways = tuple(names.split(",")) if names else EngineOptions().transports
        return pool, EngineOptions(listen="127.0.0.1:0", transports=ways, rdma=rdma)

    def _cache(self, settings: dict[str, Any], stack: ExitStack) -> TieredCache:
        options = TierOptions(**{"prefetch_tokens_min": 2 * PAGE} | settings.get("options", {}))
        count, layout, store = settings["host_pages"], settings["layout"], None
        if not settings.get("master"):
            return TieredCache(
                self.device, KvPages(self.shape, count, layout=layout), options=options
            )
        store = PageStore(HiCacheSettings(master=settings["master"]))
        stack.callback(store.close)
        memory = store.alloc(count * self.shape.page_bytes)  # which nodes map: one copy
        stack.callback(memory.close)
        host = KvPages(self.shape, count, layout=layout, memory=memory.view())
        prefix = PageFormat(
            model=self.model_name, revision="", pool="kv", dtype="float32", layout="object",
            page_tokens=PAGE, page_bytes=self.shape.page_bytes,
        ).prefix()  # fmt: skip
        return TieredCache(self.device, host, store, key_prefix=prefix, options=options)

    # --- what is said ---

    def do(self, line: dict[str, Any]) -> dict[str, Any]:
        verbs: dict[str, Callable[..., dict[str, Any]]] = {
            "serve": self.serve, "prefill": self.prefill, "decode": self.decode,
            "measure": self.measure, "settle": self.settle, "report": self.report,
        }  # fmt: skip
        self._mark = line.pop("mark", "")
        return verbs[line.pop("do")](**line)

    def _reached(self, mark: str) -> None:
        if mark == self._mark:
            self._mark = ""
            print(json.dumps({"mark": mark}), flush=True)
            sys.stdin.readline()

    def serve(self, tokens: list[int], new: int) -> dict[str, Any]:
        assert self.cache is not None
        began = time.perf_counter()
        with self.cache.begin(tokens) as request:
            logits = self._prefill(request, tokens)
            first_s = time.perf_counter() - began
            request.extend(pages_of(len(tokens) + new) - len(request.device_pages))
            text, last, gaps = self._generate(request.device_pages, tokens, logits, new, request)
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
        self._reached("asked")
        request.wait()
        load = request.load()
        cached = request.cached_tokens
        request.extend(pages_of(len(tokens)) - len(request.device_pages))
        outgoing: Outgoing | None = None
        if room is not None:
            assert self.prefill_rank is not None
            outgoing = self.prefill_rank.send(room, request.device_pages)

        def before(layer: int) -> None:
            load.wait_layer(layer)

        def after(layer: int) -> None:
            if outgoing is not None:
                outgoing.write_layer(layer, timeout_ms=CALL_MS)
            if layer == LAYERS // 2:
                self._reached("layer")

        try:
            pages = request.device_pages
            logits = self.model.prefill(self.device, pages, tokens, cached, before, after)
            if outgoing is not None:
                outgoing.finish(timeout_ms=CALL_MS)
        except BaseException:
            if outgoing is not None:
                outgoing.abort()
            raise
        request.first_token()
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
        self, pages: list[int], tokens: list[int], logits: Any, new: int,
        request: Request | None = None,
    ) -> tuple[list[int], Any, list[float]]:  # fmt: skip
        text, gaps = list(tokens), []
        for _ in range(new):
            text.append(int(logits.argmax()))
            began = time.perf_counter()
            logits = self.model.decode(self.device, pages, text[-1], len(text) - 1)
            gaps.append(time.perf_counter() - began)
            if request is not None:
                request.next_token()
        return text, logits, gaps

    # --- numbers ---

    def measure(self, pages: list[int]) -> dict[str, Any]:
        """[pages, seconds to fetch and load, seconds to compute] of prefixes nobody has seen."""
        assert self.cache is not None
        cache, rows = self.cache, []
        policy, cache.report.break_even = cache.report.break_even, BreakEven()
        for count in pages:
            tokens = [(count + i * 31) % 256 for i in range(count * PAGE + 1)]
            took = []
            for _ in range(2):  # the first time it is computed and stored, the second it is there
                began = time.perf_counter()
                with cache.begin(tokens) as request:
                    request.wait()
                    request.load().wait()
                    if not took:
                        request.extend(pages_of(len(tokens)))
                        self.model.prefill(self.device, request.device_pages, tokens, 0)
                        took.append(time.perf_counter() - began)
                        request.commit(tokens)
                    elif request.tier_pages["L3"] == count:
                        took.append(time.perf_counter() - began)
                cache.flush(timeout_ms=CALL_MS)
                cache.clear()
                cache.report.break_even = BreakEven()
            if len(took) == 2:
                rows.append([count, took[1], took[0]])
        cache.report.break_even = policy
        return {"rows": rows}

    def settle(self) -> dict[str, Any]:
        return {} if self.cache is None else {"done": self.cache.flush(timeout_ms=CALL_MS)}

    def report(self) -> dict[str, Any]:
        return {} if self.cache is None else self.settle() | self.cache.snapshot().to_json()


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
