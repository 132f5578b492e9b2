"""What a replay found, for people (a table) and for programs (a dict for JSON)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mooncake_py.ops.session import OPERATIONS, Tally
from mooncake_py.ops.sizes import size_text

MASTER_SHARE_MAX = 0.01  # of the payload; beyond it the master is in the data path


@dataclass(frozen=True, slots=True)
class Ideal:
    """Page hits of perfect caches on the same prompts."""

    capacity_pages: int
    lru_hits: int
    clairvoyant_hits: int


@dataclass(slots=True)
class Report:
    """`written`: the writer's sessions, `read`: the reader's, one a transport, in order."""

    source: str
    page_bytes: int
    capacity_bytes: int
    node_count: int
    ideal: Ideal
    written: list[Tally] = field(default_factory=list)
    read: list[Tally] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)  # of the master
    notes: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return sum(tally.requests for tally in self.written)

    @property
    def pages(self) -> int:
        return sum(tally.pages for tally in self.written)

    @property
    def hit_pages(self) -> int:
        return sum(tally.hit_pages for tally in self.written)

    @property
    def hit_rate(self) -> float:
        return self.hit_pages / max(1, self.pages)

    @property
    def payload_bytes(self) -> int:
        return sum(t.put_bytes + t.got_bytes for t in (*self.written, *self.read))

    @property
    def master_bytes(self) -> int:
        ends = ("received_bytes", "sent_bytes")
        return int(sum(n for name, n in self.counters.items() if name.endswith(ends)))

    @property
    def wrong_bytes(self) -> int:
        return sum(tally.wrong_bytes for tally in (*self.written, *self.read))

    def problems(self) -> list[str]:
        """Why the run as a whole is a failure; empty when it is not."""
        problems = []
        if self.wrong_bytes:
            problems.append(f"{self.wrong_bytes} wrong bytes were read")
        if self.master_bytes > MASTER_SHARE_MAX * self.payload_bytes:
            problems.append(f"{self.master_bytes} bytes passed the master")
        return problems


def percentile_ms(tallies: Sequence[Tally], operation: str, percent: float) -> float | None:
    """None when there was no such call."""
    times = [ns for tally in tallies for ns in tally.latency_ns[operation]]
    return float(np.percentile(times, percent)) / 1e6 if times else None


def gigabytes_per_s(tallies: Sequence[Tally], operation: str) -> float | None:
    nbytes = sum(t.put_bytes if operation == "put" else t.got_bytes for t in tallies)
    ns = sum(sum(tally.latency_ns[operation]) for tally in tallies)
    return nbytes / ns if ns and nbytes else None


def as_dict(report: Report) -> dict[str, object]:
    """For JSON. Sizes in bytes, times in ms, rates in GB/s (10^9 bytes a second)."""

    def session(process: str, tally: Tally) -> dict[str, object]:
        return {
            "process": process,
            "transport": tally.transport,
            "requests": tally.requests,
            "pages": tally.pages,
            "hit_pages": tally.hit_pages,
            "put_bytes": tally.put_bytes,
            "got_bytes": tally.got_bytes,
            "wrong_pages": tally.wrong_pages,
            "wrong_bytes": tally.wrong_bytes,
            "failures": dict(tally.failures),
            "operations": {
                operation: {
                    "calls": len(tally.latency_ns[operation]),
                    "p50_ms": percentile_ms([tally], operation, 50),
                    "p99_ms": percentile_ms([tally], operation, 99),
                    "gb_per_s": gigabytes_per_s([tally], operation),
                }
                for operation in OPERATIONS
            },
        }

    return {
        "source": report.source,
        "page_bytes": report.page_bytes,
        "capacity_bytes": report.capacity_bytes,
        "nodes": report.node_count,
        "requests": report.requests,
        "pages": report.pages,
        "hit_pages": report.hit_pages,
        "hit_rate": report.hit_rate,
        "ideal_lru_hit_rate": report.ideal.lru_hits / max(1, report.pages),
        "ideal_clairvoyant_hit_rate": report.ideal.clairvoyant_hits / max(1, report.pages),
        "payload_bytes": report.payload_bytes,
        "master_bytes": report.master_bytes,
        "evicted_objects": int(report.counters.get("evictions", 0)),
        "wrong_bytes": report.wrong_bytes,
        "sessions": [session("writer", t) for t in report.written]
        + [session("reader", t) for t in report.read],
        "notes": report.notes,
        "problems": report.problems(),
    }


# --- for people -----------------------------------------------------------------------------------


def render(report: Report) -> RenderableType:
    """The tables at the end of a replay; 80 columns are enough."""
    return Group(_sessions(report), _calls(report), _summary(report), *_remarks(report))


def _rows(report: Report) -> Iterator[tuple[str, Tally]]:
    for process, tallies in (("writer", report.written), ("reader", report.read)):
        for tally in tallies:
            yield f"{process}, {tally.transport}", tally


def _table(title: str, *headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table


def _sessions(report: Report) -> Table:
    table = _table("what each process did", "process", "requests", "pages hit", "put", "got")
    for name, tally in _rows(report):
        table.add_row(
            name,
            f"{tally.requests:,}",
            f"{tally.hit_pages:,} of {tally.pages:,}",
            size_text(tally.put_bytes),
            size_text(tally.got_bytes),
        )
    return table


def _calls(report: Report) -> Table:
    table = _table("what its calls took", "process", "call", "calls", "p50 ms", "p99 ms", "GB/s")
    for name, tally in _rows(report):
        for operation in OPERATIONS:
            if tally.latency_ns[operation]:
                rate = None if operation == "exists" else gigabytes_per_s([tally], operation)
                table.add_row(
                    name,
                    operation,
                    f"{len(tally.latency_ns[operation]):,}",
                    _number(percentile_ms([tally], operation, 50)),
                    _number(percentile_ms([tally], operation, 99)),
                    _number(rate),
                )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _summary(report: Report) -> Table:
    share = report.master_bytes / max(1, report.payload_bytes)
    pages = max(1, report.pages)
    cache = f"{report.ideal.capacity_pages:,} pages"
    table = Table(box=box.SIMPLE, show_header=False, title="as a whole", title_justify="left")
    table.add_row("requests", f"{report.requests:,} of {report.source}")
    table.add_row("hit rate", f"{report.hit_rate:.2%} ({report.hit_pages:,} of {report.pages:,})")
    table.add_row(f"  an ideal LRU of {cache}", f"{report.ideal.lru_hits / pages:.2%}")
    table.add_row("  a cache that knows the future", f"{report.ideal.clairvoyant_hits / pages:.2%}")
    table.add_row("object bytes moved", size_text(report.payload_bytes))
    table.add_row("bytes seen by the master", f"{size_text(report.master_bytes)} ({share:.3%})")
    table.add_row("pages evicted", f"{int(report.counters.get('evictions', 0)):,}")
    wrong = f"{report.wrong_bytes:,}"
    table.add_row("wrong bytes", Text(wrong, style="bold red" if report.wrong_bytes else "green"))
    return table


def _remarks(report: Report) -> list[Text]:
    failures: dict[str, int] = {}
    for tally in (*report.written, *report.read):
        for what, count in tally.failures.items():
            failures[what] = failures.get(what, 0) + count
    remarks = [f"counted as misses: {n:,} x {what}" for what, n in sorted(failures.items())]
    return [Text(f"  note: {remark}", style="yellow") for remark in remarks + report.notes] + [
        Text(f"  FAILED: {problem}", style="bold red") for problem in report.problems()
    ]
