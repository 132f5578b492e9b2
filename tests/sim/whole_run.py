"""One simulation of the product's own processes: a cluster, users, misfortune, and in the end
peace, in which everything that was promised is looked for."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from seeds import Outcome, run_seed
from sim_world import Script, Sleep, Weather, World
from whole_ledger import REFUSED, STORED_OK, UNKNOWN, Ledger, Watched
from whole_masters import Masters
from whole_net import Net
from whole_parts import stand_ins
from whole_threads import Clock, Host, Scheduler

from mooncake_py.config import NodeSettings
from mooncake_py.errors import MooncakeError, ObjectExists, ObjectLeased
from mooncake_py.master.membership import ALIVE, Segment
from mooncake_py.master.objects import GROUP, PLACE_BITS, PLACE_MASK
from mooncake_py.model import EXTENT_HEADER_BYTES, ReplicaPolicy
from mooncake_py.store.client import StoreClient
from mooncake_py.store.node_process import Node

SEGMENT_BYTES = 64 << 10
PART_BYTES = 2_500  # that a session reads at once
LARGE_BYTES = 6_000  # from which on leases are renewed while a read runs
SLACK_MS = 1_500  # of a call's deadline: what is tried although the time is over
PEACE_MS = 12_000  # after which nothing is owed any more
CALM_MS = 2_500  # without trouble for so long, everything works


class Cluster:
    def __init__(self, seed: int, masters: int = 1) -> None:
        self.world = World(seed)
        self.scheduler = Scheduler(self.world)
        self.net = Net(self.world, self.scheduler)
        self.ledger = Ledger()
        self.masters = Masters(self, masters)
        self.trouble_ms = 0  # when there was some last
        self.nodes: dict[str, tuple[Host, Node | None]] = {}
        self.stopped_until: dict[str, int] = {}  # as `World.paused_until`, also in peace
        self.peace = False
        self.friends: list[User] = []

    @property
    def catalog(self) -> Watched | None:
        return self.masters.catalog

    # --- processes ------------------------------------------------------------------------------

    def kill(self, host: Host) -> None:
        self.world.note(f"{host.name} is killed")
        self.scheduler.kill(host)
        self.net.gone(host)

    def raise_node(self, name: str) -> None:
        host, _ = self.nodes.get(name, (None, None))
        if host is not None and host.alive:
            return
        host = Host(name)
        self.nodes[name] = (host, None)
        host.born_ms = self.world.now_ms
        self.world.note(f"{name} starts")
        self.scheduler.start(host, lambda: self._run_node(host))

    def _run_node(self, host: Host) -> None:
        rate = self.world.random.choice([1.0, 1.0, 0.999, 1.001])
        settings = NodeSettings(
            self.masters.address, name=host.name, segment_bytes=SEGMENT_BYTES, health_listen="off",
            pull_threads=2, drain_ms=2_000,
        )  # fmt: skip
        node = Node(settings, Clock(self.world, self.world.random.randrange(1 << 40), rate))
        self.nodes[host.name] = (host, node)
        try:
            node.start()
        except MooncakeError as error:  # whoever watches over it starts it again
            self.world.note(f"{host.name} does not start: {error.cause}")
            self.world.after(0, lambda: self._end(host))

    def stop_node(self, host: Host, node: Node) -> None:
        """As SIGTERM does; then it is gone."""
        node.stop(self.world.random.choice([0, 500, 2_000]))
        self.world.after(0, lambda: self._end(host))

    def _end(self, host: Host) -> None:
        if host.alive:
            self.kill(host)
            self.world.after(100, lambda: self.raise_node(host.name))

    def ledger_key(self, slot: int) -> str:
        assert self.catalog is not None
        return (self.catalog.state.table.key[slot] or b"").decode()

    def trouble(self, what: str) -> None:
        self.world.note(what)
        self.trouble_ms = self.world.now_ms

    def calm_since(self, ms: int) -> bool:
        """Apart from the ends of nodes, which others replace."""
        quiet = self.world.weather == Weather() and not self.world.cut
        paused = any(until > ms - CALM_MS for until in self.world.paused_until.values())
        return quiet and not paused and self.trouble_ms < ms - CALM_MS

    # --- what the catalog says ------------------------------------------------------------------

    def committed(self, catalog: Watched, key: bytes, generation: int) -> None:
        """A generation was stored: its nodes' memory says which write it is."""
        state = catalog.state
        slot = state.tenants.obtain("t").complete[key]  # type: ignore[union-attr]
        length = state.table.length[slot]
        for place in state.table.places(slot):
            host, node = self._life(state.members.at(place >> PLACE_BITS))
            if host is None or node is None:
                continue
            address = node._memory.base + (place & PLACE_MASK) * 64
            header = ctypes.string_at(address, EXTENT_HEADER_BYTES)
            own = state.table.replica_generation(slot, place)
            assert int.from_bytes(header[8:16], "little") == own, "another generation is there"
            data = ctypes.string_at(address + EXTENT_HEADER_BYTES, length)
            write = self.ledger.of(key.decode(), data)
            write.generation = write.generation or generation

    def note_homes(self, catalog: Watched) -> None:
        table, members = catalog.state.table, catalog.state.members
        for slot in table.live():
            segments = [members.at(place >> PLACE_BITS) for place in table.places(slot)]
            homes = {self._life(each)[0] for each in segments}
            self.ledger.homes[table.generation[slot]] = homes

    def _life(self, segment: Segment) -> tuple[Host | None, Node | None]:
        """The node that has this segment, if it lives."""
        host, node = self.nodes.get(segment.node, (None, None))
        if host is None or node is None or not host.alive:
            return None, None
        return (host, node) if node._incarnation == segment.incarnation else (None, None)

    def there(self, key: str) -> tuple[int, set[Host]]:
        """The generation that the leading master would send a reader to, and the nodes that have
        had it ready for a while; of a group's member none, since that may end with another."""
        catalog = self.catalog
        if catalog is None:
            return 0, set()
        state = catalog.state
        tenant = state.tenants.find("t")
        slot = None if tenant is None else tenant.complete.get(key.encode())
        if slot is None or state.table.flags[slot] & GROUP or state.doubts:
            return 0, set()
        segments = [state.members.at(place >> PLACE_BITS) for place in state.table.places(slot)]
        lives = [self._life(each)[0] for each in segments if each.state == ALIVE]
        since_ms = self.world.now_ms - CALM_MS
        good = {each for each in lives if each is not None and each.born_ms < since_ms}
        return state.table.generation[slot], good


