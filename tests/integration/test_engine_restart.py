"""The cache is the nodes', not the engine's: an engine that is killed finds it again at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from engine_put import value

from mooncake_py import StoreClient
from mooncake_py.ops.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
PAGES, NBYTES = 32, 256 << 10


def test_f54_a_killed_engine_finds_its_cache_within_a_second(fresh_cluster: Cluster) -> None:
    program = str(Path(__file__).with_name("engine_put.py"))
    engine = subprocess.Popen(
        [sys.executable, program, fresh_cluster.address, str(PAGES), str(NBYTES)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert engine.stdout
    assert engine.stdout.readline() == "stored\n"
    engine.kill()
    engine.communicate()
    began = time.monotonic()
    with StoreClient(fresh_cluster.address) as client:
        first = client.get("page/0")
        took = time.monotonic() - began
        assert first == value(0, NBYTES)
        keys = [f"page/{number}" for number in range(PAGES)]
        assert client.exists(keys, prefix=True) == PAGES
        got = client.get_batch(keys)
    assert got == [value(number, NBYTES) for number in range(PAGES)]
    assert took < 1, "nothing is registered, scanned or copied before the first hit"
