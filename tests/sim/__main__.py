"""`python -m tests.sim SEED` runs one seed, `python -m tests.sim FIRST COUNT` many; with `whole` in
front of the numbers, of the product's own processes, and with `standby` of these with two masters
that share an etcd."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]

from sim_run import simulate  # noqa: E402 - its folder has just been added


def main() -> None:
    words = sys.argv[1:]
    run: Any = simulate
    if words[:1] in (["whole"], ["standby"]):
        import whole_run  # noqa: PLC0415 - it loads the native core

        run = getattr(whole_run, f"simulate_{words.pop(0)}")
    first = int(words[0]) if words else 1
    count = int(words[1]) if len(words) > 1 else 1
    totals: dict[str, int] = {}
    for seed in range(first, first + count):
        outcome = run(seed)
        for what, number in outcome.counts.items():
            totals[what] = totals.get(what, 0) + number
        if count == 1:
            sys.stdout.write("\n".join(outcome.trace[-40:]) + "\n")
    sys.stdout.write(f"{count} seeds from {first}: {totals}\n")


if __name__ == "__main__":
    main()
