"""What the store promises when processes die, stop or misbehave; and what a batch costs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import numpy as np
import pytest
from daemons import calls, send, status, wait_until

from mooncake_py import StoreClient, TransferEngine
from mooncake_py.errors import (
    AccessRefused,
    LeaseExpired,
    MasterUnavailable,
    MooncakeError,
    ObjectExists,
    ObjectNotFound,
    TransferTimeout,
)
from mooncake_py.master.client import MasterClient
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.store import views
from mooncake_py.wire.node import PULL_KIND, PullReply, PullRequest

MIB = 1 << 20
SLACK_MS = 1_500  # what a busy test machine may add to a deadline; the promise itself is 100 ms

WRITER = """
import os, signal, sys
from mooncake_py.master.client import MasterClient
master = MasterClient(sys.argv[1])
grants = master.put_start("default", [b"half-done"], [int(sys.argv[2])], timeout_ms=5000)
assert grants.status.tolist() == [0]
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def quick() -> Iterator[Cluster]:
    """A cluster whose grants end soon."""
    arguments = ["--metrics", "127.0.0.1:0", "--set", "grant_ttl_ms=1500"]
    arguments += ["--set", "grant_margin_ms=200"]
    options = ClusterOptions(segment_bytes=64 * MIB, master_arguments=arguments)
    with Cluster(options) as running:
        yield running


@pytest.fixture
def store(quick: Cluster) -> Iterator[StoreClient]:
    with StoreClient(quick.address) as client:
        yield client


def test_a01_f08_a_killed_writer_leaves_no_object_and_its_space_comes_back(
    quick: Cluster, store: StoreClient
) -> None:
    before = status(quick).used_bytes
    code = subprocess.run(
        [sys.executable, "-c", WRITER, quick.address, str(30 * MIB)], check=False, timeout=60
    ).returncode
    assert code == -signal.SIGKILL
    assert status(quick).used_bytes >= before + 30 * MIB
    assert store.exists("half-done") is False
    with pytest.raises(ObjectNotFound):
        store.get("half-done")

    def writable_again() -> bool:
        try:
            store.put("half-done", b"whole")
        except ObjectExists:
            return False
        return True

    wait_until(writable_again)
    assert store.get("half-done") == b"whole"
    wait_until(lambda: status(quick).used_bytes < before + MIB)
    assert status(quick).counters["grants_reclaimed"] >= 1


def test_f04_a_batch_costs_two_master_calls_to_put_and_one_to_get(
    quick: Cluster, store: StoreClient
) -> None:
    verbs = ("PutStart", "PutEnd", "PutRevoke", "Locate", "Exists", "Report")
    before = {verb: calls(quick, verb) for verb in verbs}
    keys = [f"f04/{i}" for i in range(500)]
    assert store.put_batch(keys, [b"v" * 1000] * 500) == [None] * 500
    assert store.get_batch(keys) == [b"v" * 1000] * 500
    spent = {verb: calls(quick, verb) - before[verb] for verb in verbs}
    assert spent == {**dict.fromkeys(verbs, 0), "PutStart": 1, "PutEnd": 1, "Locate": 1}


def test_f02_object_bytes_do_not_pass_the_master(quick: Cluster, store: StoreClient) -> None:
    def through_the_master() -> float:
        found = status(quick).counters
        doors = ("grpc_received_bytes", "grpc_sent_bytes", "lane_received_bytes", "lane_sent_bytes")
        return sum(found[name] for name in doors)

    before, payload = through_the_master(), 0
    value = np.random.default_rng(0).bytes(MIB)
    for i in range(256):
        store.put(f"f02/{i}", value)
        assert store.get(f"f02/{i}") == value
        assert store.remove(f"f02/{i}", force=True) is None
        payload += 2 * MIB
    assert through_the_master() - before < 0.01 * payload


