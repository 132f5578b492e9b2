"""Policies of eviction beside each other: a published trace where there is one, and a load with
scans where there is none. `python -m benchmarks.catalog --what policies` prints the whole table."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from benchmarks.catalog import replay
from mooncake_py.ops.ideal import clairvoyant_hits
from mooncake_py.ops.trace import read_trace

TRACE = Path(os.environ.get("MOONCAKE_TRACES", "")) / "synthetic_trace.jsonl"


def load_with_scans(requests: int = 1_500) -> list[list[int]]:
    """Prompts of one page: some are asked for again and again, and every other one never."""
    generator = random.Random(7)
    wanted = [[int(generator.paretovariate(0.9))] for _ in range(requests)]
    return [each for i, page in enumerate(wanted) for each in (page, [1_000_000 + i])]


@pytest.mark.parametrize("policy", ["s3fifo", "cost"])
def test_f55_the_policies_beat_lru_where_half_of_the_load_is_a_scan(policy: str) -> None:
    prompts = load_with_scans()
    for capacity in (30, 100):
        lru, hits = replay("lru", prompts, capacity), replay(policy, prompts, capacity)
        assert lru < hits <= clairvoyant_hits(prompts, capacity)


@pytest.mark.skipif(not TRACE.is_file(), reason="MOONCAKE_TRACES names no folder of traces")
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_f55_s3_fifo_hits_no_less_than_lru_on_a_published_trace(share: float) -> None:
    prompts = [request.hash_ids for request in read_trace(TRACE, 1_000)]
    capacity = int(share * len({page for prompt in prompts for page in prompt}))
    assert replay("s3fifo", prompts, capacity) >= replay("lru", prompts, capacity)


def test_f55_s3_fifo_makes_room_for_what_comes_back_later_than_a_tenth_of_the_cache() -> None:
    """Every page is asked for twice, a third of a cache later."""
    capacity, rounds = 60, 1_500
    prompts = [[page] for i in range(rounds) for page in (i, i - capacity // 3) if page >= 0]
    lru, hits = replay("lru", prompts, capacity), replay("s3fifo", prompts, capacity)
    assert lru > 0.9 * rounds
    assert hits > 0.9 * lru, "with a tenth it would be next to none"
