"""The store over RDMA beside the store over TCP: one node, one client of each, in turns.

python -m benchmarks.rdma_store NEAR FAR    ports by device name: the client's and the node's

Puts and gets of registered memory, every value new to the store. The node of each is the same
process with both ways open. They take turns: a row has the median call of the median turn, in
microseconds, of the ratios of neighbouring turns the median, the least and the largest, and the
ratio of the best turns, which other work disturbed least.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from mooncake_py import StoreClient
from mooncake_py.ops.cluster import Cluster, ClusterOptions

KIB, MIB = 1 << 10, 1 << 20
SIZES = {4 * KIB: 60, 64 * KIB: 60, MIB: 12, 16 * MIB: 3}  # and calls of a turn
BATCHES = {4 * KIB: 128, 64 * KIB: 32}  # keys a call, in a batch
BATCH_CALLS = 8
ROUNDS = 7  # turns of each way
# What is removed is usable again a while later: with less than all puts need, they would wait.
SEGMENT = 1536 * MIB


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
        calls = SIZES[nbytes] if keys == 1 else BATCH_CALLS
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


def _row(turns: list[tuple[float, float]]) -> str:
    ratios = [rdma / tcp for rdma, tcp in turns]
    rdma, tcp = (statistics.median(way) for way in zip(*turns, strict=True))
    middle = statistics.median(ratios)
    best = min(way for way, _ in turns) / min(way for _, way in turns)
    return f"{rdma:10.0f}{tcp:10.0f}{middle:8.2f}{min(ratios):7.2f}{max(ratios):7.2f}{best:7.2f}"


def compare(near: str, far: str) -> None:
    nodes = ["--transports", f"rdma:{far},tcp"]
    options = ClusterOptions(node_count=1, segment_bytes=SEGMENT, node_arguments=nodes)
    work = [(nbytes, 1) for nbytes in SIZES] + list(BATCHES.items())
    with Cluster(options) as cluster:
        ways = [Way("rdma", cluster.address, f"rdma:{near}"), Way("tcp", cluster.address, "tcp")]
        ratios = f"{'tcp':>10}{'ratio':>8}{'least':>7}{'most':>7}{'best':>7}"
        print(f"{'us a call':20}{'put rdma':>10}{ratios}{'get rdma':>12}{ratios}")
        for nbytes, keys in work:
            size = f"{nbytes // KIB} KiB" if nbytes < MIB else f"{nbytes // MIB} MiB"
            turns = [[way.us(nbytes, keys) for way in ways] for _ in range(ROUNDS)]
            puts, gets = (_row([(a[i], b[i]) for a, b in turns]) for i in (0, 1))
            print(f"{size if keys == 1 else f'{keys} x {size}':20}{puts}  {gets}", flush=True)
        for way in ways:
            way.memory.close()
            way.store.close()


if __name__ == "__main__":
    compare(*sys.argv[1:])
