"""Memory of the caller and of the node: ranges, scattered buffers, registered memory, views."""

from __future__ import annotations

import gc
import random
import resource
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from daemons import status, wait_until

from mooncake_py import StoreClient
from mooncake_py.errors import ObjectNotFound, UsageError
from mooncake_py.ops.cluster import Cluster, ClusterOptions

MIB = 1 << 20
SEGMENT_BYTES = 32 * MIB


@pytest.fixture(scope="module")
def small() -> Iterator[Cluster]:
    """One node with little memory and short leases, so that everything is evicted soon."""
    options = ClusterOptions(
        node_count=1, segment_bytes=SEGMENT_BYTES, master_arguments=["--set", "lease_ms=200"]
    )
    with Cluster(options) as running:
        yield running


@pytest.fixture(params=["shm", "tcp"])
def store(small: Cluster, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    with StoreClient(small.address, transports=(request.param,)) as client:
        yield client
        for info in client.list():
            client.remove(info.key, force=True)


@pytest.fixture
def near(small: Cluster) -> Iterator[StoreClient]:
    with StoreClient(small.address) as client:
        yield client
        for info in client.list():
            client.remove(info.key, force=True)


def random_bytes(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def cut(rng: random.Random, nbytes: int, pieces: int) -> list[int]:
    """Sizes of up to `pieces` pieces that add up to nbytes."""
    ends = sorted(rng.randint(0, nbytes) for _ in range(pieces - 1))
    return [b - a for a, b in zip([0, *ends], [*ends, nbytes], strict=True)]


def test_f34_ten_thousand_ranges_equal_slices_of_the_object(store: StoreClient) -> None:
    rng = random.Random(34)
    values = {f"f34/{i}": random_bytes(i, rng.randrange(1, 200_000)) for i in range(20)}
    keys = list(values)
    assert store.put_batch(keys, list(values.values())) == [None] * len(keys)
    for _ in range(100):
        asked = [rng.choice(keys) for _ in range(100)]
        ranges: list[tuple[int, int | None]] = []
        for key in asked:
            start = rng.randint(0, len(values[key]))
            nbytes = rng.randint(0, min(5_000, len(values[key]) - start))
            ranges.append((start, None if rng.random() < 0.02 else nbytes))
        expected = [
            values[key][start : None if nbytes is None else start + nbytes]
            for key, (start, nbytes) in zip(asked, ranges, strict=True)
        ]
        assert store.get_batch(asked, ranges=ranges) == expected


def test_f34_a_range_outside_the_object_is_refused(store: StoreClient) -> None:
    store.put("short", b"0123456789")
    assert store.get("short", offset=10) == b""
    assert store.get("short", offset=4, nbytes=3) == b"456"
    target = bytearray(b"....")
    assert store.get("short", into=target, offset=8) == 2
    assert target == b"89.."
    for offset, nbytes in ((11, None), (0, 11), (10, 1), (4, 7)):
        with pytest.raises(UsageError, match="10 bytes"):
            store.get("short", into=bytearray(20), offset=offset, nbytes=nbytes)
    for offset, nbytes in ((-1, None), (0, -1)):
        with pytest.raises(UsageError):
            store.get("short", offset=offset, nbytes=nbytes)


def test_f03_values_and_targets_in_several_buffers(store: StoreClient) -> None:
    rng = random.Random(3)
    for i, nbytes in enumerate((0, 1, 4095, 70_000, 700_000, 3 * MIB)):
        value = random_bytes(i, nbytes)
        sizes = cut(rng, nbytes, 5)
        ends = np.cumsum([0, *sizes])
        parts = [value[a:b] for a, b in pairwise(ends)]
        store.put(f"gather/{i}", [np.frombuffer(part, np.uint8) for part in parts])
        assert store.get(f"gather/{i}") == value
        targets = [bytearray(size) for size in cut(rng, nbytes, 4)]
        assert store.get(f"gather/{i}", into=targets) == nbytes
        assert b"".join(targets) == value
        start = rng.randint(0, nbytes)
        scattered = [bytearray(size) for size in cut(rng, nbytes - start, 3)]
        assert store.get(f"gather/{i}", into=scattered, offset=start) == nbytes - start
        assert b"".join(scattered) == value[start:]
    with pytest.raises(UsageError):
        store.get("gather/3", into=[bytearray(10), bytearray(20)])


@pytest.mark.parametrize("kind", ["register", "alloc"])
def test_f03_registered_memory_is_source_and_target(store: StoreClient, kind: str) -> None:
    nbytes = 4 * MIB
    memory = store.register(bytearray(nbytes)) if kind == "register" else store.alloc(nbytes)
    with memory:
        view = memory.view()
        view[:nbytes] = random_bytes(9, nbytes)
        slices = [view[i * 50_000 : i * 50_000 + 40_000] for i in range(60)]
        keys = [f"reg/{i}" for i in range(60)]
        assert store.put_batch(keys, slices) == [None] * 60
        copies = [bytes(piece) for piece in slices]
        array = np.frombuffer(view, np.uint8)
        store.put("numpy", array[123_456:1_000_000])
        assert store.get("numpy") == view[123_456:1_000_000]
        view[:nbytes] = bytes(nbytes)
        assert store.get_batch(keys, slices) == [40_000] * 60
        assert [bytes(piece) for piece in slices] == copies
        del array, slices
    assert store.put("after", b"a" * 100_000) == 1


def test_a46_registered_memory_is_held(near: StoreClient) -> None:
    buffer = bytearray(100_000)
    memory = near.register(buffer)
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    memory.close()
    memory.close()
    buffer.extend(b"more")


def test_f65_a_view_keeps_its_bytes_whatever_evicts(near: StoreClient) -> None:
    values = {f"view/{i}": random_bytes(i, MIB) for i in range(4)}
    near.put_batch(list(values), list(values.values()))
    views = {key: near.get_view(key) for key in values}
    assert all(view.mapped for view in views.values())
    assert near.remove("view/0", force=True) is None
    for i in range(120):  # nearly four times the segment
        near.put(f"other/{i}", random_bytes(1000 + i, MIB), timeout_ms=20_000)
    for key, view in views.items():
        assert view.memory.readonly
        assert view.memory == values[key]
        view.release()
        view.release()
    assert near.exists("view/0") is False


def test_f65_space_comes_back_when_views_are_released_or_dropped(
    small: Cluster, near: StoreClient
) -> None:
    near.put("dropped", random_bytes(1, 10 * MIB))
    view = near.get_view("dropped")
    array = np.frombuffer(view.memory, np.uint8)
    with pytest.raises(UsageError, match="still in use"):
        view.release()
    del array
    view.release()
    other = near.get_view("dropped")
    del other
    gc.collect()
    assert near.remove("dropped", force=True) is None
    for i in range(64):
        near.put(f"filler/{i}", random_bytes(i, MIB), timeout_ms=20_000)
    assert status(small).used_bytes <= SEGMENT_BYTES


def test_f65_a_view_over_tcp_is_a_copy(store: StoreClient) -> None:
    value = random_bytes(5, 300_000)
    store.put("copy", value)
    with store.get_view("copy") as view:
        assert view.memory == value
    with pytest.raises(ObjectNotFound):
        store.get_view("nothing there")
    store.put("empty", b"")
    with store.get_view("empty") as view:
        assert view.nbytes == 0


COUNT = 48
KEYS = [f"f09/{i}" for i in range(COUNT)]
VALUES = [random_bytes(i, 400_000 + 1000 * i) for i in range(COUNT)]


def check_reads(client: StoreClient, rng: random.Random, wrong: list[object]) -> int:
    """One round of every read path; how many objects were read whole."""
    which = [rng.randrange(COUNT) for _ in range(6)]
    keys, start, found = [KEYS[i] for i in which], rng.randrange(300_000), 0
    for i, value in zip(which, client.get_batch(keys), strict=True):
        if value == VALUES[i]:
            found += 1
        elif not isinstance(value, ObjectNotFound):
            wrong.append((KEYS[i], type(value)))
    parts = client.get_batch(keys, ranges=[(start, 1_000)] * len(which))
    for i, part in zip(which, parts, strict=True):
        if part != VALUES[i][start : start + 1_000] and not isinstance(part, ObjectNotFound):
            wrong.append(("range", KEYS[i], type(part)))
    try:
        with client.get_view(keys[0]) as view:
            if view.memory != VALUES[which[0]]:
                wrong.append(("view", keys[0]))
    except ObjectNotFound:
        return found
    return found


def test_f09_reads_under_constant_eviction_are_right_or_a_miss(small: Cluster) -> None:
    """Batch, range and view, over shared memory and tcp, while all of it is evicted, removed by
    force, and put again, again and again."""
    done, wrong, reads = threading.Event(), [], [0] * 3

    def read(worker: int, transport: str) -> None:
        rng = random.Random(worker)
        with StoreClient(small.address, transports=(transport,)) as client:
            while not done.is_set():
                reads[worker] += check_reads(client, rng, wrong)

    readers = [
        threading.Thread(target=read, args=(n, name))
        for n, name in enumerate(("shm", "tcp", "shm"))
    ]
    with StoreClient(small.address) as writer:
        for thread in readers:
            thread.start()
        rng = random.Random(0)
        for _ in range(400):
            i = rng.randrange(COUNT)
            writer.remove(KEYS[i], force=True)
            writer.put_batch([KEYS[i], f"noise/{rng.random()}"], [VALUES[i], bytes(MIB)])
        done.set()
        for thread in readers:
            thread.join(60)
            assert not thread.is_alive()
        for info in writer.list():
            writer.remove(info.key, force=True)
    assert wrong == []
    assert min(reads) > 0


def test_f03_a_large_get_does_not_pay_a_page_fault_a_page(store: StoreClient) -> None:
    """Fresh memory comes in huge pages where the kernel gives them when asked."""
    allowed = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not allowed.exists() or "[never]" in allowed.read_text():
        pytest.skip("this kernel has no transparent huge pages")
    value = random_bytes(7, 24 * MIB)
    store.put("large", value)
    assert store.get("large") == value
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    found = store.get("large")
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert found == value
    assert faults < 24 * MIB // 4096 // 2


def test_f03_a_large_get_writes_into_the_memory_of_a_result_that_is_gone(
    store: StoreClient,
) -> None:
    values = [random_bytes(n, 5 * MIB) for n in range(2)]
    keys = ["large/0", "large/1"]

    def both_are_there() -> bool:  # what the test before left may still take their room
        store.put_batch(keys, values)
        return store.get_batch(keys) == values

    wait_until(both_are_there)
    kept = store.get("large/0")
    store.get("large/1")  # of the same length, and gone at once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for turn in range(12):
        assert store.get(f"large/{turn % 2}") == values[turn % 2]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 5 * MIB // 4096, "one result's worth, if its pages were small, of twelve"
    assert kept == values[0], "what somebody holds is never written again"
