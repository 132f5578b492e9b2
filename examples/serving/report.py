"""What a run prints: architectures side by side with the run that has no cache."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake_py.hicache.tier_report import PARTS, TIERS, WAYS

SUMS = ("hit_tokens", "ttft_parts_s", "moved_bytes", "busy_s", "evicted_pages", "dropped_pages")


@dataclass
class Column:
    """One way to serve. first_s, gaps_s: what every request, and every token after the first, took.
    numbers: of all replicas together, as `TierSnapshot.to_json` has them."""

    name: str
    requests: int = 0
    tokens: int = 0
    right: int = 0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    break_even: list[list[float]] = field(default_factory=list)

    def add_reports(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        for name in SUMS:
            total: Counter[str] = Counter()
            for report in reports.values():
                total.update(report.get(name, {}))
            self.numbers[name] = dict(total)
        self.numbers["occupancy"] = {
            f"{replica} {tier}": held
            for replica, report in reports.items()
            for tier, held in report.get("occupancy", {}).items()
        }
        self.numbers["refused_fetches"] = sum(r.get("refused_fetches", 0) for r in reports.values())
        counts = [report["ttft"]["count"] for report in reports.values() if "ttft" in report]
        self.numbers["ttft"] = {"count": sum(counts)}
        self.numbers["requests"], self.numbers["tokens"] = self.requests, self.tokens
        found = sum(self.numbers["hit_tokens"].values())
        self.numbers["recomputed_tokens"] = self.tokens - found

    def part_ms(self, part: str) -> float:
        """Of the time to the first token, on average."""
        count = self.numbers.get("ttft", {}).get("count", 0)
        return self.numbers["ttft_parts_s"].get(part, 0.0) / count * 1e3 if count else 0.0


def no_cache(requests: int, tokens: int, first_s: list[float], gaps_s: list[float]) -> Column:
    column = Column("no cache", requests, tokens, requests, first_s, gaps_s)
    column.numbers = {name: {} for name in SUMS} | {
        "occupancy": {}, "refused_fetches": 0, "requests": requests, "tokens": tokens,
        "recomputed_tokens": tokens, "ttft": {"count": len(first_s)},
        "ttft_parts_s": {"recompute": sum(first_s)},
    }  # fmt: skip
    return column


def table(columns: Sequence[Column]) -> str:
    rows: list[tuple[str, list[str]]] = [("", [column.name for column in columns])]

    def row(name: str, values: Sequence[str]) -> None:
        if any(value not in ("", "0") for value in values):
            rows.append((name, list(values)))

    row("requests", [f"{c.requests:,}" for c in columns])
    row("answers with equal logits", [f"{c.right:,}" for c in columns])
    row("tokens asked for", [f"{c.tokens:,}" for c in columns])
    for tier in TIERS:
        row(f"  from {tier}", [_share(c.numbers["hit_tokens"].get(tier, 0), c) for c in columns])
    row("  recomputed", [_share(c.numbers["recomputed_tokens"], c) for c in columns])
    row("first token, p50", [_ms(statistics.median(c.first_s)) for c in columns])
    row("first token, mean", [_ms(statistics.mean(c.first_s)) for c in columns])
    for part in PARTS:
        row(f"  {part}", [f"{c.part_ms(part):.2f} ms" for c in columns])
    row("between tokens, p50", [_ms(statistics.median(c.gaps_s)) for c in columns])
    for way in WAYS:
        row(f"bytes {way}", [f"{c.numbers['moved_bytes'].get(way, 0):,}" for c in columns])
    for kind, what in (("evicted_pages", "pages evicted"), ("dropped_pages", "pages dropped")):
        for cause in sorted({cause for c in columns for cause in c.numbers[kind]}):
            row(f"{what}: {cause}", [f"{c.numbers[kind].get(cause, 0):,.0f}" for c in columns])
    row("fetches refused as too dear", [f"{c.numbers['refused_fetches']:,}" for c in columns])
    wide = max(len(name) for name, _ in rows)
    each = max(len(value) for _, values in rows for value in values) + 2
    lines = [name.ljust(wide) + "".join(value.rjust(each) for value in vs) for name, vs in rows]
    return "\n".join(lines + [_occupied(column) for column in columns[1:]])


def break_even(column: Column) -> str:
    """Measured, by length of the prefix; the cache decides by a line through such measurements."""
    lines = [f"{column.name}: prefix in pages   fetched from L3      computed   cheaper"]
    for pages, fetch_s, compute_s in column.break_even:
        cheaper = "fetch" if fetch_s <= compute_s else "compute: not fetched"
        lines.append(
            f"{pages:{len(column.name) + 17}.0f}{fetch_s * 1e3:15.2f} ms{compute_s * 1e3:11.2f} ms"
            f"   {cheaper}"
        )
    return "\n".join(lines)


def _share(tokens: float, column: Column) -> str:
    return f"{tokens:,.0f} ({tokens / column.tokens:.0%})" if tokens else "0"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _occupied(column: Column) -> str:
    held = [
        f"{name} {pages['used']}/{pages['pages']}"
        for name, pages in column.numbers["occupancy"].items()
    ]
    return f"{column.name}: pages in use at the end: {', '.join(held)}"
