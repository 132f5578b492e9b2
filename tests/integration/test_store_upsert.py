"""Objects that are replaced while others read them, and whose writer is killed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from mooncake_py import StoreClient
from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.errors import MooncakeError, OutOfSpace
from mooncake_py.ops.cluster import Cluster, ClusterOptions

MIB = 1 << 20
KEYS = [f"page/{i}" for i in range(20)]
ROUNDS = 500  # of all keys: ten thousand upserts
NBYTES = 4096

WRITER = """
import sys
from mooncake_py import StoreClient

with StoreClient(sys.argv[1]) as store:
    for number in range(1, 1 << 32):
        store.put("page/x", number.to_bytes(8, "little") * 65536, upsert=True)
        print(number, flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Short leases: within one a reader goes on with the placement that it has.
    options = ClusterOptions(
        node_count=2, segment_bytes=64 * MIB, master_arguments=["--set", "lease_ms=50"]
    )
    with Cluster(options) as running:
        yield running


def value_of(number: int) -> bytes:
    return number.to_bytes(8, "little") * (NBYTES // 8)


def number_in(value: object) -> int:
    """The version that all of the value is of."""
    assert isinstance(value, bytes), f"the object is gone: {value!r}"
    number = int.from_bytes(value[:8], "little")
    assert value == value_of(number), "a mixed value"
    return number


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_f35_c12_readers_see_old_or_new_during_ten_thousand_upserts(
    cluster: Cluster, transport: str
) -> None:
    stop, seen, failures = threading.Event(), [0, 0], []

    def read(reader: int) -> None:
        with StoreClient(cluster.address, transports=(transport,)) as store:
            last = [0] * len(KEYS)
            while not stop.wait(0.001):  # else the writer of this process starves
                try:
                    numbers = [number_in(value) for value in store.get_batch(KEYS)]
                    assert all(new >= old for new, old in zip(numbers, last, strict=True))
                except Exception as error:
                    failures.append(error)
                    return
                seen[reader] += numbers != last
                last = numbers

    with StoreClient(cluster.address) as writer:
        writer.put_batch(KEYS, [value_of(1)] * len(KEYS), upsert=True)
        readers = [threading.Thread(target=read, args=(i,)) for i in range(2)]
        for reader in readers:
            reader.start()
        try:
            for number in range(2, ROUNDS + 2):
                values = [value_of(number)] * len(KEYS)
                assert writer.put_batch(KEYS, values, upsert=True) == [None] * len(KEYS)
        finally:
            stop.set()
            for reader in readers:
                reader.join(30)
        assert not failures
        assert all(count > 1 for count in seen)
        for value in writer.get_batch(KEYS):
            assert number_in(value) == ROUNDS + 1


def test_f35_a_writer_that_is_killed_in_the_middle_leaves_a_whole_object(cluster: Cluster) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, cluster.address], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for _ in range(20):
            acknowledged = int(writer.stdout.readline())
        writer.kill()
        acknowledged = max([acknowledged, *map(int, writer.stdout.read().split())])
    with StoreClient(cluster.address) as store:
        value = store.get("page/x")
        assert isinstance(value, bytes)
        number = int.from_bytes(value[:8], "little")
        assert value == number.to_bytes(8, "little") * 65536
        assert number in (acknowledged, acknowledged + 1)
        patience = Deadline(30_000, SystemClock())
        while True:  # until its grant has ended: then it is replaced again
            try:
                store.put("page/x", b"after", upsert=True, timeout_ms=2000)
                break
            except MooncakeError:
                assert patience.left_ms() > 0
        assert store.get("page/x") == b"after"


def test_f35_a_replacement_that_finds_no_room_leaves_the_object(cluster: Cluster) -> None:
    with StoreClient(cluster.address) as store:
        store.put("page/y", b"as it was", upsert=True)
        with pytest.raises(OutOfSpace):
            store.put("page/y", bytes(400 * MIB), upsert=True, timeout_ms=500)
        assert store.get("page/y") == b"as it was"
