"""Rules of one engine: addresses, registration, lifetimes. What two promise is in the battery."""

from __future__ import annotations

import gc
import os
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from mooncake_py.errors import (
    AccessRefused,
    PeerUnreachable,
    TransferCancelled,
    UsageError,
)
from mooncake_py.transfer import SLICE, EngineOptions, Memory, Rdma, TransferEngine, make_slices

MS = 10_000


def listening(host: str = "127.0.0.1:0", **options: object) -> TransferEngine:
    return TransferEngine(EngineOptions(listen=host, **options))  # type: ignore[arg-type]


def serve_one(engine: TransferEngine) -> threading.Thread:
    def work() -> None:
        message = engine.inbox.receive(MS)
        if message is not None:
            message.reply(message.payload)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


# ---- addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a84_names_ipv4_and_ipv6_listen_and_connect(host: str, transport: str) -> None:
    if host == "[::1]" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    with listening(f"{host}:0", transports=(transport,)) as there, TransferEngine() as here:
        assert not there.address.endswith(":0")
        thread = serve_one(there)
        peer = here.open(there.address, timeout_ms=MS)
        assert peer.request(1, b"x", timeout_ms=MS) == b"x"
        thread.join()


def test_a84_the_advertised_host_is_what_peers_are_told() -> None:
    with listening(advertise="cache-7.example") as engine:
        host, port = engine.address.rsplit(":", 1)
        assert host == "cache-7.example"
        with TransferEngine() as other:
            assert other.open(f"127.0.0.1:{port}", timeout_ms=MS).transport == "local"


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_a84_listening_everywhere_advertises_an_address_that_can_be_reached(host: str) -> None:
    if host == "[::]" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    with listening(f"{host}:0", transports=("tcp",)) as there:
        advertised = there.address.rpartition(":")[0]
        assert advertised.strip("[]") not in ("0.0.0.0", "::", "127.0.0.1", "::1")


def test_a84_only_what_was_asked_for_is_bound() -> None:
    def listening_on() -> set[str]:
        """Of this process: others on the machine come and go."""
        own = set()
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it was the folder's own
                own.add(os.readlink(f"/proc/self/fd/{fd}"))
        with open("/proc/self/net/tcp") as table:
            rows = [line.split() for line in table][1:]
        return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}

    before = listening_on()
    with TransferEngine():
        assert listening_on() - before == set()
    with listening() as engine:
        port = int(engine.address.rpartition(":")[2])
        assert f"0100007F:{port:04X}" in listening_on()
        assert f"00000000:{port:04X}" not in listening_on()


@pytest.mark.parametrize(
    "address", ["", "nohost", ":1", "127.0.0.1:", "127.0.0.1:x", "1.2.3.4:70000", "::1:80", "[::1]"]
)
def test_a_bad_address_is_a_usage_error(address: str) -> None:
    with TransferEngine() as engine, pytest.raises(UsageError):
        engine.open(address, timeout_ms=MS)


def test_an_unknown_host_is_unreachable_by_its_name() -> None:
    with TransferEngine() as engine, pytest.raises(PeerUnreachable, match=r"no-such\.invalid"):
        engine.open("no-such.invalid:1234", timeout_ms=MS)


def test_a24_a_port_in_use_is_refused_with_the_reason() -> None:
    with listening() as first:
        with pytest.raises(UsageError, match="Address already in use"):
            listening(first.address)
        thread = serve_one(first)
        with TransferEngine() as other:
            peer = other.open(first.address, timeout_ms=MS)
            assert peer.request(1, b"still", timeout_ms=MS) == b"still"
        thread.join()


def test_wrong_options_are_refused() -> None:
    for wrong in (
        EngineOptions(transports=()),
        EngineOptions(transports=("carrier pigeon",)),
        EngineOptions(tcp_lanes=0),
        EngineOptions(message_max_bytes=0),
        EngineOptions(queue_max_bytes=0),
        EngineOptions(listen="here"),
    ):
        with pytest.raises(UsageError):
            TransferEngine(wrong)


@pytest.mark.parametrize("device", ["mlx5_0:abc", "mlx5_0:0", "mlx5_0:", "", "a:1:2"])
def test_a44_a_device_that_is_misspelt_does_not_mean_all_of_them(device: str) -> None:
    rdma = Rdma(devices=(device,))
    with pytest.raises(UsageError, match="a device is a name, or a name and a port"):
        TransferEngine(EngineOptions(transports=("rdma", "tcp"), rdma=rdma))


