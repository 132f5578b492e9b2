"""What the tiers did, counted: `TieredCache.report`, and its copy at one moment, `snapshot()`.

Time to the first token has four parts, which add up to it: `match` (finding the prefix), `L3`
(waiting for the store), `L2 to L1` (standing before layers that are not on the device yet), and
`recompute` (the rest). The engine says when a token is there: `Request.first_token`, `next_token`.
"""

from __future__ import annotations

import bisect
import statistics
import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mooncake_py.hicache.tier_options import BreakEven

TIERS = ("L1", "L2", "L3")
PARTS = ("match", "L3", "L2 to L1", "recompute")  # of the time to the first token
WAYS = ("L1 to L2", "L2 to L3", "L3 to L2", "L2 to L1")  # two of backup, two of restore
BOUNDS_S = tuple(0.0005 * 2**i for i in range(18))  # of the histograms; up to a minute
RECENT = 4_096


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Pages of a tier. used: with KV or reserved for it. locked: of them, by requests and copies
    that are going on, so that eviction cannot have them."""

    pages: int
    used: int
    locked: int


class Times:
    """Durations in seconds: how many in which bucket, their sum, and the recent ones."""

    def __init__(self) -> None:
        self.count, self.total_s = 0, 0.0
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.recent: deque[float] = deque(maxlen=RECENT)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.buckets[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self.recent.append(seconds)

    def p50_s(self) -> float:
        """Of the recent ones; 0 without any."""
        return statistics.median(self.recent) if self.recent else 0.0


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """All numbers at one moment. Tokens and bytes are sums since the start.

    hits: requests that found something in the tier. busy_s: of moving bytes, by way, so that
    `bytes_per_s` is what a transfer itself reaches. evicted_pages: (tier, cause) -> pages.
    dropped_pages: cause -> pages that were not backed up, or not restored. ttft, itl: durations.
    break_even_s: (fetch, compute) of `break_even_pages`; None: not measured.
    """

    requests: int
    tokens: int
    hits: Mapping[str, int]
    hit_tokens: Mapping[str, int]
    ttft_parts_s: Mapping[str, float]
    ttft: Times
    itl: Times
    moved_bytes: Mapping[str, int]
    busy_s: Mapping[str, float]
    evicted_pages: Mapping[tuple[str, str], int]
    dropped_pages: Mapping[str, int]
    occupancy: Mapping[str, Occupancy]
    refused_fetches: int

    @property
    def recomputed_tokens(self) -> int:
        return self.tokens - sum(self.hit_tokens.values())

    def hit_ratio(self, tier: str | None = None) -> float:
        """Tokens of the tier (None: of all) of those that were asked for."""
        found = sum(self.hit_tokens.values()) if tier is None else self.hit_tokens.get(tier, 0)
        return found / self.tokens if self.tokens else 0.0

    def bytes_per_s(self, way: str) -> float:
        return self.moved_bytes.get(way, 0) / self.busy_s[way] if self.busy_s.get(way) else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values. Times become count, total_s and p50_s; evictions "tier: cause"."""
        found: dict[str, Any] = {
            name: dict(getattr(self, name))
            for name in (
                "hits", "hit_tokens", "ttft_parts_s", "moved_bytes", "busy_s", "dropped_pages",
            )
        }  # fmt: skip
        for name in ("ttft", "itl"):
            times: Times = getattr(self, name)
            found[name] = {
                "count": times.count, "total_s": times.total_s, "p50_s": times.p50_s(),
            }  # fmt: skip
        found["evicted_pages"] = {f"{t}: {c}": n for (t, c), n in self.evicted_pages.items()}
        found["occupancy"] = {
            tier: {"pages": held.pages, "used": held.used, "locked": held.locked}
            for tier, held in self.occupancy.items()
        }
        counts = ("requests", "tokens", "recomputed_tokens", "refused_fetches")
        return {name: getattr(self, name) for name in counts} | found

    def __str__(self) -> str:
        tiers = ", ".join(f"{tier} {self.hit_ratio(tier):.1%}" for tier in TIERS)
        lines = [f"{self.requests:,} requests, {self.tokens:,} tokens, cached: {tiers}"]
        if self.ttft.count:
            parts = " + ".join(
                f"{part} {self.ttft_parts_s.get(part, 0.0) / self.ttft.count * 1e3:.2f}"
                for part in PARTS
            )
            mean_ms = self.ttft.total_s / self.ttft.count * 1e3
            lines.append(f"  first token {mean_ms:.2f} ms on average = {parts}")
        if self.itl.count:
            lines.append(f"  between tokens {self.itl.p50_s() * 1e3:.2f} ms (p50)")
        for way in WAYS:
            if self.moved_bytes.get(way):
                rate = self.bytes_per_s(way) / 1e9
                lines.append(f"  {way}: {self.moved_bytes[way]:,} bytes, {rate:.2f} GB/s")
        for (tier, cause), pages in sorted(self.evicted_pages.items()):
            lines.append(f"  evicted from {tier}: {pages:,} pages ({cause})")
        for cause, pages in sorted(self.dropped_pages.items()):
            lines.append(f"  dropped: {pages:,} pages ({cause})")
        for tier, held in self.occupancy.items():
            lines.append(f"  {tier}: {held.used:,} of {held.pages:,} pages, {held.locked:,} locked")
        return "\n".join(lines)


