"""How each kind of step is done to the processes, how it is undone, and what it excuses.

Excuses are generous by `GRACE`: what the master and the clients take to notice that somebody is
back (suspicion, doubts about reported placements, avoided nodes). Nothing is excused for masters,
etcd, clients and clocks: whatever happens to those, no acknowledged object may be missing. (Without
etcd the nodes may first have to tell a new master.)
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from itertools import product
from pathlib import Path

from chaos_history import FOREVER, SECOND, Excuse
from chaos_schedule import LEADER, SLOW, Step
from chaos_world import DEAD_MS, World

from mooncake_py.errors import MooncakeError
from mooncake_py.master.client import MasterClient
from mooncake_py.model import EXTENT_HEADER_BYTES

GRACE = 4 * SECOND * SLOW
DEAD = (DEAD_MS - 1_500 * SLOW) * 1_000_000  # silent for longer: perhaps forgotten
CALL_MS = 2_000 * SLOW
LOOK = SECOND * SLOW // 4

Undo = Callable[[], None]


class Faults:
    """Does steps, and remembers what they excuse."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.excuses: list[Excuse] = []
        self.supervised: set[str] = set()  # may end with exit code 1 now, and are started again
        self.doubts: list[tuple[int, int]] = []
        self.pauses: dict[str, list[tuple[int, int]]] = {}
        self.leader_kills: list[int] = []  # ns
        self.wipes: list[int] = []  # ns
        self._untold: dict[str, int] = {}  # node -> since when a master may not know what it holds
        self._down_at = self._look_at = 0
        self.done: dict[str, int] = {}  # kind and group -> count
        self.said: list[str] = []

    def do(self, step: Step) -> Undo:
        """Returns what undoes it; a step whose victim is not there does nothing."""
        victims = [self.world.resolve(victim) for victim in step.victims if victim not in _SETS]
        if None in victims:
            return _nothing
        names = [name for name in victims if name is not None]
        maker = getattr(self, "_" + step.kind)
        undo: Undo = maker(step, names)
        if undo is not _nothing:
            what = f"{step.kind} {step.victims[0].rstrip('0123456789') or step.victims[0]}"
            self.done[what] = self.done.get(what, 0) + 1
            self.said.append(f"{time.monotonic_ns() / SECOND:9.3f} {step} -> {names}")
        return undo

    def _kill(self, step: Step, names: list[str]) -> Undo:
        names = [name for name in names if self._is_up(name)]
        if not names:
            return _nothing
        now = time.monotonic_ns()
        if self.world.leader() in names:
            self.leader_kills.append(now)
        for name in names:
            self.world.kill(name)
            if name[0] == "n":
                self._away(name, now, FOREVER, lost=True)

        if self.world.database is not None and names[0][0] == "m":
            self._master_ended(now)

        def undo() -> None:
            for name in names:
                self.world.start(name, lambda name=name: self._back(name, now))  # type: ignore[misc]

        return undo

    def _wipe(self, step: Step, names: list[str]) -> Undo:
        """The master's database is deleted. Until the nodes have told what they hold, nothing is
        known; then everything is, and what was removed stays so."""
        folder = self.world.database
        assert folder is not None
        if not self._is_up(names[0]):
            return _nothing
        now = time.monotonic_ns()
        self.world.kill(names[0])
        for file in folder.glob("master.db*"):
            file.unlink()
        self.wipes.append(now)
        self._master_ended(now)
        return lambda: self.world.start(names[0])

    def _master_ended(self, now: int) -> None:
        """With its last records, or all of them: until the nodes have told what they hold, which
        takes a busy machine seconds, objects may be misses."""
        self._down_at = now
        for node in self.world.names("n"):
            if node not in self._untold:
                self._untold[node] = now
                self._away(node, now, FOREVER)

    def look(self) -> None:
        """Which nodes have told? Now and then."""
        now = time.monotonic_ns()
        ready_at = max((self.world.ready_at.get(m, 0) for m in self.world.names("m")), default=0)
        if not self._untold or now < self._look_at or ready_at < self._down_at:
            return
        self._look_at = now + LOOK
        try:
            with closing(MasterClient(self.world.master_address)) as master:
                segments = master.status(timeout_ms=LOOK // 1_000_000).segments
        except MooncakeError:
            return
        for node in [each.node for each in segments if each.state == "alive"]:
            if node in self._untold:
                self._ends(node, self._untold.pop(node), now, may_be_lost=False)

    def _is_up(self, name: str) -> bool:
        return name[0] == "e" or name in self.world.ready_at

    def _away(self, node: str, began: int, ended: int, *, lost: bool = False) -> None:
        self.excuses.append(Excuse(node, began, ended, lost))

    def _back(self, name: str, began: int) -> None:
        """A node that was killed serves again: its excuse ends soon."""
        if name[0] != "n":
            return
        self.excuses = [e for e in self.excuses if (e.node, e.began) != (name, began)]
        self._away(name, began, time.monotonic_ns() + GRACE, lost=True)

    def _stop(self, step: Step, names: list[str]) -> Undo:
        if not all(map(self._is_up, names)):
            return _nothing
        now = time.monotonic_ns()
        for name in names:
            self.world.signal(name, signal.SIGSTOP)
            if name[0] == "n":
                self._away(name, now, FOREVER, lost=step.for_ms * 1_000_000 > DEAD)

        def undo() -> None:
            for name in names:
                self._continue(name, now)

        return undo

    def _trap(self, step: Step, names: list[str]) -> Undo:
        (name,) = names
        if not self._is_up(name):
            return _nothing
        now = time.monotonic_ns()
        self.world.signal(name, signal.SIGUSR1 if step.detail == 1 else signal.SIGUSR2)
        return lambda: self._continue(name, now)

    def _continue(self, name: str, began: int) -> None:
        if name[0] == "c":
            self.world.signal(name, signal.SIGHUP)  # the trap, if it has not sprung
        self.world.signal(name, signal.SIGCONT)
        ended = time.monotonic_ns()
        if name[0] == "c":
            self.pauses.setdefault(name, []).append((began, ended))
        elif name[0] == "n":
            self._ends(name, began, ended)

    def _ends(self, node: str, began: int, ended: int, *, may_be_lost: bool = True) -> None:
        lost = may_be_lost and ended - began > DEAD
        self.excuses = [
            Excuse(node, began, ended + GRACE, lost) if (e.node, e.began) == (node, began) else e
            for e in self.excuses
        ]

    # --- network --------------------------------------------------------------------------------

    def _hosts(self, step: Step, names: list[str]) -> list[tuple[str, str]]:
        """Pairs of hosts between the two sides."""
        world = self.world
        sides = [names]
        for victim in step.victims:
            if victim in _SETS:
                sides.append([n for kind in _SETS[victim] for n in world.names(kind)])
        if len(sides) == 1:
            sides = [names[:1], names[1:]]
        pairs = {tuple(sorted((world.host(a), world.host(b)))) for a, b in product(*sides)}
        return sorted((a, b) for a, b in pairs if a != b)

    def _cut(self, step: Step, names: list[str]) -> Undo:
        network = self.world.network
        assert network is not None
        pairs = self._hosts(step, names)
        now = time.monotonic_ns()
        for a, b in pairs:
            network.cut(a, b, one_way=bool(step.detail))
        nodes = self._touched(pairs, now, step)
        if names[0][0] == "m":
            self.doubts.append((now, now + step.for_ms * 1_000_000 + GRACE))

        def undo() -> None:
            for a, b in pairs:
                network.heal(a, b)
            for node in nodes:
                self._ends(node, now, time.monotonic_ns())

        return undo

    def _touched(self, pairs: list[tuple[str, str]], now: int, step: Step) -> set[str]:
        """Nodes that somebody cannot reach are excused as long as that lasts. If that is a leader
        for less than its lease, all of them are silent to it."""
        first = step.victims[0]
        if first == LEADER and "all" in step.victims:
            nodes = set(self.world.names("n"))
            for node in nodes:
                self._away(node, now, now + step.for_ms * 1_000_000 + GRACE)
            return set()
        nodes = {host for pair in pairs for host in pair if host[0] == "n"}
        if first[0] == "n":
            nodes = {first}
        for node in nodes:
            self._away(node, now, FOREVER, lost=step.for_ms * 1_000_000 > DEAD)
        return nodes

    def _delay(self, step: Step, names: list[str]) -> Undo:
        network = self.world.network
        assert network is not None
        pairs = self._hosts(step, names)
        now = time.monotonic_ns()
        for a, b in pairs:
            network.delay(a, b, step.detail)
        nodes = self._touched(pairs, now, step)

        def undo() -> None:
            for a, b in pairs:
                network.undelay(a, b)
            for node in nodes:
                self._ends(node, now, time.monotonic_ns())

        return undo

    # --- clocks, disk, memory -------------------------------------------------------------------

    def _jump(self, step: Step, names: list[str]) -> Undo:
        (name,) = names
        self.world.set_clock(name, step.detail)
        return lambda: self.world.set_clock(name, 0)

    def _fill(self, step: Step, names: list[str]) -> Undo:
        """Until the file system says that it is full. Never one that others use, too."""
        folder = self.world.database
        assert folder is not None
        assert folder.is_mount(), "the database has no file system of its own"
        self.supervised.update(names)  # one that starts now says so and ends
        ballast = folder / "ballast"
        with ballast.open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

        def undo() -> None:
            ballast.unlink(missing_ok=True)

        return undo

    def _flip(self, step: Step, names: list[str]) -> Undo:
        """A bit of an object's bytes in this node's memory."""
        (name,) = names
        if not self._is_up(name):
            return _nothing
        try:
            found = self._some_extent(name, step.detail)
        except MooncakeError:  # no master answers just now
            return _nothing
        if found is None:
            return _nothing
        key, offset = found
        self.excuses.append(
            Excuse(name, time.monotonic_ns(), FOREVER, lost=True, keys=frozenset({key}))
        )
        flip_byte(self.world.pid(name), name, offset)
        return lambda: None

    def _some_extent(self, node: str, number: int) -> tuple[str, int] | None:
        """A key with two replicas of which one is on the node, and where its last byte lies."""
        with closing(MasterClient(self.world.master_address)) as master:
            names = [o for o in master.list("red", b"", timeout_ms=CALL_MS).keys]
            if not names:
                return None
            placements = master.locate("red", names, timeout_ms=CALL_MS)
        rows = placements.rows
        counts = [0] * len(names)
        for index in rows["key_index"].tolist():
            counts[index] += 1
        here = [
            row
            for row in rows
            if placements.segments[int(row["segment_index"])].node == node
            and counts[int(row["key_index"])] > 1
        ]
        if not here:
            return None
        row = here[number % len(here)]
        end = int(row["offset"]) + EXTENT_HEADER_BYTES + int(row["length"])
        return "red/" + names[int(row["key_index"])].decode(), end - 1


_SETS = {"masters": "m", "etcd": "e", "all": "menc"}


def _nothing() -> None:
    """What undoes a step that was not done."""


def flip_byte(pid: int, node: str, offset: int) -> None:
    """Change one byte of a node's segment, behind its back."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, mode, start, *_ = line.split()
        if f"memfd:mooncake-{node}" in line and "w" in mode and int(start, 16) <= offset:
            first, last = (int(part, 16) for part in span.split("-"))
            address = first + offset - int(start, 16)
            if address < last:
                break
    else:
        raise AssertionError(f"node {node} maps no such memory")
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    try:
        (byte,) = os.pread(memory, 1, address)
        os.pwrite(memory, bytes([byte ^ 1]), address)
    finally:
        os.close(memory)
