"""Staging is bounded, never overwrites what is being read, and forgets readers that are gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_py import TransferEngine
from mooncake_py._native import ffi, memory
from mooncake_py._native.reading import Destinations, MappedTable, read_mapped
from mooncake_py.clock import Deadline, ManualClock
from mooncake_py.errors import Backpressure, ChecksumMismatch
from mooncake_py.store.disk_staging import GRACE_MS, Staged, Staging
from mooncake_py.transfer import EngineOptions, Peer

NBYTES = 64 << 10
LENGTH = 15 << 10  # four of them fit


class Desk:
    """A staging memory, its engine and one reader that is connected."""

    def __init__(self, engine: TransferEngine, peer: int) -> None:
        self.clock = ManualClock()
        self.engine = engine
        self.peer = peer
        self.staging = Staging(engine, NBYTES, "test-staging", self.clock)

    def deadline(self, ms: int = 0) -> Deadline:
        return Deadline(ms, self.clock)

    def bring(self, generation: int, peer: int = 0, wait_ms: int = 0) -> Staged:
        staged, mine = self.staging.take(
            generation, LENGTH, peer or self.peer, self.deadline(wait_ms), self.deadline(10_000)
        )
        if mine:
            self.staging.fill(staged, lambda into: self._read(generation, into))
        return staged

    def _read(self, generation: int, into: memoryview) -> int:
        into[:] = value(generation)
        return memory.crc32c(into)

    def see(self, staged: Staged) -> bytes | None:
        """What a reader gets who was given this row; None: nothing that is valid."""
        out = bytearray(LENGTH)
        region = self.staging._memory
        table = MappedTable([(region.base, region.nbytes)], [region])
        to = Destinations([ffi.from_buffer("char[]", out)], [LENGTH])
        return bytes(out) if read_mapped(table, staged.row().tobytes(), 1, to) is None else None


def value(generation: int) -> bytes:
    return bytes([generation]) * LENGTH


@pytest.fixture
def desk() -> Iterator[Desk]:
    with TransferEngine(EngineOptions(listen="127.0.0.1:0")) as node, TransferEngine() as client:
        peer: Peer = client.open(node.address, timeout_ms=5_000)
        peer.send(99, b"hello", timeout_ms=5_000)
        message = node.inbox.receive(5_000)
        assert message is not None
        made = Desk(node, message.peer_id)
        yield made
        made.staging.stop()
        made.staging.close()


def test_f41_staged_objects_are_read_like_any_others(desk: Desk) -> None:
    staged = [desk.bring(generation) for generation in (1, 2, 3)]
    assert [desk.see(each) for each in staged] == [value(1), value(2), value(3)]
    assert desk.staging.used_bytes <= desk.staging.nbytes == NBYTES


def test_a74_what_is_being_read_is_not_overwritten(desk: Desk) -> None:
    staged = [desk.bring(generation) for generation in (1, 2, 3, 4)]
    with pytest.raises(Backpressure):
        desk.bring(5)
    assert [desk.see(each) for each in staged] == [value(each) for each in (1, 2, 3, 4)]
    desk.staging.done(staged[1].serial, desk.peer)
    late = desk.bring(5)
    assert desk.see(late) == value(5)
    assert desk.see(staged[1]) is None, "its place was given away"
    assert desk.see(staged[0]) == value(1)


def test_f41_equal_questions_share_one_read(desk: Desk) -> None:
    one = desk.bring(1)
    again, mine = desk.staging.take(1, LENGTH, desk.peer, desk.deadline(), desk.deadline(9_000))
    assert again is one
    assert not mine
    desk.staging.done(one.serial, desk.peer)
    for generation in (2, 3, 4):
        desk.staging.done(desk.bring(generation).serial, desk.peer)
    desk.bring(5)
    assert desk.see(one) == value(1), "one of its two readers is still at it"


def test_a74_readers_that_are_silent_lose_their_hold(desk: Desk) -> None:
    for generation in (1, 2, 3, 4):
        desk.bring(generation)
    desk.clock.advance(10_000 + GRACE_MS + 1)
    desk.staging.sweep()
    assert desk.see(desk.bring(5)) == value(5)


def test_a74_readers_that_are_gone_lose_their_hold(desk: Desk) -> None:
    for generation in (1, 2, 3, 4):
        desk.bring(generation, peer=12_345)  # nobody
    desk.staging.sweep()
    assert desk.see(desk.bring(5)) == value(5)


def test_f41_bytes_that_prove_damaged_are_nobodys(desk: Desk) -> None:
    def damaged(into: memoryview) -> int:
        into[:] = value(9)
        raise ChecksumMismatch("damaged")

    staged, mine = desk.staging.take(1, LENGTH, desk.peer, desk.deadline(), desk.deadline(9_000))
    assert mine
    with pytest.raises(ChecksumMismatch):
        desk.staging.fill(staged, damaged)
    assert isinstance(staged.failure, ChecksumMismatch)
    assert desk.see(staged) is None
    assert desk.staging.used_bytes == 0
    assert desk.see(desk.bring(1)) == value(1), "a second try is a new one"


def test_f42_an_object_that_ended_is_not_read_any_more(desk: Desk) -> None:
    staged = desk.bring(1)
    desk.staging.forget(1)
    assert desk.see(staged) is None
    during, _ = desk.staging.take(2, LENGTH, desk.peer, desk.deadline(), desk.deadline(9_000))
    desk.staging.forget(2)
    desk.staging.fill(during, lambda into: desk._read(2, into))
    assert desk.see(during) is None, "it ended while it was read"


def test_a74_who_waits_for_room_gets_it_when_somebody_is_done(desk: Desk) -> None:
    staged = [desk.bring(generation) for generation in (1, 2, 3, 4)]
    got: list[bytes | None] = []
    waiter = threading.Thread(target=lambda: got.append(desk.see(desk.bring(5, wait_ms=60_000))))
    waiter.start()
    desk.staging.done(staged[0].serial, desk.peer)
    waiter.join(20)
    assert got == [value(5)]


def test_a75_an_object_larger_than_staging_is_refused_at_once(desk: Desk) -> None:
    with pytest.raises(Backpressure):
        desk.staging.take(1, NBYTES, desk.peer, desk.deadline(60_000), desk.deadline(60_000))


def test_f41_random_use_never_shows_other_bytes(desk: Desk) -> None:
    dice = np.random.default_rng(5)
    held: list[Staged] = []
    for _ in range(500):
        generation = int(dice.integers(1, 30))
        try:
            held.append(desk.bring(generation))
        except Backpressure:
            assert held
        if held and dice.random() < 0.6:
            gone = held.pop(int(dice.integers(len(held))))
            assert desk.see(gone) == value(gone.generation)
            desk.staging.done(gone.serial, desk.peer)
        for each in held:
            assert desk.see(each) == value(each.generation)
