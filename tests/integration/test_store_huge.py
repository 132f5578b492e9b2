"""One object of more than 4 GiB, by every way of writing and reading: no length, offset or count on
the way has 32 bits only. The source is sparse but for marks where a smaller number would end.

Half a minute and 15 GiB of memory, so it runs when asked:
MOONCAKE_HUGE=1 ./dev test tests/integration/test_store_huge.py"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake_py import StoreClient
from mooncake_py.errors import UsageError
from mooncake_py.ops.cluster import Cluster, ClusterOptions

MIB, GIB = 1 << 20, 1 << 30
NBYTES = 4 * GIB + 3 * MIB + 5
EDGES = (0, 2 * GIB, 4 * GIB - 64, 4 * GIB, NBYTES - 64)  # each has 64 bytes of marks
NEEDED = 15 * GIB


pytestmark = pytest.mark.skipif(
    not os.environ.get("MOONCAKE_HUGE"), reason="half a minute and 15 GiB: MOONCAKE_HUGE=1"
)


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def sparse_memory() -> mmap.mmap:
    memory = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def touched_memory() -> mmap.mmap:
    """Arriving in memory that nobody has touched takes several times as long."""
    memory = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8)[::4096] = 1
    np.frombuffer(memory, np.uint8)[::4096] = 0
    return memory


@pytest.fixture(scope="module")
def roomy() -> Iterator[Cluster]:
    if available_bytes() < NEEDED:
        pytest.skip(f"needs {NEEDED // GIB} GiB of free memory")
    # A view may hold half of a node; and room for the second before the first one has gone.
    options = ClusterOptions(node_count=1, segment_bytes=2 * NBYTES + 64 * MIB)
    with Cluster(options) as cluster:
        yield cluster


def marks(n: int) -> bytes:
    return bytes((n * 64 + i) % 255 + 1 for i in range(64))


def is_the_object(memory: mmap.mmap) -> bool:
    """Marks at the edges and nothing else, in steps that the cache holds."""
    for n, edge in enumerate(EDGES):
        if memory[edge : edge + 64] != marks(n):
            return False
    found = np.frombuffer(memory, np.uint8)
    count = sum(np.count_nonzero(found[at : at + MIB]) for at in range(0, NBYTES, MIB))
    return count == 64 * len(EDGES)


def test_a06_f34_an_object_of_more_than_4_gib_is_put_read_and_looked_at(roomy: Cluster) -> None:
    source, target = sparse_memory(), touched_memory()
    for n, edge in enumerate(EDGES):
        source[edge : edge + 64] = marks(n)
    for transport in ("tcp", "shm"):
        with StoreClient(roomy.address, transports=(transport,), timeout_ms=60_000) as store:
            store.put("huge", source)
            (info,) = store.list("huge")
            assert info.nbytes == NBYTES
            for edge in EDGES:
                target[edge : edge + 64] = bytes(64)
            assert store.get("huge", into=target) == NBYTES
            assert is_the_object(target)
            for n, edge in enumerate(EDGES):
                assert store.get("huge", offset=edge, nbytes=64) == marks(n)
            across = store.get("huge", offset=4 * GIB - 64, nbytes=128)
            assert across == marks(2) + marks(3)
            assert store.get("huge", offset=NBYTES - 64) == marks(4)
            with pytest.raises(UsageError):
                store.get("huge", offset=NBYTES - 63, nbytes=64)
            with store.session(["huge"]) as reading:
                assert reading.lengths == [NBYTES]
                assert reading.read(4 * GIB, 64) == [marks(3)]
            if transport == "shm":
                with store.get_view("huge") as view:
                    assert view.mapped
                    assert view.nbytes == NBYTES
                    found = [bytes(view.memory[edge : edge + 64]) for edge in EDGES]
                    assert found == [marks(n) for n in range(len(EDGES))]
            assert store.remove("huge", force=True) is None
