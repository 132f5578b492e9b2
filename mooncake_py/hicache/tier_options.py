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
    prefetch_bytes_per_s: int = 0  # that prefetches may begin; 0: as many as there are
    prefetch_jobs_max: int = 256  # that wait or run; beyond it requests are not looked up
    batch_pages: int = 32  # of one call of the store: a prefetch stops between two
    writes_store: bool = True  # False: another rank has the same bytes (MLA) and stores them
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
        least |= {"prefetch_bytes_per_s": 0, "prefetch_jobs_max": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UsageError(f"{name} is at least {low}", got=getattr(self, name))
        if not 0 < self.prefetch_host_ratio <= 1:
            raise UsageError(
                "prefetch_host_ratio is above 0, at most 1", got=self.prefetch_host_ratio
            )

    def check_readable(self, host_pages: int, page_tokens: int) -> None:
        """UsageError: nothing that is stored could ever be read back into such a host pool."""
        most = int(host_pages * self.prefetch_host_ratio) * page_tokens
        least = max(page_tokens, self.prefetch_tokens_min)
        if most < least:
            raise UsageError(
                "nothing is ever read: a prefetch has room for fewer tokens than it begins with",
                room=most, least=least, host_pages=host_pages,
                remedy="a larger host pool, or lower prefetch_tokens_min or higher host ratio",
            )  # fmt: skip

    def wait_ms(self, tokens: int) -> int:
        """How long a request waits for a prefetch of so many tokens."""
        if self.prefetch_policy == "best_effort":
            return 0
        if self.prefetch_policy == "wait_complete":
            return self.prefetch_cap_ms
        wanted = self.prefetch_base_ms + self.prefetch_ms_per_ki_token * tokens // 1024
        return min(wanted, self.prefetch_cap_ms)


class Rate:
    """Bytes a second, of which a second's worth may come at once. Under its owner's lock."""

    def __init__(self, bytes_per_s: int) -> None:
        """0: no limit."""
        self._bytes_per_s = bytes_per_s
        self._left: float = bytes_per_s
        self._at_ns: int | None = None

    def take(self, nbytes: int, now_ns: int) -> bool:
        """False: not now. What is larger than a second's worth passes when nothing was before it,
        and is paid off afterwards."""
        if not self._bytes_per_s:
            return True
        if self._at_ns is not None:
            earned = (now_ns - self._at_ns) / 1e9 * self._bytes_per_s
            self._left = min(self._bytes_per_s, self._left + earned)
        self._at_ns = now_ns
        if self._left < min(nbytes, self._bytes_per_s):
            return False
        self._left -= nbytes
        return True


class Line:
    """seconds = fixed + each * pages, fitted to what was measured; old measurements fade."""

    FADE = 0.9

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, pages: int, seconds: float) -> None:
        new = (1.0, pages, seconds, pages * pages, pages * seconds)
        old = (self._n, self._x, self._y, self._xx, self._xy)
        self._n, self._x, self._y, self._xx, self._xy = (
            before * self.FADE + now for before, now in zip(old, new, strict=True)
        )

    def seconds(self, pages: int) -> float | None:
        """None: nothing was measured. Never negative, and never falling with the pages."""
        if not self._n:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        each = (self._xy / self._n - mean_x * mean_y) / spread if spread > 1e-9 else mean_y / mean_x
        each = min(max(each, 0.0), mean_y / mean_x)  # so that the fixed part is not negative
        return mean_y + each * (pages - mean_x)


class BreakEven:
    """Is fetching so many pages from the store faster than computing them? By what was measured
    here: a line through the times of fetches (asking included), one through those of computing.
    Unknown is answered yes, so that it gets known; and one fetch in `RETRY` that would lose is made
    all the same, because the store may have got faster. Thread-safe."""

    RETRY = 32

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fetch, self._compute = Line(), Line()
        self.refused = 0

    def fetched(self, pages: int, seconds: float) -> None:
        with self._lock:
            self._fetch.add(pages, seconds)

    def computed(self, pages: int, seconds: float) -> None:
        """Told by the engine: `Request.first_token` does it."""
        with self._lock:
            self._compute.add(pages, seconds)

    def predict_s(self, pages: int) -> tuple[float | None, float | None]:
        """(fetch, compute) in seconds; None: not measured yet."""
        with self._lock:
            return self._fetch.seconds(pages), self._compute.seconds(pages)

    def worth_fetching(self, pages: int) -> bool:
        fetch_s, compute_s = self.predict_s(pages)
        if fetch_s is None or compute_s is None or fetch_s <= compute_s:
            return True
        with self._lock:
            self.refused += 1
            return self.refused % self.RETRY == 0
