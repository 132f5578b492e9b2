"""StoreClient against a real master and two real nodes, over shared memory and over forced TCP."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_py import StoreClient, errors
from mooncake_py.errors import ObjectExists, ObjectLeased, ObjectNotFound, UsageError
from mooncake_py.model import KEY_MAX_BYTES
from mooncake_py.ops.cluster import Cluster, ClusterOptions

MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(ClusterOptions(node_count=2, segment_bytes=192 * MIB)) as running:
        yield running


@pytest.fixture(params=["shm", "tcp"])
def store(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    with StoreClient(cluster.address, transports=(request.param,)) as client:
        yield client
        client.remove([info.key for info in client.list()], force=True, timeout_ms=60_000)


def random_bytes(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def test_f01_random_objects_come_back_in_another_client(
    cluster: Cluster, store: StoreClient
) -> None:
    rng = random.Random(1)
    sizes = [1, 2, 63, 64, 65, 4096, 16383, 16384, 16385, 262_143, 262_144, 8 * MIB]
    sizes += [int(2 ** rng.uniform(0, 20)) for _ in range(200)]
    digests = {}
    for i, size in enumerate(sizes):
        value = random_bytes(i, size)
        store.put(f"f01/{i}", value)
        digests[f"f01/{i}"] = hashlib.sha256(value).digest()
    with StoreClient(cluster.address) as other:
        got = other.get_batch(list(digests))
    assert [hashlib.sha256(value).digest() for value in got] == list(digests.values())


def test_f03_caller_buffers_as_sources_and_targets(store: StoreClient) -> None:
    source = np.arange(1 << 18, dtype=np.float32)
    store.put("array", source)
    target = np.zeros_like(source)
    assert store.get("array", into=target) == source.nbytes
    np.testing.assert_array_equal(target, source)
    raw = bytearray(source.nbytes)
    store.get("array", into=memoryview(raw))
    assert raw == source.tobytes()


def test_a10_torch_tensors_round_trip(store: StoreClient) -> None:
    torch = pytest.importorskip("torch")
    source = torch.randn(64, 1024).to(torch.bfloat16)
    store.put("tensor", source)
    target = torch.zeros_like(source)
    assert store.get("tensor", into=target) == source.numel() * 2
    assert torch.equal(source, target)
    with pytest.raises(UsageError, match="contiguous"):
        store.put("strided", source[:, ::2])


def test_a03_one_outcome_a_key_in_order(store: StoreClient) -> None:
    keys = ["a", "missing-1", "b", "a", "missing-2", "a"]
    assert store.put_batch(["a", "b"], [b"1", b"22"]) == [None, None]
    got = store.get_batch(keys)
    assert [got[0], got[2], got[3], got[5]] == [b"1", b"22", b"1", b"1"]
    assert all(isinstance(got[i], ObjectNotFound) for i in (1, 4))
    puts = store.put_batch(["c", "a", "c"], [b"new", b"changed", b"second"])
    assert puts[0] is None
    assert isinstance(puts[1], ObjectExists)
    assert isinstance(puts[2], ObjectExists)
    assert store.get_batch(["a", "c"]) == [b"1", b"new"]


def test_f07_a_second_put_says_exists_and_changes_nothing(store: StoreClient) -> None:
    store.put("once", b"first")
    for value in (b"first", b"other", b""):
        with pytest.raises(ObjectExists):
            store.put("once", value)
    assert store.get("once") == b"first"


def test_a02_many_writers_of_one_key_one_wins(cluster: Cluster, store: StoreClient) -> None:
    outcomes: list[object] = []
    barrier = threading.Barrier(8)

    def write(i: int) -> None:
        barrier.wait(30)
        outcomes.extend(store.put_batch(["same"], [bytes([i]) * 1000]))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(outcome is None for outcome in outcomes) == 1
    assert sum(isinstance(outcome, ObjectExists) for outcome in outcomes) == 7
    value = store.get("same")
    assert isinstance(value, bytes)
    assert len(set(value)) == 1


def test_f05_exists_answers_each_key_and_the_prefix(store: StoreClient) -> None:
    store.put_batch([f"p/{i}" for i in range(10)], [b"x"] * 10)
    store.remove("p/6")
    keys = [f"p/{i}" for i in range(12)]
    assert store.exists("p/0") is True
    assert store.exists("nowhere") is False
    assert store.exists(keys) == [i not in (6, 10, 11) for i in range(12)]
    assert store.exists(keys, prefix=True) == 6
    assert store.exists([], prefix=True) == 0


def test_a05_empty_missing_and_failed_are_three_answers(store: StoreClient) -> None:
    store.put("empty", b"")
    assert store.get("empty") == b""
    assert store.get("empty", into=bytearray()) == 0
    with pytest.raises(ObjectNotFound):
        store.get("missing")
    assert store.get_batch(["empty"], [bytearray(5)]) == [0]


@pytest.mark.parametrize(
    "key",
    ["ключ/鍵/🔑", "nul\0inside", "new\nline", "a/b//c/", "100%/%2F", "k" * 1024,
     "k" * KEY_MAX_BYTES, " "],
    ids=range(8),
)  # fmt: skip
def test_a06_any_key_text_round_trips(store: StoreClient, key: str) -> None:
    store.put(key, key.encode())
    assert store.get(key) == key.encode()
    assert [info.key for info in store.list(key)] == [key]
    assert store.remove(key, force=True) is None
    assert store.exists(key) is False


@pytest.mark.parametrize("key", ["", "k" * (KEY_MAX_BYTES + 1), "\ud800", b"bytes", 7, None])
def test_a06_keys_outside_the_limits_are_refused_before_anything_moves(
    store: StoreClient, key: object
) -> None:
    for call in (
        lambda: store.put_batch(["fine", key], [b"1", b"2"]),  # type: ignore[list-item]
        lambda: store.get_batch([key]),  # type: ignore[list-item]
        lambda: store.exists([key]),  # type: ignore[list-item]
        lambda: store.remove([key]),  # type: ignore[list-item]
    ):
        with pytest.raises(UsageError):
            call()
    assert store.exists("fine") is False


@pytest.mark.parametrize("value", ["text", 5, None, [1, 2], np.zeros((4, 4))[:, ::2], object()])
def test_a06_values_that_are_no_bytes_are_refused(store: StoreClient, value: object) -> None:
    with pytest.raises(UsageError):
        store.put("bad", value)
    assert store.exists("bad") is False


def test_a07_small_target_is_refused_before_anything_is_written(store: StoreClient) -> None:
    store.put_batch(["s/1", "s/2"], [b"0123456789", b"ab"])
    small, large = bytearray(b"." * 9), bytearray(b"." * 5)
    first, second = store.get_batch(["s/1", "s/2"], [small, large])
    assert isinstance(first, UsageError)
    assert "9" in str(first)
    assert "10" in str(first)
    assert small == b"." * 9
    assert second == 2
    assert large == b"ab..."
    with pytest.raises(UsageError, match="writable"):
        store.get("s/1", into=b"0123456789")


def test_a08_remove_is_idempotent_and_space_returns(store: StoreClient) -> None:
    assert store.remove("never") is None
    for round_ in range(8):  # 8 x 64 MiB through 384 MiB: space must come back
        store.put("big", random_bytes(round_, 64 * MIB))
        assert store.remove("big", force=True) is None
        assert store.remove("big") is None
        assert store.exists("big") is False
    with pytest.raises(ObjectNotFound):
        store.get("big")


def test_a08_what_was_just_read_is_kept_unless_forced(store: StoreClient) -> None:
    store.put_batch(["read", "unread"], [b"r", b"u"])
    store.get("read")
    kept, removed = store.remove(["read", "unread"])  # type: ignore[misc]
    assert isinstance(kept, ObjectLeased)
    assert "force" in str(kept)
    assert removed is None
    assert store.exists(["read", "unread"]) == [True, False]
    assert store.remove("read", force=True) is None
    assert store.exists("read") is False


def test_a04_a_batch_larger_than_free_space_evicts_and_succeeds(store: StoreClient) -> None:
    values = [random_bytes(i, 2 * MIB) for i in range(16)]
    for round_ in range(24):  # 768 MiB through 384 MiB of memory
        keys = [f"full/{round_}/{i}" for i in range(16)]
        assert store.put_batch(keys, values, timeout_ms=30_000) == [None] * 16
    assert store.get_batch(keys) == values


def test_f28_a_deadline_is_a_positive_number(store: StoreClient) -> None:
    for timeout_ms in (0, -1):
        with pytest.raises(UsageError):
            store.get("x", timeout_ms=timeout_ms)


def test_a51_threads_share_one_client(store: StoreClient) -> None:
    failures: list[object] = []

    def work(worker: int) -> None:
        rng = random.Random(worker)
        for i in range(40):
            key = f"t/{worker}/{i}"
            value = random_bytes(worker * 1000 + i, rng.randrange(1, 50_000))
            store.put(key, value)
            if store.get(key) != value:
                failures.append(key)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()
    assert failures == []


def test_a72_a_forked_child_is_refused_at_once(store: StoreClient) -> None:
    store.put("fork", b"parent")
    pid = os.fork()
    if pid == 0:
        try:
            store.get("fork")
        except UsageError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.get("fork") == b"parent"


def test_a_closed_client_says_so(cluster: Cluster) -> None:
    client = StoreClient(cluster.address)
    client.close()
    client.close()
    with pytest.raises(UsageError, match="closed"):
        client.put("x", b"y")


def test_a48_more_keys_than_one_call_takes(store: StoreClient) -> None:
    keys = [f"many/{i}" for i in range(9000)]
    outcomes = store.put_batch(keys, [key.encode() for key in keys], timeout_ms=60_000)
    assert outcomes == [None] * len(keys)
    assert store.exists(keys, prefix=True) == len(keys)
    assert store.get_batch(keys, timeout_ms=60_000) == [key.encode() for key in keys]


def test_a_master_that_is_not_there_is_named() -> None:
    with pytest.raises(errors.MasterUnavailable) as caught:
        StoreClient("127.0.0.1:9", timeout_ms=500)
    assert "127.0.0.1:9" in str(caught.value)
    assert "mooncake-master" in str(caught.value)
