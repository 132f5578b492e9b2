"""LMCache's own connector, lookup client and transfer channel over mooncake_py.compat."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmcache_peer
import pytest
import torch
from daemons import wait_until
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.l2_adapters import mooncake_store_l2_adapter
from lmcache.v1.distributed.transfer_channel.api import TransferChannelAddress
from lmcache.v1.lookup_client.mooncake_lookup_client import MooncakeLookupClient
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from mooncake_py.compat import lifecycle
from mooncake_py.ops.cluster import Cluster

CHUNK = 16  # tokens
SHAPE = (2, 2, CHUNK, 2, 32)  # layers, planes, tokens, heads, size
PEER = Path(__file__).parent / "lmcache_peer.py"


def metadata(mla: bool = False) -> LMCacheMetadata:
    shape = (2, 1, CHUNK, 1, 64) if mla else SHAPE
    return LMCacheMetadata(
        model_name="test/model", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
        kv_dtype=torch.bfloat16, kv_shape=shape, use_mla=mla, chunk_size=CHUNK, role="worker",
    )  # fmt: skip


def config(address: str, **extra: Any) -> LMCacheEngineConfig:
    """As the guide writes it: the documented keys, all values texts."""
    return LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK,
        local_cpu=False,
        max_local_cpu_size=0.03,
        remote_url=f"mooncakestore://{address}/",
        remote_serde="naive",
        extra_config={
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "device_name": "",
            "master_server_address": address,
            "global_segment_size": "0",
            "transfer_timeout": 5,
            **extra,
        },
    )


class Engine:
    """What LMCache builds for one worker, without the model: its host memory and remote backend."""

    def __init__(self, settings: LMCacheEngineConfig, mla: bool = False) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.metadata = metadata(mla)
        self.mla = mla
        self.local = LocalCPUBackend(settings, self.metadata)
        self.remote = RemoteBackend(settings, self.metadata, self.loop, self.local)

    @property
    def store(self) -> Any:
        return self.remote.connection.getWrappedConnector().store

    def chunk(self, seed: int) -> MemoryObj:
        layout = MemoryFormat.KV_MLA_FMT if self.mla else MemoryFormat.KV_2LTD
        made = self.local.allocate(self.metadata.get_shapes(), self.metadata.get_dtypes(), layout)
        assert made is not None
        made.raw_tensor.copy_(
            torch.randint(0, 256, (made.get_size(),), generator=torch.manual_seed(seed)).byte()
        )
        return made

    def put(self, keys: list[CacheEngineKey], chunks: list[MemoryObj]) -> None:
        """Store them, which ends our hold on the chunks."""
        done: list[CacheEngineKey] = []
        self.remote.batched_submit_put_task(keys, chunks, on_complete_callback=done.append)
        wait_until(lambda: len(done) == len(keys), 30_000)
        for chunk in chunks:
            chunk.ref_count_down()

    def close(self) -> None:
        self.remote.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.local.close()


def key(number: int) -> CacheEngineKey:
    return CacheEngineKey("test/model", 1, 0, number, torch.bfloat16)


@pytest.fixture
def engine(cluster: Cluster) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(mla: bool = False, address: str = "", **extra: Any) -> Engine:
        engines.append(Engine(config(address or cluster.address, **extra), mla))
        return engines[-1]

    yield make
    for made in engines:
        made.close()


CASES = [(meta, mla) for meta in (True, False) for mla in (False, True)]


@pytest.mark.parametrize(("save_chunk_meta", "mla"), CASES)
def test_f68_lmcaches_chunks_come_back(
    engine: Callable[..., Engine], save_chunk_meta: bool, mla: bool
) -> None:
    """With the description beside the chunk (`put_parts`, `batch_get_buffer`) and without it
    (`batch_put_from`, `batch_get_into`)."""
    base = 1000 * (1 + CASES.index((save_chunk_meta, mla)))
    writer = engine(mla, save_chunk_meta=save_chunk_meta)
    assert type(writer.store).__module__ == "mooncake_py.compat.store"
    keys = [key(base + i) for i in range(6)]
    chunks = [writer.chunk(base + i) for i in range(6)]
    written = [bytes(chunk.byte_array) for chunk in chunks]
    assert not writer.remote.contains(keys[0])
    writer.put(keys, chunks)
    reader = engine(mla, save_chunk_meta=save_chunk_meta, mooncake_prefer_local_alloc=True)
    assert reader.remote.batched_contains([*keys, key(base + 99)]) == 6
    found = reader.remote.batched_get_blocking([*keys, key(base + 99)])
    assert found[6] is None
    assert [bytes(each.byte_array) for each in found[:6]] == written


def test_f68_lmcaches_lookup_counts_the_leading_chunks(
    engine: Callable[..., Engine], cluster: Cluster
) -> None:
    writer = engine()
    asked = MooncakeLookupClient(config(cluster.address), writer.metadata, cluster.address)
    tokens = [random.Random(5).randrange(50_000) for _ in range(4 * CHUNK)]
    keys = [each for _, _, each in asked.token_database.process_tokens(torch.tensor(tokens))]
    assert asked.lookup(torch.tensor(tokens)) == 0
    held = [keys[0], keys[1], keys[3]]
    writer.put(held, [writer.chunk(i) for i in range(3)])
    assert asked.lookup(torch.tensor(tokens)) == 2 * CHUNK
    asked.store.close()


def test_f68_lmcache_does_not_go_on_without_a_store(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores what `setup` answers and would take every chunk for present; so this raises, and
    LMCache then has no remote store, says so, and serves misses."""
    monkeypatch.setattr(lifecycle, "SETUP_MS", 500)
    made = engine(address="127.0.0.1:9")
    assert made.remote.connection is None
    assert not made.remote.contains(key(1))
    assert made.remote.batched_get_blocking([key(1)]) == [None]


