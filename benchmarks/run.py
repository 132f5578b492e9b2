"""Lets contenders take turns at every case and collects what they took.

A turn is a few operations: enough of them that the whole case takes about its budget, found from
one operation that is not counted. A contender that fails is left out of that case, with its words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.cpu import cpu_ns
from benchmarks.peer import BenchError, Contender
from benchmarks.plan import GRPC, MEMORY, Case, Effort

_REPEAT_MAX = 200


@dataclass(slots=True)
class Timing:
    """What one contender took for one case, in ns; or why there is nothing."""

    case: Case
    contender: str
    ns: list[int] = field(default_factory=list)
    cpu_ns: int = 0  # of all its processes in that time; of puts with the removals between them
    failure: str = ""

    def percentile_us(self, ratio: float) -> float:
        ordered = sorted(self.ns)
        return ordered[min(len(ordered) - 1, int(ratio * len(ordered)))] / 1000

    @property
    def p50_us(self) -> float:
        return self.percentile_us(0.5)

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds a 10^9 bytes of payload."""
        return self.cpu_ns / max(1, self.case.total_bytes * len(self.ns))

    @property
    def gb_per_s(self) -> float:
        """Payload bytes by the median, 10^9 a second."""
        return self.case.total_bytes / (1000 * self.p50_us)


def takes_part(contender: str, case: Case) -> bool:
    if case.verb == "exists":
        return contender != MEMORY
    return contender != GRPC


def run_case(case: Case, contenders: Sequence[Contender], effort: Effort) -> list[Timing]:
    fields = {
        "tag": str(case).replace(" ", "-"),
        "verb": case.verb,
        "nbytes": case.nbytes,
        "count": case.count,
        "sets": case.sets if case.verb == "get" else 1,
    }
    timings = {c.name: Timing(case, c.name) for c in contenders if takes_part(c.name, case)}
    running = [c for c in contenders if c.name in timings]

    def each(step: Callable[[Contender], None]) -> None:
        for contender in list(running):
            try:
                step(contender)
            except BenchError as error:
                timings[contender.name].failure = str(error)
                running.remove(contender)

    repeats: dict[str, int] = {}

    def prepare(contender: Contender) -> None:
        if case.verb != "put":
            contender.ask("fill", **{k: v for k, v in fields.items() if k != "verb"})
        contender.ask("run", **fields, repeat=1)
        (once_ns,) = contender.ask("run", **fields, repeat=1)["ns"]
        turn_ns = effort.budget_ms * 1_000_000 // effort.rounds
        repeats[contender.name] = max(1, min(_REPEAT_MAX, turn_ns // max(1, once_ns)))

    def turn(contender: Contender) -> None:
        before = cpu_ns(contender.pids)
        reply = contender.ask("run", **fields, repeat=repeats[contender.name])
        timings[contender.name].ns += reply["ns"]
        timings[contender.name].cpu_ns += cpu_ns(contender.pids) - before

    def tidy(contender: Contender) -> None:
        if case.verb != "put":
            contender.ask("drop", **{k: v for k, v in fields.items() if k != "verb"})

    each(prepare)
    for _ in range(effort.rounds):
        each(turn)
    each(tidy)
    return list(timings.values())
