"""Holds of a node end with their release or with their connection, and are bounded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_py import TransferEngine, errors
from mooncake_py._native import memory
from mooncake_py._native.segment import OwnedSegment
from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.store.holds import HoldHandler
from mooncake_py.transfer import EngineOptions, Peer
from mooncake_py.wire.node import HOLD_KIND, HoldReply, HoldRequest
from mooncake_py.wire.rows import EXTENT

NBYTES = 1 << 20
SEGMENT = 7
GONE = errors.LeaseExpired.code


def extent(offset: int, length: int, generation: int) -> np.ndarray:
    rows = np.zeros(1, EXTENT)
    rows["offset"], rows["length"], rows["generation"] = offset, length, generation
    rows["expires_ms"] = 1 << 60
    return rows


class Held:
    """A segment with two sealed extents, and a client that is connected to its node's engine."""

    def __init__(self, node: TransferEngine, segment: OwnedSegment, client: TransferEngine) -> None:
        self.node, self.segment, self.client = node, segment, client
        self.holds = HoldHandler(node, segment)
        self.rows = np.concatenate([extent(0, 1000, 1), extent(4096, NBYTES // 2 - 4096, 2)])
        statuses, crcs = np.zeros(2, np.int32), np.zeros(2, np.uint32)
        segment.begin(self.rows, 1, statuses)
        segment.seal(self.rows, crcs, 1, statuses)
        assert not statuses.any()

    def ask(self, peer: Peer, request: HoldRequest) -> HoldReply:
        peer.send(HOLD_KIND, request.encode(), timeout_ms=5_000)
        message = self.node.inbox.receive(5_000)
        assert message is not None
        return self.holds.serve(message, SEGMENT)


@pytest.fixture
def held() -> Iterator[Held]:
    base, nbytes, fd = memory.memory_open(NBYTES, "test-holds")
    segment = OwnedSegment(base, nbytes)
    with TransferEngine(EngineOptions(listen="127.0.0.1:0")) as node, TransferEngine() as client:
        yield Held(node, segment, client)
    segment.close()
    memory.memory_close(base, nbytes, fd)


def test_f65_a_release_says_whether_it_was_held(held: Held) -> None:
    peer = held.client.open(held.node.address, timeout_ms=5_000)
    row = held.rows[:1].tobytes()
    assert held.ask(peer, HoldRequest(SEGMENT, row)).status == b"\0"
    assert held.ask(peer, HoldRequest(SEGMENT, row)).status == b"\0"
    assert held.segment.stats().held_count == 1
    release = HoldRequest(SEGMENT, row, release=True)
    assert held.ask(peer, release).status == b"\0"
    assert held.segment.stats().held_count == 1
    assert held.ask(peer, release).status == b"\0"
    assert held.segment.stats().held_count == 0
    assert held.ask(peer, release).status == bytes([GONE])


def test_f65_holds_end_with_their_connection(held: Held) -> None:
    with TransferEngine() as other:
        peer = other.open(held.node.address, timeout_ms=5_000)
        assert held.ask(peer, HoldRequest(SEGMENT, held.rows[:1].tobytes())).status == b"\0"
        held.holds.sweep()
        assert held.segment.stats().held_count == 1
    deadline = Deadline(10_000, SystemClock())
    while held.segment.stats().held_count and not deadline.passed():
        held.node.inbox.receive(20)
        held.holds.sweep()
    assert held.segment.stats().held_count == 0


def test_f65_one_reader_cannot_hold_all_memory(held: Held) -> None:
    peer = held.client.open(held.node.address, timeout_ms=5_000)
    large = held.rows[1:].tobytes()
    assert held.ask(peer, HoldRequest(SEGMENT, large)).status == b"\0"
    assert held.ask(peer, HoldRequest(SEGMENT, large)).code == errors.Backpressure.code
    assert held.ask(peer, HoldRequest(SEGMENT, large, release=True)).status == b"\0"
    assert held.ask(peer, HoldRequest(SEGMENT, large)).status == b"\0"


def test_f65_what_strangers_send_is_refused(held: Held) -> None:
    peer = held.client.open(held.node.address, timeout_ms=5_000)
    row = held.rows[:1].tobytes()
    assert held.ask(peer, HoldRequest(SEGMENT + 1, row)).code == GONE
    assert held.ask(peer, HoldRequest(SEGMENT, row[:-1])).code == errors.UsageError.code
    assert held.ask(peer, HoldRequest(SEGMENT, extent(0, 999, 1).tobytes())).status == bytes([GONE])
    assert held.ask(peer, HoldRequest(SEGMENT, extent(1 << 60, 9, 1).tobytes())).status == bytes(
        [GONE]
    )
    assert held.segment.stats().held_count == 0
