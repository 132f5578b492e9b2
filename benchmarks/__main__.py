"""The command: `python -m benchmarks`, or `./dev bench`. Its help says the rest."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import click
from rich.console import Console
from rich.progress import Progress

from benchmarks import report, upstream
from benchmarks.peer import BenchError, Contender
from benchmarks.plan import EFFORTS, LIMITS, OUR_TCP, SHM, UPSTREAM, Effort
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
        self._batch_bytes = max(case.nbytes * case.count for case in effort.cases)
        self.contenders: list[Contender] = []
        self.notes = [
            f"load average at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        ]

    def _add(self, name: str, module: str, settings: dict[str, object]) -> None:
        contender = Contender.start(name, module, settings, self._batch_bytes, self._folder)
        self._stack.callback(contender.stop)
        self.contenders.append(contender)

    def add_limits(self) -> None:
        for name in LIMITS:
            self._add(name, "store_limits", {"limit": name})

    def add_ours(self) -> None:
        """One cluster for all of ours, each a tenant: their objects have the same names."""
        segment_bytes = len(_TRANSPORTS) * self._effort.segment_bytes
        options = ClusterOptions(node_count=1, segment_bytes=segment_bytes)
        cluster = self._stack.enter_context(Cluster(options))
        for name, transports in _TRANSPORTS.items():
            settings = {
                "master": cluster.address,
                "transports": transports,
                "tenant": transports[0],
            }
            self._add(name, "store_ours", settings)

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


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("what", type=click.Choice(["all", "limits"]), default="all")
@click.option(
    "--size", type=click.Choice(list(EFFORTS)), default="small", show_default=True,
    help="tiny: seconds, says only that it works; small: under a minute; full: minutes",
)  # fmt: skip
@click.option("--json", "json_file", type=click.File("w"), help="write every figure here too")
@click.option(
    "--upstream", "upstream_python", metavar="PYTHON",
    help=f"interpreter with {upstream.WHEEL} (or in the environment: {upstream.VARIABLE})",
)  # fmt: skip
def main(what: str, size: str, json_file: IO[str] | None, upstream_python: str | None) -> None:
    """Put, get and exists beside what this machine can do, and beside upstream Mooncake.

    Every contender is a process of its own; they take turns within one run. WHAT: all, or limits
    for the machine alone. Exit code 1 when one of our own contenders failed.
    """
    console = Console(width=None if sys.stdout.isatty() else 140)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-")))
        bench = Bench(EFFORTS[size], folder, stack)
        try:
            bench.add_limits()
            if what == "all":
                bench.add_ours()
                bench.add_upstream(upstream_python)
            timings = bench.run(console)
        except (BenchError, MooncakeError) as error:
            raise click.ClickException(str(error)) from None
    report.render(timings, bench.notes, console)
    if json_file is not None:
        json.dump(report.as_dict(timings, bench.notes), json_file, indent=1)
    if any(timing.failure and not timing.contender.startswith("upstream") for timing in timings):
        sys.exit(1)


if __name__ == "__main__":
    main()
