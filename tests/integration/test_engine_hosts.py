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
SILENCE_MS = 2_000
FOUND_S = 60  # those, a second, and a busy machine
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
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a43_a_half_open_connection_is_found_and_an_idle_one_survives(
    namespace: str, busy: bool
) -> None:
    """One peer's cable is pulled, in silence or while it is being read from: it is lost when it has
    not been heard for `silence_max_ms`, and a peer that is merely idle is not."""
    inside = ["ip", "netns", "exec", namespace]
    tcp = EngineOptions(listen="127.0.0.1:0", transports=("tcp",), silence_max_ms=SILENCE_MS)
    with (
        served(inside, "10.213.7.2:0", "far") as address,
        TransferEngine(tcp) as idle,
        TransferEngine(tcp) as here,
    ):
        idle.on_message(lambda message: message.reply(b"idle"))
        lives, cut = (here.open(one, timeout_ms=MS) for one in (idle.address, address))
        assert cut.request(1, b"", timeout_ms=MS) == b"far"
        pull_cable(namespace)
        began, pause = time.monotonic(), threading.Event()
        if busy:
            with pytest.raises(PeerUnreachable):
                cut.request(1, bytes(1 << 20), timeout_ms=FOUND_S * 1000)
        while len(here.describe()["peers"]) > 1:
            assert time.monotonic() < began + FOUND_S, "the half-open connection was not found"
            pause.wait(0.05)
        took_s = time.monotonic() - began
        assert took_s > SILENCE_MS / 1000 / 2  # a short hole in the network is survived
        with pytest.raises(PeerUnreachable):
            cut.request(1, b"", timeout_ms=MS)
        assert lives.request(1, b"", timeout_ms=MS) == b"idle"
        sys.stdout.write(f"found after {took_s:.1f} s\n")


def pull_cable(namespace: str) -> None:
    link = namespace[-5:] + "-b"  # as the fixture calls it
    down = ["ip", "netns", "exec", namespace, "ip", "link", "set", link, "down"]
    subprocess.run(down, check=True)


@needs_root
def test_a84_a_peer_is_called_from_the_address_that_was_asked_for(namespace: str) -> None:
    """This host has two addresses in the peer's network; the system would take the first."""
    link = namespace[-5:] + "-a"  # as the fixture calls it
    subprocess.run(["ip", "addr", "add", "10.213.7.3/24", "dev", link], check=True)
    inside = ["ip", "netns", "exec", namespace]
    with served(inside, "10.213.7.2:0", "far") as address:
        for listen, source in (("10.213.7.3:0", "10.213.7.3"), ("", "10.213.7.1")):
            with TransferEngine(EngineOptions(listen=listen, transports=("tcp",))) as engine:
                assert engine.open(address, timeout_ms=MS).request(1, b"", timeout_ms=MS) == b"far"
                (peer,) = engine.describe()["peers"]
                assert {path["remote"] for path in peer["paths"]} == {address}
                assert {path["local"].rpartition(":")[0] for path in peer["paths"]} == {source}


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
