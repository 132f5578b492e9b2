"""What the tiers did: one object of counters, as text, and for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from mooncake_py.hicache.tier_options import BreakEven

TIERS = ("L1", "L2", "L3")


@dataclass(slots=True)
class TierReport:
    """Tokens and bytes by tier; drops by cause. Thread-safe through its methods."""

    requests: int = 0
    tokens: int = 0  # asked for
    hit_tokens: Counter[str] = field(default_factory=Counter)  # by tier they came from
    moved_bytes: Counter[str] = field(default_factory=Counter)  # "L1 to L2" ...
    evicted_pages: Counter[str] = field(default_factory=Counter)
    dropped_pages: Counter[str] = field(default_factory=Counter)  # by cause
    seconds: Counter[str] = field(default_factory=Counter)  # match, wait, load, compute
    break_even: BreakEven = field(default_factory=BreakEven)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, key: str, amount: float) -> None:
        with self._lock:
            getattr(self, name)[key] += amount

    def began(self, tokens: int) -> None:
        with self._lock:
            self.requests += 1
            self.tokens += tokens

    @property
    def hit_ratio(self) -> float:
        return sum(self.hit_tokens.values()) / self.tokens if self.tokens else 0.0

    def rows(self) -> Iterator[tuple[str, str, float]]:
        """(name, label, value): Prometheus names with the prefix mooncake_hicache_."""
        with self._lock:
            yield "requests_total", "", self.requests
            yield "tokens_total", "", self.tokens
            for name, counts in (
                ("hit_tokens_total", self.hit_tokens),
                ("moved_bytes_total", self.moved_bytes),
                ("evicted_pages_total", self.evicted_pages),
                ("dropped_pages_total", self.dropped_pages),
                ("seconds_total", self.seconds),
            ):
                for label, value in sorted(counts.items()):
                    yield name, label, value

    def __str__(self) -> str:
        tokens = ", ".join(f"{tier} {self.hit_tokens[tier]:,.0f}" for tier in TIERS)
        asked = f"{self.requests:,} requests, {self.tokens:,} tokens"
        lines = [f"{asked}, {self.hit_ratio:.1%} cached ({tokens})"]
        for name, label, value in self.rows():
            if label and name != "hit_tokens_total":
                unit = " s" if name == "seconds_total" else ""
                lines.append(f"  {name.removesuffix('_total'):14} {label:24} {value:,.3f}{unit}")
        return "\n".join(lines)
