"""Upstream's store class: names, argument orders, integer codes, and no way to crash it."""

from __future__ import annotations

import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake_py.compat.store import (
    MooncakeDistributedStore,
    MooncakeHostMemAllocator,
    ObjectDataType,
    ReplicateConfig,
    bind_to_numa_node,
)
from mooncake_py.ops.cluster import Cluster, ClusterOptions

COMPAT = Path(__file__).parents[2] / "compat"
MIB = 1 << 20
noise = random.Random(5)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    options = ClusterOptions(segment_bytes=64 * MIB, master_arguments=("--metrics", "127.0.0.1:0"))
    with Cluster(options) as running:
        yield running


@pytest.fixture(params=["positional", "dict", "dict of LMCache", "dummy"])
def store(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[MooncakeDistributedStore]:
    made = MooncakeDistributedStore()
    address = cluster.address
    if request.param == "positional":
        code = made.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", address, None)
    elif request.param == "dict":
        code = made.setup(
            {"local_hostname": "127.0.0.1", "metadata_server": "", "master_server_addr": address,
             "global_segment_size": "0", "unknown": "ignored"}
        )  # fmt: skip
    elif request.param == "dummy":
        code = made.setup_dummy(MIB, MIB, address)
    else:
        code = made.setup(
            {"local_hostname": "127.0.0.1", "metadata_server": "", "global_segment_size": 0,
             "master_server_address": address, "device_name": "", "protocol": "tcp"}
        )  # fmt: skip
    assert code == 0
    yield made
    made.remove_all(force=True)
    assert made.close() == 0


def key() -> str:
    return f"k/{noise.random()}"


def test_f50_bytes_and_existence(store: MooncakeDistributedStore) -> None:
    name, value = key(), noise.randbytes(4096)
    assert store.put(name, value) == 0
    assert store.put(name, b"another") == 0
    assert (store.is_exist(name), store.get(name), store.get_size(name)) == (1, value, 4096)
    assert store.batch_is_exist([name, key()]) == [1, 0]
    assert store.get(key()) == b""
    assert store.get_batch([name, key()]) == [value, b""]
    assert store.get_size(key()) == -704
    assert store.put_batch([key(), key()], [b"a", b"b"]) == 0
    assert (
        store.put_parts(parts := key(), b"ab", memoryview(b"cd"), np.frombuffer(b"ef", "u1")) == 0
    )
    assert store.get(parts) == b"abcdef"
    assert store.upsert(name, b"new") == 0
    assert store.get(name) == b"new"
    assert store.health_check() == 0


def test_f50_what_cannot_be_right_has_its_code(store: MooncakeDistributedStore) -> None:
    buffer = np.zeros(100, np.uint8)
    at = buffer.ctypes.data
    assert store.put("", b"x") == -600
    assert store.put(key(), b"") == -600
    assert store.register_buffer(0, 10) == -600
    assert store.register_buffer(at, 0) == -600
    assert store.register_buffer(at, 100) == 0
    assert store.register_buffer(at, 100) == -600
    assert store.unregister_buffer(at) == 0
    assert store.unregister_buffer(at) == -600
    assert store.batch_put_from([key(), key()], [at], [1]) == [-600, -600]
    assert store.batch_put_from([key(), "", key()], [at, at, 0], [10, 10, 10]) == [0, -600, -600]
    assert store.batch_get_into([key()], [at], [100]) == [-704]
    assert store.remove(key()) == -704
    assert store.remove_by_regex("(") == -600
    name = key()
    store.put(name, b"0123456789")
    assert store.get_into(name, at, 5) == -600
    assert store.get_into(name, at, 100) == 10
    assert store.remove(name) == -706
    assert store.remove(name, force=True) == 0


@pytest.mark.parametrize("registered", [True, False])
def test_f50_memory_in_place(store: MooncakeDistributedStore, registered: bool) -> None:
    memory = np.frombuffer(noise.randbytes(4 * MIB), np.uint8).copy()
    target = np.zeros(4 * MIB, np.uint8)
    source_at, target_at = memory.ctypes.data, target.ctypes.data
    if registered:
        assert store.register_buffer(source_at, memory.nbytes) == 0
        assert store.register_buffer(target_at, target.nbytes) == 0
    keys = [key() for _ in range(16)]
    size = 256 << 10
    places = [i * size for i in range(16)]
    assert store.batch_put_from(keys, [source_at + p for p in places], [size] * 16) == [0] * 16
    assert store.batch_put_from(keys, [source_at] * 16, [size] * 16) == [0] * 16
    got = store.batch_get_into(keys, [target_at + p for p in places], [size] * 16)
    assert got == [size] * 16
    assert all(type(each) is int for each in got)
    assert (memory == target).all()
    scattered = [key(), key()]
    ptrs = [[source_at, source_at + MIB], [source_at + 2 * MIB, source_at + 3 * MIB]]
    assert store.batch_put_from_multi_buffers(scattered, ptrs, [[100_000, 5]] * 2) == [0, 0]
    target[:] = 0
    into = [[target_at, target_at + MIB], [target_at + 2 * MIB, target_at + 3 * MIB]]
    assert store.batch_get_into_multi_buffers(scattered, into, [[100_000, 5]] * 2) == [100_005] * 2
    for start, count in ((0, 100_000), (MIB, 5), (2 * MIB, 100_000), (3 * MIB, 5)):
        assert (memory[start : start + count] == target[start : start + count]).all()
    assert store.batch_get_session_start(scattered) == [0, 0]
    assert store.batch_get_into_multi_buffer_ranges(
        [*scattered, key()], [[target_at, target_at + 10]] * 3, [[10, 5]] * 3, [[0, 50]] * 3
    ) == [15, 15, -704]
    assert bytes(target[10:15]) == bytes(memory[2 * MIB + 50 : 2 * MIB + 55])
    assert store.batch_get_session_end(scattered) == [0, 0]
    one, two = store.batch_get_buffer([keys[3], key()])
    assert two is None
    assert bytes(memoryview(one)) == bytes(memory[3 * size : 4 * size])
    assert one.size() == len(one) == size


def test_f50_removal_in_numbers(store: MooncakeDistributedStore) -> None:
    store.remove_all(force=True)
    for i in range(6):
        store.put(f"number/{i}", b"x" * 100)
    assert store.remove_by_regex("number/[01]") == 2
    store.get("number/5")
    assert store.remove_all() == 3
    assert store.remove_all(force=True) == 1
    assert store.batch_get_replica_desc(["number/5"]) == {}


def test_f50_config_is_read_at_the_call_and_groups_have_one_fate(
    store: MooncakeDistributedStore,
) -> None:
    assert hasattr(ReplicateConfig, "group_ids")
    config = ReplicateConfig()
    config.replica_num, config.data_type = 2, ObjectDataType.TENSOR
    keys = [key() for _ in range(4)]
    memory = np.ones(4096, np.uint8)
    first, second = key(), key()
    at = memory.ctypes.data
    for two in (keys[:2], keys[2:]):
        config.group_ids = [first, second]
        assert store.batch_put_from(two, [at] * 2, [4096] * 2, config) == [0] * 2
    config.group_ids = None
    keys = [keys[0], keys[2], keys[1], keys[3]]  # those of a group are of two calls
    assert store.remove(keys[0], force=True) == 0
    assert store.batch_is_exist(keys) == [0, 0, 1, 1]
    found = store.batch_get_replica_desc(keys)
    assert set(found) == set(keys[2:])
    assert found[keys[2]][0].is_memory_replica()


def test_f50_allocated_memory_is_put_from(store: MooncakeDistributedStore) -> None:
    allocator = MooncakeHostMemAllocator()
    at = allocator.alloc(MIB)
    assert at != 0
    assert store.register_buffer(at, MIB) == 0
    names = [key(), key()]
    assert store.batch_put_from(names, [at, at + 500_000], [400_000] * 2) == [0, 0]
    assert store.batch_get_into(names, [at, at], [MIB] * 2) == [400_000] * 2
    assert store.unregister_buffer(at) == 0
    assert (allocator.free(at), allocator.free(at)) == (0, -600)
    assert bind_to_numa_node(0) == 0


def test_f50_before_setup_and_after_close_there_are_codes_and_no_crash(cluster: Cluster) -> None:
    """Upstream's process dies of these calls."""
    store = MooncakeDistributedStore()
    for _ in range(2):
        assert store.put("k", b"v") == -600
        assert (store.is_exist("k"), store.get("k"), store.get_buffer("k")) == (-600, b"", None)
        assert store.batch_get_into(["k"], [1], [1]) == [-600]
        assert store.register_buffer(4096, 10) == -600
        assert (store.remove("k"), store.remove_all(), store.health_check()) == (-600, -600, 1)
        assert store.setup("127.0.0.1", "", 0, 0, "tcp", "", cluster.address) == 0
        assert store.setup("127.0.0.1", "", 0, 0, "tcp", "", cluster.address) == -600
        assert store.close() == store.close() == 0


def test_f50_a_client_can_offer_memory_itself(cluster: Cluster) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, MIB, "tcp", "", cluster.address) == 0
    config = ReplicateConfig()
    config.preferred_segment = store.get_hostname()
    assert ":" in config.preferred_segment
    name = key()
    assert store.put(name, b"here" * 1000, config) == 0
    assert store.get(name) == b"here" * 1000
    with urllib.request.urlopen(
        f"http://{cluster.master.fields['metrics']}/get_all_segments", timeout=5
    ) as page:
        assert len(page.read().split()) == 3
    assert store.close() == 0


