"""The fake transport's faults: each shows as its error, none hangs, and a seed repeats them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from mooncake_py._native.memory import crc32c
from mooncake_py.errors import MooncakeError, PeerUnreachable, TransferError, TransferTimeout
from mooncake_py.transfer import (
    FLAG_CRC,
    EngineOptions,
    Faults,
    Peer,
    TransferEngine,
    make_slices,
)

MS = 10_000
NBYTES = 4096


@contextmanager
def pair(near: Faults, far: Faults | None = None) -> Iterator[tuple[TransferEngine, Peer, int]]:
    """An engine with faults, its peer, and a region of the peer that holds 0x55."""
    with (
        TransferEngine(
            EngineOptions(listen="127.0.0.1:0", transports=("fake",), faults=far)
        ) as there,
        TransferEngine(EngineOptions(transports=("fake",), faults=near)) as here,
    ):
        region = there.register(bytearray(b"\x55" * NBYTES), access="read_write")

        def echo() -> None:
            while (message := there.inbox.receive(MS)) is not None:
                if message.correlation:
                    message.reply(message.payload)

        thread = threading.Thread(target=echo)
        thread.start()
        yield here, here.open(there.address, timeout_ms=MS), region.id
        there.close()
        thread.join()


def one_slice(region: int, target: np.ndarray) -> np.ndarray:
    slices = make_slices(1)
    slices["region"], slices["length"], slices["flags"] = region, target.size, FLAG_CRC
    slices["local"] = target.ctypes.data
    return slices


def outcome(here: TransferEngine, peer: Peer, region: int) -> str:
    target = np.zeros(NBYTES, np.uint8)
    try:
        here.read(peer, one_slice(region, target), timeout_ms=100)
    except MooncakeError as error:
        return type(error).__name__
    return "right" if (target == 0x55).all() else "corrupt"


def test_what_is_lost_times_out_and_the_peer_stays_usable() -> None:
    with pair(Faults(seed=3, loss_ppm=500_000)) as (here, peer, region):
        seen = {outcome(here, peer, region) for _ in range(20)}
        assert seen == {"right", "TransferTimeout"}
        lost = 0
        for _ in range(20):
            try:
                assert peer.request(1, b"x", timeout_ms=30) == b"x"
            except TransferTimeout:
                lost += 1
        assert 0 < lost < 20


def test_a_flipped_bit_shows_in_the_crc() -> None:
    with pair(Faults(seed=5, corrupt_ppm=1_000_000)) as (here, peer, region):
        target = np.zeros(NBYTES, np.uint8)
        slices = one_slice(region, target)
        here.read(peer, slices, timeout_ms=MS)
        assert np.unpackbits(target ^ 0x55).sum() == 1
        assert slices["crc"][0] == crc32c(target) != crc32c(b"\x55" * NBYTES)
        fresh = np.full(NBYTES, 0x77, np.uint8)
        slices = one_slice(region, fresh)
        here.write(peer, slices, timeout_ms=MS)
        assert slices["crc"][0] != crc32c(fresh)


def test_a_cut_ends_every_waiter_and_a_silent_one_its_deadline() -> None:
    ends = set()
    for seed in range(6):
        with pair(Faults(seed=seed, cut_ppm=1_000_000)) as (here, peer, region):
            ends.add(outcome(here, peer, region))
            with pytest.raises(TransferError) as failure:
                peer.request(1, b"x", timeout_ms=30)
            assert failure.type in (PeerUnreachable, TransferTimeout)
    assert ends == {"PeerUnreachable", "TransferTimeout"}


def test_delayed_messages_stay_in_order() -> None:
    with (
        TransferEngine(EngineOptions(listen="127.0.0.1:0", transports=("fake",))) as there,
        TransferEngine(
            EngineOptions(transports=("fake",), faults=Faults(seed=1, delay_us=2000))
        ) as here,
    ):
        peer = here.open(there.address, timeout_ms=MS)
        for i in range(50):
            peer.send(i, b"", timeout_ms=MS)
        received = [there.inbox.receive(MS) for _ in range(50)]
        assert [message.kind for message in received if message] == list(range(50))


def test_a40_a_seed_repeats_its_faults() -> None:
    def run(seed: int) -> list[str]:
        faults = Faults(seed=seed, loss_ppm=200_000, corrupt_ppm=200_000, delay_us=500)
        with pair(faults) as (here, peer, region):
            return [outcome(here, peer, region) for _ in range(25)]

    first = run(11)
    assert first == run(11)
    assert first != run(12)
    assert {"right", "corrupt", "TransferTimeout"} <= set(first)