def test_f06_a_reader_sees_nothing_or_everything(quick: Cluster, store: StoreClient) -> None:
    """Keys are removed and put again with other bytes while readers poll, over both transports."""
    done, wrong = threading.Event(), []
    sizes = (100, 70_000)

    def read(transport: str) -> None:
        with StoreClient(quick.address, transports=(transport,)) as reader:
            while not done.is_set():
                done.wait(0.001)  # leave the interpreter to the writer now and then
                for key, value in zip(
                    ("f06/small", "f06/large"),
                    reader.get_batch(["f06/small", "f06/large"]),
                    strict=True,
                ):
                    if isinstance(value, ObjectNotFound):
                        continue
                    if not isinstance(value, bytes) or len(set(value)) != 1:
                        wrong.append((key, value))

    readers = [threading.Thread(target=read, args=(name,)) for name in ("shm", "tcp")]
    for reader in readers:
        reader.start()
    for i in range(100):
        values = [bytes([i % 255 + 1]) * size for size in sizes]
        assert store.put_batch(["f06/small", "f06/large"], values) == [None, None]
        assert store.remove(["f06/small", "f06/large"], force=True) == [None, None]
    done.set()
    for reader in readers:
        reader.join(30)
        assert not reader.is_alive()
    assert wrong == []


def test_a34_a_forged_grant_is_refused_by_the_node(quick: Cluster, store: StoreClient) -> None:
    store.put("victim", b"v" * 1000)
    with TransferEngine() as engine, closing(MasterClient(quick.address)) as master:
        grants = master.put_start("default", [b"forged"], [1000], timeout_ms=5000)
        placed = master.locate("default", [b"victim"], timeout_ms=5000)
        part = grants.grants[0]
        rows = part.table().copy()
        rows["offset"] = placed.rows["offset"][0]
        rows["generation"] += np.uint64(1000)
        peer = engine.open(part.segment.address, timeout_ms=5000)

        def pull(**changes: object) -> PullReply:
            fields: dict[str, object] = {
                "segment_id": part.segment.segment_id, "rows": part.rows, "mac": part.mac,
                "region": 0, "sources": bytes(8), "inline_values": b"x" * 1000, "timeout_ms": 1000,
            }  # fmt: skip
            request = PullRequest(**{**fields, **changes})  # type: ignore[arg-type]
            return PullReply.decode(peer.request(PULL_KIND, request.encode(), timeout_ms=5000))

        assert pull(rows=rows.tobytes()).code == AccessRefused.code
        assert pull(mac=bytes(16)).code == AccessRefused.code
        assert pull(mac=b"").code == AccessRefused.code
        assert pull(segment_id=part.segment.segment_id + 1).code != 0
        assert pull(sources=b"").status != b"\0"  # the bytes that follow are taken for them
        assert pull(sources=b"\xff" * 8).status != b"\0"
        for junk in (b"", b"\xff" * 100, os.urandom(5000)):
            reply = PullReply.decode(peer.request(PULL_KIND, junk, timeout_ms=5000))
            assert reply.code != 0
    assert store.get("victim") == b"v" * 1000
    assert store.exists("forged") is False


def test_f15_a_killed_node_costs_misses_not_errors(fresh_cluster: Cluster) -> None:
    with StoreClient(fresh_cluster.address, timeout_ms=5_000) as store:
        keys = [f"k/{i}" for i in range(200)]
        assert store.put_batch(keys, [b"x" * 20_000] * 200) == [None] * 200
        fresh_cluster.nodes[0].child.kill()
        with StoreClient(fresh_cluster.address, timeout_ms=5_000) as other:
            outcomes = other.get_batch(keys)
        lost = [o for o in outcomes if isinstance(o, ObjectNotFound)]
        assert 0 < len(lost) < 200
        assert all(o == b"x" * 20_000 for o in outcomes if not isinstance(o, ObjectNotFound))

        def puts_work() -> bool:
            return store.put_batch([f"new/{time.monotonic_ns()}"], [b"y" * 20_000]) == [None]

        wait_until(puts_work)
        wait_until(lambda: store.exists(keys).count(False) == len(lost))  # type: ignore[union-attr]
        again = [f"again/{i}" for i in range(100)]
        assert store.put_batch(again, [b"z" * 20_000] * 100) == [None] * 100


