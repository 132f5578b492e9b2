"""Values of several pieces, in registered memory or not, and keys with one fate."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator

import pytest
from daemons import calls, status

from mooncake_py.errors import MooncakeError, ObjectExists, UsageError
from mooncake_py.model import Group
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.store.client import StoreClient

REGION = 4 << 20
noise = random.Random(11)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    options = ClusterOptions(segment_bytes=64 << 20, master_arguments=("--metrics", "127.0.0.1:0"))
    with Cluster(options) as running:
        yield running


@pytest.fixture(params=["shm", "tcp"])
def store(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    with StoreClient(cluster.address, transports=(request.param,)) as client:
        yield client


def shared(nbytes: int, seals: bool) -> tuple[mmap.mmap, int]:
    """Memory of a memfd, filled with noise, as an engine's allocator makes it."""
    fd = os.memfd_create("host pool", os.MFD_ALLOW_SEALING if seals else 0)
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes)
    memory[:] = noise.randbytes(nbytes)
    return memory, fd


def cut(memory: memoryview, count: int, longest: int) -> list[memoryview]:
    parts = []
    for _ in range(count):
        length = noise.choice([0, 1, noise.randrange(longest), longest])
        start = noise.randrange(len(memory) - longest)
        parts.append(memory[start : start + length])
    return parts


def test_f03_f34_pieces_may_lie_in_regions_or_nowhere(store: StoreClient) -> None:
    first, second = bytearray(noise.randbytes(REGION)), bytearray(noise.randbytes(REGION))
    loose = bytearray(noise.randbytes(REGION))
    with store.register(first), store.register(second):
        values = []
        for _ in range(60):
            memory = [memoryview(noise.choice([first, second, loose])) for _ in range(3)]
            values.append([part for one in memory for part in cut(one, 2, 20_000)])
        keys = [f"scattered/{noise.random()}" for _ in values]
        assert store.put_batch(keys, values) == [None] * len(keys)
        assert store.get_batch(keys) == [b"".join(value) for value in values]


def test_f03_whole_values_of_two_regions_and_of_none(store: StoreClient) -> None:
    first, second = bytearray(noise.randbytes(REGION)), bytearray(noise.randbytes(REGION))
    with store.register(first), store.register(second):
        values = [
            memoryview(first)[:100_000],
            memoryview(second)[5:100_005],
            noise.randbytes(100_000),
            b"",
            memoryview(second)[-100_000:],
        ]
        keys = [f"whole/{noise.random()}" for _ in values]
        assert store.put_batch(keys, values) == [None] * len(keys)
        assert store.get_batch(keys) == [bytes(value) for value in values]


@pytest.mark.parametrize("seals", [True, False])
def test_f21_memory_of_a_foreign_memfd_is_put_from(store: StoreClient, seals: bool) -> None:
    """Nodes may not map a file that could shrink under them, and read through it instead."""
    memory, fd = shared(REGION, seals)
    view = memoryview(memory)
    values = [[view[i : i + 50_000], view[-50_000 - i : -i]] for i in range(1, 40)]
    keys = [f"memfd/{noise.random()}" for _ in values]
    registered = store.register(view, fd=fd)
    os.close(fd)  # the region has a descriptor of its own
    try:
        assert store.put_batch(keys, values) == [None] * len(keys)
        assert store.get_batch(keys) == [b"".join(value) for value in values]
    finally:
        registered.close()


def test_f03_a_memfd_that_became_shorter_is_an_error_and_no_crash(cluster: Cluster) -> None:
    memory, fd = shared(REGION, seals=False)
    view = memoryview(memory)
    with StoreClient(cluster.address, transports=("shm",)) as store:
        store.register(view, fd=fd)
        values = [view[:200_000], view[-200_000:]]
        keys = [f"short/{noise.random()}" for _ in values]
        assert store.put_batch([f"{key}/before" for key in keys], values) == [None, None]
        os.ftruncate(fd, REGION // 2)
        good, bad = store.put_batch(keys, values)
        assert good is None
        assert isinstance(bad, MooncakeError)
        assert store.exists(keys) == [True, False]
    assert len(status(cluster).segments) == 2
    os.ftruncate(fd, REGION)
    os.close(fd)


def test_a_group_is_there_whole_or_not_at_all(store: StoreClient) -> None:
    keys = [f"group/{noise.random()}" for _ in range(6)]
    assert store.put_batch(keys, [b"x" * 9_000] * 6, groups=[1, 1, 2, 2, 0, 0]) == [None] * 6
    assert store.remove(keys[0], force=True) is None
    assert store.exists(keys) == [False, False, True, True, True, True]


def test_a18_a_group_has_a_name_that_other_puts_may_join(store: StoreClient) -> None:
    keys = [f"group/{noise.random()}" for _ in range(3)]
    page = f"page/{keys[0]}"
    for key, group in zip(keys, (Group(page), Group(page, follows=True), 0), strict=True):
        assert store.put_batch([key], [b"x" * 9_000], groups=[group]) == [None]
    assert store.put_batch(keys[2:], [b"x"], groups=[Group(page)])[0] is not None, "it stays alone"
    assert store.remove(keys[0], force=True) is None
    assert store.exists(keys) == [False, False, True]


def test_one_that_exists_is_in_no_group(store: StoreClient) -> None:
    keys = [f"group/{noise.random()}" for _ in range(2)]
    store.put(keys[0], b"old")
    one, two = store.put_batch(keys, [b"new", b"new"], groups=[1, 1])
    assert isinstance(one, ObjectExists)
    assert two is None
    assert store.get_batch(keys) == [b"old", b"new"]


def test_a_group_with_a_member_that_finds_no_room_is_not_stored(store: StoreClient) -> None:
    keys = [f"group/{noise.random()}" for _ in range(3)]
    huge = memoryview(bytearray(400 << 20))  # more than this cluster has
    outcomes = store.put_batch(keys, [b"x", huge, b"y"], groups=[1, 1, 0], timeout_ms=300)
    assert [type(outcome).__name__ for outcome in outcomes] == [
        "OutOfSpace",
        "OutOfSpace",
        "NoneType",
    ]
    assert store.exists(keys) == [False, False, True]


def test_groups_are_one_a_key(store: StoreClient) -> None:
    with pytest.raises(UsageError, match="one group a key"):
        store.put_batch(["a", "b"], [b"", b""], groups=[1])


def test_f31_a_session_asks_once_for_all_keys(cluster: Cluster, store: StoreClient) -> None:
    keys = [f"asked/{noise.random()}" for _ in range(500)]
    store.put_batch(keys[::2], [b"v"] * 250)
    before = calls(cluster, "Locate")
    with store.session(keys, timeout_ms=2_000) as session:
        assert session.present == [i % 2 == 0 for i in range(500)]
    assert store.get_batch(keys[::2]) == [b"v"] * 250
    assert calls(cluster, "Locate") - before == 1
