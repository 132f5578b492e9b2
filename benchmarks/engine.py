"""Engines side by side, in one run: `python -m benchmarks.engine`.

For each case every engine gets its turn before the next case, so that all meet the same load. The
columns are the limits (memcpy between mapped memories; a plain socket stream), ours over shared
memory and over TCP, and, when an interpreter that has them is named, upstream's and NIXL's. A cell
is the p50 of one batch in µs, the sum of all threads, and CPU seconds per GB of both processes;
beside it the bars. On a machine that is not quiet, `--rounds` finds the best of several turns. With
`--out FILE` nothing measured is lost: `--resume` goes on with it, also to show it once more.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.engine_cells import Case, Contender, Failed, Figures, Found, same, turns

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
NOISE = 0.05  # by which two runs of the same differ
LIMITS = {"shm": "memcpy", "tcp": "socket"}  # what bounds it: the same by bare means


def cases(seconds: float, full: bool, largest_mib: int) -> list[Case]:
    shapes = [(nbytes, count) for nbytes in SIZES for count in (1, 16, 128)] if full else [
        (4 << 10, 1), (4 << 10, 128), (64 << 10, 16), (1 << 20, 1), (64 << 20, 1),
    ]  # fmt: skip
    shapes.sort(key=lambda shape: shape[0] * shape[1])  # if the time is too short, for the longest
    return [
        {"op": op, "nbytes": nbytes, "count": count, "threads": threads, "seconds": seconds}
        for nbytes, count in shapes
        if nbytes <= largest_mib << 20
        for op in ("read", "write")
        for threads in (1, 4)
    ]


def judged(case: Case, found: Found, one_thread: Found | None = None) -> list[str]:
    """The bars that this case has, as words: what was reached, and whether that is enough.
    `one_thread`: what a case of several threads had found with one. What failed has no bar."""
    said = []

    def ratio(one: str, other: str, what: str, than: Found = found) -> float | None:
        if one not in found or other not in than:
            return None
        return found[one][what] / than[other][what]

    def bar(text: str, reached: float | None, limit: float, least: bool) -> None:
        if reached is None:
            return
        enough = reached >= limit if least else reached <= limit
        said.append(f"{text}: {reached:.2f}{'' if enough else ' MISSED'}")

    if case["threads"] == 1 and case["nbytes"] >= 1 << 20:
        bar("shm/memcpy >= 0.9", ratio("shm", "memcpy", "bytes_per_s"), 0.9, least=True)
        bar("tcp/socket >= 0.8", ratio("tcp", "socket", "bytes_per_s"), 0.8, least=True)
    if one_thread is not None:
        for kind, limit in LIMITS.items():
            share = ratio(kind, kind, "bytes_per_s", one_thread)
            least = ratio(limit, limit, "bytes_per_s", one_thread)
            text = f"{kind} {case['threads']}t/1t >= 1"
            if least is not None and least < 1:  # the interpreter, the caches or the memory's bus
                text += f" or {limit}'s {least:.2f}"
            bar(text, share, min(1, least or 1) - NOISE, least=True)
    if case["threads"] == 1:
        bar("shm/nixl <= 1", ratio("shm", "nixl", "p50_us"), 1, least=False)
        limit = {(1 << 20, 1): 0.6, (64 << 20, 1): 0.6, (4 << 10, 128): 0.15}.get(
            (case["nbytes"], case["count"])
        )
        if limit is not None:
            text = f"tcp/upstream <= {limit}"
            bar(text, ratio("tcp", "upstream", "p50_us"), limit, least=False)
    return said


def size_text(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def name_of(case: Case) -> str:
    size = size_text(case["nbytes"])
    return f"{case['op']} {case['count']} x {size}, {case['threads']}t"


def table_of(rows: list[dict[str, Any]], kinds: list[str]) -> Table:
    table = Table("case", *kinds, "bars")
    for row in sorted(rows, key=lambda row: (row["nbytes"], row["count"], row["op"])):
        one_thread = next(
            (r["found"] for r in rows if row["threads"] > 1 and same(r, {**row, "threads": 1})),
            None,
        )
        cells = []
        for kind in kinds:
            one = row["found"].get(kind)
            cells.append(
                f"{one['p50_us']:.0f} µs\n{one['bytes_per_s'] / 1e9:.2f} GB/s\n"
                f"{one['cpu_s_per_gb']:.2f} s/GB"
                if one
                else ("failed" if kind in row["failed"] else "-")
            )
        table.add_row(name_of(row), *cells, "\n".join(judged(row, row["found"], one_thread)))
    return table


def measure(pythons: dict[str, str], todo: list[Case], figures: Figures, given: Given) -> None:
    """Until all rounds are there or the minutes over, whichever is first."""
    end = time.monotonic() + given.minutes * 60
    with ExitStack() as stack:
        contenders = {kind: Contender(kind, python) for kind, python in pythons.items()}
        for contender in contenders.values():
            stack.callback(contender.close)
        for case, kind in turns(todo, list(pythons), figures, given.rounds):
            if time.monotonic() > end:
                click.echo(f"{given.minutes:g} minutes are over: --resume goes on", err=True)
                return
            try:
                figures.add(case, kind, contenders[kind].run(case))
            except Failed as error:
                figures.fail(case, kind, str(error))
                click.echo(f"{name_of(case)}: {error}", err=True)


@dataclass(frozen=True)
class Given:
    """The command line."""

    upstream: str | None
    nixl: str | None
    seconds: float
    full: bool
    rounds: int
    minutes: float
    largest_mib: int
    out: Path | None
    resume: bool


@click.command()
@click.option("--upstream", help="interpreter that can import mooncake.engine")
@click.option("--nixl", help="interpreter that can import nixl")
@click.option("--seconds", default=0.3, show_default=True, help="of each round of a cell")
@click.option("--full", is_flag=True, help="every size, batches of 1, 16 and 128")
@click.option("--rounds", default=1, show_default=True, help="of each cell; the best counts")
@click.option("--minutes", default=15.0, show_default=True, help="no round begins after that")
@click.option("--largest-mib", default=64, show_default=True, help="leave larger slices out")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="figures, as JSON")
@click.option("--resume", is_flag=True, help="go on with the figures of --out")
def main(**options: Any) -> None:
    """Compare transfer engines between two processes of this machine."""
    given = Given(**options)
    pythons = {kind: sys.executable for kind in ("memcpy", "socket", "shm", "tcp")}
    theirs = {"upstream": given.upstream, "nixl": given.nixl}
    pythons |= {kind: python for kind, python in theirs.items() if python}
    figures = Figures(given.out, given.resume)
    measure(pythons, cases(given.seconds, given.full, given.largest_mib), figures, given)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table_of(figures.rows, list(pythons)))
    console.print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if not any(row["found"] for row in figures.rows):
        raise click.ClickException("nothing could be measured")


if __name__ == "__main__":
    main()
