"""How bytes travel between processes of one host: which way is chosen, and how fast it is.

Speeds are the best of several rounds in which ours and the plain way take turns, so that a busy
machine slows both; the bars are far enough below what a quiet one shows to mean a defect.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from mooncake_py import StoreClient, TransferEngine
from mooncake_py.clock import Deadline, SystemClock, stopwatch_ns
from mooncake_py.master.client import MasterClient
from mooncake_py.model import EXTENT_HEADER_BYTES
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.transfer import SLICE, EngineOptions

Bytes = npt.NDArray[np.uint8]
MIB = 1 << 20
ROUNDS_MIN, TRY_MS = 5, 15_000
CONNECTIONS_MAX = 4  # on a busy machine, some connections stay at half speed for all their life
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(ClusterOptions(node_count=2, segment_bytes=256 * MIB)) as running:
        yield running


def share_of(plain: Callable[[], object], ours: Callable[[], object], enough: float) -> float:
    """Speed of ours as a share of the plain way's, by their best rounds so far; tried again until
    it is enough, for as long as a busy machine may need to let both run undisturbed once."""
    best = [1 << 62] * 2
    deadline = Deadline(TRY_MS, SystemClock())
    for number in itertools.count(1):
        for index, way in enumerate((plain, ours)):
            start = stopwatch_ns()
            way()
            best[index] = min(best[index], stopwatch_ns() - start)
        if deadline.passed() or (number >= ROUNDS_MIN and best[0] / best[1] >= enough):
            break
    return best[0] / best[1]


# --- which way ------------------------------------------------------------------------------------

# Two processes hold different bytes at the same address: a fork, before any thread runs.
TWINS = """
import mmap, os
import numpy as np
from mooncake_py import TransferEngine
from mooncake_py.transfer import SLICE, EngineOptions

memory = mmap.mmap(-1, 1 << 16)
receive, send = os.pipe()
until, hold = os.pipe()
is_child = os.fork() == 0
memory[:] = (b"C" if is_child else b"P") * len(memory)
engine = TransferEngine(EngineOptions(listen="127.0.0.1:0"))
region = engine.register(memory)
if is_child:
    os.close(hold)
    os.write(send, f"{engine.address} {region.id}".encode())
    os.read(until, 1)  # ends with the parent
    os._exit(0)
