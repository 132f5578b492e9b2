"""Peers of this host that write into a mapped region by themselves (`design/remote-write.md`)."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transport_far import COMMAND, pattern, wait_for
from transport_pair import MS, PART, Pair, slices_for, start_far

from mooncake_py._native import ffi
from mooncake_py._native.memory import crc32c
from mooncake_py.errors import AccessRefused, TransferTimeout
from mooncake_py.transfer import EngineOptions, Memory, TransferEngine, region

NBYTES = 16 * PART
ROUNDS = 6
SHM = EngineOptions(listen="127.0.0.1:0", transports=("shm",))


@pytest.fixture
def two() -> Iterator[Pair]:
    near = TransferEngine(SHM)
    process = start_far(SHM)
    try:
        yield Pair(near, process.stdout.readline().strip(), process)
    finally:
        near.close()
        process.kill()
        process.communicate()


def test_f21_a_mapped_region_is_written_without_its_owner(two: Pair) -> None:
    """The owner's process stands still, and the bytes are there all the same."""
    target = two.region(NBYTES, "memfd", "read_write")
    source = pattern(NBYTES, 3)
    whole = slices_for(target, source, [(0, NBYTES)])
    two.near.write(two.peer, whole, timeout_ms=MS)  # maps it
    source[:] = pattern(NBYTES, 4)
    os.kill(two.process.pid, signal.SIGSTOP)
    two.near.write(two.peer, whole, timeout_ms=MS)
    os.kill(two.process.pid, signal.SIGCONT)
    back = np.zeros(NBYTES, np.uint8)
    two.near.read(two.peer, slices_for(target, back, [(0, NBYTES)]), timeout_ms=MS)
    assert np.array_equal(back, source)
    two.tell("deregister", region=target)
    with pytest.raises(AccessRefused):
        two.near.write(two.peer, whole, timeout_ms=MS)


def test_a_region_that_only_its_owner_may_write_is_written_by_it(two: Pair) -> None:
    """Sealed memory cannot be mapped for writing: the owner fetches the bytes."""
    memory = Memory(PART, sole_writer=True)
    with two.near.register(memory, access="read_write") as offered:
        source = two.region(PART, "memfd")
        begin_writing(two, offered.id, source, PART)
        wait_for(lambda: np.array_equal(np.frombuffer(memory.view(), np.uint8), pattern(PART, 7)))
    assert two.tell("writer_ended")


def begin_writing(two: Pair, offered: int, source: int, nbytes: int) -> None:
    order = {"do": "write_for_ever", "region": offered, "source": source, "nbytes": nbytes}
    two.peer.send(COMMAND, json.dumps(order).encode(), timeout_ms=MS)


def test_after_deregistering_a_writer_that_was_stopped_in_a_copy_writes_nothing(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at any moment, for longer than the owner waits, and then it goes on."""
    monkeypatch.setattr(region, "DEREGISTER_MS", 150)
    dice, pause = random.Random(20261129), threading.Event()
    memory = Memory(NBYTES)
    view = np.frombuffer(memory.view(), np.uint8)
    for _ in range(ROUNDS):
        view[:] = 0
        source = two.region(NBYTES, "memfd")
        offered = two.near.register(memory, access="read_write")
        begin_writing(two, offered.id, source, NBYTES)
        wait_for(lambda: view[-1] == pattern(NBYTES, 7)[-1])
        pause.wait(dice.uniform(0, 0.005))
        os.kill(two.process.pid, signal.SIGSTOP)
        offered.close()
        view[:] = 0xAA
        os.kill(two.process.pid, signal.SIGCONT)
        two.peer = two.near.open(two.address, timeout_ms=MS)  # it was cut
        assert two.tell("writer_ended")
        assert (view == 0xAA).all()


def test_memory_is_kept_while_a_copy_cannot_be_ended(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that says it is copying and runs on: the owner is told, and may try again."""
    monkeypatch.setattr(region, "DEREGISTER_MS", 50)
    memory = Memory(PART)
    offered = two.near.register(memory, access="read_write")
    source = two.region(PART, "memfd")
    begin_writing(two, offered.id, source, PART)
    wait_for(lambda: np.frombuffer(memory.view(), np.uint8)[-1] == pattern(PART, 7)[-1])
    words = gate()
    writers = next(16 * i + 1 for i in range(64) if words[16 * i] == offered.id)
    words[writers] += 1  # as a writer does that then gets no time
    with pytest.raises(TransferTimeout, match="keep its memory"):
        offered.close()
    with pytest.raises(TransferTimeout, match="keep its memory"):
        offered.close()
    words[writers] -= 1
    offered.close()
    assert two.near.describe()["regions"] == []


def gate() -> Any:
    """The page of 64 slots that this process shares with its only peer, as 32-bit words."""
    with open("/proc/self/maps") as maps:
        (line,) = [line for line in maps if "mooncake gate" in line]
    return ffi.cast("uint32_t *", int(line.split("-")[0], 16))


def test_what_is_written_before_a_message_is_there_when_it_comes(two: Pair) -> None:
    target = two.region(PART, "memfd", "read_write")
    expected = pattern(PART, 7)
    source = np.zeros(64, np.uint8)
    for i in range(200):
        source[:] = i
        two.near.write(two.peer, slices_for(target, source, [(i * 64, 64)]), timeout_ms=MS)
        expected[i * 64 : i * 64 + 64] = i
        if i % 20 == 0:
            assert two.tell("crc", region=target) == crc32c(expected)
    assert two.tell("crc", region=target) == crc32c(expected)
