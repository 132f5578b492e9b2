"""The short form of the chaos run. `./dev chaos` is the long one; the checks run five minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from etcd_cluster import needs_etcd

ROOT = Path(__file__).parents[2]
SECONDS = int(os.environ.get("MOONCAKE_CHAOS_SHORT_SECONDS", "12"))
SEED = os.environ.get("MOONCAKE_CHAOS_SEED", "4")


@needs_etcd
@pytest.mark.timeout(4 * SECONDS + 120)
def test_f59_a20_a42_a43_nothing_that_was_acknowledged_is_lost() -> None:
    command = [sys.executable, "-m", "tests.chaos", SEED, "--seconds", str(SECONDS)]
    done = subprocess.run(
        [*command, "--round", "etcd"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-3_000:]
