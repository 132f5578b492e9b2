"""Engines side by side, in one run: `python -m benchmarks.engine`.

For each case every engine gets its turn before the next case, so that all meet the same load. The
columns are the limits (memcpy between mapped memories; a plain socket stream), ours over shared
memory and over TCP, and, when an interpreter that has them is named, upstream's and NIXL's. A cell
is the p50 of one batch in µs; below it the bars and CPU seconds per GB of both processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

WORKER = Path(__file__).with_name("engine_worker.py")
TICKS = os.sysconf("SC_CLK_TCK")
SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
BATCH_BYTES_MAX = 64 << 20
NOISE = 0.05  # by which two runs of the same differ


class Contender:
    """Two processes that run one engine. What it started ends with `stack`."""

    def __init__(self, kind: str, python: str, stack: ExitStack) -> None:
        self.kind = kind
        self._python = python
        self._stack = stack
        self.server = self._start("serve")
        self.client = self._start("call", json.dumps(self._line(self.server)))
        self._line(self.client)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        root = str(WORKER.parents[1])
        process = subprocess.Popen(
            [self._python, str(WORKER), self.kind, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": root if self.kind in ("shm", "tcp") else ""},
        )
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        return process

    def _line(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout
        while line := process.stdout.readline():
            if line.startswith("{"):  # others chatter
                return json.loads(line)
        raise click.ClickException(f"{self.kind} does not run with {self._python}")

    def _cpu_s(self) -> float:
        sum_ticks = 0
        for process in (self.server, self.client):
            words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            sum_ticks += int(words[11]) + int(words[12])
        return sum_ticks / TICKS

    def run(self, case: dict[str, Any]) -> dict[str, float]:
        before = self._cpu_s()
        assert self.client.stdin
        self.client.stdin.write(json.dumps(case) + "\n")
        self.client.stdin.flush()
        found: dict[str, float] = self._line(self.client)
        found["cpu_s_per_gb"] = (self._cpu_s() - before) / max(found["moved"], 1) * 1e9
        return found


def cases(seconds: float, full: bool, largest_mib: int) -> list[dict[str, Any]]:
    shapes = [(nbytes, count) for nbytes in SIZES for count in (1, 16, 128)] if full else [
        (4 << 10, 1), (4 << 10, 128), (64 << 10, 16), (1 << 20, 1), (64 << 20, 1),
    ]  # fmt: skip
    return [
        {"op": op, "nbytes": nbytes, "count": count, "threads": threads, "seconds": seconds}
        for nbytes, count in shapes
        if nbytes * count <= BATCH_BYTES_MAX and nbytes <= largest_mib << 20
        for op in ("read", "write")
        for threads in (1, 4)
    ]


Found = dict[str, dict[str, float]]


def judged(case: dict[str, Any], found: Found, one_thread: Found | None = None) -> list[str]:
    """The bars that this case has, as words: what was reached, and whether that is enough.
    `one_thread`: what a case of several threads had found with one."""
    said = []

    def bar(text: str, reached: float, enough: bool) -> None:
        said.append(f"{text} {reached:.2f}{'' if enough else ' MISSED'}")

    if case["threads"] == 1 and case["nbytes"] >= 1 << 20:
        share = found["shm"]["bytes_per_s"] / found["memcpy"]["bytes_per_s"]
        bar("shm/memcpy >= 0.9:", share, share >= 0.9)
        share = found["tcp"]["bytes_per_s"] / found["socket"]["bytes_per_s"]
        bar("tcp/socket >= 0.8:", share, share >= 0.8)
    if one_thread is not None:
        for kind in ("shm", "tcp"):
            share = found[kind]["bytes_per_s"] / one_thread[kind]["bytes_per_s"]
            bar(f"{kind} {case['threads']}t/1t >= 1:", share, share >= 1 - NOISE)
    if "nixl" in found and case["threads"] == 1:
        ratio = found["shm"]["p50_us"] / found["nixl"]["p50_us"]
        bar("shm/nixl <= 1:", ratio, ratio <= 1)
    if "upstream" in found and case["threads"] == 1:
        limit = {(1 << 20, 1): 0.6, (64 << 20, 1): 0.6, (4 << 10, 128): 0.15}.get(
            (case["nbytes"], case["count"])
        )
        if limit is not None:
            ratio = found["tcp"]["p50_us"] / found["upstream"]["p50_us"]
            bar(f"tcp/upstream <= {limit}:", ratio, ratio <= limit)
    return said


def size_text(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


@click.command()
@click.option("--upstream", help="interpreter that can import mooncake.engine")
@click.option("--nixl", help="interpreter that can import nixl")
@click.option("--seconds", default=0.3, show_default=True, help="of each cell")
@click.option("--full", is_flag=True, help="every size, batches of 1, 16 and 128")
@click.option("--largest-mib", default=64, show_default=True, help="leave larger slices out")
@click.option("--out", type=click.Path(dir_okay=False), help="write all figures here as JSON")
def main(
    upstream: str | None,
    nixl: str | None,
    seconds: float,
    full: bool,
    largest_mib: int,
    out: str | None,
) -> None:
    """Compare transfer engines between two processes of this machine."""
    pythons = {kind: sys.executable for kind in ("memcpy", "socket", "shm", "tcp")}
    pythons |= {kind: p for kind, p in (("upstream", upstream), ("nixl", nixl)) if p}
    table = Table("case", *pythons, "bars")
    figures: list[dict[str, Any]] = []
    with ExitStack() as stack:
        contenders = [Contender(kind, python, stack) for kind, python in pythons.items()]
        for case in cases(seconds, full, largest_mib):
            found = {contender.kind: contender.run(case) for contender in contenders}
            one_thread = figures[-1]["found"] if case["threads"] > 1 else None  # just before it
            figures.append({**case, "found": found})
            name = f"{case['op']} {case['count']} x {size_text(case['nbytes'])}, {case['threads']}t"
            cells = [
                f"{one['p50_us']:.0f} µs\n{one['bytes_per_s'] / 1e9:.2f} GB/s\n"
                f"{one['cpu_s_per_gb']:.2f} s/GB"
                for one in found.values()
            ]
            table.add_row(name, *cells, "\n".join(judged(case, found, one_thread)))
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    console.print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if out:
        Path(out).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