@pytest.mark.parametrize("silence_max_ms", [0, 1_999, 600_001])
def test_a_bound_on_silence_that_makes_no_sense_is_refused(silence_max_ms: int) -> None:
    with pytest.raises(UsageError, match="silence_max_ms"):
        TransferEngine(EngineOptions(silence_max_ms=silence_max_ms))


def test_a44_without_a_common_transport_opening_fails_and_says_so() -> None:
    with listening(transports=("tcp",)) as there:
        only_shm = EngineOptions(transports=("shm",))
        with TransferEngine(only_shm) as here, pytest.raises(PeerUnreachable, match="no common"):
            here.open(there.address, timeout_ms=MS)


def test_opening_twice_is_one_connection() -> None:
    with listening() as there, TransferEngine(EngineOptions(transports=("tcp",))) as here:
        first = here.open(there.address, timeout_ms=MS)
        second = here.open(there.address, timeout_ms=MS)
        assert first.id == second.id
        first.close()
        assert second.transport == "tcp"
        second.close()
        with pytest.raises(PeerUnreachable):
            assert second.transport


def test_a41_sixty_four_engines_that_open_at_once_get_there_in_one_second() -> None:
    """That is the deadline of each, and all begin together."""
    with listening() as there:
        engines = [TransferEngine(EngineOptions(transports=("tcp",))) for _ in range(64)]
        before = len(os.listdir("/proc/self/task"))
        opened: list[str] = []
        start = threading.Barrier(len(engines))

        def work(engine: TransferEngine) -> None:
            start.wait()
            opened.append(engine.open(there.address, timeout_ms=1_000).transport)

        threads = [threading.Thread(target=work, args=(engine,)) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert opened == ["tcp"] * len(engines)
        # No thread for a peer. (One of ours may still be on its way out.)
        assert len(os.listdir("/proc/self/task")) < before + len(engines) // 2
        end = time.monotonic() + MS / 1000
        while len(there.describe()["peers"]) < len(engines):  # its side may be later
            assert time.monotonic() < end
        for engine in engines:
            engine.close()


# ---- registration


def test_a36_the_same_range_twice_is_one_region_that_counts() -> None:
    buffer = bytearray(8192)
    with listening() as there, TransferEngine() as here:
        first, second = there.register(buffer), there.register(buffer)
        assert first.id == second.id
        peer = here.open(there.address, timeout_ms=MS)
        slices = make_slices(1)
        target = np.zeros(16, np.uint8)
        slices["region"], slices["length"], slices["local"] = first.id, 16, target.ctypes.data
        first.close()
        here.read(peer, slices, timeout_ms=MS)
        second.close()
        with pytest.raises(AccessRefused):
            here.read(peer, slices, timeout_ms=MS)


def test_a36_overlap_with_a_writable_region_names_both_ranges() -> None:
    buffer = bytearray(8192)
    with TransferEngine() as engine:
        engine.register(memoryview(buffer)[:4096], access="read_write")
        with pytest.raises(UsageError, match=r"\+4096\) overlaps \[0x[0-9a-f]+, \+4096\)"):
            engine.register(memoryview(buffer)[4095:8191])
        engine.register(memoryview(buffer)[4096:])


class OnDevice:
    """What DLPack says of a tensor in the memory of a GPU: kind 2 is CUDA."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 3


def test_memory_of_a_gpu_is_refused_with_the_reason_and_a_remedy() -> None:
    with TransferEngine() as engine:
        with pytest.raises(UsageError, match=r"device 3 of DLPack kind 2.*rdma is off.*copy it"):
            engine.register(OnDevice())  # type: ignore[arg-type]
        torch = pytest.importorskip("torch")
        with pytest.raises(UsageError, match="memory of meta is not registered"):
            engine.register(torch.empty(8, device="meta"))
        assert engine.describe()["regions"] == []


def test_a46_registered_memory_is_kept_and_cannot_be_resized() -> None:
    with listening() as there, TransferEngine() as here:
        buffer = bytearray(b"k" * 4096)
        region = there.register(buffer)
        with pytest.raises(BufferError):
            buffer.append(0)
        del buffer
        gc.collect()
        target = np.zeros(4096, np.uint8)
        slices = make_slices(1)
        slices["region"], slices["length"], slices["local"] = region.id, 4096, target.ctypes.data
        here.read(here.open(there.address, timeout_ms=MS), slices, timeout_ms=MS)
        assert bytes(target) == b"k" * 4096
        region.close()


def test_a46_memory_stays_registered_when_nobody_holds_the_region() -> None:
    buffer = bytearray(4096)
    engine = TransferEngine()
    engine.register(buffer)
    gc.collect()
    assert len(engine.describe()["regions"]) == 1
    with pytest.raises(BufferError):
        buffer.append(0)
    engine.close()
    buffer.append(0)


def test_an_engine_that_is_dropped_gives_everything_back() -> None:
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    buffer = bytearray(4096)
    engine = listening()
    engine.register(buffer)
    engine.open(engine.address, timeout_ms=MS)
    del engine
    gc.collect()
    buffer.append(0)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_closing_a_region_gives_the_buffer_back() -> None:
    buffer = bytearray(4096)
    with TransferEngine() as engine:
        with engine.register(buffer):
            pass
        buffer.append(0)


@pytest.mark.parametrize("buffer", [b"", bytearray(), np.zeros((8, 8))[:, ::2]])
def test_memory_that_cannot_be_registered_is_refused(buffer: object) -> None:
    with TransferEngine() as engine, pytest.raises(UsageError):
        engine.register(buffer)  # type: ignore[arg-type]


def test_read_only_memory_is_not_offered_for_writing() -> None:
    with TransferEngine() as engine:
        engine.register(b"read only")
        with pytest.raises(UsageError):
            engine.register(b"read only too", access="read_write")


def test_slices_of_another_shape_are_refused() -> None:
    with listening() as there, TransferEngine() as here:
        peer = here.open(there.address, timeout_ms=MS)
        fixed = make_slices(2)
        fixed["op"] = 1
        fixed.flags.writeable = False
        for wrong in (make_slices(4)[::2], make_slices(4).reshape(2, 2), fixed):
            with pytest.raises(UsageError):
                here.submit(peer, wrong, timeout_ms=MS)
        here.read(peer, make_slices(0), timeout_ms=MS)
        assert SLICE.itemsize == 48


# ---- lifetimes


def test_an_engine_closes_what_was_made_from_it() -> None:
    engine, other = listening(), listening()
    region = engine.register(bytearray(10))
    peer = engine.open(other.address, timeout_ms=MS)
    engine.close()
    engine.close()
    assert region.closed
    assert peer.closed
    with pytest.raises(TransferCancelled):
        peer.request(1, b"", timeout_ms=MS)
    assert engine.inbox.receive(MS) is None
    other.close()


def test_wake_ends_one_receive() -> None:
    with TransferEngine() as engine:
        engine.inbox.wake()
        assert engine.inbox.receive(MS) is None
        assert engine.inbox.receive(0) is None


def test_views_of_memory_and_mappings_outlive_everything() -> None:
    engine = listening()
    memory = Memory(4096)
    view = memory.view()
    view[:3] = b"abc"
    region = engine.register(memory)
    mapping = engine.open(engine.address, timeout_ms=MS).map(region.id, timeout_ms=MS)
    seen = mapping.view()
    mapping.close()
    engine.close()
    memory.close()
    gc.collect()
    assert bytes(seen[:3]) == bytes(view[:3]) == b"abc"
    with pytest.raises(UsageError):
        memory.view()


def test_a38_peers_that_come_and_go_leave_nothing_behind() -> None:
    with listening() as there:

        def round_trip() -> None:
            with TransferEngine(EngineOptions(transports=("shm", "tcp"))) as here:
                here.open(there.address, timeout_ms=MS).send(1, b"x", timeout_ms=MS)
                assert there.inbox.receive(MS) is not None
            for _ in range(MS // 10):
                if not there.describe()["peers"]:
                    return
                there.inbox.receive(10)

        round_trip()
        before = (len(os.listdir("/proc/self/fd")), threading.active_count())
        for _ in range(1000):
            round_trip()
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a38_ten_thousand_failed_connects_leave_nothing_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    def fail(engine: TransferEngine, count: int) -> None:
        for _ in range(count):
            with pytest.raises(PeerUnreachable):
                engine.open(f"127.0.0.1:{port}", timeout_ms=MS)

    with TransferEngine() as engine:
        fail(engine, 200)  # what is kept once is kept by now
        before = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        memory = resident_bytes()
        fail(engine, 10_000)
        assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before
        assert resident_bytes() - memory < 4 << 20


def test_a45_small_reads_over_tcp_are_not_held_up() -> None:
    """No delayed acknowledgement (40 ms) and no timer is on the way. The best of a few rounds, as
    the machine may be busy."""
    with listening(transports=("tcp",)) as there, TransferEngine() as here:
        region = there.register(bytearray(4096))
        peer = here.open(there.address, timeout_ms=MS)
        target = np.zeros(4096, np.uint8)
        slices = make_slices(1)
        slices["region"], slices["length"], slices["local"] = region.id, 4096, target.ctypes.data

        def p99_ms() -> float:
            times = []
            for _ in range(200):
                began = time.perf_counter()
                here.read(peer, slices, timeout_ms=MS)
                times.append(time.perf_counter() - began)
            return sorted(times)[198] * 1000

        assert min(p99_ms() for _ in range(5)) < 2


def test_f20_many_transfers_need_few_sockets() -> None:
    with listening(transports=("tcp",)) as there, TransferEngine() as here:
        region = there.register(bytearray(4096))
        target = np.zeros(4096, np.uint8)
        slices = make_slices(1000)
        slices["region"], slices["length"], slices["local"] = region.id, 64, target.ctypes.data
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(100):
            peer = here.open(there.address, timeout_ms=MS)
            here.read(peer, slices, timeout_ms=MS)
            peer.close()
            peer = here.open(there.address, timeout_ms=MS)
            here.write(peer, slices[:0], timeout_ms=MS)
        assert here.describe()["peers"][0]["transport"] == "tcp"
        assert len(os.listdir("/proc/self/fd")) - before < 100


# ---- other processes


def test_a71_programs_started_meanwhile_inherit_nothing() -> None:
    with listening() as there, TransferEngine(EngineOptions(transports=("shm",))) as here:
        memory = Memory(4096, "not for children")
        there.register(memory)
        here.open(there.address, timeout_ms=MS)
        listed = subprocess.run(
            [sys.executable, "-c", "import os; print(*map(os.readlink, ["
             "f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd')"
             " if os.path.lexists(f'/proc/self/fd/{n}')]), sep='\\n')"],
            capture_output=True, text=True, check=True, close_fds=False,
        ).stdout  # fmt: skip
        assert "memfd" not in listed
        assert "socket" not in listed


def test_a72_after_fork_every_call_in_the_child_says_so() -> None:
    with listening() as engine:
        peer = engine.open(engine.address, timeout_ms=MS)
        region = engine.register(bytearray(100))
        receiving, reporting = os.pipe()
        child = os.fork()
        if child == 0:
            said = []
            for act in (
                lambda: engine.inbox.receive(MS),
                lambda: peer.request(1, b"", timeout_ms=MS),
                lambda: engine.open(engine.address, timeout_ms=MS),
                engine.describe,
            ):
                try:
                    act()
                    said.append("worked")
                except UsageError as error:
                    said.append("fork" if "fork()" in str(error) else "unclear")
            engine.close()
            os.write(reporting, " ".join(said).encode())
            os._exit(0)
        os.close(reporting)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(receiving, 1000) == b"fork fork fork fork"
        os.close(receiving)
        thread = serve_one(engine)
        assert peer.request(1, b"parent", timeout_ms=MS) == b"parent"
        thread.join()
        region.close()


def test_a50_an_engine_left_open_does_not_hold_up_the_exit() -> None:
    program = (
        "import threading\n"
        "from mooncake_py.transfer import *\n"
        "engine = TransferEngine(EngineOptions(listen='127.0.0.1:0'))\n"
        "region = engine.register(bytearray(100))\n"
        "peer = engine.open(engine.address, timeout_ms=1000)\n"
        "threading.Thread(target=lambda: engine.inbox.receive(60000), daemon=True).start()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=30, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_batch_descriptor_works_with_select_after_the_fact() -> None:
    with listening() as there, TransferEngine() as here:
        region = there.register(bytearray(b"z" * 10))
        target = np.zeros(10, np.uint8)
        slices = make_slices(1)
        slices["op"], slices["region"], slices["length"] = 1, region.id, 10
        slices["local"] = target.ctypes.data
        batch = here.submit(here.open(there.address, timeout_ms=MS), slices, timeout_ms=MS)
        batch.wait(MS)
        assert select.select([batch], [], [], MS / 1000)[0]
        assert bytes(target) == b"z" * 10