@dataclass(slots=True)
class TierReport:
    """The running counters. Thread-safe through its methods."""

    requests: int = 0
    tokens: int = 0  # asked for
    hits: Counter[str] = field(default_factory=Counter)  # requests, by tier
    hit_tokens: Counter[str] = field(default_factory=Counter)  # by tier they came from
    ttft_parts_s: Counter[str] = field(default_factory=Counter)
    moved_bytes: Counter[str] = field(default_factory=Counter)  # by way
    busy_s: Counter[str] = field(default_factory=Counter)  # by way
    evicted_pages: Counter[tuple[str, str]] = field(default_factory=Counter)  # tier, cause
    dropped_pages: Counter[str] = field(default_factory=Counter)  # by cause
    ttft: Times = field(default_factory=Times)
    itl: Times = field(default_factory=Times)
    break_even: BreakEven = field(default_factory=BreakEven)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, key: object, amount: float) -> None:
        if amount:
            with self._lock:
                getattr(self, name)[key] += amount

    def moved(self, way: str, nbytes: int, seconds: float) -> None:
        self.add("moved_bytes", way, nbytes)
        self.add("busy_s", way, seconds)

    def began(self, tokens: int) -> None:
        with self._lock:
            self.requests += 1
            self.tokens += tokens

    def first_token(self, parts_s: Mapping[str, float]) -> None:
        with self._lock:
            self.ttft.add(sum(parts_s.values()))
            for part, seconds in parts_s.items():
                self.ttft_parts_s[part] += seconds  # type: ignore[assignment]  # Counter of float

    def next_token(self, seconds: float) -> None:
        with self._lock:
            self.itl.add(seconds)

    def snapshot(self, held: Mapping[str, Occupancy]) -> TierSnapshot:
        """held: of the pools, by tier."""
        with self._lock:
            return TierSnapshot(
                self.requests, self.tokens,
                {tier: self.hits[tier] for tier in TIERS},
                {tier: self.hit_tokens[tier] for tier in TIERS},
                dict(self.ttft_parts_s), _copy(self.ttft), _copy(self.itl),
                dict(self.moved_bytes), dict(self.busy_s), dict(self.evicted_pages),
                dict(self.dropped_pages), held, self.break_even.refused,
            )  # fmt: skip


def _copy(times: Times) -> Times:
    copy = Times()
    copy.count, copy.total_s = times.count, times.total_s
    copy.buckets, copy.recent = list(times.buckets), times.recent.copy()
    return copy
