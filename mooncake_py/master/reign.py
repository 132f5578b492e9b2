"""What leads: catalog, owner, writer and lane, from the beginning of a term to its end.

A master with a store of its own reigns from start to stop. One of several begins a reign whenever
it is chosen and ends it when its term is over; the process, its gRPC door and its metrics stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from queue import Empty, SimpleQueue

from mooncake_py.clock import Clock
from mooncake_py.config import MasterSettings, join_address, split_address
from mooncake_py.errors import MooncakeError
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.doors import LaneDoor, Traffic
from mooncake_py.master.inbox import GRPC, LANE, Call, Limits
from mooncake_py.master.listen import Address, listen_address
from mooncake_py.master.metadata import MetadataStore
from mooncake_py.master.owner import Bell, Gate, Owner, Source, opened
from mooncake_py.master.quick import QuickAnswers
from mooncake_py.master.service import Cluster, Service
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.unsealer import Unsealer
from mooncake_py.master.writer import Writer
from mooncake_py.metrics import Metrics
from mooncake_py.transfer import EngineOptions, TransferEngine
from mooncake_py.wire import answers
from mooncake_py.wire.lane import STATUS

OFF = "off"
AUTO = "auto"
SCRAPE_MS = 1_000  # how long a scrape waits for the owner thread


@dataclass(frozen=True, slots=True)
class Setup:
    """What all reigns of a process have in common."""

    settings: MasterSettings
    catalog: CatalogSettings
    listen: Address  # of gRPC
    clock: Clock
    metrics: Metrics

    def reached_by(self, host: str, port: int) -> str:
        """The address that others are told for one that is listened on."""
        return join_address(self.settings.advertise or host, port)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a reign begins with. `record_nbytes`: how much the log holds above its snapshot."""

    cluster_id: str
    secret: bytes
    term: int
    store: MetadataStore
    sequence: int
    record_nbytes: int
    gate: Gate = opened
    durable_puts: bool = False
    first_records: Sequence[bytes] = ()  # durable before any other of the term


class Reign:
    """Construction starts everything, `close` stops it in reverse order and closes the store.

    Raises UsageError, MasterUnavailable (the lane's port cannot be had).
    """

    def __init__(self, setup: Setup, catalog: Catalog, claim: Claim) -> None:
        self._setup = setup
        self._stack = ExitStack()
        with ExitStack() as starting:
            self._start(starting, catalog, claim)
            self._stack = starting.pop_all()

    def _start(self, stack: ExitStack, catalog: Catalog, claim: Claim) -> None:
        settings, metrics = self._setup.settings, self._setup.metrics
        stack.callback(claim.store.close)
        heartbeat_ms = self._setup.catalog.heartbeat_ms
        cluster = Cluster(claim.cluster_id, claim.secret, claim.term, heartbeat_ms)
        self._service = Service(catalog, cluster)
        limits = Limits(
            tick_ms=self._setup.catalog.tick_ms,
            heartbeat_ms=heartbeat_ms,
            durable_puts=claim.durable_puts,
            **{
                f.name: getattr(settings, f.name)
                for f in fields(Limits)
                if hasattr(settings, f.name)
            },
        )
        self._writer = Writer(claim.store, claim.sequence, self._service.refuse, limits, metrics)
        source, self.lane = self._open_lane(stack, Traffic(LANE, metrics))
        self._owner = Owner(
            self._service,
            self._writer,
            source,
            limits,
            self._setup.clock,
            claim.gate,
        )
        self._owner.tell_nodes(self._unsealer)
        self._owner.count(metrics)
        if isinstance(source, LaneDoor) and claim.gate is opened and not claim.durable_puts:
            self._answer_quickly(source, catalog)
        self.submit = self._owner.submit
        self._service.offer(self._lane_offered(), self._counters)
        self._writer.start()
        self._writer.commit(claim.first_records, [])
        stack.callback(self._writer.close, settings.stop_ms)
        self._owner.start(claim.record_nbytes)
        stack.callback(self._owner.stop, settings.stop_ms)

    def healthy(self) -> bool:
        return self._owner.alive() and self._writer.obstacle() is None

    def catalog_numbers(self) -> dict[str, float]:
        """The catalog's numbers for a scrape: a status call like any other. HTTP threads."""
        replies: SimpleQueue[bytes] = SimpleQueue()
        expires_ms = self._setup.clock.now_ms() + SCRAPE_MS
        self.submit(Call(STATUS, b"", replies.put, expires_ms, GRPC))
        try:
            reply = answers.parse(STATUS, replies.get(timeout=SCRAPE_MS / 1000))
            answers.check(STATUS, reply)
        except (Empty, MooncakeError):
            return {}
        info = answers.status_info(reply)
        own = self._setup.metrics.values()
        numbers = {name: value for name, value in info.counters.items() if name not in own}
        numbers["objects"] = info.objects
        numbers["used_bytes"] = info.used_bytes
        numbers["capacity_bytes"] = info.capacity_bytes
        numbers["segments"] = len(info.segments)
        return numbers

    def close(self) -> None:
        """Answer what waits, write what is recorded. Harmless twice."""
        self._stack.close()

    def _counters(self) -> dict[str, float]:
        values = self._setup.metrics.values()
        return {**values, "version_refusals": self._service.version_refusals}

    def _open_lane(self, stack: ExitStack, traffic: Traffic) -> tuple[Source, str]:
        settings, listen = self._setup.settings, self._setup.listen
        text = settings.lane_listen
        if text == OFF:
            self._unsealer = Unsealer(None, self._setup.clock)  # nodes learn from heartbeats
            stack.callback(self._unsealer.close)
            return Bell(), OFF
        address = (
            str(listen_address(text, "--lane-listen"))
            if text != AUTO
            else join_address(listen.host, 0)
        )
        engine = TransferEngine(
            EngineOptions(
                listen=address,
                # A node may have RDMA alone, and has to be told of removals all the same.
                transports=("local", "shm", "tcp", "messages"),
                message_max_bytes=settings.message_bytes_max,
                queue_max_bytes=settings.queue_bytes_max,
            )
        )
        stack.callback(engine.close)
        self._unsealer = Unsealer(engine, self._setup.clock, settings.tell_ms)
        stack.callback(self._unsealer.close)
        return LaneDoor(engine, settings.call_ms_max, self._setup.clock, traffic), engine.address

    def _answer_quickly(self, door: LaneDoor, catalog: Catalog) -> None:
        owner, writer, service = self._owner, self._writer, self._service
        quick = QuickAnswers(
            door.engine, catalog, lambda: service.term, self._setup.clock,
            owner.settle, lambda: writer.obstacle() is None,
        )  # fmt: skip
        door.answer_quickly(quick, owner.count_quick)

    def _lane_offered(self) -> str:
        """The lane's address as clients are told it. Without a host: the one they dialled."""
        if self.lane == OFF:
            return ""
        host, port = split_address(self.lane)
        if not self._setup.settings.advertise and host in ("0.0.0.0", "::"):
            return f":{port}"
        return self._setup.reached_by(host, port)
