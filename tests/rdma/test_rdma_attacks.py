"""What goes wrong on purpose: dead peers, withdrawn memory, limits, many connections."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rdma_ports import FAR, NEAR
from transport_far import COMMAND, ECHO, Far, pattern
from transport_pair import MS, PART, Pair, PairedEngines, pytest_generate_tests, slices_for

from mooncake_py._native.memory import address_of, crc32c
from mooncake_py.errors import AccessRefused, MooncakeError, PeerUnreachable
from mooncake_py.transfer import EngineOptions, TransferEngine

__all__ = ["pytest_generate_tests"]

ROOT = str(Path(__file__).parents[2])


@contextmanager
def serving(options: EngineOptions) -> Iterator[Far]:
    far = Far(options)
    thread = threading.Thread(target=far.serve)
    thread.start()
    try:
        yield far
    finally:
        far.engine.close()
        thread.join()


def wait_for(condition: Any, seconds: float = 10) -> None:
    end, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        pause.wait(0.01)


def queue_pairs(engine: TransferEngine) -> int:
    return sum(port["queue_pairs"] for port in engine.describe()["rdma"]["fabric"]["ports"])


def read_all(two: Pair, region: int, nbytes: int) -> np.ndarray:
    target = np.zeros(nbytes, np.uint8)
    two.near.read(two.peer, slices_for(region, target, [(0, nbytes)]), timeout_ms=MS)
    return target


class TestAttacks(PairedEngines):
    name = "rdma"
    places = ("process",)
    near_rdma = NEAR
    far_rdma = FAR

    def test_a52_a_killed_peer_ends_its_batches_and_leaves_nothing(self, two: Pair) -> None:
        region = two.region(24 * PART, "heap")
        target = np.zeros(24 * PART, np.uint8)
        mine = two.near.register(target)
        slices = slices_for(region, target, [(0, 24 * PART)])
        slices["op"] = 1
        two.near.read(two.peer, slices_for(region, target, [(0, 4096)]), timeout_ms=MS)
        batch = two.near.submit(two.peer, slices, timeout_ms=MS)
        two.process.kill()
        with pytest.raises(PeerUnreachable):  # long before the batch's own time is over
            batch.wait(2_000)
        target[:] = 0xAA
        batch.close()
        assert (target == 0xAA).all()
        assert queue_pairs(two.near) == 0
        mine.close()

    def test_a36_a_reader_that_stands_still_finds_its_key_void(self, two: Pair) -> None:
        """It does not answer that it has stopped, so the device refuses it: the wrong key."""
        memory = pattern(32 * PART, 3)
        region = two.near.register(memory)
        payload = json.dumps({"do": "read_back", "region": region.id, "nbytes": memory.size})
        read_all(two, two.region(PART), PART)  # both sides know each other
        outcome: list[Any] = []

        def ask() -> None:
            answer = two.peer.request(COMMAND, payload.encode(), timeout_ms=4 * MS)
            outcome.append(json.loads(answer))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(lambda: two.near.describe()["peers"][0]["bytes_in"] > 0)
        os.kill(two.process.pid, signal.SIGSTOP)
        try:
            region.close()  # while it stands still
            memory[:] = 0
        finally:
            os.kill(two.process.pid, signal.SIGCONT)
        asking.join()
        done = outcome[0]
        assert done.get("failed", "AccessRefused") == "AccessRefused", done
        assert two.peer.request(ECHO, b"on", timeout_ms=MS) == b"on"
        assert np.array_equal(read_all(two, two.region(PART), PART), pattern(PART, 7))

    def test_unregistering_in_flight_refuses_or_finishes_each_slice(self, two: Pair) -> None:
        source = pattern(16 * PART, 7)
        for _ in range(3):
            region = two.region(16 * PART, "heap")
            target = np.zeros(16 * PART, np.uint8)
            mine = two.near.register(target)
            slices = slices_for(region, target, [(i * PART, PART) for i in range(16)])
            slices["op"] = 1
            batch = two.near.submit(two.peer, slices, timeout_ms=MS)
            mine.close()  # of the reader: what is on its way ends, the rest passes another way
            two.tell("deregister", region=region)
            with suppress(AccessRefused):
                batch.wait(MS)
            for i, status in enumerate(slices["status"].tolist()):
                assert status in (0, -AccessRefused.code)
                if status == 0:
                    part = slice(i * PART, (i + 1) * PART)
                    assert np.array_equal(target[part], source[part])
            batch.close()


# Ten thousand take minutes: by hand, with this and --timeout 0.
CONNECTIONS = int(os.environ.get("MOONCAKE_RDMA_CONNECTIONS", "200"))


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def _numbers() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_a38_connections_come_and_go_without_a_leak() -> None:
    base = EngineOptions(listen="127.0.0.1:0", transports=("rdma",), rdma=FAR)
    with serving(base) as far, TransferEngine(replace(base, rdma=NEAR)) as near:
        region = far.do_register(None, "heap", [4096], 7, "read_write")[0]  # type: ignore[arg-type]
        target = np.zeros(4096, np.uint8)
        mine = near.register(target)

        def once() -> None:  # a connection, and a queue pair at each end
            with near.open(far.engine.address, timeout_ms=MS) as peer:
                near.read(peer, slices_for(region, target, [(0, 4096)]), timeout_ms=MS)

        def all_gone() -> bool:
            return queue_pairs(far.engine) == 0 and not far.engine.describe()["peers"]

        for _ in range(CONNECTIONS // 10):  # what is kept for the process is there from now on
            once()
        wait_for(all_gone)
        before, memory = _numbers(), resident_kib()
        for _ in range(CONNECTIONS):
            once()
        wait_for(all_gone)
        assert queue_pairs(near) == 0
        # No more than before; one of those that were just going may have been counted then.
        wait_for(lambda: all(now <= then for now, then in zip(_numbers(), before, strict=True)))
        grown = resident_kib() - memory
        print(f"{CONNECTIONS} connections: {grown} KiB more, {before} and then {_numbers()}")
        assert grown < 4096
        assert near.describe()["rdma"]["fabric"]["rails"] == 0
        mine.close()
        assert near.describe()["rdma"]["fabric"]["memory"]["registrations"] == 0


@pytest.mark.timeout(60)
def test_a41_many_first_contacts_at_once() -> None:
    base = EngineOptions(listen="127.0.0.1:0", transports=("rdma",), rdma=FAR)
    failed: list[BaseException] = []
    expected = pattern(PART, 7)
    with serving(base) as far, ExitStack() as stack:
        region = far.do_register(None, "heap", [PART], 7, "read_write")[0]  # type: ignore[arg-type]
        engines = [
            stack.enter_context(TransferEngine(EngineOptions(transports=("rdma",), rdma=NEAR)))
            for _ in range(64)
        ]
        start = threading.Barrier(len(engines))

        def first(engine: TransferEngine, number: int) -> None:
            try:
                start.wait()
                peer = engine.open(far.engine.address, timeout_ms=3 * MS)
                target = np.zeros(5000, np.uint8)
                slices = slices_for(region, target, [(number, 5000)])
                engine.read(peer, slices, timeout_ms=3 * MS)
                assert np.array_equal(target, expected[number : number + 5000])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=first, args=(e, i)) for i, e in enumerate(engines)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []


def test_a36_a_cancelled_read_says_of_no_slice_that_it_arrived_when_it_did_not() -> None:
    """Into memory that is not registered: what arrives is copied on, unless it is too late."""
    base = EngineOptions(listen="127.0.0.1:0", transports=("rdma",), rdma=FAR)
    size, count = 32 << 10, 64
    expected = pattern(size * count, 7)
    with serving(base) as far, TransferEngine(replace(base, rdma=NEAR)) as near:
        region = far.do_register(None, "heap", [expected.size], 7, "read")[0]  # type: ignore[arg-type]
        peer = near.open(far.engine.address, timeout_ms=MS)
        pieces = [(i * size, size) for i in range(count)]
        ends = set()
        for _ in range(60):
            target = np.zeros(expected.size, np.uint8)
            slices = slices_for(region, target, pieces)
            slices["op"] = 1
            batch = near.submit(peer, slices, timeout_ms=MS)
            batch.cancel()
            for at, status in enumerate(slices["status"].tolist()):
                ends.add(status)
                part = slice(at * size, (at + 1) * size)
                assert status != 0 or np.array_equal(target[part], expected[part])
            batch.close()
        assert len(ends) == 2, "some had arrived, some had not"


def test_f25_a_peer_with_much_to_pass_on_does_not_hold_up_another() -> None:
    """Memory through which bytes pass is one for all peers; the other one needs some of it while
    there is none, and nothing of its own is on its way that would wake it."""
    base = EngineOptions(listen="127.0.0.1:0", transports=("rdma",), rdma=FAR)
    with (
        serving(base) as one,
        serving(base) as other,
        TransferEngine(replace(base, rdma=NEAR)) as near,
    ):
        large, small = 32 * PART, PART
        regions = [
            far.do_register(None, "heap", [size], 7, "read")[0]  # type: ignore[arg-type]
            for far, size in ((one, large), (other, small))
        ]
        peers = [near.open(far.engine.address, timeout_ms=MS) for far in (one, other)]
        targets = [np.zeros(size, np.uint8) for size in (large, small)]
        for peer, region, target in zip(peers, regions, targets, strict=True):
            near.read(peer, slices_for(region, target, [(0, 1)]), timeout_ms=MS)
        for _ in range(5):
            much = slices_for(regions[0], targets[0], [(0, large)])
            much["op"] = 1
            batch = near.submit(peers[0], much, timeout_ms=MS)
            near.read(
                peers[1], slices_for(regions[1], targets[1], [(0, small)]), timeout_ms=MS // 5
            )
            batch.wait(MS)
        assert np.array_equal(targets[1], pattern(small, 7))


def test_a36_values_are_registered_once_for_all_who_fetch_them() -> None:
    base = EngineOptions(listen="127.0.0.1:0", transports=("rdma",), rdma=FAR)
    values = [pattern(128 << 10, seed) for seed in range(3)]
    with (
        serving(base) as one,
        serving(base) as other,
        TransferEngine(replace(base, rdma=NEAR)) as near,
    ):
        region = near.register(list(values))
        total = sum(value.size for value in values)
        payload = json.dumps({"do": "read_back", "region": region.id, "nbytes": total}).encode()
        for far in (one, other):
            peer = near.open(far.engine.address, timeout_ms=MS)
            answer = json.loads(peer.request(COMMAND, payload, timeout_ms=MS))
            assert answer["done"] == crc32c(np.concatenate(values))
        memory = near.describe()["rdma"]["fabric"]["memory"]
        assert memory["registrations"] == len(values)
        region.close()
        assert near.describe()["rdma"]["fabric"]["memory"]["registrations"] == 0


def test_a36_a_value_in_raw_memory_has_keys_of_its_own() -> None:
    """Those of the raw memory around it are for our own device: nobody may read by them."""
    base = EngineOptions(listen="127.0.0.1:0", transports=("rdma",), rdma=FAR)
    memory = pattern(2 * PART, 3)
    with serving(base) as far, TransferEngine(replace(base, rdma=NEAR)) as near:
        raw = near.register((address_of(memory)[0], memory.size), access="read")
        value = near.register([memory[PART:]])
        payload = json.dumps({"do": "read_back", "region": value.id, "nbytes": PART}).encode()
        peer = near.open(far.engine.address, timeout_ms=MS)
        answer = json.loads(peer.request(COMMAND, payload, timeout_ms=MS))
        assert answer.get("done") == crc32c(memory[PART:]), answer
        (path,) = far.engine.describe()["peers"][0]["paths"]
        assert path["bytes_read"] == PART
        value.close()
        raw.close()


def test_rails_are_bounded_and_the_idle_one_makes_room() -> None:
    base = EngineOptions(listen="127.0.0.1:0", transports=("rdma",), rdma=FAR)
    few = EngineOptions(transports=("rdma",), rdma=replace(NEAR, rails_max=2))
    with ExitStack() as stack:
        fars = [stack.enter_context(serving(base)) for _ in range(4)]
        near = stack.enter_context(TransferEngine(few))
        regions = [
            far.do_register(None, "heap", [4096], 7, "read_write")[0]  # type: ignore[arg-type]
            for far in fars
        ]
        peers = [near.open(far.engine.address, timeout_ms=MS) for far in fars]
        for _ in range(3):
            for peer, region in zip(peers, regions, strict=True):
                target = np.zeros(4096, np.uint8)
                near.read(peer, slices_for(region, target, [(0, 4096)]), timeout_ms=MS)
                assert np.array_equal(target, pattern(4096, 7))
                assert queue_pairs(near) <= 2
        fabric = near.describe()["rdma"]["fabric"]
        assert fabric["evictions"] >= 8, fabric
        wait_for(lambda: sum(queue_pairs(far.engine) for far in fars) <= 2)


def test_a36_the_same_range_twice_needs_two_releases() -> None:
    memory = np.zeros(PART, np.uint8)
    with TransferEngine(EngineOptions(transports=("rdma",), rdma=NEAR)) as engine:

        def registrations() -> int:
            return int(engine.describe()["rdma"]["fabric"]["memory"]["registrations"])

        first, second = engine.register(memory), engine.register(memory)
        assert registrations() == 1
        with pytest.raises(MooncakeError, match="overlaps"):
            engine.register(memory[100:])
        first.close()
        assert registrations() == 1
        second.close()
        assert registrations() == 0


def test_a37_regions_above_the_limit_are_split_and_read_as_one() -> None:
    limit = 256 << 10
    base = EngineOptions(
        listen="127.0.0.1:0", transports=("rdma",), rdma=replace(FAR, region_max_bytes=limit)
    )
    with (
        serving(base) as far,
        TransferEngine(replace(base, rdma=replace(NEAR, region_max_bytes=limit))) as near,
    ):
        nbytes = 2 * PART + 12_345
        region = far.do_register(None, "heap", [nbytes], 7, "read_write")[0]  # type: ignore[arg-type]
        memory = far.engine.describe()["rdma"]["fabric"]["memory"]
        assert memory["registrations"] >= nbytes // limit
        assert memory["registering_ns"] > 0
        peer = near.open(far.engine.address, timeout_ms=MS)
        expected = pattern(nbytes, 7)
        for registered in (False, True):
            target = np.zeros(nbytes, np.uint8)
            mine = near.register(target) if registered else None
            pieces = [(0, limit - 7), (limit - 7, 14), (limit + 7, nbytes - limit - 7)]
            near.read(peer, slices_for(region, target, pieces), timeout_ms=MS)
            assert np.array_equal(target, expected)
            if mine is not None:
                mine.close()


class OnDevice:
    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # CUDA


def test_memory_of_a_gpu_is_refused_by_what_the_machine_lacks() -> None:
    with (
        TransferEngine(EngineOptions(transports=("rdma",), rdma=NEAR)) as engine,
        pytest.raises(
            MooncakeError, match=r"no dmabuf descriptor was given.*no peer memory module"
        ),
    ):
        engine.register(OnDevice())  # type: ignore[arg-type]


LOCKED = """
import sys
import numpy as np
from mooncake_py.transfer import EngineOptions, Rdma, TransferEngine
from mooncake_py.errors import OutOfSpace
rdma = Rdma(devices=(sys.argv[1],))
memory = np.zeros(8 << 20, np.uint8)
with TransferEngine(EngineOptions(transports=("rdma",), rdma=rdma)) as engine:
    try:
        engine.register(memory)
    except OutOfSpace as error:
        print("refused:", error)
    assert engine.describe()["regions"] == []
with TransferEngine(EngineOptions(transports=("rdma", "tcp"), rdma=rdma)) as engine:
    engine.register(memory)
    print("allowed:", engine.describe()["rdma"]["fabric"]["memory"]["refusal"])
"""


def test_a37_too_little_locked_memory_is_named_with_its_remedy() -> None:
    command = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-all", sys.executable, "-c"]
    ended = subprocess.run(
        [*command, LOCKED, NEAR.devices[0]],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ROOT},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20)),
    )
    assert ended.returncode == 0, ended.stderr
    for line in ("refused:", "allowed:"):
        words = next(text for text in ended.stdout.splitlines() if text.startswith(line))
        assert "RLIMIT_MEMLOCK" in words
        assert "1024 KiB" in words
        assert "ulimit -l unlimited" in words
