"""What an engine holds of the tiered cache: one request, and its copy to the device. The rules are
in `tiered_cache.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mooncake_py.errors import TransferTimeout, UsageError
from mooncake_py.hicache.prefetch import Prefetch
from mooncake_py.hicache.radix_tree import Node, Page
from mooncake_py.hicache.tier_streams import Mark, Streams
from mooncake_py.hicache.tier_work import Seconds, Work

if TYPE_CHECKING:
    from mooncake_py.hicache.tiered_cache import TieredCache


class Load:
    """A copy from the host to the device. Made by `Request.load`."""

    def __init__(self, layers: int, work: Work, streams: Streams) -> None:
        self._done = [work.flag() for _ in range(layers)]  # given to the device
        self._ended = work.flag()  # nothing of it goes on any more
        self._marks: list[Mark] = [None] * layers
        self._started = [False] * layers
        self._work, self._streams = work, streams
        self._error: BaseException | None = None
        self.stalled_s = 0.0  # that `wait_layer` held up the caller

    def wait_layer(self, layer: int, *, timeout_ms: int = 60_000) -> None:
        """Until this layer may be read by what the caller starts next. TransferTimeout."""
        with Seconds(self._work) as took:
            done = self._done[layer].wait(timeout_ms / 1000)
        self.stalled_s += took.s
        if not done:
            raise TransferTimeout("the copy to the device did not end in time", layer=layer)
        if self._error is not None:
            raise self._error
        if self._started[layer]:
            self._streams.order(self._marks[layer])

    def wait(self, *, timeout_ms: int = 60_000) -> None:
        for layer in range(len(self._done)):
            self.wait_layer(layer, timeout_ms=timeout_ms)

    # --- for the copy ---

    def started(self, layer: int, mark: Mark) -> None:
        self._marks[layer], self._started[layer] = mark, True
        self._done[layer].set()

    def fail(self, error: BaseException) -> None:
        self._error = error

    def end(self) -> None:
        for done in self._done:
            done.set()
        self._ended.set()

    def wait_end(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)


class Request:
    """One prompt's way through the tiers. Made by `TieredCache.begin`. One thread at a time."""

    def __init__(self, cache: TieredCache, namespace: str, pages: list[Page], now_ns: int) -> None:
        self._cache = cache
        self._began_ns = now_ns
        self._last_token_ns: int | None = None
        self._prompt_pages = len(pages)
        self._parts_s: dict[str, float] = {}  # of the time to the first token
        self._namespace = namespace
        self._pages = pages  # whole pages of the prompt
        self._own: set[int] = set()  # device pages that the tree does not have
        self._locked: Node | None = None
        self._cached = 0  # pages
        self._host: list[int] = []
        self._host_node: Node | None = None
        self._prefetch: Prefetch | None = None
        self._load: Load | None = None
        self._closed = False
        self.device_pages: list[int] = []  # of the prompt from its beginning; grows
        self.tier_pages = {"L1": 0, "L2": 0, "L3": 0}

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, that need not be computed once `load` is done."""
        return self._cached * self._cache.device.shape.page_tokens

    def wait(self) -> int:
        """Wait for the store as long as the policy says; answers `cached_tokens`."""
        self._check("wait")
        if self._load is not None:
            raise UsageError("wait comes before load")
        self._cache._finish_prefetch(self)
        return self.cached_tokens

    def load(self) -> Load:
        """Start to copy what is on the host to the device. Where the pages of the device (of any
        rank) are all in use, less is loaded or nothing: ask `cached_tokens` afterwards."""
        self._check("load")
        if self._load is not None:
            raise UsageError("a request loads once")
        return self._cache._load(self)

    def extend(self, count: int) -> list[int]:
        """Device pages to compute into, behind those there are; `device_pages` has them too. Raises
        OutOfSpace when all pages are in use by requests."""
        self._check("extend")
        return self._cache._extend(self, count)

    def first_token(self) -> None:
        """For the report: the first token is there. Also tells what computing costs."""
        self._check("first_token")
        self._cache._first_token(self, self._prompt_pages)
        self._last_token_ns = self._cache._work.now_ns()

    def next_token(self) -> None:
        """For the report: one more token is there. UsageError: before the first."""
        self._check("next_token")
        if self._last_token_ns is None:
            raise UsageError("next_token before first_token")
        now_ns = self._cache._work.now_ns()
        self._cache.report.next_token((now_ns - self._last_token_ns) / 1e9)
        self._last_token_ns = now_ns

    def commit(self, tokens: Sequence[int]) -> None:
        """The KV of these tokens (the prompt, and what was generated) is in `device_pages`. Whole
        pages become everybody's, and are copied below by the write policy."""
        self._check("commit")
        self._cache._commit(self, tokens)

    def close(self) -> None:
        """Give back what is not cached. Twice is fine."""
        if not self._closed:
            self._closed = True
            self._cache._close_request(self)

    def __enter__(self) -> Request:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, call: str) -> None:
        if self._closed:
            raise UsageError(f"{call} after the request was closed")
