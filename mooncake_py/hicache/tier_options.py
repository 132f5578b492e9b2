"""Policies and limits of the tiered cache, and the decisions that are pure."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from mooncake_py.errors import UsageError
from mooncake_py.hicache.eviction import POLICIES

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")


@dataclass(frozen=True, slots=True)
class TierOptions:
    """write_policy: when pages are copied below: at once; when they are used `selective_hits`
    times; when the device evicts them. prefetch_policy: how long a request waits for the store: not
    at all; until everything found is there; for a time that grows with what it waits for. None
    waits longer than `prefetch_cap_ms`."""

    write_policy: str = "write_through"
    prefetch_policy: str = "timeout"
    eviction: str = "lru"
    selective_hits: int = 2
    prefetch_tokens_min: int = 256  # fewer are computed again sooner than asked for
    prefetch_base_ms: int = 1_000
    prefetch_ms_per_ki_token: int = 250
    prefetch_cap_ms: int = 10_000
    prefetch_host_ratio: float = 0.5  # of the host pool that may be on its way at once
    batch_pages: int = 32  # of one call of the store: a prefetch stops between two
    queue_pages_max: int = 1 << 16  # waiting to be stored; beyond it they stay here only

    def __post_init__(self) -> None:
        for name, known in (
            ("write_policy", WRITE_POLICIES),
            ("prefetch_policy", PREFETCH_POLICIES),
            ("eviction", tuple(POLICIES)),
        ):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is one of {known}", got=getattr(self, name))
        least = {"selective_hits": 1, "prefetch_cap_ms": 1, "batch_pages": 1, "queue_pages_max": 1}
        least |= {"prefetch_tokens_min": 0, "prefetch_base_ms": 0, "prefetch_ms_per_ki_token": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UsageError(f"{name} is at least {low}", got=getattr(self, name))
        if not 0 < self.prefetch_host_ratio <= 1:
            raise UsageError(
                "prefetch_host_ratio is above 0, at most 1", got=self.prefetch_host_ratio
            )

    def wait_ms(self, tokens: int) -> int:
        """How long a request waits for a prefetch of so many tokens."""
        if self.prefetch_policy == "best_effort":
            return 0
        if self.prefetch_policy == "wait_complete":
            return self.prefetch_cap_ms
        wanted = self.prefetch_base_ms + self.prefetch_ms_per_ki_token * tokens // 1024
        return min(wanted, self.prefetch_cap_ms)


class BreakEven:
    """Is fetching pages from the store faster than computing them? By what was measured here:
    moving averages of seconds a page of both. Unknown is answered yes, so that it gets known; and
    one fetch in `RETRY` that would lose is made all the same, because the store may have got
    faster. Thread-safe."""

    WEIGHT = 0.2  # of the newest measurement
    RETRY = 32

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fetch_s: float | None = None  # a page
        self.compute_s: float | None = None  # a page
        self.refused = 0

    def fetched(self, pages: int, seconds: float) -> None:
        with self._lock:
            self.fetch_s = self._mean(self.fetch_s, seconds / pages)

    def computed(self, pages: int, seconds: float) -> None:
        with self._lock:
            self.compute_s = self._mean(self.compute_s, seconds / pages)

    def worth_fetching(self) -> bool:
        with self._lock:
            if self.fetch_s is None or self.compute_s is None or self.fetch_s <= self.compute_s:
                return True
            self.refused += 1
            return self.refused % self.RETRY == 0

    def _mean(self, old: float | None, new: float) -> float:
        return new if old is None else old + self.WEIGHT * (new - old)
