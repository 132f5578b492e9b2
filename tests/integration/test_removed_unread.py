"""An acknowledged removal is never followed by a read, whatever the node is doing meanwhile.

Readers here know the placement and have a lease of it, so they ask nobody: without the rule of
`master/lingering.py` each of these tests reads a removed object.
"""

from __future__ import annotations

import signal
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from daemons import send, status, wait_until
from disks import MIB, cold, fill, options, value

from mooncake_py import StoreClient
from mooncake_py.config import split_address
from mooncake_py.errors import MooncakeError, ObjectNotFound, PeerUnreachable
from mooncake_py.master.client import MasterClient
from mooncake_py.ops.cluster import Cluster, ClusterOptions

LEASE_MS = 1_500
LONG_MS = 60_000
PATIENCE_S = 30.0
KEYS = [f"disk/{i:03}" for i in range(300)]  # more than memory has room for


def one_node(lease_ms: int, *arguments: str) -> ClusterOptions:
    return ClusterOptions(
        node_count=1,
        segment_bytes=16 * MIB,
        master_arguments=["--set", f"lease_ms={lease_ms}", *arguments],
    )


@contextmanager
def stopped(cluster: Cluster) -> Iterator[None]:
    """Its only node does nothing."""
    send(cluster.nodes[0], signal.SIGSTOP)
    try:
        yield
    finally:
        send(cluster.nodes[0], signal.SIGCONT)