@pytest.mark.parametrize("who", ["master", "node"])
def test_f28_every_call_ends_in_time_when_a_process_stands_still(
    fresh_cluster: Cluster, who: str
) -> None:
    clients = [
        StoreClient(fresh_cluster.address, transports=(transport,)) for transport in ("shm", "tcp")
    ]
    try:
        for client, name in zip(clients, ("shm", "tcp"), strict=True):
            client.put_batch([f"{name}/{i}" for i in range(8)], [b"s" * 100_000] * 8)
            client.get_batch([f"{name}/{i}" for i in range(8)])
        daemons = fresh_cluster.nodes if who == "node" else [fresh_cluster.master]
        for daemon in daemons:
            send(daemon, signal.SIGSTOP)
        for client, name in zip(clients, ("shm", "tcp"), strict=True):
            for call in (
                lambda c: c.put("new", b"n" * 100_000, timeout_ms=400),
                lambda c: c.put("small", b"n", timeout_ms=400),
                lambda c: c.get(f"{name}/0", timeout_ms=400),  # noqa: B023
                lambda c: c.exists(f"{name}/1", timeout_ms=400),  # noqa: B023
                lambda c: c.remove(f"{name}/2", timeout_ms=400),  # noqa: B023
            ):
                begin = time.monotonic()
                with suppress(MooncakeError):
                    call(client)
                assert (time.monotonic() - begin) * 1000 < 400 + SLACK_MS
    finally:
        for daemon in daemons:
            send(daemon, signal.SIGCONT)
        for client in clients:
            client.close()


def test_a42_a_client_outlives_a_restart_of_the_master(fresh_cluster: Cluster) -> None:
    with StoreClient(fresh_cluster.address, timeout_ms=20_000) as store:
        store.put_batch(["kept", "flush"], [b"k" * 50_000, b"f"])
        store.remove("flush", force=True)  # answered once this and what came before is durable
        port = int(fresh_cluster.address.rpartition(":")[2])
        fresh_cluster.master.child.kill()
        with pytest.raises(MasterUnavailable):
            store.put("lost", b"l", timeout_ms=300)
        fresh_cluster.start_master(port)

        def served() -> bool:
            try:
                return store.get("kept", timeout_ms=1_000) == b"k" * 50_000
            except (ObjectNotFound, MasterUnavailable):
                return False

        wait_until(served)
        store.put("after", b"a" * 50_000)
        assert store.get("after") == b"a" * 50_000


def test_f28_a_view_whose_node_is_silent_at_the_end_says_that_it_may_have_changed(
    quick: Cluster, store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("viewed", b"v" * 30_000)
    view = store.get_view("viewed")
    assert view.mapped

    def silent(hold: object, release: bool, timeout_ms: int) -> None:
        raise TransferTimeout("no reply before the deadline")

    monkeypatch.setattr(views._Hold, "ask", silent)
    with pytest.raises(LeaseExpired, match="fell silent"):
        view.release()


def test_an_error_that_is_kept_holds_nothing_of_its_caller(
    fresh_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bytearray cannot be resized while anybody holds its bytes."""
    held: list[MooncakeError] = []

    def fail(call: Callable[[bytearray], object], *kinds: type[MooncakeError]) -> None:
        buffer = bytearray(64 << 10)
        try:
            call(buffer)
        except kinds as error:
            held.append(error)
        buffer.append(1)

    gc.disable()
    try:
        with StoreClient(fresh_cluster.address, timeout_ms=1_000) as client:
            client.put("there", b"1")
            fail(lambda b: client.put("there", b), ObjectExists)
            fail(lambda b: client.get("absent", into=b), ObjectNotFound)
            writer = client._writer
            monkeypatch.setattr(writer, "_take_reservations", lambda job: [()])
            expired = [LeaseExpired.code]
            monkeypatch.setattr(writer, "_write_reserved", lambda job, runs: list(expired))
            fail(lambda b: client.put("there", b), ObjectExists)
            fresh_cluster.master.child.kill()
            fail(lambda b: client.put("late", b), MasterUnavailable)
            monkeypatch.undo()
            fail(lambda b: client.put("new", b), MasterUnavailable)
            fail(lambda b: client.get("new", into=b), MasterUnavailable)
            assert len(held) == 6
            gc.collect()
            alone = [weakref.ref(error) for error in held]
            held.clear()
            assert [ref() for ref in alone] == [None] * 6, "an error is part of a cycle of ours"
    finally:
        gc.enable()
