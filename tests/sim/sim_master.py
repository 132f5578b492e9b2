"""The master around the real catalog: a log that becomes durable late, crashes, restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from catalog_model import check_invariants, picture
from sim_history import History
from sim_world import World

from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import (
    Applied,
    Command,
    Granted,
    Heartbeat,
    Located,
    Mount,
    Mounted,
    Remove,
    Reply,
    TaskList,
    Tick,
    Unseal,
)
from mooncake_py.master.disk_commands import DiskWork
from mooncake_py.master.records import unpack
from mooncake_py.master.replay import RestoreReport
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.shadow import Shadow


@dataclass(frozen=True)
class Answer:
    """A reply, the master's time, and what rides along: where segments are, secrets of grants,
    extents to unseal."""

    reply: object
    now_ms: int
    nodes: tuple[str, ...] = ()
    secrets: tuple[int, ...] = ()
    unseals: tuple[bytes, ...] = ()


class Master:
    """One leader at a time. Records reach the disk in order, some time after they were written."""

    def __init__(self, world: World, settings: CatalogSettings, history: History) -> None:
        self.world = world
        self.settings = settings
        self.history = history
        self.disk: list[bytes] = []
        self.snapshot = b""
        self.standby = Shadow(settings)  # follows what becomes durable
        self.clock_offset_ms = 1_000_000
        self.life = 0
        self.catalog = Catalog(settings)
        self._pending: list[tuple[list[bytes], Callable[[], None]]] = []
        self._syncing = False
        self.secrets: dict[int, int] = {}  # segment id -> key of its grants
        self.unseals: dict[int, list[bytes]] = {}
        self.up = False
        self.peace = False
        self.start()

    @property
    def now_ms(self) -> int:
        return self.world.now_ms + self.clock_offset_ms

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        self.life += 1
        self.up = True
        self.catalog = Catalog(self.settings)
        report = self._restore()
        self._keep(self.catalog.begin_term(self.life, self.now_ms))
        assert report.damaged_records == report.unknown_records == 0
        assert report.extents_overlapping == 0, "the log contradicts itself"
        check_invariants(self.catalog)
        self.history.master_restarted(self.catalog, self.now_ms)
        self.world.processes["master"] = self
        self._tick(self.life)
        if self.world.chance(0.2):
            self.crash_soon(150)

    def _restore(self) -> RestoreReport:
        """By reading everything, or as a standby that has followed: both must come to the same."""
        report = self.catalog.restore(self.snapshot, self.disk, self.now_ms)
        shadow, self.standby = self.standby, Shadow(self.settings)
        for follower in (self.standby, *([shadow] if self.world.chance(0.3) else [])):
            follower.__init__(self.settings)  # type: ignore[misc]  # reads the log from the start
            follower.feed(unpack(self.snapshot))
            for record in self.disk:
                follower.feed([record])
        other = Catalog(self.settings)
        followed = other.take_over(shadow, self.now_ms)
        if followed is None:  # the clock has gone back, and what rested is claimed again
            self.history.count("take-overs that had to read again")
            return report
        assert _lasting(other) == _lasting(self.catalog)
        if self.world.chance(0.5):
            self.catalog = other
            return followed
        return report

    def crash_soon(self, within_ms: int) -> None:
        """A crash at the worst moment: while something is not durable yet."""
        life = self.life

        def strike() -> None:
            if self.up and self.life == life and not self.peace:
                self.crash()
                self.world.after(self.world.random.randrange(1, 100), self.raise_again)

        self.world.after(self.world.random.randrange(1, within_ms), strike)

    def raise_again(self) -> None:
        if not self.up:
            self.world.note("master starts")
            self.start()

    def crash(self) -> None:
        """What is on its way to the disk arrives up to a random point."""
        kept = self.world.random.randrange(len(self._pending) + 1)
        for records, _ in self._pending[:kept]:
            self._keep(records)
        self.world.note(f"master crashes, {len(self._pending) - kept} commits lost")
        self._pending = []
        self._syncing = False
        self.secrets, self.unseals = {}, {}
        self.up = False
        self.life += 1
        del self.world.processes["master"]
        self.clock_offset_ms += self.world.random.randrange(-300, 300)

    def _tick(self, life: int) -> None:
        if not self.up or life != self.life:
            return
        if self.world.paused_until.get("master", 0) <= self.world.now_ms:
            self.apply(Tick())
            if self.world.chance(0.01):
                self._snapshot()
        self.world.after(self.settings.tick_ms, lambda: self._tick(life))

    def _snapshot(self) -> None:
        """Only when nothing is on its way, as the writer thread does it in order."""
        if not self._pending:
            self.snapshot = self.catalog.snapshot(self.now_ms)
            self.disk = []

    # --- service --------------------------------------------------------------------------------

    def receive(self, sender: str, message: object, answer: Callable[[object], None]) -> None:
        assert isinstance(message, Command)
        applied = self.apply(message)
        reply = applied.reply
        floor = self.catalog.state.next_generation
        packet = Answer(reply, self.now_ms, *self._riders(message, reply))

        def send() -> None:
            if isinstance(message, Remove):
                if self.world.chance(0.05):
                    self.crash_soon(10)
                self.history.removal_acknowledged(message.keys, reply, floor)
            answer(packet)

        if applied.durable_first:
            self._write(applied.records, send)
        else:
            if applied.records:
                self._write(applied.records, lambda: None)
            send()

    def _riders(
        self, message: Command, reply: Reply
    ) -> tuple[tuple[str, ...], tuple[int, ...], tuple[bytes, ...]]:
        if isinstance(message, Mount) and isinstance(reply, Mounted):
            secret = self.world.random.getrandbits(64)
            self.secrets[reply.segment_id] = secret
            return (), (secret,), ()
        if isinstance(reply, Granted | Located | TaskList):
            segments = [self.catalog.segment(each) for each in reply.segment_ids]
            nodes = tuple(each.node for each in segments if each is not None)
            assert len(nodes) == len(reply.segment_ids)
            if isinstance(reply, Located | TaskList):
                return nodes, (), ()
            return nodes, tuple(self.secrets[each] for each in reply.segment_ids), ()
        if isinstance(message, Heartbeat | DiskWork):
            return (), (), tuple(self.unseals.pop(message.segment_id, ()))
        return (), (), ()

    def apply(self, command: Command) -> Applied:
        applied = self.catalog.apply(command, self.now_ms)
        check_invariants(self.catalog)
        self.history.applied(self.catalog, command, applied, self.now_ms)
        for effect in applied.effects:
            assert isinstance(effect, Unseal)
            self.unseals.setdefault(effect.segment_id, []).append(effect.rows)
        if isinstance(command, Tick) and applied.records:
            self._write(applied.records, lambda: None)
        return applied

    def _keep(self, records: list[bytes]) -> None:
        """On the disk, and known to the standby."""
        self.disk += records
        self.standby.feed(records)
        self.history.durable(records)

    def step_clock(self, ms: int) -> None:
        """The wall clock is set forward."""
        self.clock_offset_ms += ms

    def _write(self, records: list[bytes], then: Callable[[], None]) -> None:
        self._pending.append((records, then))
        if not self._syncing:
            self._syncing = True
            self._sync_later(self.life)

    def _sync_later(self, life: int) -> None:
        self.world.after(self.world.random.randrange(1, 12), lambda: self._sync(life))

    def _sync(self, life: int) -> None:
        """Group commit of what was pending when it began, maybe not all of it."""
        if life != self.life:
            return
        done = self.world.random.randrange(1, len(self._pending) + 1)
        for records, then in self._pending[:done]:
            self._keep(records)
            then()
        del self._pending[:done]
        if self._pending:
            self._sync_later(life)
        else:
            self._syncing = False


def _lasting(catalog: Catalog) -> dict[str, object]:
    """What a restart must keep, whichever way. Soft pins that are over may be forgotten; what rests
    depends on the clock, which may have gone back."""
    found = picture(catalog)
    del found["resting"]
    objects = found["objects"]
    assert isinstance(objects, dict)
    found["objects"] = {(*what[:4], *what[5:]): where for what, where in objects.items()}
    return found
