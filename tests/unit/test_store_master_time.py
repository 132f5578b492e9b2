"""The node's idea of the master's clock is never behind it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake_py.clock import ManualClock
from mooncake_py.store.master_time import MasterTime

small = st.integers(0, 10_000)


@given(st.integers(-(10**9), 10**9), small, small, small)
def test_f63_never_behind_the_masters_clock(
    ahead_ms: int, to_master_ms: int, back_ms: int, later_ms: int
) -> None:
    node, start = ManualClock(10**10), 10**10
    time = MasterTime(node)
    asked_at = node.now_ms()
    stamped = start + to_master_ms + ahead_ms  # the master's clock when it answered
    node.advance(to_master_ms + back_ms)
    time.learnt(stamped, asked_at)
    node.advance(later_ms)
    masters_now = start + to_master_ms + back_ms + later_ms + ahead_ms
    assert time.latest_ms() >= masters_now
    assert time.latest_ms() - masters_now <= to_master_ms  # and no later than the request took


def test_f63_before_the_first_reply_and_after_a_new_master_no_grant_runs() -> None:
    time = MasterTime(ManualClock())
    assert time.latest_ms() > 1 << 62
    time.learnt(5_000, 1_000_000)
    assert time.latest_ms() == 5_000
    time.forget()
    assert time.latest_ms() > 1 << 62
