"""The product's own processes, simulated; `python -m tests.sim whole SEED` repeats a red one."""

from __future__ import annotations

from collections import Counter

import pytest
from whole_ledger import Watched
from whole_net import MASTER
from whole_parts import stand_ins
from whole_run import Cluster, simulate_standby, simulate_whole
from whole_threads import Clock, Host

from mooncake_py.model import ReplicaPolicy
from mooncake_py.store.client import StoreClient

SEEDS = 48
ALL = ("hint", "member", "late member", "alone")


@pytest.mark.parametrize("first", range(1, SEEDS, 4))
def test_users_are_kept_their_promises_whatever_befalls_the_processes(first: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(first, first + 4):
        totals += Counter(simulate_whole(seed, 6_000).counts)
    assert totals["put: stored"] > 0


@pytest.mark.parametrize("first", range(1, SEEDS, 4))
def test_f12_promises_are_kept_when_one_master_takes_over_from_another(first: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(first, first + 4):
        totals += Counter(simulate_standby(seed, 8_000).counts)
    assert totals["put: stored"] > 0
    assert totals["terms of several masters"] >= 4


def test_f56_deadlines_that_were_taken_over_hold_although_all_records_are_lost() -> None:
    """Nodes keep them, and tell the next master, which knows nothing else; then all end together.
    So it is on every node that holds a replica, and for a member that came after the loss, too."""
    cluster = Cluster(1)
    masters, scheduler = cluster.masters, cluster.scheduler
    found: dict[str, object] = {}
    hint = ReplicaPolicy(2, soft_pin_ms=14_000, ttl_ms=20_000)
    member = ReplicaPolicy(2, expires_with="hint")

    def use() -> None:
        store = StoreClient(MASTER, tenant="t", timeout_ms=5_000, clock=Clock(cluster.world, 5))

        def put(key: str, policy: ReplicaPolicy) -> None:
            store.put(key, cluster.ledger.begin(key, 64, 0).value(), policy=policy)

        scheduler.park(1_000)
        put("hint", hint)
        put("alone", ReplicaPolicy(ttl_ms=60_000))
        scheduler.park(5_000)
        put("member", member)
        scheduler.park(500)
        cluster.world.after(0, lose_all)
        scheduler.park(4_000)
        put("late member", member)
        state = cluster.catalog.state  # type: ignore[union-attr]
        slots = {key: state.tenants.find("t").complete.get(key.encode()) for key in ALL}
        found["ttl"] = [state.table.ttls.get(slots[key]) for key in ALL]
        found["pin"] = [state.table.soft_pins.get(slots[key]) for key in ALL]
        found["before"] = store.exists(list(ALL))
        scheduler.park(10_500)
        found["after"] = store.exists(list(ALL))

    def lose_all() -> None:
        leader = masters.leader()
        assert leader is not None
        cluster.kill(leader)
        masters.store.lose_everything()
        masters.raise_all()

    with stand_ins(cluster.net, lambda given: Watched(given, cluster)):
        masters.raise_all()
        for name in ("n0", "n1"):
            cluster.raise_node(name)
        scheduler.start(Host("user"), use)
        cluster.world.run_until(30_000)
        for host in dict.fromkeys(each.host for each in scheduler.fibers):
            scheduler.kill(host)
    assert found["before"] == [True] * 4
    assert found["after"] == [False, False, False, True]
    for what in ("ttl", "pin"):
        first, *others, alone = found[what]  # type: ignore[misc]
        assert first
        assert all(abs(each - first) < 100 for each in others)
        assert alone != first


def test_the_same_seed_is_the_same_run_of_all_processes() -> None:
    for run in (simulate_whole, simulate_standby):
        one, two = run(3, 4_000), run(3, 4_000)
        assert (one.steps, one.counts, one.trace) == (two.steps, two.counts, two.trace)
