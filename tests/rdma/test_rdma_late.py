"""What is late: bytes that a cable still holds, and transfers that outlive a registration.

The cable is slow on purpose, and the far process stands still where it would have helped.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from rdma_cables import guest_only, run
from rdma_ports import FAR, NEAR
from transport_far import pattern
from transport_pair import MS, PART, Pair, slices_for, start_far

from mooncake_py._native.memory import address_of
from mooncake_py.errors import AccessRefused, TransferCancelled
from mooncake_py.transfer import EngineOptions, Rdma, TransferEngine
from mooncake_py.transfer import region as region_module

pytestmark = [guest_only, pytest.mark.timeout(60)]
SMALL = 4096


@contextmanager
def pair(near: Rdma, far: Rdma) -> Iterator[Pair]:
    options = EngineOptions(listen="127.0.0.1:0", transports=("rdma",), rdma=far)
    process = start_far(options)
    try:
        address = process.stdout.readline().strip()
        with TransferEngine(EngineOptions(transports=("rdma",), rdma=near)) as engine:
            yield Pair(engine, address, process)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def standing_still(two: Pair) -> Iterator[None]:
    os.kill(two.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(two.process.pid, signal.SIGCONT)


@contextmanager
def late(device: str) -> Iterator[None]:
    run(f"tc qdisc add dev {device} root netem delay 400ms limit 20000")
    try:
        yield
    finally:
        run(f"tc qdisc del dev {device} root")


def packets_held(device: str) -> bool:
    shown = subprocess.run(
        ["tc", "-s", "qdisc", "show", "dev", device], check=True, capture_output=True, text=True
    )
    return "backlog 0b 0p" not in shown.stdout


def wait_until_empty(device: str) -> None:
    end, pause = time.monotonic() + 20, threading.Event()
    while packets_held(device):
        assert time.monotonic() < end, f"{device} holds packets for ever"
        pause.wait(0.01)


def test_a52_what_is_written_after_a_cancelled_write_lands_after_it(
    second_cable: tuple[Rdma, Rdma],
) -> None:
    """The first one is in a slow cable, the second takes a quick one, and the far process does not
    get to end its side of the first: the second has to wait for that, or it is overwritten."""
    with pair(*second_cable) as two:
        region = two.region(SMALL, "heap", "read_write")
        first, second = np.full(SMALL, 1, np.uint8), np.full(SMALL, 2, np.uint8)
        found = np.zeros(SMALL, np.uint8)
        kept = [two.near.register(memory) for memory in (first, second, found)]
        for _ in range(2):  # both rails come up
            two.near.write(two.peer, slices_for(region, found, [(0, SMALL)]), timeout_ms=MS)
        with late("rve0"), standing_still(two):  # an answer takes longer than what comes now
            slices = slices_for(region, first, [(0, SMALL)])
            slices["op"] = 2
            cancelled = two.near.submit(two.peer, slices, timeout_ms=MS)
            cancelled.cancel()
            again = slices_for(region, second, [(0, SMALL)])
            again["op"] = 2
            batch = two.near.submit(two.peer, again, timeout_ms=MS)
            wait_until_empty("rve0")
        batch.wait(MS)
        with pytest.raises(TransferCancelled):
            cancelled.wait(MS)
        two.near.read(two.peer, slices_for(region, found, [(0, SMALL)]), timeout_ms=MS)
        assert np.array_equal(found, second)
        for one in (batch, cancelled, *kept):
            one.close()


def test_a36_memory_that_is_unregistered_while_its_rail_is_away_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The transfer waits for its rail for longer than unregistering waits for the transfer."""
    monkeypatch.setattr(region_module, "DEREGISTER_MS", 100)
    with pair(NEAR, FAR) as two:
        region = two.region(PART, "heap")
        other, target = np.zeros(PART, np.uint8), np.full(PART, 0xAA, np.uint8)
        kept, mine = two.near.register(other), two.near.register(target)
        two.near.read(two.peer, slices_for(region, other, [(0, SMALL)]), timeout_ms=MS)
        with standing_still(two):
            with late("rve1"):
                slices = slices_for(region, other, [(0, SMALL)])
                slices["op"] = 1
                cut = two.near.submit(two.peer, slices, timeout_ms=MS)
                cut.cancel()  # which costs the rail, and who stands still gives no new one
            pending = slices_for(region, target, [(0, PART)])
            pending["op"] = 1
            batch = two.near.submit(two.peer, pending, timeout_ms=MS)
            mine.close()
        with pytest.raises(AccessRefused, match="unregistered"):
            batch.wait(MS)
        assert (target == 0xAA).all()
        two.near.read(two.peer, slices_for(region, other, [(0, PART)]), timeout_ms=MS)
        assert np.array_equal(other, pattern(PART, 7))
        for one in (batch, cut, kept):
            one.close()


def test_a46_raw_memory_here_that_was_unmapped_is_refused_at_the_next_use() -> None:
    """The device holds its pages still: it would fill them, and nobody would ever see the bytes."""
    with pair(NEAR, FAR) as two:
        region = two.region(PART, "heap", "read_write")
        raw = mmap.mmap(-1, PART)
        slices = slices_for(region, np.zeros(PART, np.uint8), [(0, PART)])
        slices["local"] = address_of(raw)[0]
        mine = two.near.register((address_of(raw)[0], PART), access="read")
        two.near.read(two.peer, slices, timeout_ms=MS)
        assert raw[:] == pattern(PART, 7).tobytes()
        (path,) = two.near.describe()["peers"][0]["paths"]
        assert path["bytes_read"] == PART
        raw.close()
        for transfer in (two.near.read, two.near.write):
            with pytest.raises(AccessRefused, match="not mapped"):
                transfer(two.peer, slices, timeout_ms=MS)
        mine.close()
        found = np.zeros(PART, np.uint8)
        two.near.read(two.peer, slices_for(region, found, [(0, PART)]), timeout_ms=MS)
        assert np.array_equal(found, pattern(PART, 7))
