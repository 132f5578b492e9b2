"""The store on etcd: the battery, and what is peculiar to it. A real etcd, started here."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from etcd_cluster import EtcdCluster, needs_etcd
from masters import until

from mooncake_py.clock import SystemClock
from mooncake_py.errors import MasterUnavailable, NotLeader, UsageError
from mooncake_py.master.etcd import Compacted, EtcdAddress, EtcdClient, Unclear
from mooncake_py.master.etcd_session import put
from mooncake_py.master.etcd_store import EtcdStore
from mooncake_py.wire.etcd import pb
from tests.conformance.metadata_battery import MetadataBattery

pytestmark = needs_etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def address(etcd: EtcdCluster) -> str:
    """A prefix of the test's own."""
    return etcd.address(secrets.token_hex(8))


class TestEtcd(MetadataBattery):
    @pytest.fixture(autouse=True)
    def _address(self, address: str) -> None:
        self.address = address

    def open_store(self) -> EtcdStore:
        return EtcdStore(self.address)


def _keys(client: EtcdClient, prefix: bytes) -> list[bytes]:
    request = pb.RangeRequest(key=prefix, range_end=prefix + b"\xff", keys_only=True)
    return [kv.key for kv in client.range(request, 2_000).kvs]


def _raw_put(client: EtcdClient, key: bytes, value: bytes) -> None:
    client.txn([], [put(key, value)], timeout_ms=2_000)


def test_a_large_append_spans_chunks_and_a_damaged_one_costs_only_its_records(
    address: str,
) -> None:
    records = [bytes([i]) * 300_000 for i in range(10)]
    store = EtcdStore(address)
    store.load()
    store.append(records)
    store.append([b"after"])
    keys = _keys(store.client, store.log.log_prefix)
    assert len(keys) > 5
    damaged = store.client.get(keys[2], 2_000)[0]
    assert damaged is not None
    _raw_put(store.client, keys[2], damaged.value[:-1] + b"?")
    store.close()
    again = EtcdStore(address)
    loaded = again.load()
    again.close()
    assert loaded.records[-1] == b"after"
    assert [r for r in records if r in loaded.records] == loaded.records[:-1]
    assert loaded.corrupt == len(records) + 1 - len(loaded.records)
    assert 1 <= loaded.corrupt <= 3
    assert loaded.sequence == len(records) + 1


def test_an_append_that_was_never_completed_counts_as_nothing(address: str) -> None:
    store = EtcdStore(address)
    store.load()
    store.append([b"whole"])
    torn = store.append([b"t" * 1_200_000])
    keys = _keys(store.client, store.log.log_prefix)
    first = store.log.key(store.log.log_prefix, torn, 0)
    assert first in keys
    delete = pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=first))
    store.client.txn([], [delete], timeout_ms=2_000)
    store.close()
    again = EtcdStore(address)
    loaded = again.load()
    assert (loaded.records, loaded.corrupt) == ([b"whole"], 0)
    assert again.append([b"next"]) == torn  # its place is used again, beside the left-overs
    again.close()
    third = EtcdStore(address)
    loaded = third.load()
    third.close()
    assert (loaded.records, loaded.corrupt) == ([b"whole", b"next"], 0)


def test_a_damaged_snapshot_falls_back_to_the_one_before(address: str) -> None:
    store = EtcdStore(address)
    store.load()
    store.write_snapshot(b"old", store.append([b"1"]))
    newest = store.append([b"2"])
    store.write_snapshot(b"new" * 500_000, newest)
    store.append([b"3"])
    _raw_put(store.client, store.log.key(store.log.snapshot_prefix, newest, 1), b"not a chunk")
    store.close()
    again = EtcdStore(address)
    loaded = again.load()
    again.close()
    assert (loaded.snapshot, loaded.records, loaded.corrupt) == (b"old", [b"2", b"3"], 1)


def test_snapshots_bound_what_etcd_holds(etcd: EtcdCluster, address: str) -> None:
    store = EtcdStore(address)
    store.load()
    sizes = []
    for _ in range(12):
        for _ in range(20):
            covered = store.append([secrets.token_bytes(50_000)])
        store.write_snapshot(secrets.token_bytes(100_000), covered)
        sizes.append(store.client.status(2_000).db_in_use_nbytes)
    assert len(_keys(store.client, store.log.log_prefix)) == 20
    assert len(_keys(store.client, store.log.snapshot_prefix)) == 2
    assert max(sizes[6:]) < 2 * max(sizes[:5]), "etcd grows although its log is truncated"
    store.close()


