"""How often the master is asked: batches, hot reads, prefixes, probes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from daemons import calls, status, wait_until

from mooncake_py import StoreClient
from mooncake_py.errors import ObjectNotFound
from mooncake_py.ops.cluster import Cluster, ClusterOptions

MIB = 1 << 20
VERBS = ("PutStart", "PutEnd", "PutRevoke", "Locate", "Exists", "Remove", "Report")
LEASE_MS = 700


@pytest.fixture(scope="module")
def counted() -> Iterator[Cluster]:
    arguments = ["--metrics", "127.0.0.1:0", "--set", f"lease_ms={LEASE_MS}"]
    with Cluster(ClusterOptions(segment_bytes=32 * MIB, master_arguments=arguments)) as running:
        yield running


@pytest.fixture(params=["shm", "tcp"])
def store(counted: Cluster, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    with StoreClient(counted.address, transports=(request.param,)) as client:
        yield client
        for info in client.list():
            client.remove(info.key, force=True)


class Spent:
    """Counts the master's calls from now on."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._before = {verb: calls(cluster, verb) for verb in VERBS}

    def __call__(self) -> dict[str, int]:
        now = {verb: int(calls(self._cluster, verb) - self._before[verb]) for verb in VERBS}
        return {verb: count for verb, count in now.items() if count}


def test_f32_a_hot_batch_get_asks_the_master_nothing(counted: Cluster, store: StoreClient) -> None:
    keys = [f"hot/{i}" for i in range(128)]
    values = [bytes([i]) * 500 for i in range(128)]
    store.put_batch(keys, values)

    def hot() -> bool:  # a slow machine may let a lease end between two reads
        assert store.get_batch(keys) == values
        spent = Spent(counted)
        for _ in range(3):
            assert store.get_batch(keys) == values
        return spent() == {}

    wait_until(hot)


def test_f31_a_prefix_and_its_pages_cost_one_call(counted: Cluster, store: StoreClient) -> None:
    keys = [f"page/{i}" for i in range(64)]
    store.put_batch(keys[:40], [b"p" * 3000] * 40)

    def one_call() -> bool:
        store_calls = Spent(counted)
        with StoreClient(counted.address) as reader:
            found = reader.exists(keys, prefix=True)
            assert found == 40
            assert reader.get_batch(keys[:40]) == [b"p" * 3000] * 40
        return store_calls() == {"Locate": 1}

    wait_until(one_call)


def test_f32_after_its_lease_a_placement_is_asked_for_again(
    counted: Cluster, store: StoreClient
) -> None:
    store.put("leased", b"x")
    assert store.get("leased") == b"x"
    spent = Spent(counted)
    wait_until(lambda: store.get("leased") == b"x" and spent().get("Locate", 0) >= 2)
    assert set(spent()) == {"Locate"}


def test_f32_what_this_client_removes_or_replaces_is_never_read_again(store: StoreClient) -> None:
    for i in range(50):
        value = b"%d" % i
        store.put("changing", value)
        assert store.get("changing") == value
        assert store.get("changing") == value
        assert store.remove("changing", force=True) is None
        with pytest.raises(ObjectNotFound):
            store.get("changing")


def test_f32_after_another_client_moved_it_a_read_is_old_or_new_or_a_miss(
    counted: Cluster, store: StoreClient
) -> None:
    """Remembered placements against a writer that removes by force, replaces and evicts."""
    done, wrong, reads = threading.Event(), [], [0]

    def read() -> None:
        keys = [f"race/{i}" for i in range(8)]
        while not done.is_set():
            for key, value in zip(keys, store.get_batch(keys), strict=True):
                if isinstance(value, ObjectNotFound):
                    continue
                reads[0] += 1
                name = key.encode()
                if not isinstance(value, bytes) or value != value[:16] * (len(value) // 16):
                    wrong.append((key, value))
                elif not value.startswith(name):
                    wrong.append((key, value[:32]))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    with StoreClient(counted.address) as writer:
        for i in range(400):
            keys = [f"race/{j}" for j in range(8)]
            values = [
                f"{key}:{i:07d} ".encode().ljust(16)[:16] * (1 + 97 * (i % 13)) for key in keys
            ]
            writer.put_batch(keys, values)
            writer.remove(keys, force=True)
            writer.put(f"filler/{i}", bytes(MIB // 4))
    done.set()
    for reader in readers:
        reader.join(30)
        assert not reader.is_alive()
    assert wrong == []
    assert reads[0] > 0


def test_f05_probes_do_not_prevent_eviction(counted: Cluster, store: StoreClient) -> None:
    probed = [f"probed/{i}" for i in range(16)]
    store.put_batch(probed, [bytes(MIB)] * 16)
    before = status(counted).counters["evictions"]
    for i in range(80):
        for _ in range(50):
            store.exists(probed)
        store.put(f"new/{i}", bytes(MIB), timeout_ms=5_000)
    assert status(counted).counters["evictions"] > before
    assert store.exists(probed) == [False] * 16


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a12_a_batch_that_takes_longer_than_its_leases_does_not_fail(transport: str) -> None:
    arguments = ["--set", "lease_ms=20"]
    options = ClusterOptions(segment_bytes=64 * MIB, master_arguments=arguments)
    with Cluster(options) as cluster, StoreClient(cluster.address) as writer:
        keys = [f"a12/{i}" for i in range(3_000)]
        values = [i.to_bytes(4, "big") * 5_000 for i in range(3_000)]
        assert writer.put_batch(keys, values, timeout_ms=60_000) == [None] * 3_000
        with StoreClient(cluster.address, transports=(transport,)) as reader:
            for _ in range(3):
                assert reader.get_batch(keys, timeout_ms=60_000) == values


def test_a51_five_thousand_small_calls_at_once_do_not_deadlock(store: StoreClient) -> None:
    failures: list[object] = []
    start = threading.Event()

    def work(worker: int) -> None:
        start.wait(60)
        key = f"storm/{worker}"
        try:
            store.put(key, key.encode(), timeout_ms=60_000)
            if not store.exists(key, timeout_ms=60_000):
                failures.append(key)
            for _ in range(3):
                if store.get(key, timeout_ms=60_000) != key.encode():
                    failures.append(key)
            store.get_batch([key, "storm/none"], timeout_ms=60_000)
            store.remove(key, force=True, timeout_ms=60_000)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(800)]
    for thread in threads:
        thread.start()
    start.set()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert failures == []
