"""What an object costs the master in memory, as growth of a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGET_BYTES = 250
SCRIPT = """
from benchmarks.catalog import Bench, _resident_bytes
from mooncake_py._native.memory import trim_heap
bench = Bench()
bench.fill(150_000)
filled = _resident_bytes()
print((filled - bench.empty_bytes) / 150_000)
slices = bench.catalog.slices(bench.now_ms)
while slices.step():
    pass
print((_resident_bytes() - filled) / 150_000)
del slices
trim_heap()
print((_resident_bytes() - filled) / 150_000)
"""


def test_f60_objects_stay_within_the_budget_of_the_catalog_also_after_a_snapshot() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    an_object, in_the_making, left = map(float, done.stdout.split())
    assert 60 < an_object <= BUDGET_BYTES
    assert in_the_making > 90, "its text is in memory"
    assert left < 10, "a snapshot leaves nothing behind"
