"""Put sessions that nobody ends take no memory for ever."""

from __future__ import annotations

import logging

import pytest

from mooncake_py.clock import ManualClock
from mooncake_py.compat.open_puts import COUNT_MAX, IDLE_MS, OpenPuts

MIB = 1 << 20


def test_f50_a_session_that_is_never_ended_gives_its_memory_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    puts = OpenPuts(clock)
    for i in range(10_000):
        assert puts.begin(f"abandoned/{i}", MIB, None)
        clock.advance(1_000)
    assert len(puts) <= IDLE_MS // 1_000 + 1
    assert puts.nbytes == len(puts) * MIB
    assert puts.begin("written", MIB, None)
    for _ in range(3):
        clock.advance(IDLE_MS - 1)
        assert puts.find("written") is not None, "one that is being written stays"
        assert puts.begin("another", MIB, None)
    assert len(puts) == 2
    with caplog.at_level(logging.WARNING):
        clock.advance(IDLE_MS)
        assert puts.begin("last", MIB, None)
    assert "2 objects whose put sessions were never ended" in caplog.text
    assert puts.take(["written", "another"]) == [None, None]
    puts.clear()
    assert (len(puts), puts.nbytes) == (0, 0)


def test_f50_open_sessions_are_bounded_in_bytes_and_number() -> None:
    puts = OpenPuts(ManualClock(), bytes_max=4 * MIB)
    assert [puts.begin(f"{i}", MIB, None) for i in range(5)] == [True] * 4 + [False]
    assert puts.begin("0", MIB, None), "begun anew, in its own room"
    assert [each is None for each in puts.take(["0", "none"])] == [False, True]
    assert puts.nbytes == 3 * MIB
    assert not puts.begin("large", 2 * MIB, None)
    many = OpenPuts(ManualClock())
    assert all(many.begin(f"{i}", 1, None) for i in range(COUNT_MAX))
    assert not many.begin("one more", 1, None)