class Removal:
    """A removal by force on its way."""

    def __init__(self, store: StoreClient, key: str) -> None:
        self.error: MooncakeError | None = None
        self._store, self._key = store, key
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            outcome = self._store.remove(self._key, force=True, timeout_ms=30_000)
            assert outcome is None
        except MooncakeError as error:
            self.error = error

    def runs(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        assert self.error is None


def is_suspect(cluster: Cluster) -> bool:
    return status(cluster).segments[0].state == "suspect"


@pytest.mark.parametrize("lane", ["auto", "off"])
def test_a08_a_mapped_object_of_a_silent_node_is_not_read_after_its_removal(lane: str) -> None:
    arguments = () if lane == "auto" else ("--lane-listen", "off")
    with (
        Cluster(one_node(LEASE_MS, *arguments)) as cluster,
        StoreClient(cluster.address) as writer,
        StoreClient(cluster.address, transports=("shm",)) as reader,
    ):
        writer.put("k", b"old")
        assert reader.get("k") == b"old"
        with stopped(cluster):
            assert writer.remove("k", force=True) is None
            with pytest.raises(ObjectNotFound):
                reader.get("k")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a08_a_removal_waits_for_a_silent_node_and_no_longer(transport: str) -> None:
    with (
        Cluster(one_node(LONG_MS)) as cluster,
        StoreClient(cluster.address) as writer,
        StoreClient(cluster.address) as other,
        StoreClient(cluster.address, transports=(transport,)) as reader,
    ):
        writer.put_batch(["k", "bystander"], [b"old", b"old"])
        assert reader.get_batch(["k", "bystander"]) == [b"old", b"old"]
        with stopped(cluster):
            removal = Removal(writer, "k")
            wait_until(lambda: is_suspect(cluster))
            assert removal.runs(), "it was acknowledged, and the node knows nothing"
            assert other.exists("absent") is False, "nobody else waits"
            assert other.remove("absent", force=True, timeout_ms=2_000) is None
            for timeout_ms in (200, 500):  # absent by now, and read still
                with pytest.raises(PeerUnreachable, match=r"node-0 .* could not be told") as said:
                    other.remove("k", force=True, timeout_ms=timeout_ms)
                assert "timeout_ms" in said.value.advice
        removal.join()
        with pytest.raises(ObjectNotFound):
            reader.get("k")
        assert reader.get("bystander") == b"old"


def test_a08_a_removal_that_cannot_be_answered_for_says_so_and_may_be_tried_again() -> None:
    with (
        Cluster(one_node(LONG_MS)) as cluster,
        StoreClient(cluster.address) as writer,
        StoreClient(cluster.address, transports=("shm",)) as reader,
    ):
        writer.put("k", b"old")
        assert reader.get("k") == b"old"
        with stopped(cluster):
            with pytest.raises(PeerUnreachable, match="could not be told") as caught:
                writer.remove("k", force=True, timeout_ms=4_000)
            assert caught.value.retryable
            assert writer.exists("k") is False
            assert reader.get("k") == b"old", "as it said"
        assert writer.remove("k", force=True) is None
        with pytest.raises(ObjectNotFound):
            reader.get("k")


def test_a08_a_removal_of_all_reaches_everything_although_a_node_is_silent() -> None:
    keys = [f"page/{i:03}" for i in range(100)]
    with (
        Cluster(one_node(LONG_MS, "--set", "step_max=16")) as cluster,
        StoreClient(cluster.address) as writer,
        StoreClient(cluster.address, transports=("shm",)) as reader,
        closing(MasterClient(cluster.address)) as master,
    ):
        writer.put_batch([*keys, "other"], [b"old"] * 101)
        assert reader.get_batch(keys) == [b"old"] * 100
        with stopped(cluster):
            with pytest.raises(PeerUnreachable, match="could not be told"):
                master.remove_all("default", b"page/", force=True, timeout_ms=3_000)
            assert reader.get_batch(keys) == [b"old"] * 100, "as it said"
        wait_until(lambda: bool(writer.exists("other")))  # its node is one that is used again
        assert not any(writer.exists(keys)), "it said that all of them are removed"
        removed = master.remove_all("default", b"page/", force=True, timeout_ms=20_000)
        assert (removed.removed, removed.kept) == (0, 0)
        assert not any(isinstance(each, bytes) for each in reader.get_batch(keys))


@pytest.mark.parametrize("long", [False, True])
def test_a08_after_a_restart_of_the_master_leases_are_waited_for_and_no_longer(long: bool) -> None:
    """The node is lost, so nobody can be told. The new master knows no lease of its predecessor,
    but how long it may be."""
    with (
        Cluster(one_node(LEASE_MS)) as cluster,
        StoreClient(cluster.address) as writer,
        StoreClient(cluster.address, transports=("shm",)) as reader,
    ):
        writer.put("k", b"old")
        assert reader.get("k") == b"old"
        if long:
            lease_long(cluster, ["k"])
        port = split_address(cluster.address)[1]
        for process in (cluster.master, cluster.nodes[0]):
            send(process, signal.SIGKILL)
            wait_until(lambda child=process.child: child.exit_code() is not None)  # type: ignore[misc]
        cluster.start_master(port)
        if long:
            with pytest.raises(PeerUnreachable, match=r"for \d\d\d\d\d ms"):
                writer.remove("k", force=True, timeout_ms=3 * LEASE_MS)
        else:
            assert writer.remove("k", force=True, timeout_ms=3 * LEASE_MS) is None
            with pytest.raises(ObjectNotFound):
                reader.get("k")


def lease_long(cluster: Cluster, keys: Sequence[str]) -> None:
    with closing(MasterClient(cluster.address)) as master:
        names = [each.encode() for each in keys]
        master.locate("default", names, lease_ms=LONG_MS, timeout_ms=10_000)


@contextmanager
def disk_stuck(folder: Path) -> Iterator[None]:
    """Nothing can be deleted from the disk."""
    with closing(sqlite3.connect(folder / "index.db", isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            db.execute("ROLLBACK")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    folder = tmp_path_factory.mktemp("disk")
    with Cluster(options(folder, master=["--set", "lease_ms=3000"])) as cluster:
        with StoreClient(cluster.address) as store:
            fill(cluster, store, KEYS)
        yield cluster, folder


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a08_a_disk_that_is_slow_to_delete_does_not_keep_memory_readable(
    disk: tuple[Cluster, Path], transport: str
) -> None:
    cluster, folder = disk
    with (
        StoreClient(cluster.address) as writer,
        StoreClient(cluster.address, transports=(transport,)) as reader,
    ):
        memory = f"memory/{transport}"
        writer.put(memory, b"old")
        assert reader.get(memory) == b"old"
        first, second = cold(cluster, KEYS)[:2]
        lease_long(cluster, (first, second))
        session = reader.session([first])
        assert session.read(0, 8) == [value(first)[:8]]
        with disk_stuck(folder):
            removals = [Removal(writer, each) for each in (first, second)]
            wait_until(lambda: not writer.exists([first, second], prefix=True))
            assert writer.remove(memory, force=True) is None
            with pytest.raises(ObjectNotFound):
                reader.get(memory)
            assert removals[0].runs(), "it was acknowledged, and is on the disk still"
        for removal in removals:
            removal.join()
        assert isinstance(session.read(0, 8)[0], MooncakeError)
        for key in (first, second):
            with pytest.raises(ObjectNotFound):
                reader.get(key)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_f42_what_was_promoted_is_not_read_after_its_removal(
    disk: tuple[Cluster, Path], transport: str
) -> None:
    cluster, _ = disk
    with (
        StoreClient(cluster.address) as writer,
        StoreClient(cluster.address, transports=(transport,)) as reader,
    ):
        key = cold(cluster, KEYS)[0]

        def promoted() -> bool:
            assert reader.get(key) == value(key)
            return not cold(cluster, [key])

        wait_until(promoted)
        assert reader.get(key) == value(key)
        assert writer.remove(key, force=True) is None
        with pytest.raises(ObjectNotFound):
            reader.get(key)


def test_a08_the_old_value_of_an_upsert_is_not_read_after_the_removal_of_its_key() -> None:
    with (
        Cluster(one_node(LONG_MS)) as cluster,
        StoreClient(cluster.address) as writer,
        StoreClient(cluster.address, transports=("shm",)) as mapped,
        StoreClient(cluster.address, transports=("tcp",)) as remote,
    ):
        writer.put("k", b"old")
        assert (mapped.get("k"), remote.get("k")) == (b"old", b"old")
        writer.put("k", b"new", upsert=True)
        assert mapped.get("k") == b"old", "under its lease"
        assert writer.remove("k", force=True) is None
        for reader in (mapped, remote):
            with pytest.raises(ObjectNotFound):
                reader.get("k")
