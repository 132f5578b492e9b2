"""Pins and the number of replicas of a put, over real processes."""

from __future__ import annotations

import asyncio

import pytest

from mooncake_py import ReplicaPolicy, StoreClient
from mooncake_py.errors import ObjectExists, ObjectLeased, ObjectNotFound, OutOfSpace, UsageError
from mooncake_py.ops.cluster import Cluster
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
