"""The store over RDMA beside the store over TCP: one node, one client of each, in turns.

python -m benchmarks.rdma_store NEAR FAR    ports by device name: the client's and the node's

Puts and gets of registered memory, every value new to the store; the median of a call, in
microseconds. The node of each is the same process with both ways open.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from mooncake_py import StoreClient
from mooncake_py.ops.cluster import Cluster, ClusterOptions

KIB, MIB = 1 << 10, 1 << 20
SIZES = {4 * KIB: 100, 64 * KIB: 60, MIB: 16, 16 * MIB: 4}
BATCHES = {4 * KIB: 128, 64 * KIB: 32}  # keys a call, in a batch
ROUNDS = 3


class Way:
    """A client that may use one transport, and what its calls took."""

    def __init__(self, name: str, master: str, transport: str) -> None:
        self.name = name
        self.store = StoreClient(master, tenant=name, transports=(transport,), timeout_ms=30_000)
        self.memory = self.store.alloc(2 * max(SIZES))
        self._number = 0

    def _calls(self, nbytes: int, keys: int, calls: int) -> tuple[float, float]:
        view = self.memory.view()
        half = len(view) // 2
        values = [view[i * nbytes : (i + 1) * nbytes] for i in range(keys)]
        targets = [view[half + i * nbytes : half + (i + 1) * nbytes] for i in range(keys)]
        puts, gets = [], []
        for _ in range(calls):
            self._number += 1
            names = [f"{self._number}-{i}" for i in range(keys)]
            puts.append(_seconds(lambda names=names: _good(self.store.put_batch(names, values))))
            gets.append(_seconds(lambda names=names: _good(self.store.get_batch(names, targets))))
            self.store.remove(names, force=True)
        return statistics.median(puts), statistics.median(gets)

    def us(self, nbytes: int, keys: int) -> tuple[float, float]:
        """Put and get."""
        calls = max(3, SIZES[nbytes] // keys)
        put, get = self._calls(nbytes, keys, calls)
        return put * 1e6, get * 1e6


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _good(outcomes: list[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


def compare(near: str, far: str) -> None:
    nodes = ["--transports", f"rdma:{far},tcp"]
    options = ClusterOptions(node_count=1, segment_bytes=128 * MIB, node_arguments=nodes)
    work = [(nbytes, 1) for nbytes in SIZES] + list(BATCHES.items())
    with Cluster(options) as cluster:
        ways = [Way("rdma", cluster.address, f"rdma:{near}"), Way("tcp", cluster.address, "tcp")]
        print(
            f"{'us a call':20}{'put rdma':>10}{'tcp':>10}{'ratio':>8}"
            f"{'get rdma':>12}{'tcp':>10}{'ratio':>8}"
        )
        for nbytes, keys in work:
            best: dict[str, list[float]] = {}
            for _ in range(ROUNDS):
                for way in ways:
                    now = way.us(nbytes, keys)
                    old = best.setdefault(way.name, list(now))
                    best[way.name] = [min(pair) for pair in zip(old, now, strict=True)]
            (put, get), (tcp_put, tcp_get) = best["rdma"], best["tcp"]
            size = f"{nbytes // KIB} KiB" if nbytes < MIB else f"{nbytes // MIB} MiB"
            name = size if keys == 1 else f"{keys} x {size}"
            print(
                f"{name:20}{put:10.0f}{tcp_put:10.0f}{put / tcp_put:8.2f}"
                f"{get:12.0f}{tcp_get:10.0f}{get / tcp_get:8.2f}",
                flush=True,
            )
        for way in ways:
            way.memory.close()
            way.store.close()


if __name__ == "__main__":
    compare(*sys.argv[1:])
