"""Several clients at once: 1, 2, 4 and 8 processes, and as many threads of one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peer import Contender
from benchmarks.plan import Case, Effort

COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Crowd:
    """What `clients` together did: payload bytes by wall time, 10^9 a second."""

    contender: str
    case: Case
    kind: str  # processes or threads
    clients: int
    gb_per_s: float
    calls_per_s: float


def run_crowds(name: str, case: Case, workers: Sequence[Contender], effort: Effort) -> list[Crowd]:
    """`workers`: as many as the largest count; the first one also runs the threads."""
    fields = {"tag": f"crowd-{case}".replace(" ", "-"), "verb": case.verb, "nbytes": case.nbytes}
    fields |= {"count": case.count, "sets": min(2, case.sets)}
    filled = {key: value for key, value in fields.items() if key != "verb"}
    for number, worker in enumerate(workers):
        if case.verb != "put":
            worker.ask("fill", **filled, owner=number)
        worker.ask("run", **fields, owner=number, repeat=1)
    (once_ns,) = workers[0].ask("run", **fields, owner=0, repeat=1)["ns"]
    repeat = max(2, min(500, effort.budget_ms * 1_000_000 // max(1, once_ns)))
    found = []
    for count in COUNTS[: len(workers)]:
        start = time.perf_counter()
        for number, worker in enumerate(workers[:count]):
            worker.say("run", **fields, owner=number, repeat=repeat)
        for worker in workers[:count]:
            worker.answer()
        found.append(_crowd(name, case, "processes", count, repeat, time.perf_counter() - start))
    for count in COUNTS:
        start = time.perf_counter()
        workers[0].ask("run", **fields, owner=0, repeat=repeat, threads=count)
        found.append(_crowd(name, case, "threads", count, repeat, time.perf_counter() - start))
    for number, worker in enumerate(workers):
        if case.verb != "put":
            worker.ask("drop", **filled, owner=number)
    return found


def _crowd(
    name: str, case: Case, kind: str, count: int, repeat: int, seconds: float
) -> Crowd:  # fmt: skip
    calls = count * repeat
    return Crowd(name, case, kind, count, calls * case.total_bytes / seconds / 1e9, calls / seconds)
