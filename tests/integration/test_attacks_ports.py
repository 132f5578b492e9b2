"""Bytes from whoever finds a port: daemons answer others meanwhile, and live."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator

import grpc
import pytest
from processes import wait_until

from mooncake_py import StoreClient
from mooncake_py.errors import MooncakeError
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.transfer import EngineOptions, TransferEngine
from mooncake_py.wire.lane import METHODS, SERVICE

PORTS = ("grpc", "lane", "metrics", "engine", "health")
VALUE = bytes(range(256)) * 800
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    options = ClusterOptions(
        node_count=1, segment_bytes=64 << 20, master_arguments=("--metrics", "127.0.0.1:0")
    )
    with Cluster(options) as running:
        with StoreClient(running.address) as store:
            store.put("key", VALUE)
        yield running


def address(cluster: Cluster, port: str) -> tuple[str, int]:
    fields = cluster.master.fields | cluster.nodes[0].fields
    host, _, number = fields[port].rpartition(":")
    return host, int(number)


def assert_well(cluster: Cluster) -> None:
    assert cluster.casualties() == []
    for transport in ("shm", "tcp"):
        with StoreClient(cluster.address, transports=(transport,), timeout_ms=5_000) as store:
            assert store.get("key") == VALUE


def hostile(seed: int) -> Iterator[bytes]:
    """Noise, the beginnings of real protocols with noise behind them, lengths of all ones."""
    source = random.Random(seed)
    starts = (b"", b"MCET\x02\0\0\0\x01\0\0\0", HTTP2, b"GET /metrics HTTP/1.1\r\n")
    for turn in range(60):
        noise = source.randbytes(source.randrange(1, 3_000))
        ones = b"\xff" * source.randrange(1, 3_000)
        yield starts[turn % len(starts)] + (noise, ones, b"")[turn % 3]


@pytest.mark.parametrize("port", PORTS)
def test_a43_hostile_bytes_and_resets_harm_nobody_else(cluster: Cluster, port: str) -> None:
    for turn, data in enumerate(hostile(seed=PORTS.index(port))):
        with socket.create_connection(address(cluster, port), 5) as connection:
            try:
                connection.sendall(data)
            except OSError:
                continue  # it has hung up already
            if turn % 2:  # a reset instead of an end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + [0] * 7))
    assert_well(cluster)


@pytest.mark.parametrize("port", PORTS)
def test_a43_two_hundred_silent_connections_keep_nobody_out(cluster: Cluster, port: str) -> None:
    crowd = [socket.create_connection(address(cluster, port), 5) for _ in range(200)]
    for connection in crowd[::2]:
        connection.send(b"M")
    assert_well(cluster)
    for connection in crowd:
        connection.close()
    pids = [cluster.master.child.pid, cluster.nodes[0].child.pid]
    wait_until(
        lambda: all(len(os.listdir(f"/proc/{pid}/fd")) < 100 for pid in pids),
        "descriptors of the crowd are given back",
    )


def test_a43_requests_of_noise_are_answered_and_change_nothing(cluster: Cluster) -> None:
    """Every method by both doors, and every kind of message of a node."""
    source = random.Random(7)
    lane, engine = (":".join(map(str, address(cluster, port))) for port in ("lane", "engine"))
    with (
        TransferEngine(EngineOptions()) as own,
        grpc.insecure_channel(cluster.address) as channel,
    ):
        master, node = (own.open(peer, timeout_ms=5_000) for peer in (lane, engine))
        for method in METHODS:
            call = channel.unary_unary(f"/{SERVICE}/{method.name}")
            for _ in range(15):
                noise = source.randbytes(source.randrange(1, 300))
                assert call(noise, timeout=10)
                assert master.request(method.number, noise, timeout_ms=10_000)
        for kind in range(1, 40):
            assert node.request(kind, source.randbytes(kind * 9), timeout_ms=10_000)
        with pytest.raises(MooncakeError, match="accepts"):
            master.request(1, bytes(40 << 20), timeout_ms=10_000)
    assert_well(cluster)
