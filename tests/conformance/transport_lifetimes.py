"""What every transport promises when memory, batches, peers or engines come to their end."""

from __future__ import annotations

import json
import mmap
import os
import signal
import threading
import time
from array import array
from contextlib import suppress

import numpy as np
import pytest
from transport_far import COMMAND, ECHO, SILENCE, Far, pattern
from transport_pair import MS, PART, Pair, PairedEngines, slices_for

from mooncake_py._native.memory import address_of, crc32c
from mooncake_py._native.offering import Offer
from mooncake_py.errors import (
    AccessRefused,
    MooncakeError,
    PeerUnreachable,
    TransferCancelled,
    TransferTimeout,
)
from mooncake_py.transfer import EngineOptions, Memory, TransferEngine
from mooncake_py.transfer import region as region_module


class LifetimeBattery(PairedEngines):
    # ---- memory that goes away

    def test_a46_raw_memory_that_was_unmapped_fails_its_slices_only(self, two: Pair) -> None:
        region, _ = two.tell("register_raw", nbytes=2 * PART)
        other = two.region(PART)
        target = np.zeros(2 * PART, np.uint8)
        whole = slices_for(region, target, [(0, 2 * PART)])
        two.near.read(two.peer, whole, timeout_ms=MS)
        assert np.array_equal(target, pattern(2 * PART, 7))
        two.tell("unmap", region=region)
        for nbytes in (64, PART, 2 * PART):
            gone = slices_for(region, target, [(0, nbytes)])
            with pytest.raises(AccessRefused, match="not mapped any more"):
                two.near.read(two.peer, gone, timeout_ms=MS)
            with pytest.raises(AccessRefused):
                two.near.write(two.peer, gone, timeout_ms=MS)
        both = slices_for(other, target, [(0, PART), (0, 64)])
        both["region"][1] = region
        with pytest.raises(AccessRefused):
            two.near.read(two.peer, both, timeout_ms=MS)
        assert both["status"].tolist() == [0, -AccessRefused.code]
        assert two.peer.request(ECHO, b"alive", timeout_ms=MS) == b"alive"

    def test_after_deregistering_nothing_is_written_there(self, two: Pair) -> None:
        """Writes of the peer are on their way when the owner takes its memory back."""
        if two.process is None:
            pytest.skip("the far side would have to write while it deregisters")
        memory = np.zeros(16 * PART, np.uint8)
        for kind in ("memfd", "heap"):
            source = two.region(16 * PART, kind, "read_write")
            for _ in range(3):
                region = two.near.register(memory, access="read_write")
                two.peer.send(
                    COMMAND, json.dumps({"do": "write_to_sender", "region": region.id,
                                         "source": source, "nbytes": memory.size}).encode(),
                    timeout_ms=MS,
                )  # fmt: skip
                two.peer.request(ECHO, b"", timeout_ms=MS) if kind == "memfd" else None
                region.close()
                memory[:] = 0xAA
                assert two.peer.request(ECHO, b"x", timeout_ms=MS) == b"x"
                assert (memory == 0xAA).all()

    def test_deregistering_does_not_wait_for_a_peer_that_stands_still(
        self, two: Pair, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has read the region before, so that it may still be looking. It is cut in time."""
        if place in ("thread", "hidden"):
            pytest.skip("only a process that is ours can be stopped")
        monkeypatch.setattr(region_module, "DEREGISTER_MS", 200)
        memory = pattern(PART, 5)
        region = two.near.register(memory, access="read_write")
        assert two.tell("read_back", region=region.id, nbytes=PART) == crc32c(memory)
        os.kill(two.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        region.close()
        took_s = time.monotonic() - began
        os.kill(two.process.pid, signal.SIGCONT)
        assert took_s < 5
        assert two.near.describe()["regions"] == []
        again = two.near.open(two.address, timeout_ms=MS)  # the same, or anew when it was cut
        assert again.request(ECHO, b"on", timeout_ms=MS) == b"on"

    def test_f28_an_offer_for_a_call_that_is_over_does_not_wait_for_a_peer_that_stands_still(
        self, two: Pair, place: str
    ) -> None:
        if place in ("thread", "hidden"):
            pytest.skip("only a process that is ours can be stopped")
        memory = pattern(PART, 5)
        address, size = np.array([[memory.ctypes.data], [memory.size]], dtype=np.uint64)
        offer = Offer(two.near.native, address, size)
        assert two.tell("read_back", region=offer.id, nbytes=PART) == crc32c(memory)
        os.kill(two.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        offer.close(0)
        took_s = time.monotonic() - began
        os.kill(two.process.pid, signal.SIGCONT)
        assert took_s < 5, "it would wait for ten seconds otherwise"
        assert two.near.describe()["regions"] == []
        again = two.near.open(two.address, timeout_ms=MS)
        assert again.request(ECHO, b"on", timeout_ms=MS) == b"on"

    def test_a_busy_interpreter_does_not_hold_up_peers(self, two: Pair) -> None:
        """Python here has something else to do: reads, writes and first contacts go on."""
        if two.process is None:
            pytest.skip("the far side would share the interpreter")
        memory = pattern(PART, 5)
        expected, ending = crc32c(memory), threading.Event()

        def compute() -> None:
            while not ending.is_set():
                sum(range(1000))

        busy = [threading.Thread(target=compute) for _ in range(2)]
        with two.near.register(memory, access="read_write") as region:
            for thread in busy:
                thread.start()
            try:
                assert two.tell("read_many", region=region.id, nbytes=PART, times=50) == expected
                assert two.tell("open_anew", address=two.near.address) == self.name
            finally:
                ending.set()
                for thread in busy:
                    thread.join()

    def test_a_write_lands_after_the_cancelled_one_before_it(self, two: Pair) -> None:
        """Whatever of the first is on its way, on whichever connection, arrives before."""
        first, second = np.full(24 * PART, 0xAA, np.uint8), pattern(24 * PART, 9)
        for kind in ("heap", "memfd"):
            region = two.region(first.size, kind, "read_write")
            whole = slices_for(region, first, [(0, first.size)])
            whole["op"] = 2
            pieces = [(i * PART, PART) for i in reversed(range(24))]
            again = slices_for(region, second, pieces)
            again["local"] = address_of(second)[0] + again["remote_offset"]
            for _ in range(3):
                batch = two.near.submit(two.peer, whole, timeout_ms=MS)
                batch.cancel()
                two.near.write(two.peer, again, timeout_ms=MS)
                assert two.tell("crc", region=region) == crc32c(second)
                assert two.peer.request(ECHO, b"x", timeout_ms=MS) == b"x"
                assert two.tell("crc", region=region) == crc32c(second)
                batch.close()

    def test_a_cancelled_batch_is_called_off_at_the_peer(self, two: Pair, place: str) -> None:
        """A peer that stood still when a batch was cancelled does not do it for nobody."""
        if place in ("thread", "hidden"):
            pytest.skip("only a process that is ours can be stopped")
        memory = np.ones(64 * PART, np.uint8)
        region = two.region(memory.size, "heap", "read_write")

        def bytes_moved() -> int:
            (peer,) = two.tell("describe")["peers"]
            return int(peer["bytes_in"] + peer["bytes_out"])

        for op in (1, 2):
            before = bytes_moved()
            os.kill(two.process.pid, signal.SIGSTOP)
            slices = slices_for(region, memory, [(0, memory.size)])
            slices["op"] = op
            with two.near.submit(two.peer, slices, timeout_ms=MS) as batch:
                batch.cancel()
            os.kill(two.process.pid, signal.SIGCONT)
            assert bytes_moved() - before < memory.size // 2

    # ---- memory that is registered

    def test_whatever_has_the_buffer_protocol_is_registered(self, two: Pair) -> None:
        mapped = mmap.mmap(-1, 5000)
        mapped[:] = pattern(5000, 3).tobytes()
        memory = Memory(5000)
        np.frombuffer(memory.view(), np.uint8)[:5000] = pattern(5000, 4)
        square = pattern(5000, 5).reshape(50, 100)
        for buffer in (
            bytes(pattern(5000, 1)), bytearray(pattern(5000, 2)), array("I", range(1250)), mapped,
            memory, square, memoryview(square).cast("B"), address_of(square),
        ):  # fmt: skip
            whole = memory.view() if buffer is memory else buffer
            expected = crc32c(square if isinstance(buffer, tuple) else whole)
            with two.near.register(buffer) as region:
                assert two.tell("read_back", region=region.id, nbytes=region.nbytes) == expected

    def test_a36_a_region_counts_how_often_it_was_registered(self, two: Pair) -> None:
        memory = pattern(5000, 1)
        first, second = two.near.register(memory), two.near.register(memory)
        order = {"region": first.id, "nbytes": memory.size}
        first.close()
        assert two.tell("read_back", **order) == crc32c(memory)
        second.close()
        with pytest.raises(AssertionError, match="AccessRefused"):
            two.tell("read_back", **order)

    # ---- failures

    def test_a_failed_slice_says_which_why_and_whether_a_retry_can_help(self, two: Pair) -> None:
        region = two.region(4096)
        target = np.zeros(3 * 4096, np.uint8)
        slices = slices_for(region, target, [(0, 64), (4096, 1), (64, 64)])
        with pytest.raises(AccessRefused, match=r"slice 1: .*range") as refused:
            two.near.read(two.peer, slices, timeout_ms=MS)
        assert not refused.value.retryable
        assert slices["status"].tolist() == [0, -AccessRefused.code, 0]
        with pytest.raises(TransferTimeout) as late:
            two.peer.request(SILENCE, b"", timeout_ms=20)
        assert late.value.retryable
        two.peer.close()
        slices = slices_for(region, target, [(0, 64)])
        with pytest.raises(PeerUnreachable) as gone:
            two.near.read(two.peer, slices, timeout_ms=MS)
        assert gone.value.retryable

    def test_f28_calls_end_at_their_deadline_when_the_peer_stands_still(
        self, two: Pair, place: str
    ) -> None:
        if place in ("thread", "hidden"):
            pytest.skip("only a process that is ours can be stopped")
        region = two.region(PART, "heap", "read_write")  # not looked at yet
        whole = slices_for(region, np.zeros(PART, np.uint8), [(0, PART)])
        with TransferEngine(EngineOptions(transports=(self.name,))) as stranger:
            os.kill(two.process.pid, signal.SIGSTOP)
            began = time.monotonic()
            for call in (
                lambda: two.near.read(two.peer, whole, timeout_ms=100),
                lambda: two.near.write(two.peer, whole, timeout_ms=100),
                lambda: two.peer.request(ECHO, b"", timeout_ms=100),
                lambda: stranger.open(two.address, timeout_ms=100),
            ):
                with pytest.raises((TransferTimeout, PeerUnreachable)):
                    call()
            took_s = time.monotonic() - began
            os.kill(two.process.pid, signal.SIGCONT)
        assert took_s < MS / 1000 / 2
        assert two.peer.request(ECHO, b"on", timeout_ms=MS) == b"on"

    # ---- the end of a peer

    def test_closing_ends_also_with_a_peer_that_stands_still(self, two: Pair, place: str) -> None:
        region = two.region(64 * PART, "heap", "read_write")
        memory = np.zeros(64 * PART, np.uint8)
        slices = slices_for(region, memory, [(0, memory.size)])
        slices["op"] = 2
        stopped = place not in ("thread", "hidden")
        if stopped:
            os.kill(two.process.pid, signal.SIGSTOP)
        batch = two.near.submit(two.peer, slices, timeout_ms=MS)
        offered = two.near.register(bytearray(4096), access="read_write")
        began = time.monotonic()
        two.near.close()
        two.near.close()
        assert time.monotonic() - began < MS / 1000 / 2
        assert offered.closed
        with suppress(TransferCancelled, PeerUnreachable):
            batch.wait(0)
        assert batch.done()
        if stopped:
            os.kill(two.process.pid, signal.SIGCONT)

    def test_waiters_end_when_the_engine_closes(self, two: Pair) -> None:
        ended: list[type[Exception] | None] = []
        started = threading.Barrier(3)

        def ask() -> None:
            started.wait()
            with pytest.raises(MooncakeError) as failure:
                two.peer.request(SILENCE, b"", timeout_ms=MS)
            ended.append(failure.type)

        def listen() -> None:
            started.wait()
            assert two.near.inbox.receive(MS) is None
            ended.append(None)

        threads = [threading.Thread(target=work) for work in (ask, listen)]
        for thread in threads:
            thread.start()
        started.wait()
        two.near.close()
        for thread in threads:
            thread.join()
        assert None in ended
        # PeerUnreachable: it had not begun to wait when the engine closed.
        assert set(ended) - {None} <= {TransferCancelled, PeerUnreachable}
        assert len(ended) == 2

    def test_a43_waiters_end_when_the_peer_dies(self, two: Pair) -> None:
        failures: list[BaseException] = []
        asking = threading.Event()

        def ask() -> None:
            asking.set()
            with pytest.raises(PeerUnreachable) as failure:
                two.peer.request(SILENCE, b"", timeout_ms=MS)
            failures.append(failure.value)

        thread = threading.Thread(target=ask)
        thread.start()
        asking.wait()
        if two.process is not None:
            two.process.kill()
        else:
            two.tell("stop")
        thread.join()
        assert len(failures) == 1
        with pytest.raises(PeerUnreachable):
            two.peer.request(ECHO, b"", timeout_ms=MS)
        with pytest.raises(PeerUnreachable):
            assert two.peer.transport

    def test_a42_a_restarted_peer_is_a_new_peer(self, two: Pair) -> None:
        if two.process is None:
            two.tell("stop")
        else:
            two.process.kill()
            two.process.communicate()
        with pytest.raises(MooncakeError):
            two.peer.request(SILENCE, b"", timeout_ms=MS)
        options = EngineOptions(listen=two.address, transports=(self.name,))
        far = Far(options)
        thread = threading.Thread(target=far.serve)
        thread.start()
        again = two.near.open(two.address, timeout_ms=MS)
        assert again.id != two.peer.id
        assert again.request(ECHO, b"back", timeout_ms=MS) == b"back"
        far.engine.close()
        thread.join()

    def test_after_a_timeout_nothing_is_written(self, two: Pair, place: str) -> None:
        """A peer that is stopped in the middle and goes on later finds no memory to write."""
        if place in ("thread", "hidden"):
            pytest.skip("only a process that is ours can be stopped")
        region = two.region(64 * PART, "heap")
        target = np.zeros(64 * PART, np.uint8)
        slices = slices_for(region, target, [(0, 64 * PART)])
        slices["op"] = 1
        batch = two.near.submit(two.peer, slices, timeout_ms=MS)
        os.kill(two.process.pid, signal.SIGSTOP)
        batch.cancel()
        target[:] = 0xAA
        with pytest.raises(TransferTimeout):
            two.peer.request(ECHO, b"", timeout_ms=50)
        os.kill(two.process.pid, signal.SIGCONT)
        assert two.peer.request(ECHO, b"on", timeout_ms=MS) == b"on"
        assert (target == 0xAA).all()
