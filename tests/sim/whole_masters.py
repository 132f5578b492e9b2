"""The masters of a simulated cluster: one with a store of its own, or two that share an etcd.

Of one it is `Reign` that is driven, of two `Contender`, with all that is below: the follower and
its watch, campaigns, leases, what is done when the leader's process is gone, the store on etcd and
its client.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from whole_etcd import Etcd
from whole_ledger import Watched
from whole_parts import Reign, Store
from whole_threads import Clock, Host

from mooncake_py.config import MasterSettings
from mooncake_py.master import standby
from mooncake_py.master.election import Stand
from mooncake_py.master.inbox import GRPC, Call
from mooncake_py.master.listen import Address
from mooncake_py.master.reign import Claim, Setup
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.metrics import Metrics

SETTINGS = CatalogSettings(
    tick_ms=50, grant_ttl_ms=3_000, grant_margin_ms=500, lease_ms=800, lease_max_ms=3_000,
    heartbeat_ms=100, suspect_ms=500, dead_ms=3_000, doubt_ms=400, spare_ms=200, slow_start_ms=500,
    objects_max=1 << 12, events_max=1 << 12, hot_copies_max=1, hot_window_ms=1_000, hot_min=4,
    hot_factor=2, generation_block=1 << 13, stripe_min_bytes=1 << 20,
)  # fmt: skip
_NAMES = ("master", "second")
_OFFSETS_MS = (1_000_000, 1_000_120)  # of their clocks


class Masters:
    """`cluster`: the simulated one, which is told of what they do."""

    def __init__(self, cluster: Any, count: int) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self.names = _NAMES[:count]
        self.address = ",".join(f"{name}:1" for name in self.names)
        self._hosts: dict[str, Host] = {}
        self._contenders: dict[Host, standby.Contender] = {}
        self.store = Store(cluster.net)
        self._lone: tuple[Host, Watched] | None = None
        self._led: tuple[Host, Watched, int] | None = None  # of the newest term: who began it
        if count > 1:
            Etcd(cluster.net)

    @property
    def catalog(self) -> Watched | None:
        """Of whoever leads, if its process lives and may serve."""
        if self._lone is not None:
            host, catalog = self._lone
            return catalog if host.alive else None
        if self._led is None:
            return None
        host, catalog, _ = self._led
        contender = self._contenders.get(host)
        if not host.alive or contender is None or contender._reign is None:
            return None
        session = contender._session
        now_ms = contender._setup.clock.now_ms()
        leads = session is not None and session.stand(now_ms) is Stand.LEADING
        return catalog if leads else None

    def is_newest(self, catalog: Watched) -> bool:
        """Has nobody begun a later term? Whoever has not heard of it yet decides in vain."""
        return self._lone is not None or (self._led is not None and self._led[1] is catalog)

    def alive(self) -> list[Host]:
        return [host for host in self._hosts.values() if host.alive]

    def leader(self) -> Host | None:
        """Who began the newest term."""
        found = self._lone[0] if self._lone else self._led[0] if self._led else None
        return found if found is not None and found.alive else None

    def raise_all(self) -> None:
        for name in self.names:
            self.raise_one(name)

    def raise_one(self, name: str) -> None:
        if name in self._hosts and self._hosts[name].alive:
            return
        host = self._hosts[name] = Host(name)
        self._cluster.trouble(f"{name} starts")
        clock = Clock(self._world, _OFFSETS_MS[_NAMES.index(name)])
        begin = self._reign if len(self.names) == 1 else self._contend
        self._cluster.scheduler.start(host, lambda: begin(host, clock))

    def stop(self, host: Host) -> None:
        """As SIGTERM does; by a fiber of its own."""
        contender = self._contenders.get(host)
        if contender is not None:
            contender.close()
        self._world.after(0, lambda: self._cluster.kill(host))

    def begins(self, catalog: Watched, term: int) -> None:
        """A term has begun."""
        if len(self.names) == 1:
            return
        host = self._cluster.scheduler.me().host
        assert self._led is None or term > self._led[2], "a term does not grow"
        self._led = (host, catalog, term)
        self._cluster.ledger.counts["terms of several masters"] += 1
        self._cluster.trouble(f"{host.name} leads in term {term}")

    def _setup(self, host: Host, clock: Clock, metadata: str) -> Setup:
        settings = MasterSettings(
            metadata=metadata, snapshot_record_bytes=20_000, commit_linger_ms=60,
            leader_lease_ms=2_000,
        )  # fmt: skip
        listen = Address(socket.AF_INET, host.name, 1)
        return Setup(settings, SETTINGS, listen, clock, Metrics("sim"))

    def _serve(self, host: Host, clock: Clock, submit: Callable[[Call], None]) -> None:
        def receive(sender: Host, message: object, answer: Callable[[object], None]) -> None:
            if message == "hello":
                answer(host)
                return
            method, payload, left_ms = message  # type: ignore[misc]
            submit(Call(method, payload, answer, clock.now_ms() + int(left_ms), GRPC))

        self._cluster.net.listen(f"{host.name}:1", host, receive)

    # --- one with a store of its own --------------------------------------------------------------

    def _reign(self, host: Host, clock: Clock) -> None:
        catalog = Watched(SETTINGS, self._cluster)
        loaded = self.store.load()
        report = catalog.restore(loaded.snapshot, loaded.records, clock.now_ms())
        assert report.damaged_records == report.extents_overlapping == 0, report
        foreign_until_ms = loaded.born_ms + SETTINGS.recovery_ms if loaded.born_ms else 0
        first = catalog.begin_term(loaded.term, clock.now_ms(), foreign_until_ms)
        claim = Claim(
            loaded.cluster_id, loaded.secret, loaded.term, self.store, loaded.sequence, 0,
            first_records=first,
        )  # fmt: skip
        self._lone = (host, catalog)
        ruler = Reign(self._setup(host, clock, ""), catalog, claim)
        self._serve(host, clock, ruler.submit)

    # --- one of two -------------------------------------------------------------------------------

    def _contend(self, host: Host, clock: Clock) -> None:
        setup = self._setup(host, clock, "etcd://etcd:2379")
        identity = standby.wait_for_store(setup)
        contender = standby.Contender(setup, 1, identity, lambda _: None)
        self._contenders[host] = contender
        self._serve(host, clock, contender.submit)
        contender.start()
