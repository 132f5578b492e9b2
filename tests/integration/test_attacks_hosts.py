"""Other users, other network namespaces, few descriptors: what is refused there is done another
way. Tests that need root to make such a place are left out without it."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_py import StoreClient
from mooncake_py.ops.cluster import Cluster, ClusterOptions

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65_534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and ip to make the place"
)
OPTIONS = ClusterOptions(node_count=1, segment_bytes=64 << 20)

CLIENT = """
import sys
sys.path.insert(0, {root!r})
from mooncake_py import StoreClient
with StoreClient({master!r}) as store:
    for key, value in (("large", bytes(3_000_000)), ("small", b"small"), ("empty", b"")):
        store.put(key, value)
        assert store.get(key) == value
    print(*sorted({{peer["transport"] for peer in store._engine.describe()["peers"]}}))
"""


def client(prefix: list[str], master: str) -> str:
    """Transports of a client that puts and gets behind a command prefix."""
    code = CLIENT.format(root=str(ROOT), master=master)
    done = subprocess.run(
        [*prefix, sys.executable, "-I", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace named so, joined to this one by 10.213.7.1 (here) and 10.213.7.2. One at
    a time: another file's tests may run beside these."""
    name = "mooncake-" + uuid.uuid4().hex[:5]
    here, there = name[-5:] + "-a", name[-5:] + "-b"
    inside = ["ip", "netns", "exec", name]
    commands = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name],
        ["ip", "addr", "add", "10.213.7.1/24", "dev", here],
        ["ip", "link", "set", here, "up"],
        [*inside, "ip", "addr", "add", "10.213.7.2/24", "dev", there],
        [*inside, "ip", "link", "set", there, "up"],
    ]
    turn = os.open(__file__, os.O_RDONLY)
    fcntl.flock(turn, fcntl.LOCK_EX)
    try:
        for command in commands:
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode != 0:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        yield name
    finally:  # the link first: the kernel ends namespaces, and what is in them, some time later
        subprocess.run(["ip", "link", "del", here], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        os.close(turn)


@needs_root
def test_f13_a_client_in_another_network_namespace_uses_tcp(namespace: str) -> None:
    options = ClusterOptions(node_count=1, segment_bytes=64 << 20, host="10.213.7.1")
    with Cluster(options) as cluster:
        assert client(["ip", "netns", "exec", namespace], cluster.address) == "tcp"


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv to be somebody else")
def test_a85_a_client_of_another_user_works_without_reading_foreign_memory() -> None:
    """process_vm_readv is refused between users; puts go another way and gets are mapped."""
    if not _nobody_can_run():
        pytest.skip("this interpreter cannot be run by another user")
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    with Cluster(OPTIONS) as cluster:
        assert client(prefix, cluster.address) == "shm"


def _nobody_can_run() -> bool:
    """Interpreter and package may lie where only their owner comes."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import mooncake_py.store.client"
    command = [sys.executable, "-I", "-c", code]
    try:
        done = subprocess.run(
            command, user=NOBODY, group=NOBODY, capture_output=True, check=False, cwd="/"
        )
    except PermissionError:
        return False
    return done.returncode == 0


def test_a38_daemons_with_few_descriptors_survive_many_connections() -> None:
    """More connections than descriptors: nobody spins or dies, and all is well afterwards."""
    if shutil.which("prlimit") is None:
        pytest.skip("needs prlimit to lower the limit of a running process")
    with Cluster(OPTIONS) as cluster:
        node = cluster.nodes[0]
        for daemon in (cluster.master, node):
            limit = ["prlimit", "--pid", str(daemon.child.pid), "--nofile=64:64"]
            subprocess.run(limit, check=True)
        fields = cluster.master.fields | node.fields
        with StoreClient(cluster.address, transports=("tcp",)) as store:
            store.put("key", bytes(100_000))
            for name in ("grpc", "lane", "engine", "health"):
                host, _, port = fields[name].rpartition(":")
                crowd = [socket.create_connection((host, int(port)), 5) for _ in range(120)]
                assert store.get("key") == bytes(100_000), name
                for connection in crowd:
                    connection.close()
                with StoreClient(cluster.address) as another:
                    assert another.get("key") == bytes(100_000), name
        assert cluster.casualties() == []


def test_c07_a_process_without_descriptors_says_which_limit_to_raise() -> None:
    """A client that cannot be opened names the limit, and one that is open goes on."""
    code = """
import os, resource, sys
from mooncake_py import StoreClient
from mooncake_py.errors import OutOfSpace
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with StoreClient(sys.argv[1]) as store:
    store.put("key", bytes(100_000))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    assert store.get("key") == bytes(100_000)
    try:
        StoreClient(sys.argv[1])
    except OutOfSpace as error:
        print(error)
    for descriptor in held:
        os.close(descriptor)
"""
    with Cluster(OPTIONS) as cluster:
        command = [sys.executable, "-c", code, cluster.address]
        done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ulimit -n" in done.stdout
