"""`python -m tests.sim SEED` runs one seed, `python -m tests.sim FIRST COUNT` many."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]

from sim_run import simulate  # noqa: E402 - its folder has just been added


def main() -> None:
    first = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    totals: dict[str, int] = {}
    for seed in range(first, first + count):
        outcome = simulate(seed)
        for what, number in outcome.counts.items():
            totals[what] = totals.get(what, 0) + number
        if count == 1:
            sys.stdout.write("\n".join(outcome.trace[-40:]) + "\n")
    sys.stdout.write(f"{count} seeds from {first}: {totals}\n")


if __name__ == "__main__":
    main()
