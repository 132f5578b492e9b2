"""One client, 32 threads, every call: no result is lost, given twice, or somebody else's.

MOONCAKE_THREADS_SECONDS=600 runs it for ten minutes.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from mooncake_py import StoreClient
from mooncake_py.errors import ObjectExists, ObjectNotFound
from mooncake_py.ops.cluster import Cluster, ClusterOptions

SECONDS = float(os.environ.get("MOONCAKE_THREADS_SECONDS", "4"))
THREADS = 32
MIB = 1 << 20


@pytest.fixture(scope="module")
def store() -> Iterator[StoreClient]:
    """Patient: what a machine that is busy with other things takes is not what is looked at."""
    options = ClusterOptions(node_count=2, segment_bytes=256 * MIB)
    with Cluster(options) as cluster, StoreClient(cluster.address, timeout_ms=120_000) as client:
        yield client


def value(key: str, version: int, nbytes: int) -> bytes:
    """What nobody else would write: its key, again and again."""
    text = f"{key}#{version}/{nbytes};".encode()
    return (text * (nbytes // len(text) + 1))[:nbytes]


class Worker:
    """Its own keys, of which it knows everything; `shared` ones it races the others for."""

    def __init__(self, store: StoreClient, number: int) -> None:
        self.store, self.number = store, number
        self.random = random.Random(number)
        self.mine: dict[str, bytes] = {}
        self.next = 0
        self.done: Counter[str] = Counter()
        self.calls: list[Callable[[], None]] = [
            self.put, self.get, self.put_many, self.get_many, self.exists, self.remove,
            self.upsert, self.session, self.race, self.miss,
        ]  # fmt: skip

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            call = self.random.choice(self.calls)
            call()
            self.done[call.__name__] += 1
            while len(self.mine) > 40:
                self.remove()
        keys = list(self.mine)
        assert self.store.get_batch(keys) == list(self.mine.values()), "what was stored is there"

    def fresh(self) -> tuple[str, bytes]:
        self.next += 1
        key = f"{self.number}/{self.next}"
        return key, value(key, 0, self.random.choice((1, 700, 5_000, 70_000, 300_000)))

    def some(self, most: int) -> list[str]:
        return self.random.sample(list(self.mine), min(len(self.mine), most))

    def put(self) -> None:
        key, data = self.fresh()
        assert self.store.put(key, data) == 1
        self.mine[key] = data

    def put_many(self) -> None:
        new = dict(self.fresh() for _ in range(self.random.randrange(1, 9)))
        outcomes = self.store.put_batch(list(new), list(new.values()))
        assert outcomes == [None] * len(new)
        self.mine.update(new)

    def get(self) -> None:
        for key in self.some(1):
            assert self.store.get(key) == self.mine[key]

    def get_many(self) -> None:
        keys = self.some(9)
        targets = [bytearray(len(self.mine[key])) for key in keys]
        assert self.store.get_batch(keys, targets) == [len(each) for each in targets]
        assert targets == [self.mine[key] for key in keys]

    def exists(self) -> None:
        keys = self.some(5)
        asked = [each for key in keys for each in (key, key + "?")]
        assert self.store.exists(asked) == [True, False] * len(keys)

    def remove(self) -> None:
        keys = self.some(3)
        assert self.store.remove(keys, force=True) == [None] * len(keys)
        for key in keys:
            del self.mine[key]
        assert not any(self.store.exists(keys))  # type: ignore[arg-type]  # a list for a list

    def upsert(self) -> None:
        for key in self.some(1):
            self.mine[key] = value(key, self.next, self.random.choice((900, 40_000)))
            assert self.store.put_batch([key], [self.mine[key]], upsert=True) == [None]

    def session(self) -> None:
        keys = [key for key in self.some(4) if len(self.mine[key]) >= 64]
        with self.store.session(keys) as reading:
            assert reading.lengths == [len(self.mine[key]) for key in keys]
            assert reading.read(16, 48) == [self.mine[key][16:64] for key in keys]

    def race(self) -> None:
        """One of all wins; everybody reads what the winner wrote, whole."""
        key = f"shared/{self.random.randrange(50)}"
        (outcome,) = self.store.put_batch([key], [value(key, self.number, 9_000)])
        assert outcome is None or isinstance(outcome, ObjectExists)
        (found,) = self.store.get_batch([key])
        if isinstance(found, bytes):
            assert found in {value(key, writer, 9_000) for writer in range(THREADS)}
        else:
            assert isinstance(found, ObjectNotFound), found
        if self.random.random() < 0.2:
            self.store.remove([key], force=True)

    def miss(self) -> None:
        with pytest.raises(ObjectNotFound):
            self.store.get(f"{self.number}/never")


def test_a51_threads_with_mixed_calls_lose_and_cross_nothing(store: StoreClient) -> None:
    workers = [Worker(store, number) for number in range(THREADS)]
    until = time.monotonic() + SECONDS
    failures: list[BaseException] = []

    def run(worker: Worker) -> None:
        try:
            worker.run(until)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 90)
        assert not thread.is_alive()
    assert not failures, failures[:3]
    done = sum((worker.done for worker in workers), Counter())
    assert set(done) == {call.__name__ for call in workers[0].calls}
    print(f"{done.total()} calls in {SECONDS:.0f} s: {dict(done)}")
