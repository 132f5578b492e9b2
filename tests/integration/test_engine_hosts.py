"""Engines in other network and pid namespaces, and many processes at once: what is chosen, and why.

The same host is not the same process, and equal addresses are not the same host."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from test_attacks_hosts import namespace, needs_root

from mooncake_py.errors import PeerUnreachable
from mooncake_py.transfer import EngineOptions, TransferEngine

__all__ = ["namespace"]  # the fixture

ROOT = Path(__file__).resolve().parents[2]
MS = 10_000
FOUND_S = 100  # a minute, the time for which data may go without an answer, and a busy machine
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


@needs_root
@pytest.mark.timeout(2 * FOUND_S)
@pytest.mark.skipif(float(os.environ.get("SOAK_SECONDS", "0")) < 60, reason="a minute: ./dev soak")
def test_a43_a_half_open_connection_is_found_and_an_idle_one_survives(namespace: str) -> None:
    """One peer's cable is pulled; nobody says anything for as long as that takes to be found."""
    inside = ["ip", "netns", "exec", namespace]
    idle = TransferEngine(EngineOptions(listen="127.0.0.1:0", transports=("tcp",)))
    with (
        served(inside, "10.213.7.2:0", "far") as address,
        idle,
        TransferEngine(EngineOptions(transports=("tcp",))) as here,
    ):
        idle.on_message(lambda message: message.reply(b"idle"))
        lives, cut = (here.open(one, timeout_ms=MS) for one in (idle.address, address))
        assert cut.request(1, b"", timeout_ms=MS) == b"far"
        links = subprocess.run([*inside, "ip", "-o", "-4", "addr"], capture_output=True, text=True,
                               check=True).stdout  # fmt: skip
        (link,) = (line.split()[1] for line in links.splitlines() if "10.213.7.2" in line)
        subprocess.run([*inside, "ip", "link", "set", link, "down"], check=True)
        end, pause = time.monotonic() + FOUND_S, threading.Event()
        while len(here.describe()["peers"]) > 1:
            assert time.monotonic() < end, "the half-open connection was not found"
            pause.wait(0.1)
        with pytest.raises(PeerUnreachable):
            cut.request(1, b"", timeout_ms=MS)
        assert lives.request(1, b"", timeout_ms=MS) == b"idle"


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
