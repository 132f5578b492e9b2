"""The product's processes in the simulated cluster: what stands in for what, and the master's disk.

Driven as they are: `StoreClient` with all below it (placement cache, reader, writers, reservations,
retries), `MasterClient` with its connection, `Node` with its tasks, inventory, holds and
heartbeats, `Reign` with owner, queues, writer, unsealer, service and catalog, `Contender` with all
that follows, campaigns and writes to etcd, the messages between them, and the native code that
judges extents and keeps a segment's table. Stood in for: threads, clock, engine, gRPC, sockets, the
native pull server, the embedded metadata store, and etcd.
"""

from __future__ import annotations

import ctypes
import random as random_module
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty
from typing import Any

import numpy as np
from whole_etcd import Channel, Poll, Sockets
from whole_net import Engine, Message, Net, Stop
from whole_threads import Executor, Scheduler, SimpleQueue, Threading

from mooncake_py import errors
from mooncake_py._native.memory import digests
from mooncake_py._native.pulls import grant_mac, row_macs
from mooncake_py._native.segment import OwnedSegment
from mooncake_py.errors import MooncakeError
from mooncake_py.master import (
    etcd,
    etcd_session,
    etcd_store,
    inbox,
    link,
    owner,
    reign,
    route,
    service,
    standby,
    unsealer,
    writer,
)
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.metadata import Loaded
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.model import EXTENT_HEADER_BYTES
from mooncake_py.store import (
    calls,
    client,
    get,
    holds,
    inventory,
    node_process,
    placement_cache,
    regions,
    renewal,
    reservations,
    results,
    room,
    segments,
    tasks,
    views,
)
from mooncake_py.store.master_time import MasterTime
from mooncake_py.store.pull import Mounted
from mooncake_py.transfer import EngineOptions
from mooncake_py.wire import names as names_wire
from mooncake_py.wire import node as node_wire
from mooncake_py.wire.rows import EXTENT

_THREADED = (
    calls, etcd, etcd_session, etcd_store, holds, inbox, inventory, link, node_process, owner,
    placement_cache, regions, renewal, reservations, results, room, route, segments, standby, tasks,
    unsealer, views, writer,
)  # fmt: skip


class _Dice:
    """Stands in for `secrets`."""

    def __init__(self, dice: random_module.Random) -> None:
        self._dice = dice

    def randbits(self, count: int) -> int:
        return self._dice.getrandbits(count)

    def token_hex(self, nbytes: int) -> str:
        return f"{self._dice.getrandbits(8 * nbytes):0{2 * nbytes}x}"


class _Queues:
    """Stands in for the module `queue`."""

    Empty = Empty

    def __init__(self, scheduler: Scheduler) -> None:
        self.SimpleQueue = lambda: SimpleQueue(scheduler, Empty)


