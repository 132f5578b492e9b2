"""Pins and the number of replicas of a put, over real processes."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from daemons import wait_until

from mooncake_py import ReplicaPolicy, StoreClient
from mooncake_py.clock import Deadline
from mooncake_py.errors import (
    CapacityError,
    MasterUnavailable,
    ObjectError,
    ObjectExists,
    ObjectLeased,
    ObjectNotFound,
    OutOfSpace,
    PeerUnreachable,
    TransferTimeout,
    UsageError,
)
from mooncake_py.master.client import MasterClient
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.store.aio import AsyncStoreClient


def test_a14_f18_pins_are_set_changed_and_ended_after_the_put(cluster: Cluster) -> None:
    with StoreClient(cluster.address) as store:
        store.put("pins/a", b"a")
        assert store.pin("pins/a", hard_pin=True) is None
        assert isinstance(store.remove("pins/a"), ObjectLeased)
        assert isinstance(store.pin("pins/none", soft_pin_ms=5_000), ObjectNotFound)
        first, second = store.pin(["pins/a", "pins/none"], soft_pin_ms=0)  # type: ignore[misc]
        assert first is None
        assert isinstance(second, ObjectNotFound)
        assert store.remove("pins/a") is None
        with pytest.raises(UsageError, match="say how to pin"):
            store.pin("pins/a")
        assert store.pin([], hard_pin=True) == []


def test_f56_the_deadline_of_another_object_is_taken_over(cluster: Cluster) -> None:
    with StoreClient(cluster.address) as store:
        store.put("turn/0", b"0", policy=ReplicaPolicy(ttl_ms=60_000, soft_pin_ms=30_000))
        store.put("turn/1", b"1", policy=ReplicaPolicy(expires_with="turn/0", recompute_cost=3))
        assert store.get("turn/1") == b"1"


def test_a17_f13_a_put_says_on_how_many_nodes_it_is(cluster: Cluster) -> None:
    three, strict = ReplicaPolicy(replica_count=3), ReplicaPolicy(replica_count=3, strict=True)
    with StoreClient(cluster.address) as store:
        assert store.put("many/1", b"1") == 1
        assert store.put("many/2", b"2", policy=ReplicaPolicy(replica_count=2)) == 2
        assert store.put("many/3", b"3", policy=three) == 2, "there are two nodes"
        done = store.put_batch(["many/3", "many/4", "many/5"], [b"3", b"4", b"5"], policy=three)
        assert isinstance(done[0], ObjectExists)
        assert list(done[1:]) == [None, None]
        assert done.replicas == [0, 2, 2]
        with pytest.raises(OutOfSpace):
            store.put("many/6", b"6", policy=strict, timeout_ms=3_000)
        assert store.put_batch(["many/7"] * 2, [b"7"] * 2).replicas == [1, 0]
        assert {each.key: each.replicas for each in store.list("many/")} == {
            "many/1": 1, "many/2": 2, "many/3": 2, "many/4": 2, "many/5": 2, "many/7": 1,
        }  # fmt: skip


def test_a17_an_asynchronous_put_says_it_too(cluster: Cluster) -> None:
    async def puts() -> list[int]:
        async with await AsyncStoreClient.open(cluster.address) as store:
            two = ReplicaPolicy(replica_count=2, ttl_ms=1 << 40)
            return [await store.put("async/1", b"1"), await store.put("async/2", b"2", policy=two)]

    assert asyncio.run(puts()) == [1, 2]


def test_a17_every_way_to_write_makes_as_many_replicas(cluster: Cluster) -> None:
    two = ReplicaPolicy(replica_count=2, strict=True)
    with StoreClient(cluster.address) as store:
        for i in range(12):  # of one size: without a policy these would use reservations
            assert store.put(f"ways/one/{i}", bytes(100), policy=two) == 2
        assert store.put("ways/large", bytes(1 << 20), policy=two) == 2
        assert store.put("ways/large", bytes(1 << 20), policy=two, upsert=True) == 2
        keys = [f"ways/batch/{i}" for i in range(5)]
        assert store.put_batch(keys, [bytes(1_000)] * 5, policy=two).replicas == [2] * 5
        keys = [f"ways/group/{i}" for i in range(2)]
        assert store.put_batch(keys, [b"k", b"v"], policy=two, groups=[1, 1]).replicas == [2, 2]
        memory = store.alloc(4_096)
        assert store.put("ways/registered", memory.view(), policy=two) == 2
        with store.session(["ways/session"], sizes=[300]) as writing:
            writing.write(0, [bytes(300)])
            assert writing.commit(policy=two) == [None]
        with store.session(["ways/session"], sizes=[300]) as writing:
            writing.write(0, [b"n" * 300])
            assert writing.commit(policy=two, upsert=True) == [None]
        assert store.get("ways/session") == b"n" * 300
        assert {each.replicas for each in store.list("ways/")} == {2}
        memory.close()


class Traffic:
    """A user who does a bit of everything, and often does not finish it."""

    def __init__(self, address: str, seed: int) -> None:
        self.address = address
        self.dice = random.Random(seed)
        self.wrong: list[str] = []
        self.done = 0

    def run(self, stop: Callable[[], bool]) -> None:
        try:
            left: list[StoreClient] = []  # ended without close, as far as they know
            while not stop():
                store = StoreClient(self.address, transports=("local", "shm", "tcp"))
                for _ in range(self.dice.randrange(20, 200)):
                    self._one(store)
                    self.done += 1
                if self.dice.random() < 0.7:
                    store.close()
                    continue
                left.append(store)
                while len(left) > 2:
                    left.pop(0).close()
        except Exception as error:
            self.wrong.append(repr(error))

    def _one(self, store: StoreClient) -> None:
        dice = self.dice
        keys = [f"mixed/{dice.randrange(60)}" for _ in range(dice.randrange(1, 6))]
        doing = dice.choice((self._put, self._put, self._read, self._read, self._look, self._end))
        told = (ObjectError, CapacityError, TransferTimeout, MasterUnavailable, PeerUnreachable)
        with suppress(*told):  # the last: of a removal that did not wait for readers to end
            doing(store, keys, dice.choice((3, 50, 3_000)))  # the first is a call that is cut short

    def _put(self, store: StoreClient, keys: list[str], timeout_ms: int) -> None:
        dice = self.dice
        policy = ReplicaPolicy(
            dice.choice((1, 2)), soft_pin_ms=dice.choice((0, 0, 1_500)),
            ttl_ms=dice.choice((0, 0, 2_000)),
        )  # fmt: skip
        if dice.random() < 0.3:
            with store.session(keys[:1], sizes=[500]) as writing:
                writing.write(0, [keys[0].encode().ljust(dice.choice((500, 20)), b".")])
                if dice.random() < 0.5:
                    writing.commit()
            return
        values = [key.encode().ljust(dice.choice((200, 70_000)), b".") for key in keys]
        upsert = dice.random() < 0.3
        store.put_batch(keys, values, policy=policy, upsert=upsert, timeout_ms=timeout_ms)

    def _read(self, store: StoreClient, keys: list[str], timeout_ms: int) -> None:
        if self.dice.random() < 0.4:
            view = store.get_view(keys[0], timeout_ms=timeout_ms)
            self._judge(keys[0], bytes(view.memory))
            if self.dice.random() < 0.5:
                view.release()
            return
        for key, found in zip(keys, store.get_batch(keys, timeout_ms=timeout_ms), strict=True):
            if isinstance(found, bytes):
                self._judge(key, found)

    def _judge(self, key: str, found: bytes) -> None:
        if found.rstrip(b".") != key.encode():
            self.wrong.append(f"{key}: {found[:40]!r}")

    def _look(self, store: StoreClient, keys: list[str], timeout_ms: int) -> None:
        store.exists(keys, prefix=self.dice.random() < 0.5, timeout_ms=timeout_ms)  # and no read

    def _end(self, store: StoreClient, keys: list[str], timeout_ms: int) -> None:
        dice = self.dice
        if dice.random() < 0.5:
            store.remove(keys, force=dice.random() < 0.5, timeout_ms=max(timeout_ms, 50))
        elif dice.random() < 0.8:
            store.pin(keys, soft_pin_ms=dice.choice((0, 500, 2_000)), timeout_ms=timeout_ms)
        else:
            store.pin(keys, hard_pin=True, timeout_ms=timeout_ms)
            store.pin(keys, soft_pin_ms=0)


def test_a14_after_mixed_traffic_with_random_ends_nothing_is_pinned_or_held() -> None:
    """`MOONCAKE_MIXED_SECONDS` of it; what is promised ends by itself, and all space comes back."""
    seconds = float(os.environ.get("MOONCAKE_MIXED_SECONDS", "3"))
    settings = ("lease_ms=500", "grant_ttl_ms=2000", "grant_margin_ms=300", "recovery_ms=1000")
    arguments = [word for each in settings for word in ("--set", each)]
    options = ClusterOptions(node_count=2, segment_bytes=8 << 20, master_arguments=arguments)
    with Cluster(options) as cluster:
        over = threading.Event()
        users = [Traffic(cluster.address, seed) for seed in range(4)]
        threads = [threading.Thread(target=user.run, args=(over.is_set,)) for user in users]
        for thread in threads:
            thread.start()
        over.wait(seconds)
        over.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert [user.wrong for user in users] == [[]] * 4
        assert all(user.done > 10 for user in users)
        gc.collect()  # views that nobody released, and clients that nobody closed
        with StoreClient(cluster.address) as store:
            for info in store.list():  # a pin may have been set by a call that was cut short
                store.pin(info.key, soft_pin_ms=0)
            master = MasterClient(cluster.address)
            wait_until(lambda: _owes_nothing(master), 20_000)
            store.remove([info.key for info in store.list()], force=True)
            wait_until(lambda: master.status(timeout_ms=5_000).used_bytes == 0)
            for i in range(3):  # and every byte can be had again
                keys = [f"again/{i}/{n}" for n in range(14)]
                assert store.put_batch(keys, [bytes(1 << 20)] * 14) == [None] * 14
            master.close()


def _owes_nothing(master: MasterClient) -> bool:
    info = master.status(timeout_ms=5_000)
    names = ("hard_pinned_bytes", "grants_running", "resting_bytes", "copies_running")
    soft = [tenant.counters["soft_pinned_bytes"] for tenant in info.tenants]
    return not any(info.counters[name] for name in names) and not any(soft)


def test_f28_a_view_whose_time_is_over_ends_as_a_get_does(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that `timeout_ms` must be positive, which it was."""

    def find(key: str, name: bytes, reader: object, deadline: Deadline) -> None:
        wait_until(deadline.passed)

    with StoreClient(cluster.address) as store:
        store.put("late/view", b"v")
        monkeypatch.setattr(store._views, "find", find)
        with suppress(TransferTimeout, MasterUnavailable):
            assert bytes(store.get_view("late/view", timeout_ms=5).memory) == b"v"
