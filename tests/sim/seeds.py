"""What both simulators do with a seed: say how to see it again, and look for one that notices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from sim_world import World


@dataclass
class Outcome:
    seed: int
    steps: int
    counts: dict[str, int]
    trace: list[str]


class Simulates(Protocol):
    seed: int
    world: World

    def run(self, length_ms: int) -> Outcome: ...


def run_seed(simulation: Simulates, length_ms: int, command: str) -> Outcome:
    """An AssertionError carries the seed, the command that repeats it, and the last events."""
    try:
        return simulation.run(length_ms)
    except AssertionError as error:
        lines = "\n".join(simulation.world.trace[-25:])
        raise AssertionError(
            f"seed {simulation.seed} at {simulation.world.now_ms} ms: {error}\n"
            f"again: python -m tests.sim {command}{simulation.seed}\n{lines}"
        ) from error


def assert_found_out(run: Callable[[int], Any], seeds: Iterable[int], words: str) -> None:
    """One of these seeds fails, and for that reason."""
    faults = map(partial(_fault_of, run), seeds)
    fault = next((each for each in faults if each is not None), None)
    assert fault is not None, "no seed noticed"
    assert words in fault


def _fault_of(run: Callable[[int], Any], seed: int) -> str | None:
    try:
        run(seed)
    except (AssertionError, KeyError) as error:
        return str(error)
    return None
