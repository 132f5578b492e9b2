"""How bytes travel between processes of one host: which way is chosen, and what it costs.

How fast each way is, beside memcpy and plain sockets in the same run: `python -m benchmarks`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from mooncake_py import StoreClient, TransferEngine
from mooncake_py.ops.cluster import Cluster, ClusterOptions

Bytes = npt.NDArray[np.uint8]
MIB = 1 << 20
ROUNDS_MIN, TRY_MS = 5, 15_000
CONNECTIONS_MAX = 4  # on a busy machine, some connections stay at half speed for all their life
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(ClusterOptions(node_count=2, segment_bytes=256 * MIB)) as running:
        yield running


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


# --- what it costs --------------------------------------------------------------------------------


def test_f21_shared_memory_is_chosen_and_no_byte_passes_a_socket(cluster: Cluster) -> None:
    """A get of 16 MiB is a copy out of the mapping: the engine's connections carry none of it."""
    source = np.random.default_rng(1).integers(0, 255, 16 * MIB, dtype=np.uint8)
    target = np.zeros_like(source)

    def carried(client: StoreClient) -> int:
        return sum(peer["bytes_in"] for peer in client._engine.describe()["peers"])

    for transport, expected in (("shm", 0), ("tcp", 16 * MIB)):
        with StoreClient(cluster.address, transports=(transport,)) as store:
            store.put_batch(["f21"], [source])
            before = carried(store)
            assert store.get("f21", into=target) == source.nbytes
            assert expected <= carried(store) - before < expected + MIB
        assert np.array_equal(target, source)
        target[:] = 0


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
