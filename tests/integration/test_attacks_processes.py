"""What kills, stops and bad moments do to processes: the promises that have to hold anyway."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from processes import wait_until

from mooncake_py import StoreClient
from mooncake_py.master.client import MasterClient
from mooncake_py.ops.child import Child
from mooncake_py.ops.cluster import Cluster, ClusterOptions

MIB = 1 << 20
CYCLES = 6
SEGMENT = 32 * MIB
NODE = "mooncake_py.store.node"


@pytest.fixture
def lone_master() -> Iterator[Cluster]:
    options = ClusterOptions(node_count=0, master_arguments=("--metrics", "127.0.0.1:0"))
    with Cluster(options) as running:
        yield running


def mapped_nbytes() -> int:
    """Shared memory that this process has mapped, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssShmem"].split()[0]) << 10


def named_node(cluster: Cluster, name: str = "same") -> Child:
    arguments = ["--master", cluster.address, "--name", name, "--segment-bytes", str(SEGMENT)]
    return Child(f"{name}-{os.urandom(4).hex()}", NODE, arguments, cluster.folder)


def wait_ready(node: Child) -> None:
    line = node.line(30_000)
    assert line is not None, node.complaint()
    assert " ready " in line


def test_a70_a_client_lets_go_of_the_memory_of_killed_nodes(lone_master: Cluster) -> None:
    """One client outlives nodes that are killed and started again under their name at once: each
    start works, and the dead nodes' memory is given back although nobody calls the client."""
    before = mapped_nbytes()
    with StoreClient(lone_master.address) as store:
        for cycle in range(CYCLES):
            node = named_node(lone_master)
            wait_ready(node)
            store.put(f"cycle/{cycle}", bytes(MIB))
            assert store.get(f"cycle/{cycle}") == bytes(MIB)
            assert mapped_nbytes() - before >= SEGMENT, "the test must see what it measures"
            node.kill()
        wait_until(lambda: mapped_nbytes() - before < SEGMENT, "dead nodes' memory is unmapped")


def test_f30_a_node_that_waits_for_its_master_leaves_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and never answers
        master = f"127.0.0.1:{silent.getsockname()[1]}"
        arguments = ["--master", master, "--segment-bytes", "1MiB"]
        node = Child("waiting", NODE, arguments, tmp_path)
        silent.settimeout(30)
        connection, _ = silent.accept()
        with connection:
            node.ask_to_stop()
            assert node.wait(5_000) == 0


def test_a49_two_signals_at_once_end_a_node(lone_master: Cluster) -> None:
    """Right after the ready line, when the main thread is just going to sleep; often, since a
    signal that is slept through shows in some of the tries only."""
    for _ in range(8):
        node = named_node(lone_master)
        wait_ready(node)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(node.pid, number)
        assert node.wait(10_000) in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT)


def test_a31_a_signal_to_any_thread_drains_a_node_and_ends_it(lone_master: Cluster) -> None:
    """The kernel may give it to one that waits in native code or in gRPC's core."""
    node = named_node(lone_master)
    wait_ready(node)
    other = max(int(each.name) for each in Path(f"/proc/{node.pid}/task").iterdir())
    assert other != node.pid
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.tgkill(node.pid, other, signal.SIGTERM) == 0
    assert node.wait(10_000) == 0
    assert "drained: " in (lone_master.folder / f"{node.name}.stderr").read_text()
    wait_until(lambda: not segments(lone_master), "the master knows it no more")


def segments(cluster: Cluster) -> list[str]:
    with closing(MasterClient(cluster.address)) as master:
        return [each.node for each in master.status(timeout_ms=5_000).segments]


def test_a24_sixteen_nodes_that_start_at_once_get_addresses_of_their_own(
    lone_master: Cluster,
) -> None:
    """Every port is bound by who tells of it, so nobody else can have it from then on."""
    nodes = [named_node(lone_master, f"node{i}") for i in range(16)]
    for node in nodes:
        wait_ready(node)
    with closing(MasterClient(lone_master.address)) as master:
        found = master.status(timeout_ms=5_000).segments
    assert len({each.node for each in found}) == 16
    assert len({each.address for each in found}) == 16
    assert {each.state for each in found} == {"alive"}
    for node in nodes:
        node.kill()


def test_a43_scrapers_that_hang_up_or_say_nothing_keep_nobody_out(lone_master: Cluster) -> None:
    host, _, port = lone_master.master.fields["metrics"].rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=5) for _ in range(50)]
    for connection in silent[:25]:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + [0] * 7))
        connection.close()  # a reset
    with urllib.request.urlopen(f"http://{host}:{port}/health", timeout=5) as answer:
        assert answer.read() == b"ok"
    for connection in silent[25:]:
        connection.close()
    log = (lone_master.folder / "master.stderr").read_text()
    assert "Traceback" not in log


def test_a72_a_child_that_ends_leaves_its_parents_client_alone(lone_master: Cluster) -> None:
    lone_master.start_node()
    code = """
import os, sys
from mooncake_py import StoreClient
store = StoreClient(sys.argv[1])
store.put("key", bytes(100_000))
pid = os.fork()
if pid == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert store.get("key") == bytes(100_000)
"""
    command = [sys.executable, "-c", code, lone_master.address]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


class _Interrupt(Exception):
    pass


def _interrupt(*_: object) -> None:
    raise _Interrupt


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a51_an_exception_out_of_a_signal_handler_leaves_the_client_whole(
    lone_master: Cluster, transport: str
) -> None:
    """Calls are interrupted at many moments; what is read afterwards is right and close is quick,
    so no call is still counted and nobody writes into memory that was given back."""
    lone_master.start_node()
    value = os.urandom(8 * MIB)
    interrupted = 0
    former = signal.signal(signal.SIGALRM, _interrupt)
    try:
        with StoreClient(lone_master.address, transports=(transport,)) as store:
            store.put("key", value)
            for turn in range(40):
                signal.setitimer(signal.ITIMER_REAL, 0.0002 * (turn + 1))
                try:
                    assert store.get("key") == value
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except _Interrupt:
                    interrupted += 1
            assert store.get("key") == value
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert interrupted, "the test must interrupt something"
