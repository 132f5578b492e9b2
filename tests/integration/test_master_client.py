"""`MasterClient` against masters that are absent, foreign, replaced, or shared by many threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from mooncake_py.clock import SystemClock
from mooncake_py.errors import MasterUnavailable, NotLeader, UsageError, VersionMismatch
from mooncake_py.master.client import MasterClient
from mooncake_py.master.link import RECONNECT_MS
from mooncake_py.wire import lane
from mooncake_py.wire.v1 import master_pb2 as pb
from tests.conformance.master_battery import T, mount, stored
from tests.integration.test_master_doors import running_master

Played = Callable[[dict[str, Callable[[bytes], Any]]], str]


@pytest.fixture
def played() -> Iterator[Played]:
    """A server whose answers the test makes: method name -> request bytes -> reply message."""
    servers = []

    def serve(answers: dict[str, Callable[[bytes], Any]]) -> str:
        server = grpc.server(futures.ThreadPoolExecutor(2))
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                lambda request, context, answer=answer: answer(request).SerializeToString()
            )
            for name, answer in answers.items()
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(lane.SERVICE, handlers),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield serve
    for server in servers:
        server.stop(0).wait(10)


def connect_reply(term: int, major: int = 1, cluster_id: str = "c") -> Any:
    return pb.ConnectReply(
        outcome=pb.Outcome(term=term), protocol_major=major, release="9.9", batch_max_keys=4096,
        cluster_id=cluster_id,
    )  # fmt: skip


def test_f28_no_master_is_said_soon_and_in_time() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        client = MasterClient(f"127.0.0.1:{unused.getsockname()[1]}")
        clock = SystemClock()
        for timeout_ms in (200, 60_000):
            begun_ms = clock.now_ms()
            with pytest.raises(MasterUnavailable, match="no master at"):
                client.exists("", [b"a"], timeout_ms=timeout_ms)
            assert clock.now_ms() - begun_ms < min(timeout_ms, RECONNECT_MS) + 500
        client.close()


def test_f28_a_master_that_accepts_and_says_nothing_is_bounded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = MasterClient(f"127.0.0.1:{mute.getsockname()[1]}")
        clock = SystemClock()
        begun_ms = clock.now_ms()
        with pytest.raises(MasterUnavailable):
            client.exists("", [b"a"], timeout_ms=300)
        assert clock.now_ms() - begun_ms < 400
        client.close()


def test_connect_waits_for_a_master_that_is_still_starting(played: Played) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    client = MasterClient(f"127.0.0.1:{port}")
    found: list[str] = []
    waiter = threading.Thread(
        target=lambda: found.append(client.connect(timeout_ms=20_000).cluster_id)
    )
    waiter.start()
    with running_master(listen=f"127.0.0.1:{port}"):
        waiter.join(20)
        assert len(found) == 1
    client.close()


@pytest.mark.parametrize("address", ["nowhere", "host:", "::1:5", "http://host:5"])
def test_a84_bad_addresses_are_refused_at_once(address: str) -> None:
    with pytest.raises(UsageError):
        MasterClient(address)


def test_a29_another_major_version_is_refused_naming_both(played: Played) -> None:
    client = MasterClient(played({"Connect": lambda _: connect_reply(1, major=9)}))
    with pytest.raises(VersionMismatch, match=r"protocol 1.* 9 \(release 9\.9\)"):
        client.exists("", [b"a"], timeout_ms=T)
    client.close()


def test_a29_a_server_of_another_kind_is_a_version_mismatch(played: Played) -> None:
    client = MasterClient(played({}))
    with pytest.raises(VersionMismatch, match="Connect"):
        client.connect(timeout_ms=T)
    client.close()


def test_a27_answers_of_an_older_term_are_refused(played: Played) -> None:
    term = {"now": 5}
    address = played(
        {
            "Connect": lambda _: connect_reply(term["now"]),
            "Exists": lambda _: pb.ExistsReply(outcome=pb.Outcome(term=term["now"]), present=b"\1"),
        }
    )
    client = MasterClient(address)
    assert client.exists("", [b"a"], timeout_ms=T).tolist() == [1]
    term["now"] = 4
    for _ in range(2):
        with pytest.raises(NotLeader):
            client.exists("", [b"a"], timeout_ms=T)
    term["now"] = 6
    assert client.exists("", [b"a"], timeout_ms=T).tolist() == [1]
    client.close()


def test_a_new_cluster_on_the_same_address_begins_anew(played: Played) -> None:
    state = {"term": 5, "cluster": "one"}
    address = played(
        {
            "Connect": lambda _: connect_reply(state["term"], cluster_id=state["cluster"]),
            "Exists": lambda _: pb.ExistsReply(
                outcome=pb.Outcome(term=state["term"]), present=b"\1"
            ),
        }
    )
    client = MasterClient(address)
    client.exists("", [b"a"], timeout_ms=T)
    state.update(term=1, cluster="two")
    assert client.exists("", [b"a"], timeout_ms=T).tolist() == [1]
    assert client.connect(timeout_ms=T).cluster_id == "two"
    client.close()


def test_a51_many_threads_get_their_own_answers() -> None:
    with running_master() as address:
        client = MasterClient(address)
        client.mount(mount(client), timeout_ms=T)
        for n in range(16):
            stored(client, f"tenant-{n}", [b"%d" % i for i in range(n)])
        wrong: list[int] = []

        def caller(n: int) -> None:
            keys = [b"%d" % i for i in range(16)]
            for _ in range(40):
                present = client.exists(f"tenant-{n}", keys, timeout_ms=20_000)
                rows = client.locate(f"tenant-{n}", keys, timeout_ms=20_000).rows
                if present.sum() != n or len(rows) != n:
                    wrong.append(n)

        threads = [threading.Thread(target=caller, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        client.close()


def test_a_closed_client_says_so() -> None:
    with running_master() as address:
        client = MasterClient(address)
        client.connect(timeout_ms=T)
        client.close()
        client.close()
        with pytest.raises(MasterUnavailable, match="closed"):
            client.exists("", [b"a"], timeout_ms=T)
