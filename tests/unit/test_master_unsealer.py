"""Who is told of a removal, how often, and when it may be answered. Nodes are played."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
import pytest

from mooncake_py.clock import ManualClock
from mooncake_py.errors import NodeDraining, TransferTimeout
from mooncake_py.master.lease import LEASE_MARGIN_MS
from mooncake_py.master.unsealer import TELL_MS, WAITING_MAX, Both, Order, Unsealer
from mooncake_py.transfer import TransferEngine
from mooncake_py.wire.node import HoldReply
from mooncake_py.wire.rows import EXTENT

PATIENCE_S = 20.0
NEVER_MS = 1 << 50


class PlayedEngine:
    """Nodes by address. `silent`: (address, segment id) that do not answer; `refuses` likewise."""

    def __init__(self) -> None:
        self.silent: set[tuple[str, int]] = set()
        self.refuses: set[tuple[str, int]] = set()
        self.asked: list[tuple[str, int]] = []
        self.patience_ms: list[int] = []
        self.refused = threading.Event()

    def open(self, address: str, timeout_ms: int) -> PlayedPeer:
        return PlayedPeer(self, address)


class PlayedPeer:
    def __init__(self, engine: PlayedEngine, address: str) -> None:
        self._engine, self._address = engine, address

    def request(self, kind: int, payload: bytes, timeout_ms: int) -> bytes:
        engine = self._engine
        place = (self._address, int.from_bytes(payload[:8], "little"))
        engine.asked.append(place)
        engine.patience_ms.append(timeout_ms)
        if place in engine.silent:
            engine.refused.set()
            raise TransferTimeout("silence")
        if place in engine.refuses:
            engine.refused.set()
            return HoldReply(code=NodeDraining.code, cause="not mounted").encode()
        return HoldReply().encode()

    def close(self) -> None:
        pass


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000)


@pytest.fixture
def engine() -> PlayedEngine:
    return PlayedEngine()


@pytest.fixture
def unsealer(engine: PlayedEngine, clock: ManualClock) -> Iterator[Unsealer]:
    made = Unsealer(cast("TransferEngine", engine), clock)
    yield made
    made.close()


def order(address: str = "a", segment_id: int = 1, until_ms: int = 0) -> Order:
    rows = np.zeros(1, EXTENT)
    rows["generation"] = 77
    return Order(address, segment_id, b"s" * 32, rows.tobytes(), until_ms)


def push(unsealer: Unsealer, *orders: Order, give_up_ms: int = NEVER_MS) -> SimpleQueue[int]:
    ends: SimpleQueue[int] = SimpleQueue()
    unsealer.push(orders, lambda until_ms, left: ends.put(until_ms), give_up_ms)
    return ends


@pytest.mark.parametrize("fault", ["silent", "refuses"])
def test_a08_what_somebody_may_read_is_told_until_it_is_told(
    unsealer: Unsealer, engine: PlayedEngine, fault: str
) -> None:
    places = getattr(engine, fault)
    places.add(("a", 1))
    ends = push(unsealer, order(until_ms=NEVER_MS))
    assert engine.refused.wait(PATIENCE_S)
    assert ends.empty()
    places.clear()
    assert ends.get(timeout=PATIENCE_S) == 0
    assert unsealer.take_told() == [(1, [77])]
    assert unsealer.take_told() == []


def test_a08_or_until_the_lease_is_over(
    unsealer: Unsealer, engine: PlayedEngine, clock: ManualClock
) -> None:
    engine.silent.add(("a", 1))
    ends = push(unsealer, order(until_ms=6_000), order("", 0, until_ms=6_000))
    assert engine.refused.wait(PATIENCE_S)
    clock.advance(5_000 + LEASE_MARGIN_MS - 1)
    assert ends.empty()
    clock.advance(1)
    assert ends.get(timeout=PATIENCE_S) == 0
    assert unsealer.take_told() == []


def test_a08_whoever_cannot_wait_so_long_is_told_how_long(
    unsealer: Unsealer, engine: PlayedEngine, clock: ManualClock
) -> None:
    engine.silent.add(("a", 1))
    ends = push(unsealer, order(until_ms=60_000), give_up_ms=4_000)
    assert engine.refused.wait(PATIENCE_S)
    assert ends.empty()
    clock.advance(3_000)
    assert ends.get(timeout=PATIENCE_S) == 60_000


def test_a08_it_says_who_was_not_told(
    unsealer: Unsealer, engine: PlayedEngine, clock: ManualClock
) -> None:
    engine.silent.add(("a", 1))
    said: SimpleQueue[list[Order]] = SimpleQueue()
    orders = [order("a", 1, 60_000), order("b", 2, 90_000), order("", 0, 2_000)]
    unsealer.push(orders, lambda until_ms, left: said.put(list(left)), 4_000)
    assert engine.refused.wait(PATIENCE_S)
    clock.advance(3_000)
    assert said.get(timeout=PATIENCE_S) == orders[:1], "the others are told, or over"


def test_what_nobody_reads_is_left_to_the_heartbeats(
    unsealer: Unsealer, engine: PlayedEngine
) -> None:
    engine.silent.add(("a", 1))
    assert push(unsealer, order()).get(timeout=PATIENCE_S) == 0
    assert push(unsealer, order()).get(timeout=PATIENCE_S) == 0
    assert engine.asked == [("a", 1)], "it is spared for a while"


def test_a_slow_node_may_be_given_more_time_each_time(
    engine: PlayedEngine, clock: ManualClock
) -> None:
    unsealer = Unsealer(cast("TransferEngine", engine), clock, tell_ms=1_000)
    engine.silent.add(("a", 1))
    ends = push(unsealer, order(until_ms=NEVER_MS))
    assert engine.refused.wait(PATIENCE_S)
    engine.silent.clear()
    assert ends.get(timeout=PATIENCE_S) == 0
    unsealer.close()
    assert engine.patience_ms[0] == 1_000
    assert set(engine.patience_ms[1:]) == {2_500}


def test_a08_a_silent_part_of_a_node_silences_no_other(
    unsealer: Unsealer, engine: PlayedEngine, clock: ManualClock
) -> None:
    engine.silent.add(("a", 2))
    assert push(unsealer, order("a", 2)).get(timeout=PATIENCE_S) == 0
    assert push(unsealer, order("a", 1)).get(timeout=PATIENCE_S) == 0
    assert engine.asked == [("a", 2), ("a", 1)]
    clock.advance(5 * TELL_MS)
    push(unsealer, order("a", 2)).get(timeout=PATIENCE_S)
    assert engine.asked[-1] == ("a", 2)


def test_a08_whoever_waits_holds_up_nobody(unsealer: Unsealer, engine: PlayedEngine) -> None:
    engine.silent.add(("a", 1))
    waits = push(unsealer, order(until_ms=NEVER_MS))
    assert engine.refused.wait(PATIENCE_S)
    for _ in range(10):
        assert push(unsealer, order("b", 5, NEVER_MS)).get(timeout=PATIENCE_S) == 0
    assert waits.empty()


def test_a08_too_many_that_wait_are_not_acknowledged(
    unsealer: Unsealer, engine: PlayedEngine
) -> None:
    engine.silent.add(("a", 1))
    waits = [push(unsealer, order(until_ms=NEVER_MS)) for _ in range(WAITING_MAX + 1)]
    assert waits[-1].get(timeout=PATIENCE_S) == NEVER_MS
    unsealer.close()
    assert [each.get(timeout=PATIENCE_S) for each in waits[:-1]] == [NEVER_MS] * WAITING_MAX


def test_a08_without_a_lane_leases_are_waited_for(clock: ManualClock) -> None:
    unsealer = Unsealer(None, clock)
    assert push(unsealer, order()).get(timeout=PATIENCE_S) == 0
    ends = push(unsealer, order(until_ms=6_000))
    assert ends.empty()
    clock.advance(6_000)
    assert ends.get(timeout=PATIENCE_S) == 0
    unsealer.close()


def test_a_reply_leaves_once_both_are_done_and_says_what_was_not() -> None:
    for instead, expected in ((b"", b"reply"), (b"not told", b"not told")):
        for first in ("durable", "told"):
            sent: list[bytes] = []
            both: Any = Both(sent.append)
            steps = {
                "durable": lambda b=both: b.durable(b"reply"),
                "told": lambda b=both, i=instead: b.told(i),
            }
            steps.pop(first)()
            assert not sent
            steps.popitem()[1]()
            assert sent == [expected]
