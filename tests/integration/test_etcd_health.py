"""What a load balancer or a person is told when etcd is lost."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_cluster import EtcdCluster
from masters import CLOCK, Masters, T, until

from mooncake_py import StoreClient

FLIPS_MS = 2_000


def health(masters: Masters) -> list[int]:
    return [_health(masters.fields[number]["metrics"]) for number in range(2)]


def _health(address: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=2) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd", 1) as cluster:
        yield cluster


def test_f29_health_turns_within_two_seconds_of_losing_etcd_and_back(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    with Masters(tmp_path, etcd, 2, options=("--metrics", "127.0.0.1:0")) as masters:
        assert health(masters) == [200, 200]
        for lose, find in ((etcd.freeze, etcd.thaw), (etcd.kill, etcd.start)):
            lost_ms = CLOCK.now_ms()
            lose(0)
            until(lambda: health(masters) == [503, 503], 4 * FLIPS_MS, "both are unhealthy")
            took_ms = CLOCK.now_ms() - lost_ms
            find(0)
            until(lambda: health(masters) == [200, 200], 10_000, "both are healthy again")
            assert took_ms <= FLIPS_MS, took_ms


def test_a30_a_follower_says_how_many_keys_it_would_serve(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    with Masters(tmp_path, etcd, 2, 1, ("--metrics", "127.0.0.1:0")) as masters:
        with StoreClient(masters.address) as client:
            keys = [f"k{i}" for i in range(300)]
            assert not any(client.put_batch(keys, [b"v"] * 300))
            assert not any(client.remove(keys[:40]))  # type: ignore[arg-type]
        leader = masters.leader()
        assert leader is not None
        until(lambda: number(masters, 1 - leader, "followed_objects") == 260, T, "it follows")
        assert number(masters, leader, "objects") == 260
        masters.stop(leader)
        until(lambda: number(masters, 1 - leader, "objects") == 260, T, "and serves them")


def number(masters: Masters, which: int, name: str) -> float:
    url = f"http://{masters.fields[which]['metrics']}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    found = [line.split()[1] for line in lines if line.startswith(f"mooncake_master_{name} ")]
    return float(found[0]) if found else -1.0
