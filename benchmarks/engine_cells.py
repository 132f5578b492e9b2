"""The engines that `benchmarks.engine` compares, and what was found of them so far.

A cell is one engine in one case. It is measured in rounds, each as short as `seconds`; of a cell's
rounds the best median, the best rate, and the mean of the CPU time count: what else the machine
does makes a round slower and never faster. Every round goes to the file, so that a run that was cut
goes on where it was. An engine that fails, or takes too long, loses that round and starts anew.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("engine_worker.py")
TICKS = os.sysconf("SC_CLK_TCK")
START_S = 60.0
CELL_S = 60.0  # beyond what was asked for: eight gigabytes by four threads of the slowest

Case = dict[str, Any]
Found = dict[str, dict[str, float]]


class Failed(Exception):
    """What an engine said instead of figures."""


class Lines:
    """JSON lines of a process, each until a deadline; others chatter."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout
        self._file = process.stdout.fileno()
        self._left = b""

    def next(self, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while True:
            line, newline, rest = self._left.partition(b"\n")
            if newline:
                self._left = rest
                if line.startswith(b"{"):
                    return json.loads(line)
                continue
            ready, _, _ = select.select([self._file], [], [], max(0, end - time.monotonic()))
            more = os.read(self._file, 1 << 16) if ready else b""
            if not more:
                raise Failed("it ended" if ready else f"no answer in {seconds:.0f} s")
            self._left += more


class Contender:
    """Two processes that run one engine, from the first case on until `close`."""

    def __init__(self, kind: str, python: str) -> None:
        self.kind = kind
        self._python = python
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []

    def _start(self, *arguments: str) -> tuple[subprocess.Popen[bytes], Lines]:
        root = str(WORKER.parents[1])
        process = subprocess.Popen(
            [self._python, str(WORKER), self.kind, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": root if self.kind in ("shm", "tcp") else ""},
        )
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        self._processes.append(process)
        return process, Lines(process)

    def _begin(self) -> None:
        if self._processes:
            return
        peer = self._start("serve")[1].next(START_S)
        self._client, self._answers = self._start("call", json.dumps(peer))
        self._answers.next(START_S)

    def close(self) -> None:
        self._stack.close()
        self._processes.clear()

    def _cpu_s(self) -> float:
        sum_ticks = 0
        for process in self._processes:
            words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            sum_ticks += int(words[11]) + int(words[12])
        return sum_ticks / TICKS

    def run(self, case: Case) -> dict[str, float]:
        """One round. Failed: the next one begins with new processes."""
        try:
            self._begin()
            before = self._cpu_s()
            assert self._client.stdin
            self._client.stdin.write(json.dumps(case).encode() + b"\n")
            self._client.stdin.flush()
            found: dict[str, float] = self._answers.next(case["seconds"] + CELL_S)
            if "failed" in found:
                raise Failed(str(found["failed"]))
            return {**found, "cpu_s": self._cpu_s() - before}
        except (Failed, OSError) as error:
            self.close()
            raise Failed(f"{self.kind}: {error}") from error


def same(case: Case, other: Case) -> bool:
    return all(case[name] == other[name] for name in ("op", "nbytes", "count", "threads"))


class Figures:
    """All rounds of all cells, in `path` as well if there is one."""

    def __init__(self, path: Path | None, resume: bool) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []
        if resume and path is not None and path.exists():
            self.rows = json.loads(path.read_text())

    def row(self, case: Case) -> dict[str, Any]:
        for row in self.rows:
            if same(row, case):
                return row
        row = {**case, "found": {}, "rounds": {}, "failed": {}}
        self.rows.append(row)
        return row

    def rounds(self, case: Case, kind: str) -> int:
        row = self.row(case)
        return len(row["rounds"].get(kind, [])) + len(row["failed"].get(kind, []))

    def add(self, case: Case, kind: str, one: dict[str, float]) -> None:
        row = self.row(case)
        rounds = row["rounds"].setdefault(kind, [])
        rounds.append(one)
        row["found"][kind] = {
            "p50_us": min(each["p50_us"] for each in rounds),
            "bytes_per_s": max(each["bytes_per_s"] for each in rounds),
            "cpu_s_per_gb": sum(each["cpu_s"] for each in rounds)
            / max(sum(each["moved"] for each in rounds), 1)
            * 1e9,
        }
        self._write()

    def fail(self, case: Case, kind: str, words: str) -> None:
        self.row(case)["failed"].setdefault(kind, []).append(words)
        self._write()

    def _write(self) -> None:
        """As a whole or not at all."""
        if self._path is None:
            return
        beside = self._path.with_name(self._path.name + ".new")
        beside.write_text(json.dumps(self.rows, indent=1))
        beside.replace(self._path)


def turns(
    cases: list[Case], kinds: list[str], figures: Figures, rounds: int
) -> Iterator[tuple[Case, str]]:
    """What to measure next: every cell once before any of them once more, and within a case every
    engine before the next case, so that all meet the same load."""
    for number in range(rounds):
        for case in cases:
            for kind in kinds:
                if figures.rounds(case, kind) <= number:
                    yield case, kind
