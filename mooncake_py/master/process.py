"""The process of a master: its gRPC door and metrics, and what leads behind them.

With a store of its own it leads from start to stop (`Reign`). With a store that several masters
share it contends (`Contender`) and leads when it is chosen. The store is loaded first (which
refuses a second master of an own store), ports are taken, threads begun; calls are accepted last.
Whatever fails on the way gives back what was taken. On the way out nothing new is accepted, what
waits is answered, records are written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from mooncake_py import config
from mooncake_py.clock import Clock
from mooncake_py.config import MasterSettings, join_address
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.doors import GrpcDoor, Traffic
from mooncake_py.master.embedded import MEMORY, EmbeddedStore
from mooncake_py.master.inbox import GRPC, Call
from mooncake_py.master.listen import cannot_listen, listen_address
from mooncake_py.master.reign import OFF, Claim, Reign, Setup
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.metrics import Metrics, MetricsServer

if TYPE_CHECKING:  # a master with a store of its own does not load what knows etcd
    from mooncake_py.master.etcd_store import Identity

log = logging.getLogger(__name__)

SHARED = ("etcd://", "etcds://")  # stores of several masters


class Ruler(Protocol):
    """What calls are handed to, whether it leads or not."""

    def submit(self, call: Call) -> None: ...
    def healthy(self) -> bool: ...
    def catalog_numbers(self) -> dict[str, float]: ...
    def close(self) -> None: ...


class Master:
    """A running master. Construction starts everything; `close` stops it, in reverse order.

    `say`: told when it begins and ceases to lead, if that can change. Raises UsageError,
    MasterUnavailable (a port or the metadata store cannot be had).
    """

    def __init__(
        self,
        settings: MasterSettings,
        catalog_settings: CatalogSettings,
        clock: Clock,
        say: Callable[[str], None] = log.info,
    ) -> None:
        listen = listen_address(settings.listen, "--listen")
        metrics = Metrics("mooncake_master")
        self._setup = Setup(settings, catalog_settings, listen, clock, metrics)
        self._say = say
        self._ruler: Ruler | None = None
        self._stack = ExitStack()
        with ExitStack() as starting:
            self._start(starting)
            self._stack = starting.pop_all()

    def _start(self, stack: ExitStack) -> None:
        setup = self._setup
        settings = setup.settings
        shared = settings.metadata.startswith(SHARED)
        identity: Identity | None = None
        if shared:
            from mooncake_py.master.standby import wait_for_store  # noqa: PLC0415  (see _contend)

            identity = wait_for_store(setup)
        else:
            self._reign(stack)
        door = GrpcDoor(
            str(setup.listen),
            self._submit,
            (settings.message_bytes_max, settings.call_ms_max),
            setup.clock,
            Traffic(GRPC, setup.metrics),
        )
        stack.callback(door.stop, 0)
        self.grpc = join_address(setup.listen.host, door.port)
        if identity is not None:
            self._contend(stack, door.port, identity)
        setup.metrics.source("catalog", self._numbers)
        self.metrics = self._open_metrics(stack)
        door.serve(self.healthy)
        stack.callback(door.stop, settings.stop_ms)
        if shared and self._ruler is not None:  # before the door: callers are told who leads next
            stack.callback(self._ruler.close)

    def _reign(self, stack: ExitStack) -> None:
        setup = self._setup
        store = EmbeddedStore(_metadata_path(setup.settings, setup.listen.port), setup.clock)
        self.metadata = store.describe()
        loaded = store.load()
        stack.callback(store.close)
        catalog = Catalog(setup.catalog)
        now_ms = setup.clock.now_ms()
        report = catalog.restore(loaded.snapshot, loaded.records, now_ms, loaded.corrupt)
        foreign_until_ms = loaded.born_ms + setup.catalog.recovery_ms
        first_records = catalog.begin_term(loaded.term, now_ms, foreign_until_ms)
        self.recovered = str(report)
        if loaded.corrupt:
            log.error("%d damaged entries of the metadata store were left out", loaded.corrupt)
        claim = Claim(
            loaded.cluster_id,
            loaded.secret,
            loaded.term,
            store,
            loaded.sequence,
            sum(map(len, loaded.records)),
            first_records=first_records,
        )
        reign = Reign(setup, catalog, claim)
        stack.callback(reign.close)
        self.lane = reign.lane
        self._ruler = reign

    def _contend(self, stack: ExitStack, port: int, identity: Identity) -> None:
        from mooncake_py.master.standby import Contender  # noqa: PLC0415  (only with etcd)

        contender = Contender(self._setup, port, identity, self._say)
        stack.callback(contender.close)
        self.metadata = contender.metadata
        self.recovered = "follows"
        self.lane = "later"  # a reign opens its own
        self._ruler = contender
        contender.start()

    def _submit(self, call: Call) -> None:
        assert self._ruler is not None, "calls are accepted last"
        self._ruler.submit(call)

    def healthy(self) -> bool:
        return self._ruler is not None and self._ruler.healthy()

    def _numbers(self) -> dict[str, float]:
        return self._ruler.catalog_numbers() if self._ruler is not None else {}

    def _segments(self) -> str:
        """Ids of the mounted segments, one a line."""
        mark = "largest_hole_bytes."
        found = [name.removeprefix(mark) for name in self._numbers() if name.startswith(mark)]
        return "".join(f"{each}\n" for each in sorted(found))

    def _open_metrics(self, stack: ExitStack) -> str:
        if self._setup.settings.metrics_listen == OFF:
            return OFF
        address = listen_address(self._setup.settings.metrics_listen, "--metrics")
        try:
            server = MetricsServer(
                (address.host, address.port),
                self._setup.metrics,
                self.healthy,
                {"/get_all_segments": self._segments},  # what launch scripts of upstream's poll
            )
        except OSError as error:
            raise cannot_listen("--metrics", address, error) from None
        stack.callback(server.close)
        return join_address(address.host, server.port)

    def close(self) -> None:
        self._stack.close()


def _metadata_path(settings: MasterSettings, port: int) -> str:
    """The path that was given, else a file of this user for this port. A master on any free
    port cannot be found again by its port, so it keeps nothing."""
    if settings.metadata:
        return settings.metadata.removeprefix("sqlite:")
    if port == 0:
        return MEMORY
    return os.path.join(config.state_folder(), f"master-{port}.db")
