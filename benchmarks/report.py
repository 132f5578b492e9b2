"""Tables for people, one JSON value for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.baseline import machine
from benchmarks.clients import Crowd
from benchmarks.plan import LIMIT_OF, OURS, P7_GAIN, Bar, Case, bars
from benchmarks.run import Timing

Found = dict[tuple[Case, str], Timing]


def index(timings: Iterable[Timing]) -> Found:
    return {(t.case, t.contender): t for t in timings if t.ns}


def judged(found: Found) -> list[dict[str, Any]]:
    """Every bar whose contenders were all there."""
    return [row for bar in bars() if (row := _judge(bar, found)) is not None]


def _judge(bar: Bar, found: Found) -> dict[str, Any] | None:
    ours = found.get((bar.case, bar.ours))
    theirs = [t for name in bar.against if (t := found.get((bar.case, name))) is not None]
    if ours is None or not theirs:
        return None
    best = min(theirs, key=lambda timing: timing.p50_us)
    ratio = ours.p50_us / best.p50_us
    return {
        "bar": bar.name,
        "case": str(bar.case),
        "ours": bar.ours,
        "against": best.contender,
        "ours_us": round(ours.p50_us, 1),
        "against_us": round(best.p50_us, 1),
        "ratio": round(ratio, 3),
        "limit": bar.ratio,
        "met": ratio <= bar.ratio,
    }


def as_dict(
    timings: Sequence[Timing], notes: Sequence[str], crowds: Sequence[Crowd] = ()
) -> dict[str, Any]:
    found = index(timings)
    return {
        "machine": machine(),
        "notes": list(notes),
        "timings": [_row(timing, found) for timing in timings],
        "bars": [*judged(found), *judged_crowds(crowds)],
        "crowds": [asdict(crowd) | {"case": str(crowd.case)} for crowd in crowds],
    }


def judged_crowds(crowds: Sequence[Crowd]) -> list[dict[str, Any]]:
    """Bar P7: all processes together against one."""
    found = []
    for case in dict.fromkeys(crowd.case for crowd in crowds):
        rates = {c.clients: c.gb_per_s for c in crowds if c.case == case and c.kind == "processes"}
        most = max(rates)
        ratio = rates[1] / rates[most]
        found.append(
            {
                "bar": "P7",
                "case": str(case),
                "ours": f"{most} processes, GB/s",
                "against": "one process, GB/s",
                "ours_us": round(rates[most], 2),
                "against_us": round(rates[1], 2),
                "ratio": round(ratio, 3),
                "limit": round(1 / P7_GAIN, 3),
                "met": ratio <= 1 / P7_GAIN,
            }
        )
    return found


def _row(timing: Timing, found: Found) -> dict[str, Any]:
    row: dict[str, Any] = {
        "case": str(timing.case),
        "verb": timing.case.verb,
        "nbytes": timing.case.nbytes,
        "count": timing.case.count,
        "contender": timing.contender,
    }
    if not timing.ns:
        return row | {"failure": timing.failure}
    row |= {
        "samples": len(timing.ns),
        "p50_us": round(timing.p50_us, 2),
        "p99_us": round(timing.percentile_us(0.99), 2),
        "p999_us": round(timing.percentile_us(0.999), 2),
        "gb_per_s": round(timing.gb_per_s, 3),
        "cpu_us_per_call": round(timing.cpu_ns / 1000 / len(timing.ns), 1),
    }
    if timing.case.total_bytes:
        row["cpu_s_per_gb"] = round(timing.cpu_s_per_gb, 3)
    limit = found.get((timing.case, LIMIT_OF.get(timing.contender, "")))
    if limit is not None:
        row["times_limit"] = round(timing.p50_us / limit.p50_us, 2)
    return row


def render(
    timings: Sequence[Timing],
    notes: Sequence[str],
    console: Console,
    crowds: Sequence[Crowd] = (),
) -> None:
    found = index(timings)
    names = list(dict.fromkeys(timing.contender for timing in timings))
    cases = list(dict.fromkeys(timing.case for timing in timings))
    console.print(_overview(found, names, cases))
    for name in OURS:
        if any(timing.contender == name for timing in found.values()):
            console.print(_detail(found, name, cases))
    if timings:
        console.print(_cpu(found, names, cases))
    if crowds:
        console.print(_crowds(crowds))
    verdicts = [*judged(found), *judged_crowds(crowds)]
    if verdicts:
        console.print(_verdicts(verdicts))
    for timing in timings:
        if timing.failure:
            console.print(f"{timing.case}: {timing.failure}", markup=False, highlight=False)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def _overview(found: Found, names: Sequence[str], cases: Sequence[Case]) -> Table:
    table = Table(title="p50 in µs, same run, taking turns")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for case in cases:
        cells = [found.get((case, name)) for name in names]
        table.add_row(str(case), *("" if t is None else _us(t.p50_us) for t in cells))
    return table


def _cpu(found: Found, names: Sequence[str], cases: Sequence[Case]) -> Table:
    table = Table(title="CPU seconds per 10^9 bytes, all its processes; puts with removals")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for case in cases:
        if case.total_bytes:
            cells = [found.get((case, name)) for name in names]
            table.add_row(str(case), *("" if t is None else f"{t.cpu_s_per_gb:.2f}" for t in cells))
    return table


def _crowds(crowds: Sequence[Crowd]) -> Table:
    table = Table(title="several clients together, GB/s (puts with the removals between them)")
    counts = sorted({crowd.clients for crowd in crowds})
    for column in ("", "as", *map(str, counts)):
        table.add_column(column, justify="right" if column.isdigit() else "left")
    for case, kind in dict.fromkeys((crowd.case, crowd.kind) for crowd in crowds):
        rates = {c.clients: c.gb_per_s for c in crowds if c.case == case and c.kind == kind}
        table.add_row(str(case), kind, *(f"{rates[n]:.2f}" if n in rates else "" for n in counts))
    return table


def _detail(found: Found, name: str, cases: Sequence[Case]) -> Table:
    limit_name = LIMIT_OF[name]
    table = Table(title=f"{name} against {limit_name}")
    for column in ("", "p50 µs", "p99 µs", "p99.9 µs", "GB/s", "limit GB/s", "x limit"):
        table.add_column(column, justify="right" if column else "left")
    for case in cases:
        timing, limit = found.get((case, name)), found.get((case, limit_name))
        if timing is None:
            continue
        cells = [_us(timing.percentile_us(ratio)) for ratio in (0.5, 0.99, 0.999)]
        if case.total_bytes:
            cells.append(f"{timing.gb_per_s:.2f}")
            cells.append(f"{limit.gb_per_s:.2f}" if limit else "")
        else:
            cells += ["", ""]
        cells.append(f"{timing.p50_us / limit.p50_us:.1f}" if limit else "")
        table.add_row(str(case), *cells)
    return table


def _verdicts(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="bars: our p50 over theirs")
    for column in (
        "bar",
        "case",
        "ours",
        "against",
        "ours µs",
        "theirs µs",
        "ratio",
        "bar at most",
    ):
        table.add_column(column, justify="right" if "µs" in column or "bar " in column else "left")
    table.add_column("")
    for row in rows:
        verdict = "[green]met[/green]" if row["met"] else "[red]missed[/red]"
        table.add_row(
            row["bar"], row["case"], row["ours"], row["against"], _us(row["ours_us"]),
            _us(row["against_us"]), f"{row['ratio']:.2f}", f"{row['limit']:.2f}", verdict,
        )  # fmt: skip
    return table


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
