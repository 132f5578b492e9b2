"""The disk tier with real processes: found again, never wrong, never in the way."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from daemons import send, status, wait_until
from disks import KIB, MEMORY, MIB, SIZE, cold, fill, numbers, options, read_all, value

from mooncake_py import StoreClient
from mooncake_py.errors import ChecksumMismatch, MooncakeError, ObjectNotFound
from mooncake_py.model import ReplicaPolicy
from mooncake_py.ops.cluster import Cluster
from mooncake_py.wire.names import decode

COUNT = 2 * MEMORY // SIZE  # twice what memory holds


def names(count: int = COUNT, prefix: str = "k") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Twice as many objects as memory holds; those of the first half are on the disk."""
    with Cluster(options(tmp_path_factory.mktemp("disk"))) as cluster:
        with StoreClient(cluster.address) as store:
            fill(cluster, store, names())
        yield cluster


@pytest.fixture
def store(filled: Cluster) -> Iterator[StoreClient]:
    with StoreClient(filled.address) as client:
        yield client


def kill_all(cluster: Cluster) -> None:
    """Nodes and master, at once, as a power cut does."""
    for node in cluster.nodes:
        node.child.kill()
    cluster.master.child.kill()


def start_all(cluster: Cluster) -> None:
    cluster.start_master(int(cluster.address.rpartition(":")[2]))
    cluster.start_node()


def files_of(folder: Path) -> list[Path]:
    return [each for each in (folder / "objects").rglob("*") if each.is_file()]


@pytest.mark.parametrize("transports", [("local", "shm", "tcp"), ("tcp",)])
def test_f41_evicted_objects_are_read_back_byte_identical(
    filled: Cluster, transports: tuple[str, ...]
) -> None:
    before = numbers(filled)["disk_node_hits"]
    with StoreClient(filled.address, transports=transports) as client:
        found, missed = read_all(client, names())
        assert not missed
        batch = client.get_batch(found[:200])
        assert batch == [value(key) for key in found[:200]]
    wait_until(lambda: numbers(filled)["disk_node_hits"] > before)
    assert numbers(filled)["evictions"] == 0


def test_f42_the_second_read_of_a_disk_object_is_served_from_memory(
    filled: Cluster, store: StoreClient
) -> None:
    key = cold(filled, names())[0]
    assert store.get(key) == value(key)
    assert store.get(key) == value(key)
    wait_until(lambda: any(r.way == "mapped" for r in store.explain(key).replicas))
    hits = numbers(filled)["disk_node_hits"]
    for _ in range(20):
        assert store.get(key) == value(key)
    assert numbers(filled)["disk_node_hits"] <= hits + 1
    assert numbers(filled)["disk_promotions"] > 0


def test_f41_every_way_of_reading_reaches_the_disk(filled: Cluster, store: StoreClient) -> None:
    keys = cold(filled, names())[:8]
    assert store.exists(keys[0])
    into = np.zeros(SIZE, np.uint8)
    assert store.get(keys[0], into=into) == SIZE
    assert into.tobytes() == value(keys[0])
    with store.get_view(keys[1]) as view:
        assert bytes(view.memory) == value(keys[1])
    with store.session(keys[2:5]) as reading:
        parts = reading.read(1_000, 2_000)
        assert parts == [value(key)[1_000:3_000] for key in keys[2:5]]
    mixed = [*keys[5:7], names()[-1], "never put"]
    got = store.get_batch(mixed)
    assert got[:3] == [value(key) for key in mixed[:3]]
    assert isinstance(got[3], ObjectNotFound)


def test_f42_a_removed_object_is_gone_for_every_client(filled: Cluster, store: StoreClient) -> None:
    keys = cold(filled, names())[10:14]
    with StoreClient(filled.address) as other:
        for key in keys:
            assert other.get(key) == value(key)
        store.remove(keys[0], force=True)
        for _ in range(50):
            with pytest.raises(ObjectNotFound):
                other.get(keys[0])
        assert not other.exists(keys[0])
        store.put(keys[0], value(keys[0], version=1))
        assert other.get(keys[0]) == value(keys[0], version=1)


