"""When a leader may act, on its own clock; and when a follower may depose one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake_py.master.election import Leadership, LeaseTimes, Stand, Suspicion

TIMES = LeaseTimes(3_000)
START = 1_000_000


def _leading() -> Leadership:
    return Leadership(TIMES, 7, START, 3_000)


def test_a27_the_proof_ends_before_the_lease_can() -> None:
    leader = _leading()
    assert leader.stand(START + 2_699) is Stand.LEADING
    assert leader.stand(START + 2_700) is Stand.DOUBT


def test_a27_a_renewal_counts_from_when_it_was_sent() -> None:
    leader = _leading()
    leader.came_round(START + 600)
    leader.renewed(START + 600, 3_000)
    assert leader.stand(START + 3_299) is Stand.LEADING
    assert leader.stand(START + 3_300) is Stand.DOUBT


def test_a27_a_process_that_was_stopped_is_in_doubt_even_after_an_outage() -> None:
    leader = _leading()
    leader.came_round(START + 1_500)
    leader.unreached(START + 1_500, START + 3_000)
    assert leader.stand(START + 3_000) is Stand.OUTAGE
    woken = START + 100_000
    assert leader.stand(woken) is Stand.DOUBT
    leader.came_round(woken)
    assert leader.stand(woken + 1) is Stand.DOUBT, "what it knew before it was stopped is old"
    leader.unreached(woken, woken + 1_500)
    assert leader.stand(woken + 1_500) is Stand.OUTAGE


def test_a27_a_renewal_in_which_the_process_was_stopped_is_no_outage() -> None:
    leader = _leading()
    leader.came_round(START + 600)
    leader.unreached(START + 600, START + 60_000)
    assert leader.stand(START + 60_000) is Stand.DOUBT


def test_f62_an_outage_that_is_known_before_the_proof_ends_leaves_no_doubt() -> None:
    leader = _leading()
    leader.came_round(START + 600)
    leader.unreached(START + 600, START + 2_100)
    leader.came_round(START + 2_150)
    assert leader.stand(START + 2_699) is Stand.LEADING
    assert leader.stand(START + 2_700) is Stand.OUTAGE


def test_f62_etcd_comes_back_with_the_lease() -> None:
    leader = _leading()
    leader.came_round(START + 1_500)
    leader.unreached(START + 1_500, START + 3_000)
    leader.renewed(START + 4_000, 3_000)
    assert leader.stand(START + 4_100) is Stand.LEADING


def test_a27_the_end_is_for_ever() -> None:
    leader = _leading()
    leader.end()
    leader.renewed(START + 100, 3_000)
    assert leader.stand(START + 101) is Stand.ENDED


@given(
    st.lists(
        st.tuples(st.integers(1, 5_000), st.sampled_from(["renewed", "unreached", "lost"])),
        max_size=40,
    )
)
def test_a27_no_history_leads_beyond_a_lease_that_etcd_may_have_ended(
    history: list[tuple[int, str]],
) -> None:
    leader, now, lease_end = _leading(), START, START + 3_000
    for pause, event in history:
        now += pause
        if leader.stand(now) is Stand.LEADING:
            assert now < lease_end
        leader.came_round(now)
        if event == "renewed" and now < lease_end:  # etcd answers only while it has the lease
            lease_end = now + 3_000
            leader.renewed(now, 3_000)
        elif event == "unreached":
            leader.unreached(now, now)


def test_f12_only_who_was_connected_may_depose_and_not_again_and_again() -> None:
    suspicion = Suspicion(rest_ms=3_000)
    assert not suspicion.refused("a:1", 0), "never met"
    suspicion.connected("a:1")
    assert not suspicion.refused("b:1", 0), "somebody else's address"
    assert suspicion.refused("a:1", 0)
    suspicion.connected("a:1")
    assert suspicion.refused("a:1", 1), "somebody else was faster: that does not count"
    suspicion.deposed(1)
    suspicion.connected("a:1")
    assert not suspicion.refused("a:1", 3_000)
    assert suspicion.refused("a:1", 3_001)