class User:
    """A client process: one `StoreClient`, and somebody who calls it."""

    def __init__(self, cluster: Cluster, name: str, keys: list[str]) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.ledger = cluster.ledger
        self.keys = keys
        self.host = Host(name)
        self.store: StoreClient | None = None
        cluster.scheduler.start(self.host, self._live)

    def _open(self) -> StoreClient:
        clock = Clock(self.world, self.world.random.randrange(1 << 40))
        while True:
            try:
                return StoreClient(
                    self.cluster.masters.address, tenant="t", timeout_ms=5_000, clock=clock
                )
            except MooncakeError:
                self.cluster.scheduler.park(200)

    def _live(self) -> None:
        dice = self.world.random
        store = self.store = self._open()
        doings = (self._put, self._put, self._put, self._get, self._get, self._get, self._remove)
        sessions = (self._session, self._session) if len(self.cluster.masters.names) > 1 else ()
        while not self.cluster.peace:
            chosen = dice.choice((*doings, *doings, self._look, self._copy, self._copy, *sessions))
            chosen(store, dice.choice([300, 2_000, 5_000]))
            self.cluster.scheduler.park(dice.randrange(1, 120))

    def _some(self, most: int) -> list[str]:
        return self.world.random.sample(
            self.keys, self.world.random.randrange(1, min(most, len(self.keys)) + 1)
        )

    def _in_time(self, begun_ms: int, timeout_ms: int) -> None:
        """Time in which this process was stopped does not count; nor does the margin."""
        stopped = self.cluster.stopped_until.get(self.host.name, 0) >= begun_ms
        late = self.world.now_ms - begun_ms - timeout_ms
        assert stopped or late <= SLACK_MS, f"a call of {timeout_ms} ms is {late} ms late"

    def _put(self, store: StoreClient, timeout_ms: int) -> None:
        dice, begun_ms = self.world.random, self.world.now_ms
        keys = self._some(3)
        upsert, grouped = dice.random() < 0.3, dice.random() < 0.1
        for key in keys if upsert else ():
            self.ledger.unwant(key)
        policy = ReplicaPolicy(dice.choice([1, 2, 2, 3]), soft_pin_ms=dice.choice([0, 0, 500]))
        plain = dice.random() < 0.5
        length = dice.choice([64, 1_000, 4_000])
        lengths = [length if plain else dice.choice([64, 900, 7_000]) for _ in keys]
        writes = [
            self.ledger.begin(key, nbytes, begun_ms, upsert)
            for key, nbytes in zip(keys, lengths, strict=True)
        ]
        options: dict[str, Any] = {} if plain else {"policy": policy, "upsert": upsert}
        if grouped:
            options["groups"] = [1] * len(keys)
        for write in writes:
            write.grouped = grouped
        values = [write.value() for write in writes]
        try:
            outcomes: list[Any] = store.put_batch(keys, values, timeout_ms=timeout_ms, **options)
        except MooncakeError as error:
            outcomes = [error] * len(keys)
        for key in keys if upsert else ():
            self.ledger.unwanted(key)
        for write, outcome in zip(writes, outcomes, strict=True):
            refused = isinstance(outcome, ObjectExists)
            what = STORED_OK if outcome is None else REFUSED if refused else UNKNOWN
            self.ledger.end(write, what, self.world.now_ms)
        self._in_time(begun_ms, timeout_ms)

    def _get(self, store: StoreClient, timeout_ms: int, keys: Sequence[str] = ()) -> None:
        keys, begun_ms = keys or self._some(4), self.world.now_ms
        before = {key: self.cluster.there(key) for key in keys}
        try:
            outcomes: list[Any] = store.get_batch(keys, timeout_ms=timeout_ms)
        except MooncakeError as error:
            outcomes = [error] * len(keys)
        self._in_time(begun_ms, timeout_ms)
        calm = self.cluster.calm_since(begun_ms) and timeout_ms >= 2_000
        for key, outcome in zip(keys, outcomes, strict=True):
            if isinstance(outcome, bytes):
                self.ledger.judge_read(key, outcome, begun_ms, self.world.now_ms)
                continue
            self.ledger.counts[f"get: {type(outcome).__name__}"] += 1
            (generation, homes), (now, homes_now) = before[key], self.cluster.there(key)
            same = generation == now and homes & homes_now
            assert not (calm and same), f"{key} is there and was not read: {outcome!r}"

    def _session(self, store: StoreClient, timeout_ms: int) -> None:
        """An object part by part, with pauses in which its lease ends; a whole one is judged."""
        key, dice = self.world.random.choice(self.keys), self.world.random
        begun_ms, data = self.world.now_ms, b""
        try:
            with store.session([key], timeout_ms=timeout_ms) as reading:
                length = reading.lengths[0]
                while len(data) < length:
                    self.cluster.scheduler.park(dice.choice([0, 0, 30, 700, 1_600]))
                    begun_ms = self.world.now_ms
                    part = reading.read(len(data), min(PART_BYTES, length - len(data)))[0]
                    self._in_time(begun_ms, 2 * timeout_ms)  # it may ask and read again
                    if not isinstance(part, bytes):
                        break
                    data += part
        except MooncakeError:
            self.ledger.counts["sessions in vain"] += 1
            return
        if length and len(data) == length:
            self.ledger.judge_read(key, data, begun_ms, self.world.now_ms)
            self.ledger.counts["read part by part"] += 1

    def _remove(self, store: StoreClient, timeout_ms: int) -> None:
        keys = self._some(2)
        friend = self.world.random.choice(self.cluster.friends)
        if friend.store is not None and self.world.chance(0.5):
            self._get(friend.store, timeout_ms, keys)  # it has leases, and knows where
        self._remove_these(keys, store, timeout_ms)
        if friend.store is not None and self.world.chance(0.8):
            self._get(friend.store, timeout_ms, keys)

    def _remove_these(self, keys: list[str], store: StoreClient, timeout_ms: int) -> None:
        begun_ms = self.world.now_ms
        for key in keys:
            self.ledger.unwant(key)
        try:
            outcomes: Any = store.remove(keys, force=self.world.chance(0.5), timeout_ms=timeout_ms)
        except MooncakeError as error:
            outcomes = [error] * len(keys)
        for key, outcome in zip(keys, outcomes, strict=True):
            self.ledger.unwanted(key)
            if outcome is None:
                self.ledger.removed(key, begun_ms, self.world.now_ms)
            elif isinstance(outcome, ObjectLeased):
                self.ledger.counts["leased"] += 1
        self._in_time(begun_ms, timeout_ms)

    def _look(self, store: StoreClient, timeout_ms: int) -> None:
        begun_ms = self.world.now_ms
        try:
            if self.world.chance(0.5):
                store.exists(self._some(4), prefix=self.world.chance(0.5), timeout_ms=timeout_ms)
            else:
                list(store.list(timeout_ms=timeout_ms))
        except MooncakeError:
            self.ledger.counts["looks in vain"] += 1
        self._in_time(begun_ms, 2 * timeout_ms)

    def _copy(self, store: StoreClient, timeout_ms: int) -> None:
        names = sorted(self.cluster.nodes)
        to, origin = self.world.random.choice(names), self.world.random.choice(["", *names])
        try:
            store.copy(self._some(3), to, from_node=origin, timeout_ms=timeout_ms)
        except MooncakeError:
            self.ledger.counts["copies in vain"] += 1


