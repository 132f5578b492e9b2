"""Sessions, the asyncio client, and what explain tells."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from daemons import calls, status, wait_until

from mooncake_py import StoreClient
from mooncake_py.errors import ObjectExists, ObjectNotFound, UsageError
from mooncake_py.master.client import MasterClient
from mooncake_py.master.commands import CopyObjects
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.store.aio import AsyncStoreClient

MIB = 1 << 20
VERBS = ("PutStart", "PutEnd", "PutRevoke", "Locate", "Exists", "Remove", "Report")
LEASE_MS = 300
LAYERS, LAYER_BYTES, PAGES = 80, 2_000, 16


@pytest.fixture(scope="module")
def counted() -> Iterator[Cluster]:
    arguments = ["--metrics", "127.0.0.1:0"]
    with Cluster(ClusterOptions(segment_bytes=64 * MIB, master_arguments=arguments)) as running:
        yield running


@pytest.fixture(params=["shm", "tcp"])
def store(counted: Cluster, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    with StoreClient(counted.address, transports=(request.param,)) as client:
        yield client
        for info in client.list():
            client.remove(info.key, force=True)


def spent(cluster: Cluster) -> dict[str, float]:
    return {verb: calls(cluster, verb) for verb in VERBS}


def test_f33_eighty_layers_cost_two_calls_to_write_and_one_to_read(
    counted: Cluster, store: StoreClient
) -> None:
    keys = [f"f33/{i}" for i in range(PAGES)]
    layers = [
        [np.random.default_rng([layer, page]).bytes(LAYER_BYTES) for page in range(PAGES)]
        for layer in range(LAYERS)
    ]
    before = spent(counted)
    with store.session(keys, sizes=[LAYERS * LAYER_BYTES] * PAGES) as writing:
        for layer, parts in enumerate(layers):
            writing.write(layer * LAYER_BYTES, parts)
        assert store.exists(keys[0]) is False
        assert writing.commit() == [None] * PAGES
    with store.session(keys) as reading:
        assert reading.present == [True] * PAGES
        targets = [bytearray(LAYER_BYTES) for _ in keys]
        for layer, parts in enumerate(layers):
            got = reading.read(layer * LAYER_BYTES, LAYER_BYTES, into=targets)
            assert got == [LAYER_BYTES] * PAGES
            assert targets == parts
    after = spent(counted)
    used = {verb: after[verb] - before[verb] for verb in VERBS if after[verb] != before[verb]}
    assert used == {"PutStart": 1, "PutEnd": 1, "Locate": 1, "Exists": 1}  # our own question


def test_f33_an_abandoned_session_leaves_nothing(store: StoreClient) -> None:
    with store.session(["gone"], sizes=[100]) as writing:
        writing.write(0, [b"x" * 100])
        with pytest.raises(UsageError):
            writing.write(1, [b"x" * 100])
        with pytest.raises(UsageError):
            writing.write(-1, [b"x"])
    assert store.exists("gone") is False
    with pytest.raises(UsageError, match="ended"):
        writing.commit()


SESSION_WRITER = """
import os, signal, sys
from mooncake_py import StoreClient
store = StoreClient(sys.argv[1])
writing = store.session(["killed/0", "killed/1"], sizes=[1 << 20, 1 << 20])
for layer in range(8):
    writing.write(layer << 17, [bytes(1 << 17)] * 2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_f33_f08_a_session_whose_process_is_killed_leaves_no_key_and_no_space_is_lost(
    counted: Cluster, store: StoreClient
) -> None:
    before, used = spent(counted), status(counted).used_bytes
    arguments = [sys.executable, "-c", SESSION_WRITER, counted.address]
    assert subprocess.run(arguments, check=False, timeout=60).returncode == -signal.SIGKILL
    assert spent(counted) == before, "an open session is nothing that a master has to end"
    assert status(counted).used_bytes == used
    assert store.exists(["killed/0", "killed/1"]) == [False, False]
    store.put_batch(["killed/0", "killed/1"], [b"0", b"1"])
    assert store.get_batch(["killed/0", "killed/1"]) == [b"0", b"1"]


def test_f33_a_session_may_last_as_long_as_it_likes_and_holds_nothing_meanwhile(
    counted: Cluster, store: StoreClient
) -> None:
    used = status(counted).used_bytes
    with store.session(["slow"], sizes=[MIB], timeout_ms=1_000) as writing:
        before = spent(counted)
        writing.write(0, [bytes(MIB)])
        assert spent(counted) == before
        assert status(counted).used_bytes == used, "space that is asked for only at commit"
        assert writing.commit() == [None]
    assert len(store.get("slow")) == MIB


def test_f33_what_was_not_written_whole_is_refused_and_the_rest_is_stored(
    store: StoreClient,
) -> None:
    keys = ["whole", "hole", "untouched", "empty", "backwards", "twice", "short"]
    with store.session(keys, sizes=[8, 8, 8, 0, 8, 8, 8]) as writing:
        writing.write(0, [b"12345678", b"123", None, None, None, b"aaaaaa", b"1234567"])
        writing.write(4, [None, b"5678", None, None, b"5678", b"5678", None])
        writing.write(0, [None, None, None, b"", b"1234", b"1234", None])
        outcomes = writing.commit()
    refused = {key: str(o) for key, o in zip(keys, outcomes, strict=True) if o is not None}
    assert refused.keys() == {"hole", "untouched", "short"}
    assert all(isinstance(o, UsageError) for o in outcomes if o is not None)
    assert "3 to 4" in refused["hole"]
    assert "0 to 8" in refused["untouched"]
    assert "7 to 8" in refused["short"]
    assert store.exists(keys) == [key not in refused for key in keys]
    stored = [store.get(key) for key in keys if key not in refused]
    assert stored == [b"12345678", b"", b"12345678", b"12345678"]


@pytest.mark.parametrize("part", ["text", 7, np.zeros((4, 4), np.uint8)[:, ::2], object()])
def test_f33_a_part_without_bytes_of_its_own_is_refused_before_any_is_written(
    store: StoreClient, part: object
) -> None:
    with store.session(["f33/ok", "f33/bad"], sizes=[4, 4]) as writing:
        with pytest.raises(UsageError, match="contiguous buffer"):
            writing.write(0, [b"abcd", part])
        assert [bytes(view) for view in writing.views] == [bytes(4)] * 2


def test_f33_what_is_written_through_views_is_the_callers_word(store: StoreClient) -> None:
    with store.session(["by hand"], sizes=[4]) as writing:
        writing.views[0][1:3] = b"ab"
        assert writing.commit() == [None]
    assert store.get("by hand") == b"\0ab\0"


def test_f33_a_session_never_mixes_two_objects_of_one_key(store: StoreClient) -> None:
    store.put_batch(["old", "other"], [b"o" * 1000, b"k" * 1000])
    with store.session(["old", "missing", "other"]) as reading:
        assert reading.present == [True, False, True]
        first = reading.read(0, 500)
        assert first[0] == b"o" * 500
        assert isinstance(first[1], ObjectNotFound)
        store.remove("old", force=True)
        store.put("old", b"n" * 1000)
        second = reading.read(500, 500)
        assert second[2] == b"k" * 500
        assert second[0] == b"o" * 500 or isinstance(second[0], ObjectNotFound)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("often", [True, False])
def test_f33_a_session_goes_on_when_its_object_moves(transport: str, often: bool) -> None:
    """`often`: it is read all the time; else the leases end while nothing is read."""
    arguments = ["--set", f"lease_ms={LEASE_MS}"]
    options = ClusterOptions(node_count=2, segment_bytes=16 * MIB, master_arguments=arguments)
    with (
        Cluster(options) as cluster,
        StoreClient(cluster.address, transports=(transport,)) as store,
        closing(MasterClient(cluster.address)) as master,
    ):
        store.put("moves", bytes(range(256)))
        (here,) = [each.node for each in status(cluster).segments if each.used_bytes]
        (there,) = [each.node for each in status(cluster).segments if each.node != here]
        with store.session(["moves"]) as reading:
            assert reading.read(0, 100) == [bytes(range(100))]

            move = CopyObjects("default", [b"moves"], there, here)

            def moved() -> bool:
                if often:
                    assert reading.read(100, 100) == [bytes(range(100, 200))]
                return not any(master.copy(move, timeout_ms=5_000))

            wait_until(moved)
            until = time.monotonic() + 2 * LEASE_MS / 1_000
            while time.monotonic() < until:
                found = reading.read(200, 56) if often else [store.get("moves", offset=200)]
                assert found == [bytes(range(200, 256))]
            assert reading.read(200, 56) == [bytes(range(200, 256))]


def test_f52_a_thousand_concurrent_gets_on_one_thread(counted: Cluster) -> None:
    async def work() -> None:
        async with await AsyncStoreClient.open(counted.address) as store:
            keys = [f"aio/{i}" for i in range(1000)]
            await asyncio.gather(*(store.put(key, key.encode()) for key in keys))
            before = calls(counted, "Locate")
            got = await asyncio.gather(*(store.get(key) for key in keys))
            assert got == [key.encode() for key in keys]
            assert calls(counted, "Locate") - before <= 4
            targets = [bytearray(10) for _ in range(50)]
            counts = await asyncio.gather(
                *(store.get(key, target) for key, target in zip(keys, targets, strict=False))
            )
            assert [bytes(t[:n]) for t, n in zip(targets, counts, strict=True)] == got[:50]
            assert all(await asyncio.gather(*(store.exists(key) for key in keys[:50])))
            outcomes = await asyncio.gather(
                store.get("aio/none"), store.put(keys[0], b"again"), store.get(keys[1]),
                store.put("bad", object()), store.put("good", b"g"), return_exceptions=True,
            )  # fmt: skip
            kinds = [type(outcome) for outcome in outcomes]
            assert kinds == [ObjectNotFound, ObjectExists, bytes, UsageError, int]
        for call in (store.get(keys[0]), store.get_batch(keys[:1])):
            with pytest.raises(UsageError, match="the client is closed"):
                await call

    asyncio.run(work())


def test_f52_a_cancelled_get_lets_its_buffer_go(counted: Cluster) -> None:
    async def work() -> None:
        async with await AsyncStoreClient.open(counted.address) as store:
            await store.put("big", bytes(20 * MIB))
            target = bytearray(20 * MIB)
            held = sys.getrefcount(target)
            waiting = asyncio.ensure_future(store.get("big", target))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await store.drained()
            del waiting
            for _ in range(500):  # the worker thread lets go a moment after its result is there
                if sys.getrefcount(target) == held:
                    break
                await asyncio.sleep(0.01)
            assert sys.getrefcount(target) == held
            target.extend(b"resizable again")

    asyncio.run(work())


def test_f49_the_steps_of_a_read_add_up(store: StoreClient) -> None:
    store.put("explained", bytes(MIB))
    for remembered in (False, True):
        begin = time.perf_counter_ns()
        found = store.explain("explained")
        wall_us = (time.perf_counter_ns() - begin) / 1000
        assert found.remembered is remembered
        assert found.outcome == "readable"
        assert found.nbytes == MIB
        (replica,) = found.replicas
        assert replica.node.startswith("node-")
        assert replica.way in ("mapped", "tcp")
        moved = "copy" if replica.way == "mapped" else "wire"
        assert found.us[moved] > 0
        assert ("metadata" in found.us) is not remembered
        assert (found.retries, found.used) == (0, 0)
        assert 0 <= wall_us - sum(found.us.values()) <= 0.05 * wall_us + 200
        assert "readable" in str(found)
    assert store.explain("nothing").replicas == ()
