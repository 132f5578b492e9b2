"""A running master: everything it consists of, started in order and stopped in reverse.

The metadata store is loaded first (which refuses a second master), the catalog restored, ports
taken, threads begun; calls are accepted last. Whatever fails on the way gives back what was taken.
On the way out nothing new is accepted, what waits is answered, records are written.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from queue import Empty, SimpleQueue

from mooncake_py import config
from mooncake_py.clock import Clock
from mooncake_py.config import MasterSettings, join_address, split_address
from mooncake_py.errors import MasterUnavailable, MooncakeError, UsageError
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.doors import GrpcDoor, LaneDoor, Traffic
from mooncake_py.master.embedded import MEMORY, EmbeddedStore
from mooncake_py.master.inbox import GRPC, LANE, Call, Limits
from mooncake_py.master.metadata import Loaded
from mooncake_py.master.owner import Bell, Owner, Source
from mooncake_py.master.service import Cluster, Service
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.writer import Writer
from mooncake_py.metrics import Metrics, MetricsServer
from mooncake_py.transfer import EngineOptions, TransferEngine
from mooncake_py.wire import answers
from mooncake_py.wire.lane import STATUS

log = logging.getLogger(__name__)

OFF = "off"
AUTO = "auto"
SCRAPE_MS = 1_000  # how long a scrape waits for the owner thread


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen, resolved: a literal host, so that nothing listens on a second one."""

    family: socket.AddressFamily
    host: str
    port: int

    def __str__(self) -> str:
        return join_address(self.host, self.port)


