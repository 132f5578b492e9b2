"""Objects that no single hole, or no single node, can hold."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_py import StoreClient
from mooncake_py.errors import ObjectNotFound, OutOfSpace, UsageError
from mooncake_py.ops.cluster import Cluster, ClusterOptions

MIB = 1 << 20
LARGE = 45 * MIB + 123


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    options = ClusterOptions(
        node_count=3, segment_bytes=20 * MIB, master_arguments=["--set", "lease_ms=200"]
    )
    with Cluster(options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def value() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, LARGE, dtype=np.uint8)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a06_objects_larger_than_a_node_round_trip(
    three: Cluster, value: np.ndarray, transport: str
) -> None:
    with StoreClient(three.address, transports=(transport,), timeout_ms=30_000) as store:
        store.put("large", value)
        got = store.get("large")
        assert isinstance(got, bytes)
        assert np.array_equal(np.frombuffer(got, np.uint8), value)
        (info,) = store.list("large")
        assert info.nbytes == LARGE
        small = np.zeros(LARGE - 1, np.uint8)
        with pytest.raises(UsageError):
            store.get("large", into=small)
        assert not small.any()
        into = np.zeros(LARGE + 5, np.uint8)
        assert store.get("large", into=[into[:MIB], into[MIB:]]) == LARGE
        assert np.array_equal(into[:LARGE], value)
        assert not into[LARGE:].any()
        with pytest.raises(UsageError):
            store.get("large", offset=LARGE - 5, nbytes=6)
        with store.get_view("large") as view:
            assert view.nbytes == LARGE
        with store.session(["large"]) as session:
            assert session.lengths == [LARGE]
            (part,) = session.read(30 * MIB, 1000)
            assert part == value[30 * MIB : 30 * MIB + 1000].tobytes()
        assert store.remove("large", force=True) is None
        with pytest.raises(ObjectNotFound):
            store.get("large")


def test_f34_any_range_of_a_striped_object_equals_the_slice(
    three: Cluster, value: np.ndarray
) -> None:
    random = np.random.default_rng(8)
    with StoreClient(three.address, timeout_ms=30_000) as store:
        memory = store.alloc(LARGE)
        memory.view()[:LARGE] = value.tobytes()
        store.put("ranges", [memory.view()[: MIB + 7], memory.view()[MIB + 7 : LARGE]])
        store.put("small", b"small")
        for start, nbytes in random.integers(0, LARGE, (60, 2)).tolist():
            wanted = min(nbytes, LARGE - start)
            keys = ["small", "ranges", "none"]
            ranges = [(1, 3), (start, wanted), (0, None)]
            small, got, none = store.get_batch(keys, ranges=ranges)
            assert (small, type(none)) == (b"mal", ObjectNotFound)
            assert got == value[start : start + wanted].tobytes()
        with pytest.raises(OutOfSpace):
            store.put("too large", bytes(61 * MIB), timeout_ms=300)
        assert store.remove("ranges", force=True) is None
