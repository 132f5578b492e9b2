"""What a load balancer or a person is told when etcd is lost."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_cluster import EtcdCluster
from masters import CLOCK, Masters, until

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
