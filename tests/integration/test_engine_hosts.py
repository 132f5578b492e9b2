"""Engines in other network and pid namespaces, and many processes at once: what is chosen, and why.

The same host is not the same process, and equal addresses are not the same host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from test_attacks_hosts import namespace, needs_root

from mooncake_py.transfer import EngineOptions, TransferEngine

__all__ = ["namespace"]  # the fixture

ROOT = Path(__file__).resolve().parents[2]
MS = 10_000
SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from mooncake_py.transfer import EngineOptions, TransferEngine
with TransferEngine(EngineOptions(listen=sys.argv[2])) as engine:
    engine.on_message(lambda message: message.reply(sys.argv[3].encode()))
    print(engine.address, flush=True)
    sys.stdin.read()
"""
CLIENT = """
import sys
sys.path.insert(0, sys.argv[1])
from mooncake_py.transfer import TransferEngine
sys.stdin.readline()
with TransferEngine() as engine:
    peer = engine.open(sys.argv[2], timeout_ms=20000)
    print(peer.transport, peer.request(1, b"", timeout_ms=20000).decode(), flush=True)
"""


def start(prefix: list[str], code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-I", "-c", code, str(ROOT), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )


@contextmanager
def served(prefix: list[str], listen: str, name: str) -> Iterator[str]:
    """The address of an engine elsewhere that answers every request with its name."""
    process = start(prefix, SERVER, listen, name)
    try:
        assert process.stdout
        yield process.stdout.readline().strip()
    finally:
        process.communicate()


@needs_root
def test_f21_shm_is_not_chosen_across_network_namespaces(namespace: str) -> None:
    inside = ["ip", "netns", "exec", namespace]
    with served(inside, "10.213.7.2:0", "far") as address, TransferEngine() as engine:
        assert engine.open(address, timeout_ms=MS).request(1, b"", timeout_ms=MS) == b"far"
        (peer,) = engine.describe()["peers"]
        assert peer["transport"] == "tcp"
        assert "unix socket is not on this host" in peer["reason"]


@needs_root
def test_a35_equal_addresses_in_two_network_namespaces_are_two_engines(namespace: str) -> None:
    """Both listen on 10.213.7.1: ours, and one in another namespace that has that address too."""
    inside = ["ip", "netns", "exec", namespace]
    added = ["ip", "addr", "add", "10.213.7.1/32", "dev", "lo"]
    subprocess.run([*inside, *added], check=True)
    subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
    with (
        TransferEngine(EngineOptions(listen="10.213.7.1:0")) as ours,
        served(inside, ours.address, "theirs") as address,
        TransferEngine() as here,
    ):
        assert address == ours.address
        ours.on_message(lambda message: message.reply(b"ours"))
        assert here.open(address, timeout_ms=MS).request(1, b"", timeout_ms=MS) == b"ours"
        for prefix, expected in (([], "shm ours"), (inside, "shm theirs")):
            client = start(prefix, CLIENT, address)
            assert client.communicate("go\n", timeout=60)[0].strip() == expected


def test_a35_equal_process_ids_in_two_pid_namespaces_are_two_processes() -> None:
    """Each is the first process of its namespace, so that their ids are equal to themselves."""
    prefix = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no pid namespaces here")
    with served(prefix, "127.0.0.1:0", "far") as address:
        client = start(prefix, CLIENT, address)
        assert client.communicate("go\n", timeout=60)[0].strip() == "shm far"


def test_a41_sixty_four_processes_connect_at_once() -> None:
    with TransferEngine(EngineOptions(listen="127.0.0.1:0")) as engine, ExitStack() as stack:
        engine.on_message(lambda message: message.reply(b"welcome"), threads=2)
        before = len(os.listdir("/proc/self/fd"))
        clients = [start([], CLIENT, engine.address) for _ in range(64)]
        for client in clients:
            stack.callback(client.kill)
        for client in clients:  # all are imported and wait
            assert client.stdin
            client.stdin.write("go\n")
            client.stdin.flush()
        for client in clients:
            assert client.communicate(timeout=120)[0].strip() == "shm welcome"
        while engine.describe()["peers"]:  # each is noticed when it hangs up
            engine.inbox.receive(10)
        assert len(os.listdir("/proc/self/fd")) - before <= 2 * 64  # the pipes of this test
