"""Long calls of many callers hold up neither short calls nor heartbeats."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mooncake_py.clock import SystemClock
from mooncake_py.errors import Backpressure, MooncakeError
from mooncake_py.master.client import MasterClient
from mooncake_py.master.commands import Heartbeat, Mount
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.transfer import TransferEngine

pytestmark = pytest.mark.alone
KEYS = 10_000
CALLERS = 40
T = 60_000


def name_of(number: int) -> bytes:
    return b"page/%08d" % number


@contextmanager
def filled(cluster: Cluster) -> Iterator[MasterClient]:
    """A catalog of many objects, on a segment that this test says it has."""
    client = MasterClient(cluster.address, clock=SystemClock())
    ended = threading.Event()
    mounted = client.mount(Mount("paper", 1, "127.0.0.1:1", 1, 1 << 40, "h"), timeout_ms=T)
    beat = Heartbeat("paper", 1, mounted.segment_id)

    def live() -> None:
        while not ended.wait(0.2):
            client.heartbeat(beat, timeout_ms=T)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        for start in range(0, KEYS, 2_000):
            names = [name_of(i) for i in range(start, start + 2_000)]
            granted = client.put_start("t", names, [64] * len(names), timeout_ms=T)
            generations = granted.generations.tolist()
            assert not client.put_end("t", names, generations, timeout_ms=T).any()
        yield client
    finally:
        ended.set()
        thread.join(T / 1000)
        client.close()


class Crowd:
    """Callers that make one kind of call again and again, until the block ends."""

    def __init__(self, address: str, call: Callable[[MasterClient], object], count: int) -> None:
        self._call = call
        self._over = threading.Event()
        self._clients = [MasterClient(address, clock=SystemClock()) for _ in range(count)]
        self.begun = 0
        self.faults: list[MooncakeError] = []
        self._threads = [
            threading.Thread(target=self._work, args=(each,)) for each in self._clients
        ]

    def _work(self, client: MasterClient) -> None:
        while not self._over.is_set():
            self.begun += 1
            try:
                self._call(client)
            except Backpressure:
                continue
            except MooncakeError as error:
                if not self._over.is_set():
                    self.faults.append(error)
                return

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *ending: object) -> None:
        self._over.set()
        for client in self._clients:
            client.close()
        for thread in self._threads:
            thread.join(T / 1000)


def list_all(client: MasterClient) -> None:
    client.list("t", limit=10_000, timeout_ms=T)


def look_for_a_pattern(client: MasterClient) -> None:
    """It is found in no key, but every key is looked at, to its end."""
    client.remove_all("t", pattern=rb"(p|a|g|e|/|0)*x", timeout_ms=T)


def ask_for_thousands(client: MasterClient) -> None:
    client.exists("t", [name_of(i) for i in range(4_000)], timeout_ms=T)


@pytest.mark.parametrize("long", [list_all, look_for_a_pattern, ask_for_thousands])
def test_a20_a33_a73_short_calls_and_heartbeats_get_through_forty_long_ones(
    long: Callable[[MasterClient], object],
) -> None:
    with (
        Cluster(ClusterOptions(node_count=2, segment_bytes=16 << 20)) as cluster,
        filled(cluster) as client,
        TransferEngine() as engine,
    ):
        lane = MasterClient(cluster.address, engine=engine, clock=SystemClock())
        lane.connect(timeout_ms=T)
        with Crowd(cluster.address, long, CALLERS) as crowd:
            rounds = 0
            while crowd.begun < CALLERS or rounds < 10:
                for each in (lane, client):
                    assert each.exists("t", [name_of(7)], timeout_ms=T).all()
                told = lane.status(timeout_ms=T)
                assert {segment.state for segment in told.segments} == {"alive"}
                rounds += 1
                assert not crowd.faults
        assert told.counters["suspects"] == 0
        assert told.objects == KEYS
        lane.close()


def test_f48_short_calls_are_served_between_the_steps_of_one_long_call() -> None:
    """One call that takes many steps, and a caller who counts how often it was served meanwhile."""
    with (
        Cluster(ClusterOptions(node_count=0)) as cluster,
        filled(cluster) as client,
    ):
        short = MasterClient(cluster.address, clock=SystemClock())
        short.connect(timeout_ms=T)
        served: list[int] = []  # during each of the long calls
        while max(served, default=0) < 2 and len(served) < 20:  # a busy machine may run none of us
            over = threading.Event()

            def long(over: threading.Event = over) -> None:
                try:
                    look_for_a_pattern(client)
                finally:
                    over.set()

            thread = threading.Thread(target=long)
            thread.start()
            served.append(0)
            while not over.is_set():
                short.exists("t", [name_of(1)], timeout_ms=T)
                served[-1] += not over.is_set()
            thread.join(T / 1000)
        short.close()
        assert max(served) >= 2, "one step at a time, and others in between"