def test_a27_a_deposed_holder_cannot_write(address: str) -> None:
    former = EtcdStore(address)
    former.load()
    former.append([b"mine"])
    usurper = EtcdStore(address)
    leader = usurper.campaign("here:1").leader(2_000)
    session = usurper.campaign("here:1").run(leader, 2_000)
    usurper.lead(session, 1)
    with pytest.raises(NotLeader) as refused:
        former.append([b"too late"])
    assert refused.value.context["leader"] == "here:1"
    with pytest.raises(NotLeader):
        former.write_snapshot(b"too late", 1)
    usurper.append([b"theirs"])
    former.close()  # gives back its own lease, which is not the leader's
    usurper.append([b"and again"])
    usurper.close()
    again = EtcdStore(address)
    assert again.load().records == [b"mine", b"theirs", b"and again"]
    again.close()


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_an_append_without_an_answer_is_settled(
    address: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrived is not written twice, and what did not arrive is written."""
    store = EtcdStore(address)
    store.load()
    answered = store.client.txn
    failures = iter([True])

    def broken(*args: Any, timeout_ms: int) -> Any:
        if next(failures, False):
            if lost == "answer":
                answered(*args, timeout_ms=timeout_ms)
            raise Unclear("the connection broke")
        return answered(*args, timeout_ms=timeout_ms)

    monkeypatch.setattr(store.client, "txn", broken)
    assert store.append([b"first", b"second"]) == 2
    assert store.append([b"third"]) == 3
    store.close()
    again = EtcdStore(address)
    loaded = again.load()
    again.close()
    assert (loaded.records, loaded.sequence) == ([b"first", b"second", b"third"], 3)


def test_a_failed_append_goes_on_with_the_same_records_and_more(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = EtcdStore(address)
    store.load()
    answered = store.client.txn

    def deaf(*args: Any, timeout_ms: int) -> Any:
        """Everything arrives and nothing is answered."""
        answered(*args, timeout_ms=timeout_ms)
        raise Unclear("no answer")

    monkeypatch.setattr(store.client, "txn", deaf)
    with pytest.raises(MasterUnavailable):
        store.append([b"a"])
    monkeypatch.setattr(store.client, "txn", answered)
    assert store.append([b"a", b"b"]) == 2
    store.close()
    again = EtcdStore(address)
    assert again.load().records == [b"a", b"b"]
    again.close()


def test_a_watch_behind_a_compaction_says_so(etcd: EtcdCluster) -> None:
    client = etcd.client()
    for number in range(5):
        _raw_put(client, b"/w/x", b"%d" % number)
    _, revision = client.get(b"/w/x", 2_000)
    client.compact(revision, 2_000)
    behind = client.watch(b"/w/", revision - 3)
    with pytest.raises(Compacted):
        behind.events(5_000)
    ahead = client.watch(b"/w/", revision)
    _raw_put(client, b"/w/x", b"new")
    assert [event.kv.value for event in ahead.events(5_000)] == [b"new"]
    behind.close()
    ahead.close()
    client.close()


def test_nobody_there_ends_by_the_deadline() -> None:
    clock = SystemClock()
    client = EtcdClient(EtcdAddress.parse("etcd://127.0.0.1:1,127.0.0.1:2/x"), clock)
    start_ms = clock.now_ms()
    with pytest.raises(MasterUnavailable, match=r"127\.0\.0\.1:1,127\.0\.0\.1:2"):
        client.get(b"/x", 700)
    assert clock.now_ms() - start_ms < 1_000
    client.close()


@pytest.mark.parametrize(
    ("text", "members", "prefix"),
    [
        ("etcd://h1,h2:99,h3", ("h1:2379", "h2:99", "h3:2379"), "/mooncake/"),
        ("etcd://h1;h2/a/b/", ("h1:2379", "h2:2379"), "/a/b/"),
        ("etcd://me:p%40ss@[::1]:5", ("[::1]:5",), "/mooncake/"),
        ("etcds://h?ca=/x/ca.pem", ("h:2379",), "/mooncake/"),
    ],
)
def test_addresses(text: str, members: tuple[str, ...], prefix: str) -> None:
    address = EtcdAddress.parse(text)
    assert (address.members, address.prefix) == (members, prefix)
    assert "p@ss" not in f"{address} {address!r}"


@pytest.mark.parametrize(
    "text", ["etcd://", "etcd://a,,b", "etcd://me@h", "etcd://h?ca=x", "etcds://h?foo=x"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        EtcdAddress.parse(text)


def test_snapshots_in_the_background_are_there_when_the_store_is_closed(address: str) -> None:
    owner = EtcdStore(address)
    session = owner.campaign("").run(None, 2_000)
    store = owner.borrowed()
    store.lead(session, 0)
    covered = store.append([b"a"])
    store.write_snapshot(b"s" * 3_000_000, covered)
    store.append([b"b"])  # does not wait for it
    store.close()
    owner.close()
    again = EtcdStore(address)
    loaded = again.load()
    again.close()
    assert (loaded.snapshot, loaded.records) == (b"s" * 3_000_000, [b"b"])


def test_a28_many_sessions_leave_no_thread_and_no_socket(address: str) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def one() -> None:
        store = EtcdStore(address)
        store.load()
        store.append([b"x"])
        store.close()

    one()  # what gRPC keeps for the process is there from now on
    before = threading.active_count(), open_files()
    for _ in range(int(os.environ.get("MOONCAKE_SESSIONS", "50"))):
        one()
    until(lambda: threading.active_count() <= before[0] and open_files() <= before[1], 5_000, "end")