def test_f50_without_room_the_code_is_the_one_that_callers_pause_for(cluster: Cluster) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "", 0, 0, "tcp", "", cluster.address) == 0
    huge = np.zeros(400 * MIB, np.uint8)  # more than all segments
    assert store.put(key(), huge) == -200
    assert store.close() == 0


def test_f50_a_setup_that_fails_says_so() -> None:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "", 0, 0, "tcp", "", "redis://a:1") == -600
    with pytest.raises(RuntimeError, match="not set up"):
        store.setup({"metadata_server": "x"})
    with pytest.raises(TypeError):
        store.setup("127.0.0.1")


def test_f68_the_name_mooncake_leads_here_and_flags_are_translated() -> None:
    program = (
        "import mooncake.store, mooncake.engine, mooncake.master as m;"
        "assert mooncake.store.MooncakeDistributedStore.__module__ == 'mooncake_py.compat.store';"
        "assert mooncake.engine.TransferEngine and mooncake.store.ObjectDataType;"
        "print(m.arguments_of(['--rpc_port=50052','-metrics_port','9004','--rpc-address=127.0.0.1',"
        "'--enable_http_metadata_server=true','--default_kv_lease_ttl=7000','--logtostderr']));"
        "print(m.warning_of(m.arguments_of([])));"
        "own = m.arguments_of(['--rpc_address=127.0.0.1','--enable_ha','--etcd_endpoints=h:1']);"
        "assert not m.warning_of(own);"
        "m.arguments_of(['--enable_snapshot','--root_fs_dir=/x'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{COMPAT}:{COMPAT.parent}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "--listen', '127.0.0.1:50052'" in done.stdout
    assert "'--set', 'lease_ms=7000'" in done.stdout
    assert "listens on 0.0.0.0:50051 without authentication" in done.stdout
    assert "metadata in memory" in done.stdout
    assert "not supported: --enable_snapshot, --root_fs_dir" in done.stderr
    assert done.returncode == 1