def test_f68_a_master_that_dies_costs_lmcache_chunks_and_no_thread(
    fresh_cluster: Cluster, engine: Callable[..., Engine]
) -> None:
    made = engine(address=fresh_cluster.address)
    keys = [key(7000 + i) for i in range(3)]
    made.put(keys[:1], [made.chunk(1)])
    port = int(fresh_cluster.address.rsplit(":", 1)[1])
    fresh_cluster.master.child.kill()
    fresh_cluster.master.child.wait(5_000)
    start = time.monotonic()
    assert made.remote.batched_get_blocking(keys[1:2]) == [None]
    made.put(keys[1:2], [made.chunk(2)])
    assert time.monotonic() - start < 30
    fresh_cluster.start_master(port)

    def stores() -> bool:
        made.put(keys[2:], [made.chunk(3)])
        found = made.remote.batched_get_blocking(keys[2:])
        return found[0] is not None

    wait_until(stores, 30_000)


# --- reads from another engine's memory ---

NBYTES = 24 << 20


def free_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def peer() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    url = free_url()
    child = subprocess.Popen(
        [sys.executable, str(PEER), url, str(NBYTES)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=paths(),
    )  # fmt: skip
    assert child.stdout is not None
    while (line := child.stdout.readline()).strip() != "ready":
        assert line, "the peer did not start"
    yield url, child
    child.kill()
    child.communicate()


def paths() -> dict[str, str]:
    here = Path(__file__).parents[2]
    return {**os.environ, "PYTHONPATH": f"{here}:{here / 'compat'}:{Path(__file__).parent}"}


def finished(client: Any, task: int) -> list[bool]:
    answer = client.query_read_status(task)
    deadline = time.monotonic() + 40
    while not answer.is_finished():
        assert time.monotonic() < deadline
        answer = client.query_read_status(task)
    return list(answer.succeeded_mask)


def test_f68_lmcaches_channel_says_done_when_every_block_is_there(
    peer: tuple[str, subprocess.Popen[str]],
) -> None:
    """Upstream's engine looks at the first block only: LMCache then used what had not come yet."""
    url, _ = peer
    memory = torch.zeros(NBYTES, dtype=torch.uint8)
    here: Any = lmcache_peer.channel(free_url(), memory)
    try:
        client = here.get_transfer_channel_client(url)
        sizes = [4096] + [NBYTES // 64] * 63  # the first is done long before the last
        offsets = [sum(sizes[:i]) for i in range(64)]
        places = [TransferChannelAddress(at, size) for at, size in zip(offsets, sizes, strict=True)]
        expected = lmcache_peer.pattern(NBYTES)[: sum(sizes)]
        for _ in range(8):
            memory.zero_()
            task = client.submit_read(places, places)
            assert finished(client, task) == [True] * 64
            assert torch.equal(memory[: sum(sizes)], expected)
    finally:
        here.close()


def test_f68_a_channels_peer_that_dies_is_an_error_in_seconds(
    peer: tuple[str, subprocess.Popen[str]],
) -> None:
    url, child = peer
    memory = torch.zeros(NBYTES, dtype=torch.uint8)
    here: Any = lmcache_peer.channel(free_url(), memory)
    try:
        client = here.get_transfer_channel_client(url)
        place = [TransferChannelAddress(0, 1 << 20)]
        assert finished(client, client.submit_read(place, place)) == [True]
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        start = time.monotonic()
        try:
            read = finished(client, client.submit_read(place, place))
        except RuntimeError:  # how LMCache says that it could not be begun
            read = [False]
        assert read == [False]
        assert time.monotonic() - start < 10
    finally:
        here.close()


def test_f68_the_adapter_of_the_multi_process_mode_says_what_it_lacks() -> None:
    """It stands on an extension compiled against upstream's C++ library. LMCache's wheel has none,
    and nothing of ours pretends to be one."""
    kind = "mooncake_store"
    given = {"type": kind, "num_workers": 1, "local_hostname": "127.0.0.1", "protocol": "tcp"}
    config = mooncake_store_l2_adapter.MooncakeStoreL2AdapterConfig.from_dict(given)
    with pytest.raises(RuntimeError, match="requires the C\\+\\+ Mooncake extension"):
        mooncake_store_l2_adapter._create_mooncake_store_l2_adapter(config)