@contextmanager
def stand_ins(
    net: Net, catalog: Callable[[CatalogSettings], Catalog], large_bytes: int | None = None
) -> Iterator[None]:
    """For as long as a simulation runs. `catalog` makes those of masters that take over;
    `large_bytes`: reads of so much renew their leases."""
    world, scheduler = net.world, net.scheduler
    shim, dice = Threading(scheduler), _Dice(world.random)

    def options(*_: object, **__: object) -> EngineOptions:
        return EngineOptions()

    def engine(given: EngineOptions) -> Engine:
        return Engine(net, given)

    replaced: list[tuple[Any, str, object]] = [(each, "threading", shim) for each in _THREADED]
    for module in (client, node_process):
        replaced += [
            (module, "TransferEngine", engine),
            (module, "options_for", options),
            (module, "host_id", lambda: "a host"),
        ]
    replaced += [
        (client, "ThreadPoolExecutor", lambda **_: Executor(scheduler)),
        (node_process, "PullHandler", Pulls),
        (node_process, "secrets", dice),
        (service, "secrets", dice),
        (inventory, "stopwatch_ns", lambda: world.now_ms * 1_000_000),
        (owner, "SimpleQueue", lambda: SimpleQueue(scheduler, Empty)),
        (writer, "trim_heap", lambda: None),
        (route, "Stop", lambda address: Stop(net, address)),
        (Reign, "net", net),
        (standby, "Reign", Reign),
        (standby, "Catalog", catalog),
        (standby, "socket", Sockets(net)),
        (standby, "poll", lambda: Poll(net)),
        (etcd_store, "secrets", dice),
        (etcd, "queue", _Queues(scheduler)),
        (etcd, "_channel", lambda *_: Channel(net)),
        (get, "LARGE_BYTES", large_bytes or get.LARGE_BYTES),
    ]
    before = [(module, name, getattr(module, name, None)) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


class Pulls:
    """Stands in for `PullHandler`: what native/src/node/pulls.cc does, in the same order, over the
    real table of extents. A copy takes time, and half of its bytes are there before the rest."""

    def __init__(self, engine: Engine, segment: OwnedSegment, master_time: MasterTime) -> None:
        self._engine = engine
        self._segment = segment
        self._master_time = master_time
        self._mounted: Mounted | None = None
        self._mounts = 0
        self.draining = False

    @property
    def mounted(self) -> Mounted | None:
        return self._mounted

    @mounted.setter
    def mounted(self, mounted: Mounted | None) -> None:
        if mounted != self._mounted:
            self._mounts += 1
        self._mounted = mounted

    def drain(self) -> None:
        self.draining = True

    def follow_time(self) -> None: ...

    def close(self) -> None: ...

    def serve(self, timeout_ms: int) -> Message | None:
        message = self._engine.inbox.receive(timeout_ms)
        if message is None or message.kind != node_wire.PULL_KIND:
            return message
        message.reply(self._pull(message.payload))
        return None

    def _pull(self, payload: bytes) -> bytes:
        head = node_wire._HEAD.unpack_from(payload)
        segment_id, mac, count, region, _, flags, names_nbytes, _ = head
        assert not region, "values are small enough to ride along"
        assert not flags & node_wire._PIECES
        mounted, number = self._mounted, self._mounts
        if mounted is None or self.draining:
            return _refused(errors.NodeDraining)
        if segment_id != mounted.segment_id:
            return _refused(errors.LeaseExpired)
        at = node_wire._HEAD.size
        raw = payload[at : at + 64 * count]
        at += len(raw)
        sources = np.frombuffer(payload, "<u8", count, at)
        at += 8 * count
        macs = payload[at : at + 16 * count] if flags & node_wire._ROW_MACS else b""
        at += len(macs)
        if not _signed(segment_id, raw, mac, macs, mounted.grant_secret):
            return _refused(errors.AccessRefused)
        names, values = payload[at : at + names_nbytes], payload[at + names_nbytes :]
        rows = np.frombuffer(raw, EXTENT)
        statuses = np.zeros(count, dtype=np.int32)
        self._segment.begin(rows, self._master_time.latest_ms(), statuses)
        self._name(mounted, rows, names, statuses)
        begun = np.flatnonzero(statuses == errors.OK)
        mine = np.ascontiguousarray(rows[begun])
        outcome = self._copy(mine, values, sources[begun].copy(), number)
        statuses[begun] = outcome
        return bytes(4) + bytes((-statuses).astype(np.uint8))

    def _copy(
        self, rows: np.ndarray, values: bytes, sources: np.ndarray, number: int
    ) -> np.ndarray:
        world = self._engine.net.world
        outcome = np.zeros(len(rows), dtype=np.int32)
        crcs = np.zeros(len(rows), dtype=np.uint32)
        for row, source in zip(rows, sources.tolist(), strict=True):
            start = self._segment.base + int(row["offset"]) + EXTENT_HEADER_BYTES
            half = values[source : source + int(row["length"]) // 2]
            ctypes.memmove(start, half, len(half))
        self._engine.net.scheduler.park(world.random.choice([0, 1, 1, 10, 60]))
        self._segment.fill(rows, values, sources, crcs, outcome)
        if self._mounts != number:
            outcome[:] = -errors.LeaseExpired.code
        self._segment.seal(rows, crcs, self._master_time.latest_ms(), outcome)
        return outcome

    def _name(self, mounted: Mounted, rows: np.ndarray, names: bytes, statuses: np.ndarray) -> None:
        if not names or not mounted.name_secret:
            return
        soft_ms, ttl_ms, tenant_nbytes, flags, _ = node_wire._NAMES.unpack_from(names)
        at = node_wire._NAMES.size
        ends = np.frombuffer(names, "<u8", len(rows), at)
        text = names[at + 8 * len(rows) :]
        now_ms = self._master_time.latest_ms()
        tenant = text[:tenant_nbytes]
        soft_until_ms, ttl_until_ms = (now_ms + each if each else 0 for each in (soft_ms, ttl_ms))
        name = names_wire.Name(
            tenant.decode(), b"", soft_until_ms, ttl_until_ms, bool(flags & 1), 0
        )
        common = names_wire.common(name)
        secret = digests((tenant,), mounted.name_secret[:16])
        keys = text[tenant_nbytes : tenant_nbytes + int(ends[-1])]
        self._segment.name(rows, common, keys, ends, secret, statuses.copy())


def _refused(error: type[MooncakeError]) -> bytes:
    return error.code.to_bytes(4, "little")


def _signed(segment_id: int, raw: bytes, mac: bytes, macs: bytes, secret: bytes) -> bool:
    if macs:
        return row_macs(segment_id, raw, secret) == macs
    return grant_mac(segment_id, raw, secret) == mac


class Store:
    """Stands in for the metadata store: outlives the masters. What an append was about to write
    when its process is killed is there or is not."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._snapshot: bytes | None = None
        self._records: list[tuple[int, bytes]] = []
        self._sequence = 0
        self._term = 0
        self._cluster_id = "cluster"
        self._born_ms = 0

    def lose_everything(self) -> None:
        """Somebody has deleted it: the next master begins a new cluster."""
        self._snapshot, self._records, self._sequence = None, [], 0
        self._cluster_id, self._born_ms = "another cluster", self._net.world.now_ms + 1_000_000
        self._term = 100  # a store that is made later begins with a later number

    def load(self) -> Loaded:
        self._term += 1
        records = [each for _, each in self._records]
        return Loaded(
            self._cluster_id, bytes(32), self._term, self._snapshot, records, self._sequence,
            born_ms=self._born_ms,
        )  # fmt: skip

    def append(self, records: Sequence[bytes]) -> int:
        """All or nothing."""
        dice = self._net.world.random
        self._net.scheduler.park(dice.randrange(1, 8))
        for record in records:
            self._sequence += 1
            self._records.append((self._sequence, record))
        self._net.scheduler.park(dice.randrange(1, 4))
        return self._sequence

    def raise_term(self, term: int) -> None:
        self._term = max(self._term, term)

    def write_snapshot(self, snapshot: bytes | bytearray, sequence: int) -> None:
        self._net.scheduler.park(self._net.world.random.randrange(1, 20))
        self._snapshot = bytes(snapshot)
        self._records = [each for each in self._records if each[0] > sequence]

    def describe(self) -> str:
        return "memory"

    def close(self) -> None: ...


class Reign(reign.Reign):
    """Without a lane for clients; nodes are told of removals over an engine."""

    net: Net

    def _open_lane(self, stack: Any, traffic: Any) -> tuple[Any, str]:
        self._unsealer = unsealer.Unsealer(Engine(self.net, EngineOptions(), 2), self._setup.clock)
        stack.callback(self._unsealer.close)
        return owner.Bell(), reign.OFF
