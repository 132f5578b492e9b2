"""The daemons as processes: how they start, refuse to start, answer, stop, and what stays."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import holders_of_memory, shared_memory_names

from mooncake_py import StoreClient
from mooncake_py.ops.child import Child
from mooncake_py.ops.cluster import Cluster, ClusterOptions, Daemon

MASTER, NODE = "mooncake_py.master.server", "mooncake_py.store.node"
MIB = 1 << 20


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    running: list[Child] = []

    def launch(module: str, *arguments: str) -> Daemon:
        name = f"{module.rsplit('.', 1)[1]}-{len(running)}"
        running.append(Child(name, module, arguments, tmp_path))
        return Daemon(running[-1])

    yield launch
    for child in running:
        child.kill()


def refusal(daemon: Daemon) -> tuple[int, str]:
    """Exit code and the one line of a daemon that does not start."""
    assert daemon.child.line(30_000) is None, "it became ready"
    code = daemon.child.stop(30_000)
    return code, daemon.child.complaint()


def health(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status


def start_master(launch: Callable[..., Daemon], *arguments: str) -> Daemon:
    defaults = ("--listen", "127.0.0.1:0", "--lane-listen", "127.0.0.1:0", "--metadata", "memory")
    master = launch(MASTER, *defaults, *arguments)
    master.wait_ready(30_000)
    return master


def start_node(launch: Callable[..., Daemon], master: str, *arguments: str) -> Daemon:
    node = launch(NODE, "--master", master, "--segment-bytes", "16MiB", *arguments)
    node.wait_ready(30_000)
    return node


# --- start and stop -------------------------------------------------------------------------------


def test_f30_both_start_with_addresses_only_and_serve(launch: Callable[..., Daemon]) -> None:
    master = launch(MASTER, "--listen", "127.0.0.1:0")
    master.wait_ready(30_000)
    node = launch(NODE, "--master", master.fields["grpc"], "--listen", "127.0.0.1:0")
    node.wait_ready(60_000)
    assert health(master.fields["grpc"]) == health_pb2.HealthCheckResponse.SERVING
    with StoreClient(master.fields["grpc"]) as store:
        store.put("key", b"value")
        assert store.get("key") == b"value"


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_clean_stop(launch: Callable[..., Daemon], ending: signal.Signals) -> None:
    master = start_master(launch)
    node = start_node(launch, master.fields["grpc"])
    for daemon in (node, master):
        os.kill(daemon.child.pid, ending)
        assert daemon.child.wait(15_000) == 0
        assert "Traceback" not in daemon.child.complaint()


def test_a76_a_node_says_how_long_its_memory_took(launch: Callable[..., Daemon]) -> None:
    master = start_master(launch)
    node = start_node(launch, master.fields["grpc"], "--segment-bytes", "256MiB")
    line = r"0\.2 GiB of memory are mapped and registered, after \d+ ms \(\d+\.\d GiB a second\)"
    assert re.search(line, node.child._stderr_path.read_text())


def test_a_node_that_leaves_is_forgotten_at_once(launch: Callable[..., Daemon]) -> None:
    master = start_master(launch)
    node = start_node(launch, master.fields["grpc"])
    with StoreClient(master.fields["grpc"]) as store:
        store.put("key", b"value")
        assert store.exists("key")
        assert node.child.stop(15_000) == 0
        assert not store.exists("key")


# --- starts that cannot work ----------------------------------------------------------------------


def assert_one_clear_line(daemon: Daemon, name: str, *words: str) -> None:
    code, line = refusal(daemon)
    assert code != 0
    assert line.startswith(f"{name}: ")
    assert "Remedy: " in line
    for word in words:
        assert word in line


def test_a_port_in_use_is_one_line(launch: Callable[..., Daemon]) -> None:
    master = start_master(launch)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        in_use = "already in use"
        memory = ("--metadata", "memory")
        refused = launch(MASTER, "--listen", address, "--lane-listen", "127.0.0.1:0", *memory)
        assert_one_clear_line(refused, "mooncake-master", address, in_use)
        refused = launch(MASTER, "--listen", "127.0.0.1:0", "--lane-listen", address, *memory)
        assert_one_clear_line(refused, "mooncake-master", address, in_use)
        refused = launch(NODE, "--master", master.fields["grpc"], "--listen", address)
        assert_one_clear_line(refused, "mooncake-node", address, in_use)


@pytest.mark.parametrize("module", [MASTER, NODE])
def test_an_address_of_another_machine_is_one_line(
    launch: Callable[..., Daemon], module: str
) -> None:
    refused = launch(module, "--listen", "192.0.2.1:0")
    name = "mooncake-master" if module == MASTER else "mooncake-node"
    assert_one_clear_line(refused, name, "192.0.2.1:0", "this machine has no such address")


def test_an_unwritable_path_is_one_line(launch: Callable[..., Daemon]) -> None:
    path = "/proc/no-such-folder/metadata"
    refused = launch(MASTER, "--listen", "127.0.0.1:0", "--metadata", path)
    assert_one_clear_line(refused, "mooncake-master", "/proc/no-such-folder")


def test_too_little_memory_is_one_line(launch: Callable[..., Daemon]) -> None:
    master = start_master(launch)
    node = launch(NODE, "--master", master.fields["grpc"], "--segment-bytes", "64TiB")
    assert_one_clear_line(node, "mooncake-node", str(64 << 40))


def test_a_master_that_is_not_there_is_one_line(
    launch: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_NODE_START_MS", "1000")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
    node = launch(NODE, "--master", address, "--segment-bytes", "16MiB")
    assert_one_clear_line(node, "mooncake-node", address)


def test_a_node_says_that_it_waits_for_its_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_NODE_START_MS", "2500")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
    words = [sys.executable, "-m", NODE, "--master", address, "--segment-bytes", "16MiB"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"waiting for the master at {address}, 1 s at most" in done.stderr


@pytest.mark.parametrize("module", [MASTER, NODE])
def test_nonsense_is_refused_with_exit_code_2(launch: Callable[..., Daemon], module: str) -> None:
    for arguments in (["--listen", "nowhere"], ["--no-such-option"]):
        code, _ = refusal(launch(module, *arguments))
        assert code == 2


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
    ],
)
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a84_names_and_both_address_families_work(host: str, transports: str) -> None:
    options = ClusterOptions(node_count=1, segment_bytes=16 * MIB, host=host)
    with Cluster(options) as cluster:
        port = cluster.address.rpartition(":")[2]
        with StoreClient(f"{host}:{port}", transports=(transports,)) as store:
            store.put("key", b"v" * 100_000)
            assert store.get("key") == b"v" * 100_000


def test_a84_listening_and_advertised_addresses_are_separate(
    launch: Callable[..., Daemon],
) -> None:
    """Listen on every address, be known by a name."""
    master = launch(
        MASTER, "--listen", "0.0.0.0:0", "--lane-listen", "0.0.0.0:0",
        "--advertise", "localhost", "--metadata", "memory",
    )  # fmt: skip
    master.wait_ready(30_000)
    port = master.fields["grpc"].rpartition(":")[2]
    start_node(launch, f"127.0.0.2:{port}", "--listen", "0.0.0.0:0", "--advertise", "localhost")
    with StoreClient(f"127.0.0.3:{port}", transports=("tcp",)) as store:
        store.put("key", b"value")
        assert store.get("key") == b"value"


# --- what stays -----------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_a70_killed_nodes_leave_no_shared_memory(launch: Callable[..., Daemon]) -> None:
    """50 nodes, killed and replaced, five at a time. Memory that no process holds or maps is
    given back by the kernel; what it is called says whose it is."""
    master = start_master(launch)
    mark, names = uuid.uuid4().hex, shared_memory_names()
    for lap in range(10):
        arguments = ("--master", master.fields["grpc"], "--segment-bytes", "16MiB")
        nodes = [launch(NODE, *arguments, "--name", f"{mark}-{lap}-{i}") for i in range(5)]
        for node in nodes:
            node.wait_ready(60_000)
        with StoreClient(master.fields["grpc"]) as store:  # clients map what they read
            assert store.put_batch([f"{lap}/{i}" for i in range(20)], [b"v" * 9000] * 20)
            store.get_batch([f"{lap}/{i}" for i in range(20)])
            assert {node.child.pid for node in nodes} <= holders_of_memory(mark).keys()
            for node in nodes:
                node.child.kill()
            assert holders_of_memory(mark).keys() <= {os.getpid()}  # the client may still look
        assert holders_of_memory(mark) == {}
    assert shared_memory_names() <= names


def test_a71_children_of_a_client_inherit_nothing(cluster: Cluster) -> None:
    look = """if True:
        import os
        for fd in os.listdir("/proc/self/fd"):
            if os.path.exists(f"/proc/self/fd/{fd}"):
                print(os.readlink(f"/proc/self/fd/{fd}"))"""
    command = [sys.executable, "-I", "-S", "-c", look]

    def seen(**options: bool) -> list[str]:
        done = subprocess.run(command, capture_output=True, text=True, check=True, **options)
        return [word for word in ("memfd", "socket", "eventpoll", "eventfd") if word in done.stdout]

    assert seen(close_fds=False) == []
    for transports in (("shm",), ("tcp",)):
        with StoreClient(cluster.address, transports=transports) as store:
            store.put(f"a71/{transports}", b"v" * MIB)
            assert store.get(f"a71/{transports}") == b"v" * MIB
            assert any(
                "socket" in os.readlink(f"/proc/self/fd/{n}")
                for n in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{n}")
            )
            assert seen(close_fds=False) == []


def test_a71_a_daemons_port_is_free_once_it_is_killed(launch: Callable[..., Daemon]) -> None:
    master = start_master(launch)
    start_node(launch, master.fields["grpc"])
    address = master.fields["grpc"]
    master.child.kill()
    again = launch(MASTER, "--listen", address, "--metadata", "memory")
    again.wait_ready(30_000)
    assert again.fields["grpc"] == address