def listen_address(text: str, option: str) -> Address:
    """Resolve `HOST:PORT` and make sure that it can be listened on.

    UsageError: no such name or form. MasterUnavailable: somebody else has it, or it is not ours.
    """
    host, port = split_address(text)
    if not host:
        raise UsageError(f"{option} {text!r} names no host", remedy="write 0.0.0.0 for all")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"{option} {text!r}: {error.strerror}") from None
    family, _, _, _, where = found[0]
    address = Address(family, str(where[0]), port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
        except OSError as error:
            raise _cannot_listen(option, address, error) from None
    return address


def _cannot_listen(option: str, address: Address, error: OSError) -> MasterUnavailable:
    return MasterUnavailable(
        f"{option} {address}: {error.strerror}",
        remedy=f"choose another {option}, or stop the process that has it",
    )


class Master:
    """A running master. Construction starts everything; `close` stops it, in reverse order.

    Raises UsageError, MasterUnavailable (a port or the metadata store cannot be had).
    """

    def __init__(
        self, settings: MasterSettings, catalog_settings: CatalogSettings, clock: Clock
    ) -> None:
        self._settings = settings
        self._metrics = Metrics("mooncake_master")
        self._stack = ExitStack()
        with ExitStack() as starting:
            self._start(starting, catalog_settings, clock)
            self._stack = starting.pop_all()

    def _start(self, stack: ExitStack, catalog_settings: CatalogSettings, clock: Clock) -> None:
        settings, metrics = self._settings, self._metrics
        listen = listen_address(settings.listen, "--listen")
        store = EmbeddedStore(_metadata_path(settings, listen.port))
        self.metadata = store.describe()
        loaded = store.load()
        stack.callback(store.close)
        catalog, self.recovered = _restore(catalog_settings, loaded, clock)
        heartbeat_ms = catalog_settings.heartbeat_ms
        service = Service(
            catalog, Cluster(loaded.cluster_id, loaded.secret, loaded.term, heartbeat_ms)
        )
        limits = Limits(
            tick_ms=catalog_settings.tick_ms,
            heartbeat_ms=heartbeat_ms,
            **{
                f.name: getattr(settings, f.name)
                for f in fields(Limits)
                if hasattr(settings, f.name)
            },
        )
        writer = Writer(store, loaded.sequence, service.refuse, limits, metrics)
        source, self.lane = self._open_lane(stack, listen, clock, Traffic(LANE, metrics))
        owner = Owner(service, writer, source, limits, clock)
        owner.count(metrics)
        door = GrpcDoor(
            str(listen), owner.submit, (settings.message_bytes_max, settings.call_ms_max), clock,
            Traffic(GRPC, metrics),
        )  # fmt: skip
        stack.callback(door.stop, 0)
        self.grpc = join_address(listen.host, door.port)
        service.offer(self._advertised(), lambda: self._counters(service))
        writer.start()
        stack.callback(writer.close, settings.stop_ms)
        owner.start(sum(map(len, loaded.records)))
        stack.callback(owner.stop, settings.stop_ms)
        self.healthy: Callable[[], bool] = lambda: owner.alive() and writer.obstacle() is None
        self._metrics.source(lambda: self._catalog_numbers(owner, clock))
        self.metrics = self._open_metrics(stack)
        door.serve(self.healthy)
        stack.callback(door.stop, settings.stop_ms)

    def _open_lane(
        self, stack: ExitStack, listen: Address, clock: Clock, traffic: Traffic
    ) -> tuple[Source, str]:
        settings = self._settings
        if settings.lane_listen == OFF:
            return Bell(), OFF
        text = settings.lane_listen
        address = (
            str(listen_address(text, "--lane-listen"))
            if text != AUTO
            else join_address(listen.host, 0)
        )
        engine = TransferEngine(
            EngineOptions(
                listen=address,
                message_max_bytes=settings.message_bytes_max,
                queue_max_bytes=settings.queue_bytes_max,
            )
        )
        stack.callback(engine.close)
        return LaneDoor(engine, settings.call_ms_max, clock, traffic), engine.address

    def _open_metrics(self, stack: ExitStack) -> str:
        if self._settings.metrics_listen == OFF:
            return OFF
        address = listen_address(self._settings.metrics_listen, "--metrics")
        try:
            server = MetricsServer((address.host, address.port), self._metrics, self.healthy)
        except OSError as error:
            raise _cannot_listen("--metrics", address, error) from None
        stack.callback(server.close)
        return join_address(address.host, server.port)

    def _advertised(self) -> str:
        """The lane's address as clients are told it. Without a host: the one they dialled."""
        if self.lane == OFF:
            return ""
        host, port = split_address(self.lane)
        if self._settings.advertise:
            return join_address(self._settings.advertise, port)
        return f":{port}" if host in ("0.0.0.0", "::") else self.lane

    def _counters(self, service: Service) -> dict[str, float]:
        return {**self._metrics.values(), "version_refusals": service.version_refusals}

    def _catalog_numbers(self, owner: Owner, clock: Clock) -> dict[str, float]:
        """The catalog's numbers for a scrape: a status call like any other. HTTP threads."""
        replies: SimpleQueue[bytes] = SimpleQueue()
        owner.submit(Call(STATUS, b"", replies.put, clock.now_ms() + SCRAPE_MS, GRPC))
        with suppress(Empty, MooncakeError):
            reply = answers.parse(STATUS, replies.get(timeout=SCRAPE_MS / 1000))
            answers.check(STATUS, reply)
            info = answers.status_info(reply)
            own = self._metrics.values()
            numbers = {name: value for name, value in info.counters.items() if name not in own}
            numbers["objects"] = info.objects
            numbers["used_bytes"] = info.used_bytes
            numbers["capacity_bytes"] = info.capacity_bytes
            numbers["segments"] = len(info.segments)
            return numbers
        return {}

    def close(self) -> None:
        self._stack.close()


def _restore(settings: CatalogSettings, loaded: Loaded, clock: Clock) -> tuple[Catalog, str]:
    """A catalog as it was, and a word about it for the log."""
    catalog = Catalog(settings)
    report = catalog.restore(loaded.snapshot, loaded.records, clock.now_ms())
    if loaded.corrupt:
        log.error("%d damaged entries of the metadata store were left out", loaded.corrupt)
    return catalog, str(report)


def _metadata_path(settings: MasterSettings, port: int) -> str:
    """The path that was given, else a file of this user for this port. A master on any free
    port cannot be found again by its port, so it keeps nothing."""
    if settings.metadata:
        return settings.metadata.removeprefix("sqlite:")
    if port == 0:
        return MEMORY
    return os.path.join(config.state_folder(), f"master-{port}.db")
