"""Whole runs over RDMA, in processes of their own: the store's own tests, and a round of chaos."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rdma_ports import PORTS

ROOT = Path(__file__).parents[2]
STORE = ("test_store.py", "test_store_scattered.py")
WHOLE = os.environ.get("MOONCAKE_RDMA_WHOLE") == "1"
# Seed and seconds of a round of chaos. The short one has a node killed twice, a client stopped,
# and a full disk; the longer one a master killed, too, which takes a guest a minute.
SEED, SECONDS = ("19", "12") if WHOLE else ("211", "10")
SLOW = "2"  # all times of a round are twice as long: a guest has one processor for eight processes

whole = pytest.mark.skipif(
    not WHOLE, reason="takes minutes in a guest on one processor: set MOONCAKE_RDMA_WHOLE=1"
)


def run(*words: str, seconds: int, **environment: str) -> str:
    paths = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    ended = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6_000:] + ended.stderr[-2_000:]
    return ended.stdout


@whole
@pytest.mark.timeout(900)
def test_f22_the_stores_own_tests_pass_with_every_byte_over_rdma() -> None:
    files = [f"tests/integration/{name}" for name in STORE]
    said = run(
        *("pytest", "-p", "over_rdma", *files, "-q", "-p", "no:cacheprovider", "--timeout", "90"),
        seconds=890,
    )
    assert "passed" in said
    assert "failed" not in said


@pytest.mark.timeout(900 if WHOLE else 300)
def test_a40_killed_and_stopped_at_random_the_store_keeps_its_promises_over_rdma() -> None:
    """A round of `./dev chaos --rdma`, judged as everywhere."""
    ports = ",".join(PORTS)
    said = run(
        *("tests.chaos", SEED, "--seconds", SECONDS, "--round", "embedded", "--rdma", ports),
        seconds=890,
        MOONCAKE_CHAOS_SLOW=os.environ.get("MOONCAKE_CHAOS_SLOW", SLOW),
    )
    print(said)
    assert " 0 violations" in said
    (faults,) = re.findall(r"faults: (\{.*\})", said)
    assert {"kill n", "stop c"} <= set(ast.literal_eval(faults)), faults
    (nbytes,) = map(int, re.findall(r"read by the devices at the end: (\d+) bytes", said))
    assert nbytes > 0