address, number = os.read(receive, 100).decode().split()
peer = engine.open(address, timeout_ms=5000)
target = np.zeros(1 << 16, np.uint8)
slices = np.zeros(1, SLICE)
slices["region"], slices["local"], slices["length"] = int(number), target.ctypes.data, target.nbytes
engine.read(peer, slices, timeout_ms=5000)
print(peer.transport, set(target.tobytes()) == {ord("C")})
"""


def test_a35_equal_addresses_in_two_processes_are_not_the_same_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWINS], input="", cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["shm", "True"]


def test_a35_the_shortcut_within_a_process_needs_the_same_process(cluster: Cluster) -> None:
    """Two engines here, two nodes and a master on the same host and the same address."""
    with TransferEngine() as mine, ExitStack() as opened:
        for node in cluster.nodes:
            peer = opened.enter_context(mine.open(node.fields["engine"], timeout_ms=5_000))
            assert peer.transport == "shm"


def test_a35_all_on_one_host_under_load(cluster: Cluster) -> None:
    """Four clients of this process, over both ways at once, never see each other's bytes."""
    wrong: list[str] = []

    def work(number: int, transport: str) -> None:
        with StoreClient(cluster.address, transports=(transport,)) as store:
            keys = [f"a35/{number}/{i}" for i in range(64)]
            values = [bytes([number, i]) * 20_000 for i in range(64)]
            for _ in range(5):
                store.put_batch(keys, values)
                wrong.extend(
                    key
                    for key, value, got in zip(keys, values, store.get_batch(keys), strict=True)
                    if got != value
                )
                store.remove(keys, force=True)

    threads = [
        threading.Thread(target=work, args=(number, ("shm", "tcp")[number % 2]))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


# --- how fast -------------------------------------------------------------------------------------


def stored_bytes(cluster: Cluster, engine: TransferEngine, key: str, stack: ExitStack) -> Bytes:
    """The object where it lies: in the node's memory, mapped into this process."""
    master = MasterClient(cluster.address, engine=None, role="tool", clock=SystemClock())
    stack.callback(master.close)
    placements = master.locate("default", [key.encode()], timeout_ms=5_000)
    (row,), segment = placements.rows, placements.segments[0]
    peer = stack.enter_context(engine.open(segment.address, timeout_ms=5_000))
    mapping = peer.map(segment.region, timeout_ms=5_000)
    start = int(row["offset"]) + EXTENT_HEADER_BYTES
    return np.frombuffer(mapping.view(), np.uint8)[start : start + int(row["length"])]


def test_f21_shared_memory_is_chosen_and_near_a_plain_copy(cluster: Cluster) -> None:
    """16 MiB with all its checks, against memcpy between the same buffers."""
    source = np.random.default_rng(1).integers(0, 255, 16 * MIB, dtype=np.uint8)
    target = np.zeros_like(source)
    with StoreClient(cluster.address) as store, ExitStack() as stack:
        store.put("f21", source)
        stored = stored_bytes(cluster, stack.enter_context(TransferEngine()), "f21", stack)
        share = share_of(
            lambda: np.copyto(target, stored), lambda: store.get("f21", into=target), 0.7
        )
    assert np.array_equal(target, source)
    assert share >= 0.7, share


def sockets_of_this_process() -> int:
    return sum(
        os.path.exists(f"/proc/self/fd/{fd}")
        and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        for fd in os.listdir("/proc/self/fd")
    )


def test_f20_many_transfers_over_tcp_leave_few_sockets(cluster: Cluster) -> None:
    with StoreClient(cluster.address, transports=("tcp",)) as store:
        keys = [f"f20/{i}" for i in range(100)]
        store.put_batch(keys, [b"v" * 4096] * 100)
        before = sockets_of_this_process()
        for _ in range(100):
            assert all(isinstance(got, bytes) for got in store.get_batch(keys))
        assert sockets_of_this_process() <= before < 100


# Each of four plain connections carries its quarter of 64 MiB, as often as it is asked to.
SENDER = """
import socket, sys, threading
quarter = 16 << 20
def send(data):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as lane:
        while lane.recv(1):
            lane.sendall(data)
memory = memoryview(bytearray(4 * quarter))
for i in range(4):
    threading.Thread(target=send, args=(memory[i * quarter : (i + 1) * quarter],)).start()
"""

# A process that offers 64 MiB to whoever reads it.
OWNER = """
import sys
from mooncake_py import TransferEngine
from mooncake_py.transfer import EngineOptions, Memory
with TransferEngine(EngineOptions(listen="127.0.0.1:0")) as engine, Memory(64 << 20) as memory:
    region = engine.register(memory)
    print(engine.address, region.id, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def plain_lanes() -> Iterator[Callable[[], None]]:
    """Receive 64 MiB from another process over four plain connections, a thread each."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = server.getsockname()[1]
        sender = subprocess.Popen([sys.executable, "-I", "-S", "-c", SENDER, str(port)])
        stack.callback(sender.wait, 30)
        sockets = [stack.enter_context(server.accept()[0]) for _ in range(4)]
        targets = [memoryview(bytearray(16 * MIB)) for _ in sockets]

        def receive(lane: socket.socket, target: memoryview) -> None:
            lane.send(b"x")
            at = 0
            while at < len(target):
                at += lane.recv_into(target[at:])

        def receive_all() -> None:
            pairs = zip(sockets, targets, strict=True)
            threads = [threading.Thread(target=receive, args=pair) for pair in pairs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        yield receive_all


@pytest.fixture
def owner() -> Iterator[tuple[str, int]]:
    """Address and region of 64 MiB in another process."""
    command = [sys.executable, "-c", OWNER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout is not None
        address, region = process.stdout.readline().split()
        yield address, int(region)
        assert process.stdin is not None
        process.stdin.close()


def test_f20_tcp_is_near_plain_sockets(
    owner: tuple[str, int], plain_lanes: Callable[[], None]
) -> None:
    """Slices of 1 MiB over four lanes, against four plain connections."""
    address, region = owner
    target = np.zeros(64 * MIB, dtype=np.uint8)
    slices = np.zeros(64, SLICE)
    slices["region"], slices["length"] = region, MIB
    slices["remote_offset"] = np.arange(64) * MIB
    slices["local"] = target.ctypes.data + np.arange(64) * MIB
    options = EngineOptions(transports=("tcp",), tcp_lanes=4)
    shares = []
    while len(shares) < CONNECTIONS_MAX and max(shares, default=0) < 0.8:
        with TransferEngine(options) as engine, engine.open(address, timeout_ms=5_000) as peer:
            assert peer.transport == "tcp"
            ours = partial(engine.read, peer, slices, timeout_ms=10_000)
            shares.append(share_of(plain_lanes, ours, 0.8))
    assert max(shares) >= 0.8, shares
