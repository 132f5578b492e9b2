"""What an engine holds of the tiered cache: one request, and its copy to the device. The rules are
in `tiered_cache.py`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mooncake_py.errors import OutOfSpace, UsageError
from mooncake_py.hicache.prefetch import Prefetch
from mooncake_py.hicache.radix_tree import Node, Page

if TYPE_CHECKING:
    from mooncake_py.hicache.tiered_cache import TieredCache


class Load:
    """A copy from the host to the device. Made by `Request.load`."""

    def __init__(self, layers: int) -> None:
        self._done = [threading.Event() for _ in range(layers)]
        self._events: list[torch.cuda.Event] = []
        self._error: BaseException | None = None

    def wait_layer(self, layer: int, *, timeout_ms: int = 60_000) -> None:
        """Until this layer may be read by what the caller starts next."""
        if not self._done[layer].wait(timeout_ms / 1000):
            raise OutOfSpace("the copy to the device did not end in time", layer=layer)
        if self._error is not None:
            raise self._error
        if self._events:
            torch.cuda.current_stream().wait_event(self._events[layer])

    def wait(self, *, timeout_ms: int = 60_000) -> None:
        for layer in range(len(self._done)):
            self.wait_layer(layer, timeout_ms=timeout_ms)


class Request:
    """One prompt's way through the tiers. Made by `TieredCache.begin`. One thread at a time."""

    def __init__(self, cache: TieredCache, namespace: str, pages: list[Page]) -> None:
        self._cache = cache
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
        self._cache._finish_prefetch(self)
        return self.cached_tokens

    def load(self) -> Load:
        """Start to copy what is on the host to the device. OutOfSpace: the device's pages are all
        in use; nothing is loaded and the request goes on without (its prefix is shorter)."""
        self._check("load")
        if self._load is not None:
            raise UsageError("a request loads once")
        return self._cache._load(self)

    def extend(self, count: int) -> list[int]:
        """Device pages to compute into, behind those there are; `device_pages` has them too. Raises
        OutOfSpace when all pages are in use by requests."""
        self._check("extend")
        return self._cache._extend(self, count)

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