def test_a73_slow_readers_of_the_disk_do_not_stop_puts(filled: Cluster, store: StoreClient) -> None:
    """Eight threads read from the disk as fast as they can, and every put ends in its time."""
    keys = cold(filled, names())
    assert len(keys) > 100
    hits = numbers(filled)["disk_node_hits"]
    stop = threading.Event()
    wrong: list[str] = []

    def reader(number: int) -> None:
        with StoreClient(filled.address) as mine:
            at = number
            while not stop.is_set():
                key = keys[at % len(keys)]
                at += 7
                try:
                    if mine.get(key) != value(key):
                        wrong.append(key)
                except MooncakeError:
                    continue  # it has just left the disk, or staging is full

    threads = [threading.Thread(target=reader, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    try:
        for i in range(100):
            store.put(f"between{i}", b"x" * 1_000, timeout_ms=5_000)
        wait_until(lambda: numbers(filled)["disk_node_hits"] > hits + 50)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


def test_f41_the_disk_outlives_node_and_master_and_removals_do_too(tmp_path: Path) -> None:
    with Cluster(options(tmp_path)) as cluster:
        with StoreClient(cluster.address) as store:
            fill(cluster, store, names())
            on_disk = cold(cluster, names())
            assert len(on_disk) > 100
            removed = on_disk[:5]
            for key in removed:
                store.remove(key, force=True)
            kill_all(cluster)
        used = sum(each.stat().st_size for each in files_of(tmp_path))
        start_all(cluster)
        with StoreClient(cluster.address) as store:
            wait_until(lambda: store.exists(on_disk[-1]))
            found = read_all(store, on_disk)[0]
            assert not set(removed) & set(found), "a removed object came back"
            assert len(found) == len(on_disk) - len(removed)
        wait_until(lambda: sum(each.stat().st_size for each in files_of(tmp_path)) <= used)
        assert [each for each in files_of(tmp_path) if each.suffix == ".part"] == []


def ttls(folder: Path) -> set[str]:
    """Keys that the disk keeps a TTL for."""
    with closing(sqlite3.connect(folder / "index.db")) as index:
        told = [decode(row[0][12:]) for row in index.execute("SELECT told FROM names")]
    assert told
    assert all(told), "every object has a name"
    return {each.key.decode() for each in told if each and each.ttl_until_ms}


@pytest.mark.parametrize("nodes_live", [True, False])
def test_f64_a_deleted_database_costs_nothing_that_is_on_disks_alone(
    tmp_path: Path, nodes_live: bool
) -> None:
    """The nodes may have lost their memory, too. Deadlines are kept beside the bytes."""
    with Cluster(options(tmp_path / "disk")) as cluster:
        with StoreClient(cluster.address) as store:
            store.put("mortal", value("mortal"), policy=ReplicaPolicy(ttl_ms=3_600_000))
            fill(cluster, store, names())
            on_disk = cold(cluster, [*names(), "mortal"])
            assert len(on_disk) > 100
            assert "mortal" in on_disk
            removed, kept = on_disk[:5], on_disk[5:]
            for key in removed:
                store.remove(key, force=True)
        assert ttls(tmp_path / "disk") == {"mortal"}
        if not nodes_live:
            kill_all(cluster)
        cluster.master.child.kill()
        for file in Path(cluster.folder).glob("metadata*"):
            file.unlink()
        cluster.start_master(int(cluster.address.rpartition(":")[2]))
        if not nodes_live:
            cluster.start_node()
        with StoreClient(cluster.address) as store:
            wait_until(lambda: all(store.exists(kept)))
            assert not any(store.exists(removed))
            assert read_all(store, kept) == (kept, [])
            if nodes_live:
                assert all(store.exists([each for each in names() if each not in removed]))
            fill(cluster, store, names(40, "more"))  # the tier goes on


def test_a78_kill_and_restart_cycles_in_the_middle_of_offloads_leave_no_rubbish(
    tmp_path: Path,
) -> None:
    with Cluster(options(tmp_path, size=64 * MIB)) as cluster:
        for cycle in range(4):
            with StoreClient(cluster.address, timeout_ms=2_000) as store:
                keys = names(300, f"c{cycle}-")
                for key in keys:  # as fast as it goes: offloads are running when the node dies
                    store.put(key, value(key))
                cluster.nodes[-1].child.kill()
            cluster.start_node()
            with StoreClient(cluster.address) as store:
                for before in range(cycle + 1):
                    read_all(store, names(300, f"c{before}-"))
                wait_until(lambda: len(files_of(tmp_path)) <= objects_on_disk(cluster) + 2)
        assert sum(each.stat().st_size for each in files_of(tmp_path)) <= 64 * MIB


def objects_on_disk(cluster: Cluster) -> int:
    return int(numbers(cluster).get("disk_node_objects", 0))


def test_a83_flipped_bytes_on_the_disk_are_never_handed_out(tmp_path: Path) -> None:
    with Cluster(options(tmp_path)) as cluster, StoreClient(cluster.address) as store:
        fill(cluster, store, names())
        on_disk = cold(cluster, names())
        for file in files_of(tmp_path):
            with open(file, "r+b") as stream:
                stream.seek(file.stat().st_size // 2)
                byte = stream.read(1)
                stream.seek(-1, os.SEEK_CUR)
                stream.write(bytes([byte[0] ^ 0x40]))
        assert len(on_disk) > 100
        for key in on_disk:
            with pytest.raises((ChecksumMismatch, ObjectNotFound)):
                store.get(key)
        for key in on_disk:
            with pytest.raises(ObjectNotFound):
                store.get(key)
        wait_until(lambda: numbers(cluster)["disk_node_damaged"] > 0)
        assert not any(store.exists(on_disk))
        store.put(on_disk[0], b"anew")
        assert store.get(on_disk[0]) == b"anew"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def put_until(
    store: StoreClient, prefix: str, nbytes: int, condition: Callable[[], bool]
) -> list[str]:
    """Put ever more objects until it is so; the keys of the last turn. (How much is offloaded, and
    what is dropped instead, depends on how fast the writer is.)"""
    turns = count()
    last: list[str] = []

    def again() -> bool:
        last[:] = names(max(1, 4 * MIB // nbytes), f"{prefix}-{next(turns)}-")
        for key in last:
            store.put(key, value(key, nbytes))
        return condition()

    wait_until(again, 60_000)
    return last


def test_a80_a_full_disk_drops_and_counts_and_recovers(small_disk: Path) -> None:
    """Configured to take more than there is; then somebody else fills what is left."""
    where = options(small_disk / "tier", size=1 << 30)
    with Cluster(where) as cluster, StoreClient(cluster.address) as store:
        last = put_until(
            store, "first", SIZE, lambda: numbers(cluster).get("disk_offloads", 0) > 10
        )
        assert numbers(cluster)["disk_node_bytes"] <= 12 * MIB
        assert read_all(store, last)[0]
        ballast = small_disk / "ballast"
        with suppress_enospc(), open(ballast, "wb") as stream:
            while True:
                stream.write(bytes(64 * KIB))
        for key in names(400, "full-"):
            store.put(key, value(key))  # never refused for the disk
        wait_until(lambda: any("disk_drops" in name for name in numbers(cluster)))
        assert len(read_all(store, names(400, "full-"))[0]) > 100
        ballast.unlink()
        wait_until(lambda: numbers(cluster)["disk_node_usable_bytes"] > 4 * MIB)

        before = numbers(cluster)["disk_offloads"]
        put_until(store, "again", SIZE, lambda: numbers(cluster)["disk_offloads"] > before + 10)


class suppress_enospc:
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, OSError) and error.errno == 28


def test_a80_objects_larger_than_disk_or_staging_are_dropped_and_counted(tmp_path: Path) -> None:
    with Cluster(options(tmp_path, size=1 * MIB)) as cluster, StoreClient(cluster.address) as store:
        last = put_until(
            store, "large", 2 * MIB, lambda: numbers(cluster).get("disk_drops.too_large", 0) > 0
        )
        assert numbers(cluster)["disk_used_bytes"] == 0
        assert store.get(last[-1]) == value(last[-1], 2 * MIB)


def test_a75_small_objects_take_no_files_and_large_ones_pass(tmp_path: Path) -> None:
    with Cluster(options(tmp_path)) as cluster, StoreClient(cluster.address) as store:
        small = names(12_000, "s")
        for at in range(0, len(small), 500):
            keys = small[at : at + 500]
            store.put_batch(keys, [value(key, 2_000) for key in keys])
        put_until(store, "t", 2_000, lambda: numbers(cluster).get("evictions_to_disk", 0) > 1_000)
        assert files_of(tmp_path) == []
        found, _ = read_all(store, small[::50], 2_000)
        assert found
        large = names(4, "l")
        for key in large:
            store.put(key, value(key, 6 * MIB))
        assert store.get(large[-1]) == value(large[-1], 6 * MIB)


def test_f41_objects_of_64_mib_go_to_the_disk_and_come_back(tmp_path: Path) -> None:
    nbytes = 64 * MIB
    where = options(tmp_path, size=1 << 30, memory=320 * MIB)
    with Cluster(where) as cluster, StoreClient(cluster.address, timeout_ms=20_000) as store:
        keys = names(7, "large")
        for key in keys:
            store.put(key, value(key, nbytes))
            wait_until(lambda: not numbers(cluster).get("disk_pending_bytes", 0))
        found, _ = read_all(store, keys, nbytes)
        assert len(found) >= 5, numbers(cluster)
        assert numbers(cluster)["evictions_to_disk"] >= 1
        # The reads themselves may have sent one more to the disk, which is being written.
        wait_until(lambda: not numbers(cluster).get("disk_pending_bytes", 0))
        assert sum(path.stat().st_size for path in files_of(tmp_path)) % nbytes == 0


def test_a80_a_disk_that_became_read_only_fails_no_put_and_still_serves(tmp_path: Path) -> None:
    with Cluster(options(tmp_path)) as cluster, StoreClient(cluster.address) as store:
        put_until(store, "a", SIZE, lambda: numbers(cluster).get("evictions_to_disk", 0) > 20)
        objects = str(tmp_path / "objects")
        if subprocess.run(["mount", "--bind", objects, objects], check=False).returncode:
            pytest.skip("this user may not mount a file system")
        try:
            read_only = ["mount", "-o", "remount,bind,ro", objects]
            subprocess.run(read_only, check=True)
            fails = "disk_drops.disk_failed"
            last = put_until(store, "b", SIZE, lambda: numbers(cluster).get(fails, 0) > 0)
            assert read_all(store, last)[0]  # puts go on
            kept = [o.key for o in store.list("a")]
            assert read_all(store, kept)[0]  # and so do reads of what is there
        finally:
            subprocess.run(["umount", "-l", objects], check=True)
        before = numbers(cluster)["disk_offloads"]
        put_until(store, "c", SIZE, lambda: numbers(cluster)["disk_offloads"] > before + 10)


def node_command(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mooncake_py.store.node", "--master", cluster.address]
    return subprocess.run(
        [*command, "--name", "second", "--segment-bytes", "1MiB", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_f41_a_folder_that_cannot_be_used_ends_the_start_with_one_line(
    filled: Cluster, tmp_path: Path
) -> None:
    arguments = list(filled.options.node_arguments)
    folder = arguments[arguments.index("--disk") + 1]
    done = node_command(filled, "--disk", folder)
    assert done.returncode in {1, 2}
    assert "is in use by another node" in done.stderr
    assert "Traceback" not in done.stderr
    (tmp_path / "file").write_bytes(b"")
    done = node_command(filled, "--disk", str(tmp_path / "file" / "sub"))
    assert "cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


def test_f41_status_shows_the_memory_and_the_disk_of_a_node(filled: Cluster) -> None:
    states = {each.state for each in status(filled).segments}
    assert states == {"alive"}
    assert sum(bool(each.disk_id) for each in status(filled).segments) == 1


def test_f41_sigterm_leaves_the_disk_for_the_next_start(tmp_path: Path) -> None:
    with Cluster(options(tmp_path)) as cluster:
        with StoreClient(cluster.address) as store:
            fill(cluster, store, names())
            on_disk = cold(cluster, names())
        send(cluster.nodes[-1], signal.SIGTERM)
        assert cluster.nodes[-1].child.wait(20_000) == 0
        with StoreClient(cluster.address) as store:
            assert not store.exists(on_disk[0]), "its node is away"
            cluster.start_node()
            found, missed = read_all(store, on_disk)
            assert not missed
            assert len(found) == len(on_disk)