class Simulation:
    def __init__(self, seed: int, masters: int) -> None:
        self.seed = seed
        self.cluster = Cluster(seed, masters)
        self.world = self.cluster.world
        dice = self.world.random
        self.cluster.masters.raise_all()
        for i in range(dice.randrange(1, 5)):
            self.cluster.raise_node(f"n{i}")
        keys = [f"k{i}" for i in range(dice.choice([3, 8, 24]))]
        self.users = [User(self.cluster, f"c{i}", keys) for i in range(dice.randrange(1, 4))]
        self.cluster.friends = self.users
        self.reader: StoreClient | None = None  # of the end
        if dice.random() < 0.85:
            self.world.start("chaos", self._chaos(), lambda: not self.cluster.peace)

    def run(self, length_ms: int) -> Outcome:
        large_bytes = LARGE_BYTES if len(self.cluster.masters.names) > 1 else None
        cluster = self.cluster
        with stand_ins(cluster.net, lambda given: Watched(given, cluster), large_bytes):
            try:
                self.world.run_until(length_ms)
                self._make_peace()
                while self.world.now_ms < length_ms + PEACE_MS and not self._is_quiet():
                    self.world.run_until(self.world.now_ms + 300)
                self._look_for_everything()
            finally:
                self.world.paused_until.clear()
                for host in dict.fromkeys(each.host for each in self.cluster.scheduler.fibers):
                    self.cluster.scheduler.kill(host)
        return Outcome(
            self.seed, self.world.steps, dict(self.cluster.ledger.counts), self.world.trace
        )

    def _chaos(self) -> Script:
        world, dice, cluster = self.world, self.world.random, self.cluster
        calm_ms = dice.choice([500, 2_000, 8_000])
        everything = ("weather", "node", "node", "stop", "master", "cut", "pause")
        several = cluster.masters.names if len(cluster.masters.names) > 1 else ()
        everything += ("master", "outage") if several else ()
        kinds = dice.choice([everything, everything, ("node", "stop"), ("master",)])
        while True:
            yield Sleep(dice.randrange(1, calm_ms))
            what = dice.choice(kinds)
            names = [
                *cluster.masters.names,
                *cluster.nodes,
                *(each.host.name for each in self.users),
            ]
            if what == "weather":
                cluster.trouble("weather")
                world.weather = dice.choice(
                    [Weather(), Weather(), Weather(loss=0.05, delay_ms=20),
                     Weather(twice=0.1, slow=0.1, slow_ms=300),
                     Weather(loss=0.01, slow=0.02, slow_ms=2_000)]
                )  # fmt: skip
            elif what in ("node", "stop"):
                self._end_node(dice.choice(sorted(cluster.nodes)), what)
            elif what == "master":
                self._end_master()
            elif what == "cut":
                cluster.trouble("cut")
                pairs = {frozenset(dice.sample(names, 2)) for _ in range(2)}
                world.cut = pairs if world.chance(0.6) else set()
            elif what == "outage":
                cluster.trouble("etcd is away")
                world.cut = {frozenset(("etcd", name)) for name in several}
            elif what == "pause":
                name = dice.choice([each for each in names if each != "etcd"])
                world.paused_until[name] = world.now_ms + dice.choice([50, 300, 2_500])
                cluster.stopped_until[name] = world.paused_until[name]
                cluster.trouble(f"{name} is stopped until {world.paused_until[name]}")

    def _end_master(self) -> None:
        """The leading one, or any where there are several; by a signal that it may see, or not."""
        cluster, world = self.cluster, self.world
        host = cluster.masters.leader()
        if len(cluster.masters.names) > 1 and (host is None or world.chance(0.2)):
            host = world.random.choice(cluster.masters.alive() or [None])
        if host is None:
            return
        if len(cluster.masters.names) > 1 and world.chance(0.3):
            cluster.trouble(f"{host.name} is told to stop")
            cluster.scheduler.start(host, lambda: cluster.masters.stop(host))
        else:
            cluster.trouble("the master is killed")
            cluster.kill(host)
        world.after(world.random.randrange(1, 1_500), lambda: cluster.masters.raise_one(host.name))

    def _end_node(self, name: str, how: str) -> None:
        cluster = self.cluster
        host, node = cluster.nodes[name]
        if not host.alive:
            return
        if how == "stop" and node is not None and not node._stopped:
            self.world.note(f"{name} is told to stop")
            cluster.scheduler.start(host, lambda: cluster.stop_node(host, node))
            self.world.after(3_500, lambda: self._lose_patience(name, host))
            return
        cluster.kill(host)
        self.world.after(self.world.random.randrange(1, 4_500), lambda: cluster.raise_node(name))

    def _lose_patience(self, name: str, host: Host) -> None:
        if self.cluster.nodes[name][0] is host and not self.cluster.peace:
            self._end_node(name, "node")

    # --- the end --------------------------------------------------------------------------------

    def _make_peace(self) -> None:
        cluster, world = self.cluster, self.world
        cluster.peace = True
        world.weather, world.cut, world.paused_until = Weather(), set(), {}
        cluster.masters.raise_all()
        for name in list(cluster.nodes):
            cluster.raise_node(name)

    def _is_quiet(self) -> bool:
        """All nodes are mounted and have told what they hold, and no grant runs."""
        catalog, nodes = self.cluster.catalog, self.cluster.nodes.values()
        return (
            catalog is not None
            and all(host.alive and node is not None and node.healthy() for host, node in nodes)
            and all(
                each.recorded and each.compared and each.state == ALIVE
                for each in catalog.state.members
            )
            and not catalog.state.open_grants
        )

    def _look_for_everything(self) -> None:
        """Whoever opens a client now finds all that the catalog has, and all that was promised."""
        catalog = self.cluster.catalog
        assert catalog is not None, "nobody leads"
        for name, (host, node) in self.cluster.nodes.items():
            assert host.alive, f"{name} has ended by itself"
            assert node is not None, f"{name} did not start"
            assert node.healthy() or node._stopped, f"{name} is not mounted"
        table = catalog.state.table
        assert catalog.state.open_grants == 0 or catalog.state.reservations, "a grant has not ended"
        live = {table.generation[slot] for slot in table.live()}
        for write in self.cluster.ledger.writes:
            generation = write.generation
            if write.outcome != STORED_OK or write.grouped or write.unwanted or not generation:
                continue
            homes = self.cluster.ledger.homes.get(generation, set())
            kept = generation in live or generation in self.cluster.ledger.ended
            assert kept or not any(each is not None and each.alive for each in homes), (  # type: ignore[attr-defined]
                f"{write.key}: write {write.number} (generation {generation}) vanished"
            )
        wanted = {self.cluster.ledger_key(slot) for slot in table.live()}
        reader = Host("reader")
        found: list[Any] = []
        self.cluster.scheduler.start(reader, lambda: found.extend(self._read_all(sorted(wanted))))
        begun_ms = self.world.now_ms
        while len(found) < len(wanted) and self.world.now_ms < begun_ms + PEACE_MS:
            self.world.run_until(self.world.now_ms + 50)
        assert len(found) == len(wanted), "the last reader has not come back"
        for key, data in zip(sorted(wanted), found, strict=True):
            assert isinstance(data, bytes), f"{key} is in the catalog and cannot be read: {data!r}"
            self.cluster.ledger.judge_read(key, data, begun_ms, self.world.now_ms)

    def _read_all(self, keys: list[str]) -> list[Any]:
        clock = Clock(self.world, 77)
        address = self.cluster.masters.address
        self.reader = StoreClient(address, tenant="t", timeout_ms=5_000, clock=clock)
        return list(self.reader.get_batch(keys)) if keys else []


def simulate_whole(seed: int, length_ms: int = 12_000) -> Outcome:
    """Run one seed; an AssertionError carries the seed and the last events."""
    return run_seed(Simulation(seed, 1), length_ms, "whole ")


def simulate_standby(seed: int, length_ms: int = 12_000) -> Outcome:
    """The same with two masters that share an etcd."""
    return run_seed(Simulation(seed, 2), length_ms, "standby ")
