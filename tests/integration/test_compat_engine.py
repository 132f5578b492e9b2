"""Upstream's transfer engine class between two processes, one of which dies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from daemons import wait_until

from mooncake_py.compat import peers
from mooncake_py.compat.engine import TransferEngine
from mooncake_py.errors import OutOfSpace

PEER = """
import sys
import numpy as np
from mooncake_py.compat.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = np.arange(8 << 20, dtype=np.uint8)
assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
print(engine.get_rpc_port(), memory.ctypes.data, flush=True)
for line in sys.stdin:
    start, count = map(int, line.split())
    print(memory[start : start + count].tobytes().hex(), flush=True)
"""
SIZE = 8 << 20


class Peer:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        port, address = self.process.stdout.readline().split()
        self.session, self.address = f"127.0.0.1:{port}", int(address)

    def look(self, start: int, count: int) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{start} {count}\n")
        self.process.stdin.flush()
        return bytes.fromhex(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    running = Peer()
    yield running
    running.kill()


@pytest.fixture(params=["0", "1"], ids=["shm", "tcp"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TransferEngine:
    monkeypatch.setenv("MC_FORCE_TCP", request.param)
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made


def test_f24_f50_a_write_that_returned_is_there(engine: TransferEngine, peer: Peer) -> None:
    local = np.random.default_rng(1).integers(0, 256, 1 << 20).astype(np.uint8)
    at = local.ctypes.data
    assert engine.register_memory(at, local.nbytes) == 0
    for length in (1, 4096, 300_000):
        code = engine.transfer_sync_write(peer.session, at, peer.address + 77, length)
        assert code == 0
        assert peer.look(77, length) == local[:length].tobytes()
    count = 128
    sources = [at + i * 4096 for i in range(count)]
    targets = [peer.address + i * 8192 for i in range(count)]
    assert engine.batch_transfer_sync_write(peer.session, sources, targets, [4096] * count) == 0
    assert peer.look(127 * 8192, 4096) == local[127 * 4096 : 128 * 4096].tobytes()
    back = np.zeros(local.nbytes, np.uint8)
    homes = [back.ctypes.data + i * 4096 for i in range(count)]
    assert engine.batch_transfer_sync_read(peer.session, homes, targets, [4096] * count) == 0
    assert (back[: count * 4096] == local[: count * 4096]).all()
    assert engine.transfer_sync_read(peer.session, homes[0], peer.address, 10) == 0
    assert engine.get_first_buffer_address(peer.session) == peer.address
    assert engine.send_probe(peer.session) == 0


def test_f24_f50_an_asynchronous_batch_is_done_when_all_of_it_is(
    engine: TransferEngine, peer: Peer
) -> None:
    """Upstream looks at the first task only and says done with most bytes missing."""
    for _ in range(5):
        target = np.zeros(SIZE, np.uint8)
        count = 64
        size = SIZE // count
        number = engine.batch_transfer_async_read(
            peer.session,
            [target.ctypes.data + i * size for i in range(count)],
            [peer.address + i * size for i in range(count)],
            [size] * count,
        )
        assert 0 < number < 1 << 63
        wait_until(lambda number=number: (code := engine.transfer_check_status(number)) != 0
                   and _is_done(code))  # fmt: skip
        expected = peer.look(SIZE - size, size)
        assert target[SIZE - size :].tobytes() == expected
        assert target[size // 2 : size // 2 + 64].tobytes() == peer.look(size // 2, 64)
        assert engine.transfer_check_status(number) == -1  # it was told once


def _is_done(code: int) -> bool:
    assert code == 1
    return True


def test_f24_f50_wrong_calls_have_their_codes(engine: TransferEngine, peer: Peer) -> None:
    memory = np.zeros(4096, np.uint8)
    at = memory.ctypes.data
    assert TransferEngine().register_memory(at, 10) == -1
    assert TransferEngine().transfer_sync_write(peer.session, at, peer.address, 1) == -1
    assert engine.register_memory(at, 4096) == 0
    assert engine.register_memory(at, 4096) == -7
    assert engine.register_memory(at + 10, 10) == -7
    assert engine.unregister_memory(at) == 0
    assert engine.unregister_memory(at) == -3
    assert engine.batch_register_memory([at, at + 2048], [2048, 2048]) == 0
    assert engine.batch_unregister_memory([at, at + 2048]) == 0
    assert engine.batch_register_memory([at], []) == -1
    assert engine.batch_transfer_sync_write(peer.session, [], [], []) == 0
    assert engine.batch_transfer_sync_write(peer.session, [at], [], []) == -1
    assert engine.transfer_sync_write(peer.session, at, peer.address + SIZE - 1, 2) == -1
    assert engine.transfer_sync_write(peer.session, at, 4096, 2) == -1
    assert engine.batch_transfer_async_read(peer.session, [at], [4096], [10]) == 0
    assert engine.transfer_check_status(12345) == -1
    managed = engine.allocate_managed_buffer(100)
    assert engine.write_bytes_to_buffer(managed, b"hello", 5) == 0
    assert engine.read_bytes_from_buffer(managed, 5) == b"hello"
    assert engine.free_managed_buffer(managed) == 0
    assert engine.initialize("127.0.0.1", "", "tcp", "") == -1  # once


def managed_memory() -> set[str]:
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    return {f"{link} {os.readlink(link)}" for link in links
            if os.path.lexists(link) and "mooncake-engine" in os.readlink(link)}  # fmt: skip


def test_f50_memory_that_cannot_be_registered_is_given_back(
    engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TransferEngine().allocate_managed_buffer(4096) == 0

    def refuse(*_: object, **__: object) -> None:
        raise OutOfSpace("no memory may be locked")

    assert engine._engine is not None
    held = managed_memory()
    monkeypatch.setattr(engine._engine, "register", refuse)
    assert engine.allocate_managed_buffer(4096) == 0
    assert engine.register_memory(np.zeros(4096, np.uint8).ctypes.data, 4096) == -1
    assert not engine._managed
    assert managed_memory() <= held


@pytest.mark.timeout(60)  # three answers at the transfer's own limit would take 90 s
def test_f50_a_dead_peer_is_an_answer_within_seconds_and_a_new_one_is_found(
    engine: TransferEngine,
) -> None:
    peer = Peer()
    memory = np.zeros(4096, np.uint8)
    at = memory.ctypes.data
    assert engine.transfer_sync_write(peer.session, at, peer.address, 4096) == 0
    peer.kill()
    assert engine.transfer_sync_write(peer.session, at, peer.address, 4096) == -1
    assert engine.batch_transfer_async_read(peer.session, [at], [peer.address], [10]) == 0
    assert engine.send_probe(peer.session) == -1
    again = Peer()
    assert engine.transfer_sync_write(again.session, at, again.address, 4096) == 0
    again.kill()


def test_a51_many_threads_write_to_many_peers_at_once(engine: TransferEngine, peer: Peer) -> None:
    other = Peer()
    failed: list[int] = []

    def write(number: int) -> None:
        local = np.full(64 << 10, number, np.uint8)
        for turn in range(20):
            there = other if turn % 2 else peer
            code = engine.transfer_sync_write(
                there.session, local.ctypes.data, there.address + number * (64 << 10), 64 << 10
            )
            if code:
                failed.append(code)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for there in (peer, other):
        assert there.look(5 * (64 << 10), 100) == bytes([5]) * 100
    other.kill()


def test_a48_a_call_that_takes_longer_than_its_timeout_goes_on_while_bytes_move(
    engine: TransferEngine, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of a GiB (here: of 100 KB), each of which has the whole of the time."""
    monkeypatch.setattr(peers, "PART_BYTES", 100_000)
    local = np.random.default_rng(4).integers(0, 256, 1 << 20, np.uint8)
    at = local.ctypes.data
    assert engine.register_memory(at, local.nbytes) == 0
    parts: list[int] = []
    submit = engine._submit

    def slow(target: str, what: Any, *rest: Any) -> Any:
        parts.append(sum(what[2]))
        threading.Event().wait(0.12)
        return submit(target, what, *rest)

    monkeypatch.setattr(engine, "_submit", slow)
    monkeypatch.setattr(engine, "_timeout_ms", 1_000)  # of one part; all take longer
    lengths = [1, 300_000, 0, 99_999, 448_576, 200_000]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    sources, targets = ([base + start for start in starts] for base in (at, peer.address))
    assert engine.batch_transfer_sync_write(peer.session, sources, targets, lengths) == 0
    assert parts == [100_000] * 10 + [sum(lengths) - 1_000_000]
    for start in (0, 299_990, 648_000, sum(lengths) - 100):
        assert peer.look(start, 100) == local[start : start + 100].tobytes()
    broken = [*targets[:-1], 4096]
    assert engine.batch_transfer_sync_write(peer.session, sources, broken, lengths) == -1


def test_a48_an_asynchronous_call_has_the_whole_time_for_each_part(
    engine: TransferEngine, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PART_BYTES", 100_000)
    local = np.random.default_rng(6).integers(0, 256, 1 << 20, np.uint8)
    at = local.ctypes.data
    assert engine.register_memory(at, local.nbytes) == 0
    live = engine._live()
    given: list[int] = []
    submit = live.submit

    def seen(*arguments: Any, timeout_ms: int) -> Any:
        given.append(timeout_ms)
        return submit(*arguments, timeout_ms=timeout_ms)

    monkeypatch.setattr(live, "submit", seen)
    monkeypatch.setattr(engine, "_timeout_ms", 1_000)
    for length in (50_000, 1 << 20):
        number = engine.batch_transfer_async_write(peer.session, [at], [peer.address], [length])
        assert engine.get_batch_transfer_status([number]) == 0
        assert peer.look(length - 100, 100) == local[length - 100 : length].tobytes()
    assert given == [1_000, 11_000]
