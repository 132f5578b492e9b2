"""A bounded number of seeds; `python -m tests.sim SEED` reproduces a red one."""

from __future__ import annotations

import pytest
from sim_run import simulate

SEEDS = 12


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_promises_hold_whatever_the_network_and_the_processes_do(seed: int) -> None:
    outcome = simulate(seed)
    assert outcome.counts["PutStart"] > 0


def test_the_same_seed_is_the_same_run() -> None:
    one, two = simulate(3, 1_500), simulate(3, 1_500)
    assert (one.steps, one.counts, one.trace) == (two.steps, two.counts, two.trace)


def test_seeds_reach_what_they_are_meant_to_reach() -> None:
    totals: dict[str, int] = {}
    for seed in range(1, 17):
        for what, number in simulate(seed).counts.items():
            totals[what] = totals.get(what, 0) + number
    for what in (
        "good reads",
        "stale reads",
        "Remove",
        "Report",
        "Mount",
        "PutRevoke",
        "SetQuota",
        "removals of all",
        "Drain",
        "CopyObjects",
        "copies committed",
        "good reads of parts",
        "Pin",
        "offloads",
        "reads of a disk",
        "ended: evict",
    ):
        assert totals.get(what, 0) > 5, f"hardly any {what}"


@pytest.mark.parametrize("first", range(1_000, 2_000, 50))
def test_a_thousand_short_lives(first: int) -> None:
    """Each is long enough for several grants, leases, deaths of nodes and changes of the leader."""
    for seed in range(first, first + 50):
        simulate(seed, 500)
