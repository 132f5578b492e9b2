"""The product's own processes, simulated; `python -m tests.sim whole SEED` repeats a red one."""

from __future__ import annotations

import numpy as np
import pytest
from whole_net import MASTER
from whole_parts import stand_ins
from whole_run import Cluster, simulate_whole
from whole_threads import Clock, Host

from mooncake_py.model import ReplicaPolicy
from mooncake_py.store.client import StoreClient
from mooncake_py.wire import names
from mooncake_py.wire.rows import GENERATIONS

SEEDS = 16


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_users_are_kept_their_promises_whatever_befalls_the_processes(seed: int) -> None:
    outcome = simulate_whole(seed, 6_000)
    assert outcome.counts["put: stored"] > 0


def test_f56_a_node_knows_the_deadlines_that_an_object_took_over() -> None:
    """So that they hold although all the master's records are lost and nodes tell what there is."""
    cluster = Cluster(1)
    with stand_ins(cluster.net):
        cluster.raise_master()
        cluster.raise_node("n0")
        found: dict[str, names.Name] = {}
        user = Host("user")

        def use() -> None:
            clock = Clock(cluster.world, 5)
            store = StoreClient(MASTER, tenant="t", timeout_ms=5_000, clock=clock)
            cluster.scheduler.park(1_000)
            value = cluster.ledger.begin("hint", 64, 0).value()
            store.put("hint", value, policy=ReplicaPolicy(soft_pin_ms=30_000, ttl_ms=60_000))
            cluster.scheduler.park(5_000)
            value = cluster.ledger.begin("member", 64, 0).value()
            store.put("member", value, policy=ReplicaPolicy(expires_with="hint"))
            node = cluster.nodes["n0"][1]
            assert node is not None
            page = node._segment.named(np.array([(1, 1 << 62)], dtype=GENERATIONS))
            told = names.split(page.names, page.ends.astype("<u8").tobytes(), len(page.rows))
            found.update({each.key.decode(): each for each in told if each is not None})

        cluster.scheduler.start(user, use)
        cluster.world.run_until(10_000)
        for host in dict.fromkeys(each.host for each in cluster.scheduler.fibers):
            cluster.scheduler.kill(host)
    hint, member = found["hint"], found["member"]
    assert 0 <= member.ttl_until_ms - hint.ttl_until_ms < 100
    assert 0 <= member.soft_pin_until_ms - hint.soft_pin_until_ms < 100


def test_the_same_seed_is_the_same_run_of_all_processes() -> None:
    one, two = simulate_whole(3, 2_000), simulate_whole(3, 2_000)
    assert (one.steps, one.counts, one.trace) == (two.steps, two.counts, two.trace)
