"""The command: `python -m benchmarks`, or `./dev bench`. Its help says the rest."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.progress import Progress

from benchmarks import caches, report, upstream
from benchmarks.baseline import compared, other_machine, table
from benchmarks.clients import COUNTS, Crowd, run_crowds
from benchmarks.peer import BenchError, Contender
from benchmarks.picture import svg
from benchmarks.plan import (
    CACHES,
    CROWD_CASES,
    EFFORTS,
    LIMITS,
    OUR_TCP,
    OURS,
    SHM,
    UPSTREAM,
    Case,
    Effort,
)
from benchmarks.run import Timing, run_case, takes_part
from mooncake_py.errors import MooncakeError
from mooncake_py.ops.cluster import Cluster, ClusterOptions

_TRANSPORTS = {SHM: ["shm"], OUR_TCP: ["tcp"]}


class Bench:
    """Starts the contenders asked for, runs the cases; everything it started ends with `stack`."""

    def __init__(self, effort: Effort, folder: Path, stack: ExitStack) -> None:
        self._effort = effort
        self._folder = folder
        self._stack = stack
        self._batch_bytes = max((case.nbytes * case.count for case in effort.cases), default=1)
        self.contenders: list[Contender] = []
        self.notes = [
            f"load average at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        ]

    def _add(self, name: str, module: str, settings: dict[str, object]) -> Contender:
        contender = Contender.start(name, module, settings, self._batch_bytes, self._folder)
        self._stack.callback(contender.stop)
        self.contenders.append(contender)
        return contender

    def add_limits(self) -> None:
        for name in LIMITS:
            self._add(name, "store_limits", {"limit": name})

    def add_ours(self) -> None:
        """One cluster for all of ours, each a tenant: their objects have the same names."""
        segment_bytes = len(_TRANSPORTS) * self._effort.segment_bytes
        options = ClusterOptions(node_count=1, segment_bytes=segment_bytes)
        self._cluster = self._stack.enter_context(Cluster(options))
        daemons = [each.child.pid for each in (self._cluster.master, *self._cluster.nodes)]
        for name, transports in _TRANSPORTS.items():
            self._add(name, "store_ours", self._settings(transports)).pids += daemons

    def _settings(self, transports: list[str]) -> dict[str, object]:
        address = self._cluster.address
        return {"master": address, "transports": transports, "tenant": transports[0]}

    def add_caches(self) -> None:
        """Peers that are started when they are installed."""
        for name in CACHES:
            found = caches.start(
                name, self._batch_bytes, self._effort.segment_bytes, self._folder, self._stack
            )
            if isinstance(found, str):
                self.notes.append(found)
            else:
                self.contenders.append(found)

    def add_upstream(self, option: str | None) -> None:
        """A flavour that does not start is a note, not a failure: it is not ours to repair."""
        python, note = upstream.find(option)
        self.notes.append(note)
        if python is None:
            return
        theirs = upstream.Upstream(python, self._folder, self._stack)
        for name in UPSTREAM:
            try:
                contender = theirs.start(name, self._batch_bytes, self._effort.segment_bytes)
            except BenchError as error:
                self.notes.append(f"{name} skipped: {error}")
            else:
                self.contenders.append(contender)

    def crowd(self) -> list[Crowd]:
        """Bar P7, with clients of their own."""
        cases = [Case(*each) for each in CROWD_CASES[: self._effort.crowd_cases]]
        if not cases:
            return []
        with ExitStack() as stack:
            workers = []
            for number in range(max(COUNTS)):
                settings = self._settings(_TRANSPORTS[SHM])
                nbytes = max(COUNTS) * max(case.total_bytes for case in cases)
                name = f"client {number}"
                worker = Contender.start(name, "store_ours", settings, nbytes, self._folder)
                stack.callback(worker.stop)
                workers.append(worker)
            return [each for case in cases for each in run_crowds(SHM, case, workers, self._effort)]

    def run(self, console: Console) -> list[Timing]:
        timings: list[Timing] = []
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("", total=len(self._effort.cases))
            for case in self._effort.cases:
                progress.update(task, description=str(case))
                if any(takes_part(c.name, case) for c in self.contenders):
                    timings += run_case(case, self.contenders, self._effort)
                progress.advance(task)
        return timings


def _figures_of(file: IO[str] | None) -> dict[str, Any] | None:
    """Read before anything is measured: who names a wrong file does not wait for that."""
    if file is None:
        return None
    try:
        before = json.load(file)
        compared({"timings": []}, before)
    except (ValueError, BenchError) as error:
        raise click.ClickException(
            f"--baseline {file.name}: {error}. Remedy: name what --json wrote"
        ) from None
    assert isinstance(before, dict)
    return before


def _slower(now: dict[str, Any], before: dict[str, Any], console: Console) -> bool:
    rows = compared(now, before)
    console.print(table(rows))
    if note := other_machine(now, before):
        console.print(note)
    return any(row["slower"] for row in rows)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("what", type=click.Choice(["all", "limits"]), default="all")
@click.option(
    "--size", type=click.Choice(list(EFFORTS)), default="small", show_default=True,
    help="tiny: seconds, says only that it works; small: under a minute; full: minutes",
)  # fmt: skip
@click.option("--only", metavar="REGEX", default="", help="only cases whose names match")
@click.option("--picture", type=click.File("w"), help="draw the medians (SVG)")
@click.option("--json", "json_file", type=click.File("w"), help="write every figure here too")
@click.option(
    "--baseline",
    type=click.File("r"),
    metavar="FILE",
    help="compare with what --json wrote earlier",
)
@click.option(
    "--upstream", "upstream_python", metavar="PYTHON",
    help=f"interpreter with {upstream.WHEEL} (or in the environment: {upstream.VARIABLE})",
)  # fmt: skip
def main(
    what: str,
    size: str,
    only: str,
    upstream_python: str | None,
    **files: IO[str] | None,
) -> None:
    """Put, get and exists beside what this machine can do, beside upstream Mooncake, and beside
    Redis and memcached where they are installed.

    Every contender is a process of its own; they take turns within one run. WHAT: all, or limits
    for the machine alone. Exit code 1 when one of our own contenders failed, or is slower than in
    the baseline.
    """
    console = Console(width=None if sys.stdout.isatty() else 140)
    before = _figures_of(files["baseline"])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-")))
        effort = EFFORTS[size]
        if only:
            cases = [case for case in effort.cases if re.search(only, str(case))]
            effort = replace(effort, cases=cases, crowd_cases=0)
        bench = Bench(effort, folder, stack)
        try:
            bench.add_limits()
            if what == "all":
                bench.add_ours()
                bench.add_upstream(upstream_python)
                bench.add_caches()
            timings = bench.run(console)
            crowds = bench.crowd() if what == "all" else []
        except (BenchError, MooncakeError) as error:
            raise click.ClickException(str(error)) from None
    report.render(timings, bench.notes, console, crowds)
    figures = report.as_dict(timings, bench.notes, crowds)
    if (json_file := files["json_file"]) is not None:
        json.dump(figures, json_file, indent=1)
    if (picture := files["picture"]) is not None:
        picture.write(svg(timings))
    slower = before is not None and _slower(figures, before, console)
    if slower or any(timing.failure and timing.contender in (*LIMITS, *OURS) for timing in timings):
        sys.exit(1)


if __name__ == "__main__":
    main()
