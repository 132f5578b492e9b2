"""One simulation: a cluster, clients, misfortune, and in the end peace, in which all debts are
paid."""

from __future__ import annotations

from catalog_model import check_invariants
from seeds import Outcome, run_seed
from sim_client import Client
from sim_history import History
from sim_master import Master
from sim_node import Node
from sim_world import Script, Sleep, Weather, World

from mooncake_py.master.commands import Drain
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.stripes import whole_key

SETTINGS = CatalogSettings(
    tick_ms=20, grant_ttl_ms=600, grant_margin_ms=150, lease_ms=300, lease_max_ms=1_000,
    heartbeat_ms=50, suspect_ms=150, dead_ms=1_000, doubt_ms=200, reclaim_max=3, step_max=3,
    generation_block=1 << 13, objects_max=1 << 12, hot_copies_max=1, hot_window_ms=300, hot_min=3,
    hot_factor=2, stripe_min_bytes=1 << 10, offload_ms=700, events_max=1 << 10,
    evict_low_ratio=0.85, offload_ahead_ratio=0.84,
)  # fmt: skip


class Simulation:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.world = World(seed)
        random = self.world.random
        self.history = History()
        self.master = Master(self.world, SETTINGS, self.history)
        nbytes = random.choice([4, 16]) * 1024
        self.nodes = [
            Node(self.world, f"n{i}", nbytes, SETTINGS, self.history)
            for i in range(random.randrange(1, 5))
        ]
        keys = [b"k%d" % i for i in range(random.choice([3, 12, 30]))]
        self.clients = [
            Client(self.world, f"c{i}", keys, self.history) for i in range(random.randrange(1, 5))
        ]
        self.peace = False
        self.world.start("chaos", self._chaos(), lambda: not self.peace)

    def run(self, length_ms: int) -> Outcome:
        self.world.run_until(length_ms)
        self._make_peace()
        settled = length_ms + SETTINGS.dead_ms + SETTINGS.lease_max_ms
        settled += 4 * (SETTINGS.grant_ttl_ms + SETTINGS.grant_margin_ms)
        while self.world.now_ms < settled and not self._is_quiet():
            self.world.run_until(self.world.now_ms + 250)
        self._check_debts()
        return Outcome(self.seed, self.world.steps, self.history.counts, self.world.trace)

    def _chaos(self) -> Script:
        world, random = self.world, self.world.random
        calm_ms = random.choice([300, 1_000, 3_000])
        while True:
            yield Sleep(random.randrange(1, calm_ms))
            what = random.choice(
                ("weather", "node", "node", "master", "cut", "pause", "drain", "clock")
            )
            if what == "weather":
                world.weather = random.choice(
                    [
                        Weather(),
                        Weather(loss=0.1, delay_ms=20),
                        Weather(twice=0.2, delay_ms=10, slow=0.1, slow_ms=300),
                        Weather(loss=0.02, twice=0.05, slow=0.02, slow_ms=2_000),
                    ]
                )
            elif what == "node":
                self._toggle_node(random.choice(self.nodes))
            elif what == "master":
                self._toggle_master()
            elif what == "cut":
                names = ["master", *(each.name for each in self.nodes)]
                names += [each.name for each in self.clients]
                world.cut = (
                    {frozenset(random.sample(names, 2)) for _ in range(2)}
                    if world.chance(0.6)
                    else set()
                )
            elif what == "pause":
                name = random.choice(["master", *(each.name for each in self.nodes)])
                world.paused_until[name] = world.now_ms + random.choice([50, 300, 1_500])
                world.note(f"{name} is stopped until {world.paused_until[name]}")
            elif what == "drain":
                node = random.choice(self.nodes)
                node.draining = not node.draining
            elif what == "clock":
                self.master.step_clock(random.randrange(60))

    def _toggle_node(self, node: Node) -> None:
        if node.up:
            self.world.note(f"{node.name} crashes")
            node.crash()
            self.world.after(self.world.random.randrange(1, 1_500), lambda: self._raise(node))

    def _raise(self, node: Node) -> None:
        if not node.up:
            self.world.note(f"{node.name} starts")
            node.start()

    def _toggle_master(self) -> None:
        if self.master.up:
            self.master.crash()
            self.world.after(self.world.random.randrange(1, 600), self.master.raise_again)

    # --- the end --------------------------------------------------------------------------------

    def _make_peace(self) -> None:
        self.peace = True
        for client in self.clients:
            client.up = False
        world = self.world
        world.weather, world.cut, world.paused_until = Weather(), set(), {}
        self.master.peace = True
        self.master.raise_again()
        for node in self.nodes:
            node.draining = False
            self._raise(node)
            self.master.apply(Drain(node.name, cancel=True))

    def _is_quiet(self) -> bool:
        """Nothing is owed any more; at the latest this comes with the last promise's end."""
        state = self.master.catalog.state
        return not (
            state.open_grants
            or len(state.resting)
            or state.leaving
            or state.tasks.running
            or {each.segment_id for each in state.members} != self._segment_ids()
            or any(each.state != "alive" for each in state.members)
            or any(each.disk and each.disk.promotions for each in state.members)
        )

    def _segment_ids(self) -> set[int]:
        disks = {each.disk.segment_id for each in self.nodes if each.disk is not None}
        return disks | {each.segment_id for each in self.nodes}

    def _check_debts(self) -> None:
        """Every grant has ended, nothing rests, and what the catalog lists is really there."""
        state = self.master.catalog.state
        check_invariants(self.master.catalog)
        assert state.open_grants == 0, "a grant has not ended"
        assert len(state.resting) == 0, "extents rest although every promise is over"
        assert not state.leaving
        assert not state.tasks.running, "a copy has not ended"
        by_segment = {each.segment_id: each for each in self.nodes}
        disks = {each.disk.segment_id: each.disk for each in self.nodes if each.disk is not None}
        assert {each.segment_id for each in state.members} == self._segment_ids()
        assert all(each.state == "alive" for each in state.members)
        table = state.table
        for slot in table.live():
            if table.generation[slot] in self.history.risen:
                continue
            for place in table.places(slot):
                generation = table.replica_generation(slot, place)
                segment = state.members.at(place >> 44)
                if segment.segment_id in disks:
                    file = disks[segment.segment_id].files.get(generation)
                    named = (whole_key(table.key[slot] or b""), table.length[slot])
                    assert file == named, f"{generation} is not on its disk"
                    continue
                node = by_segment[segment.segment_id]
                header = node.headers.get((place & ((1 << 44) - 1)) * 64)
                assert header is not None, f"{table.key[slot]!r} is not where it should be"
                assert header.sealed
                assert header.generation == generation
                assert header.key == whole_key(table.key[slot] or b"")


def simulate(seed: int, length_ms: int = 6_000) -> Outcome:
    """Run one seed; an AssertionError carries the seed and the last events."""
    return run_seed(Simulation(seed), length_ms, "")
