"""Three members of which one is frozen or dead, TLS, and user and password: the client goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from etcd_cluster import EtcdCluster, needs_etcd

from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.errors import MasterUnavailable, MooncakeError
from mooncake_py.master.etcd import EtcdAddress, EtcdClient
from mooncake_py.master.etcd_session import put
from mooncake_py.master.etcd_store import EtcdStore
from mooncake_py.wire.etcd import pb

pytestmark = needs_etcd

CLOCK = SystemClock()
RECOVER_MS = 10_000  # for etcd to choose a leader of its own


@pytest.fixture
def three(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd", 3) as cluster:
        yield cluster


def _append_until(store: EtcdStore, records: list[bytes]) -> int:
    """Milliseconds until the append succeeded; each attempt ended in time."""
    start_ms = CLOCK.now_ms()
    deadline = Deadline(RECOVER_MS, CLOCK)
    while True:
        began_ms = CLOCK.now_ms()
        try:
            store.append(records)
            return CLOCK.now_ms() - start_ms
        except MasterUnavailable:
            assert CLOCK.now_ms() - began_ms < 2_500
            if deadline.passed():
                raise


@pytest.mark.parametrize("how", ["freeze", "kill"])
@pytest.mark.parametrize("whom", ["raft leader", "follower"])
def test_f28_a_member_that_is_frozen_or_dead_costs_little(
    three: EtcdCluster, how: str, whom: str
) -> None:
    leader = three.raft_leader()
    victim = leader if whom == "raft leader" else (leader + 1) % 3
    # The victim is first in the list, so it is the one that is being used.
    names = [three.members[victim], *(m for m in three.members if m != three.members[victim])]
    store = EtcdStore(f"etcd://{','.join(names)}/test")
    store.load()
    store.append([b"before"])
    with closing(three.client()) as other:
        watch = EtcdClient(store.address, CLOCK).watch(b"/w/", other.get(b"/", 2_000)[1])
        other.txn([], [put(b"/w/1", b"1")], timeout_ms=2_000)
        assert [event.kv.value for event in watch.events(5_000)] == [b"1"]
        getattr(three, how)(victim)
        took_ms = _append_until(store, [b"after"])
        assert took_ms < (1_500 if whom == "follower" else RECOVER_MS)
        healthy = EtcdClient(EtcdAddress.parse(f"etcd://{','.join(names[1:])}/test"), CLOCK)
        healthy.txn([], [put(b"/w/2", b"2")], timeout_ms=2_000)
        assert [event.kv.value for event in watch.events(RECOVER_MS)] == [b"2"]
        healthy.close()
    watch.close()
    store.close()


def test_f28_without_a_majority_every_call_ends_by_its_deadline(three: EtcdCluster) -> None:
    store = EtcdStore(three.address())
    store.load()
    three.freeze(0)
    three.freeze(1)
    start_ms = CLOCK.now_ms()
    with pytest.raises(MasterUnavailable):
        store.append([b"x"])
    assert CLOCK.now_ms() - start_ms < 2_500
    three.thaw(0)
    three.thaw(1)
    _append_until(store, [b"x", b"y"])
    store.close()
    again = EtcdStore(three.address())
    assert again.load().records == [b"x", b"y"]
    again.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_tls_on_both_sides(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path / "etcd", tls=True) as cluster:
        store = EtcdStore(cluster.address())
        store.load()
        assert store.append([b"x"]) == 1
        store.close()
        plain = EtcdClient(EtcdAddress.parse(f"etcd://{cluster.members[0]}"), CLOCK)
        with closing(plain), pytest.raises(MasterUnavailable):
            plain.get(b"/", 500)


def _administer(member: str, path: str, name: str = "", second: str = "") -> None:
    """Calls of etcd's administration have the shape of (text, text), or less."""
    request = pb.AuthenticateRequest(name=name, password=second).SerializeToString()
    with grpc.insecure_channel(member) as channel:
        channel.unary_unary(f"/etcdserverpb.Auth/{path}")(request, timeout=5)


def test_a28_user_and_password_and_a_token_that_expires(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        member = cluster.members[0]
        _administer(member, "UserAdd", "root", "s3:cr@t")
        _administer(member, "RoleAdd", "root")
        _administer(member, "UserGrantRole", "root", "root")
        _administer(member, "AuthEnable")
        store = EtcdStore(cluster.address(who="root:s3%3Acr%40t@"))
        store.load()
        store.append([b"1"])
        with store.client._lock:  # etcd forgets tokens after a while, and when it is restarted
            store.client._token = "forgotten.1"
        store.append([b"2"])
        store.close()
        for who in ("", "root:wrong@"):
            with pytest.raises(MooncakeError):
                EtcdStore(cluster.address(who=who)).load()
