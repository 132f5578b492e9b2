"""How Python programs use the engine: handlers, asyncio, names, raw memory, and what is refused."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import mmap
import os
import resource
import signal
import threading

import numpy as np
import pytest

from mooncake_py._native.memory import address_of
from mooncake_py.errors import PeerUnreachable, TransferCancelled, TransferTimeout, UsageError
from mooncake_py.transfer import (
    EngineOptions,
    Faults,
    Memory,
    Message,
    StaticDirectory,
    TransferEngine,
    make_slices,
)

MS = 10_000


def listening(**options: object) -> TransferEngine:
    return TransferEngine(EngineOptions(listen="127.0.0.1:0", **options))  # type: ignore[arg-type]


def one_slice(region: int, target: np.ndarray) -> np.ndarray:
    slices = make_slices(1)
    slices["op"], slices["region"], slices["length"] = 1, region, target.size
    slices["local"] = target.ctypes.data
    return slices


# ---- messages


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_handlers_get_every_message_and_end_with_the_engine(transport: str) -> None:
    before = threading.active_count()
    with listening(transports=(transport,)) as there:

        def handle(message: Message) -> None:
            if message.payload == b"bad":
                raise ValueError("a handler that fails")
            message.reply(message.payload * 2)

        there.on_message(handle, threads=3)
        with TransferEngine(EngineOptions(transports=(transport,))) as here:
            peer = here.open(there.address, timeout_ms=MS)
            with pytest.raises(TransferTimeout):
                peer.request(1, b"bad", timeout_ms=50)
            for i in range(50):
                assert peer.request(1, b"%d" % i, timeout_ms=MS) == b"%d" % i * 2
    assert threading.active_count() <= before  # one of another test may have ended meanwhile


def test_a_handler_may_close_its_engine() -> None:
    there = listening()
    ended = threading.Event()

    def handle(_: Message) -> None:
        there.close()
        ended.set()

    there.on_message(handle)
    with TransferEngine() as here:
        here.open(there.address, timeout_ms=MS).send(1, b"", timeout_ms=MS)
        assert ended.wait(MS / 1000)


def test_a_dropped_engine_ends_its_handlers() -> None:
    before = threading.active_count()
    engine = TransferEngine()
    engine.on_message(lambda message: message.reply(b""))
    threads = engine.inbox._threads
    del engine
    for thread in threads:
        thread.join(MS / 1000)
    assert threading.active_count() <= before  # one of another test may have ended meanwhile


@pytest.mark.parametrize("transport", ["local", "shm", "tcp", "fake"])
def test_f24_a_notification_finds_the_data_that_was_written_before_it(transport: str) -> None:
    with (
        listening(transports=(transport,)) as there,
        TransferEngine(EngineOptions(transports=(transport,))) as here,
    ):
        memory = np.zeros(1 << 20, np.uint8)
        region = there.register(memory, access="read_write")
        seen: list[bool] = []
        there.on_message(lambda message: seen.append(bool((memory == message.payload[0]).all())))
        peer = here.open(there.address, timeout_ms=MS)
        for i in range(1, 100):
            source = np.full(memory.size, i, np.uint8)
            here.write(peer, one_slice(region.id, source), timeout_ms=MS)
            peer.send(1, bytes([i]), timeout_ms=MS)
            peer_has_seen(seen, i)
        assert all(seen)


def peer_has_seen(seen: list[bool], count: int) -> None:
    done = threading.Event()
    for _ in range(MS):
        if len(seen) >= count:
            return
        done.wait(0.001)
    raise AssertionError("the notification did not arrive")


# ---- asyncio


@pytest.mark.parametrize("transport", ["local", "shm", "tcp", "fake"])
def test_batches_are_awaited_side_by_side(transport: str) -> None:
    source = np.random.default_rng(1).integers(0, 256, 8 << 20, dtype=np.uint8)

    async def move(there: TransferEngine, here: TransferEngine) -> None:
        region = there.register(source)
        peer = await asyncio.to_thread(here.open, there.address, timeout_ms=MS)
        targets = [np.zeros(source.size, np.uint8) for _ in range(4)]
        batches = [here.submit(peer, one_slice(region.id, t), timeout_ms=MS) for t in targets]
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        await asyncio.gather(*batches)
        await batches[0]  # once more is fine
        ticking.cancel()
        assert ticks > 0
        assert all(np.array_equal(target, source) for target in targets)

    with (
        listening(transports=(transport,)) as there,
        TransferEngine(EngineOptions(transports=(transport,))) as here,
    ):
        asyncio.run(asyncio.wait_for(move(there, here), MS / 1000))


def test_an_awaited_batch_may_be_given_up() -> None:
    async def move(here: TransferEngine, there: TransferEngine) -> None:
        region = there.register(bytearray(1 << 20))
        peer = here.open(there.address, timeout_ms=MS)
        target = np.zeros(1 << 20, np.uint8)
        batch = here.submit(peer, one_slice(region.id, target), timeout_ms=MS)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(batch, 0.02)
        assert not batch.done()
        batch.cancel()
        with pytest.raises(TransferCancelled):
            await batch

    lossy = EngineOptions(transports=("fake",), faults=Faults(seed=1, loss_ppm=1_000_000))
    with listening(transports=("fake",)) as there, TransferEngine(lossy) as here:
        asyncio.run(move(here, there))


# ---- names


def test_peers_are_found_by_name() -> None:
    with listening() as there:
        names = StaticDirectory({"prefill-3": there.address})
        with TransferEngine(directory=names) as here:
            there.on_message(lambda message: message.reply(b"here"))
            peer = here.open("prefill-3", timeout_ms=MS)
            assert peer.address == "prefill-3"
            assert peer.request(1, b"", timeout_ms=MS) == b"here"
            assert here.open(there.address, timeout_ms=MS).id == peer.id
            with pytest.raises(PeerUnreachable, match="knows no peer"):
                here.open("prefill-4", timeout_ms=MS)
        with TransferEngine() as here, pytest.raises(UsageError, match="no directory"):
            here.open("prefill-3", timeout_ms=MS)


# ---- registration


def test_raw_memory_is_registered_by_address() -> None:
    raw = mmap.mmap(-1, 8192)
    raw[:4] = b"raw!"
    address = address_of(raw)[0]
    with listening() as there, TransferEngine(EngineOptions(transports=("tcp",))) as here:
        region = there.register((address, 8192))
        target = np.zeros(4, np.uint8)
        here.read(
            here.open(there.address, timeout_ms=MS), one_slice(region.id, target), timeout_ms=MS
        )
        assert bytes(target) == b"raw!"
        for wrong in ((0, 10), (address, 0), (-1, 5), (1 << 64, 5)):
            with pytest.raises(UsageError):
                there.register(wrong)


def test_a36_partial_overlap_is_refused_with_both_ranges_also_for_reading() -> None:
    buffer = bytearray(8192)
    address = address_of(buffer)[0]
    with TransferEngine() as engine:
        engine.register(memoryview(buffer)[:4096])
        with pytest.raises(UsageError) as refused:
            engine.register(memoryview(buffer)[4000:])
        assert f"[{address + 4000:#x}, +4192) overlaps [{address:#x}, +4096)" in str(refused.value)
        engine.register([memoryview(buffer)[4000:]])  # gathered for reading
        with pytest.raises(UsageError):
            engine.register([memoryview(buffer)[4000:]], access="read_write")


def test_f63_memory_with_a_sole_writer_cannot_be_mapped_for_writing() -> None:
    memory = Memory(1 << 16, "segment", sole_writer=True)
    view = memory.view()
    view[0] = 7
    again = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, 1 << 16, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    readable = mmap.mmap(again, 1 << 16, mmap.MAP_SHARED, mmap.PROT_READ)
    assert readable[0] == 7
    os.close(again)


def test_f63_a_write_through_a_mapping_of_a_peer_faults() -> None:
    with listening() as there, TransferEngine(EngineOptions(transports=("shm",))) as here:
        region = there.register(Memory(4096, sole_writer=True))
        mapping = here.open(there.address, timeout_ms=MS).map(region.id, timeout_ms=MS)
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.memset(mapping.base, 1, 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


# ---- what goes on is visible


def test_describe_tells_what_is_chosen_and_why() -> None:
    with listening() as there, TransferEngine(EngineOptions(transports=("shm", "tcp"))) as here:
        there.register(Memory(4096))
        here.open(there.address, timeout_ms=MS)
        (peer,) = here.describe()["peers"]
        assert peer["transport"] == "shm"
        assert "shared memory proven" in peer["reason"]
        assert peer["address"] == there.address
        described = there.describe()
        assert described["address"] == there.address
        (region,) = described["regions"]
        assert (region["nbytes"], region["mappable"]) == (4096, True)
        assert set(described["queues"]) >= {"messages", "message_bytes", "message_bytes_max"}
