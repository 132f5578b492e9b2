"""What an object costs the master in memory, as growth of a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGET_BYTES = 250
SCRIPT = """
from benchmarks.catalog import Bench, _resident_bytes
bench = Bench()
bench.fill(50_000)
before = _resident_bytes()
bench.fill(150_000)
print((_resident_bytes() - before) / 100_000)
"""


def test_f60_a_hundred_thousand_more_objects_stay_within_the_budget_of_the_catalog() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert 100 < float(done.stdout) <= BUDGET_BYTES, done.stdout
