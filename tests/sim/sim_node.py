"""A node in the model: memory in units, pulls that take time, the rules of design/extent.md.

Rules that the catalog relies on, and that the real node must keep as well:

* a grant is believed only with the secret of the latest mount, and not after its expiry on the
  master's clock, which the node follows from the master's answers;
* a pull whose extent overlaps one that still runs here is refused (a process that was stopped in
  the middle of a copy goes on copying when it wakes up);
* before it mounts (again), the node ends its running pulls;
* a new segment id means that nothing in memory counts any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sim_disk import Disk
from sim_history import History
from sim_master import Answer
from sim_world import Call, Script, Sleep, World

from mooncake_py.errors import ChecksumMismatch, LeaseExpired, PeerUnreachable
from mooncake_py.master.commands import (
    CopyTask,
    Done,
    Heartbeat,
    Mount,
    Mounted,
    Refused,
    TaskList,
    Tasks,
)
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.stripes import whole_key
from mooncake_py.model import EXTENT_ROW, extent_bytes


@dataclass
class Header:
    generation: int
    length: int
    key: bytes
    sealed: bool = False


@dataclass(frozen=True)
class Pull:
    segment_id: int
    secret: int
    rows: bytes
    keys: tuple[bytes, ...]
    take_ms: int


@dataclass(frozen=True)
class Read:
    offset: int
    length: int
    generation: int
    segment_id: int = 0


@dataclass(frozen=True)
class Bytes:
    """What a reader got: the generation it read, or the error that validation came to."""

    generation: int = 0
    code: int = 0


class Node:
    def __init__(
        self, world: World, name: str, nbytes: int, settings: CatalogSettings, history: History
    ) -> None:
        self.world = world
        self.name = name
        self.nbytes = nbytes
        self.settings = settings
        self.history = history
        self.incarnation = 0
        self.up = False
        self.draining = False
        self.disk = Disk(self, int(name[1:]) + 1) if world.chance(0.5) else None
        self.start()

    def start(self) -> None:
        self.incarnation += 1
        self.up = True
        self.segment_id = 0
        self.secret = 0
        self.master_ms: tuple[int, int] | None = None  # (its time, ours)
        self.headers: dict[int, Header] = {}  # by offset
        self.memory: list[int] = [0] * (self.nbytes // 64)  # generation that wrote each unit
        self.running: dict[int, tuple[int, int]] = {}  # pull number -> range
        self._pulls = 0
        self.working = False  # on tasks of the master
        self.clock_rate = self.world.random.choice([1.0, 1.0, 0.98, 1.02])  # of this node
        self.world.processes[self.name] = self
        life = self.incarnation
        self.world.start(self.name, self._keep_mounted(), lambda: self.alive(life))
        if self.disk is not None:
            self.world.start(self.name, self.disk.serve(), lambda: self.alive(life))

    def alive(self, life: int) -> bool:
        return self.up and life == self.incarnation

    def crash(self) -> None:
        self.up = False
        self.world.processes.pop(self.name, None)
        self.history.node_lost(self.segment_id)

    # --- master ---------------------------------------------------------------------------------

    def _keep_mounted(self) -> Script:
        while True:
            if not self.secret:
                yield from self._mount()
            else:
                command = Heartbeat(self.name, self.incarnation, self.segment_id, self.draining)
                answer = yield Call("master", command, self.settings.heartbeat_ms)
                if isinstance(answer, Answer):
                    self.follow(answer)
                    if isinstance(answer.reply, Refused):
                        self.secret = 0
                        continue
                    for rows in answer.unseals:
                        self._unseal(rows)
                    if isinstance(answer.reply, Done) and answer.reply.tasks and not self.working:
                        self._work_off()
            yield Sleep(self.settings.heartbeat_ms // 2)

    def _mount(self) -> Script:
        self.running.clear()  # what runs stops here, and its extents stay unsealed
        command = Mount(
            self.name, self.incarnation, f"{self.name}:1", self.incarnation, self.nbytes,
            self.name, self.segment_id,
        )  # fmt: skip
        answer = yield Call("master", command, 4 * self.settings.heartbeat_ms)
        if not isinstance(answer, Answer) or not isinstance(answer.reply, Mounted):
            return
        self.follow(answer)
        if answer.reply.segment_id != self.segment_id:
            self.history.node_lost(self.segment_id)
            self.segment_id = answer.reply.segment_id
            self.headers.clear()
        (self.secret,) = answer.secrets

    def follow(self, answer: Answer) -> None:
        self.master_ms = (answer.now_ms, self.world.now_ms)

    def _master_now_ms(self) -> int:
        assert self.master_ms is not None
        passed_ms = self.world.now_ms - self.master_ms[1]
        return self.master_ms[0] + round(passed_ms * self.clock_rate)

    # --- tasks ----------------------------------------------------------------------------------

    def _work_off(self) -> None:
        self.working = True
        life = self.incarnation
        self.world.start(self.name, self._tasks(), lambda: self.alive(life))

    def _tasks(self) -> Script:
        """Fetch, copy, report with the next question; now and then forget to report."""
        done: list[tuple[int, int]] = []
        while self.secret:
            ask = Tasks(self.name, self.incarnation, self.segment_id, tuple(done), 3)
            answer = yield Call("master", ask, 4 * self.settings.heartbeat_ms)
            if not isinstance(answer, Answer) or not isinstance(answer.reply, TaskList):
                break
            self.follow(answer)
            if not answer.reply.copies:
                break
            done = []
            for task in answer.reply.copies:
                home = answer.reply.segment_ids[task.source]
                code = yield from self._make_copy(task, answer.nodes[task.source], home)
                if not self.world.chance(0.05):
                    done.append((task.generation, code))
        self.working = False

    def _make_copy(self, task: CopyTask, source: str, home: int) -> Script:
        """As `store/tasks.py` does: begin, read a replica, seal if it was good."""
        read = Read(task.source_offset, task.length, task.source_generation, home)
        extent = (task.offset, task.length, task.generation)
        key = whole_key(task.name.key)
        code = yield from self.write_extent(extent, key, task.expires_ms, Call(source, read, 200))
        if not code:
            self.history.count("copies made")
        return code  # type: ignore[return-value]

    def write_extent(
        self, extent: tuple[int, int, int], key: bytes, expires_ms: int, bytes_from: Call | int
    ) -> Script:
        """Begin, get the bytes (from a node, or in so many ms), seal if they were good."""
        offset, length, generation = extent
        units = self._units(offset, length)
        pull = Pull(self.segment_id, self.secret, b"", (), 0)
        if self._refuses(pull, offset, units, generation, expires_ms):
            return LeaseExpired.code  # type: ignore[return-value]
        header = Header(generation, length, key)
        number = self._begin(units, header, offset)
        found = yield bytes_from if isinstance(bytes_from, Call) else Sleep(bytes_from)
        if self.running.pop(number, None) is None:
            return LeaseExpired.code  # type: ignore[return-value]
        if isinstance(bytes_from, Call):
            if not isinstance(found, Bytes) or found.code:
                return PeerUnreachable.code  # type: ignore[return-value]
            assert self.history.keys[found.generation] == key, "a copy of another object"
        if expires_ms <= self._master_now_ms():
            return LeaseExpired.code  # type: ignore[return-value]
        self._write(units, generation, first_half=False)
        if self.headers.get(offset) is not header:
            return LeaseExpired.code  # type: ignore[return-value]
        header.sealed = True
        return 0  # type: ignore[return-value]

    def _begin(self, units: range, header: Header, offset: int) -> int:
        self._forget_headers(units)
        self.headers[offset] = header
        self._pulls += 1
        self.running[self._pulls] = (units.start, units.stop)
        self.history.judge_write(self.segment_id, units, header.generation)
        self._write(units, header.generation, first_half=True)
        return self._pulls

    # --- data -----------------------------------------------------------------------------------

    def receive(self, sender: str, message: object, answer: Callable[[object], None]) -> None:
        if isinstance(message, Pull):
            self._pull(message, answer)
        elif isinstance(message, Read):
            answer(self._read(message))

    def _read(self, read: Read) -> Bytes:
        if self.disk is not None and read.segment_id == self.disk.segment_id:
            found = self.disk.read(read)
            return Bytes(found, 0 if found else LeaseExpired.code)
        header = self.headers.get(read.offset)
        if (
            header is None
            or not header.sealed
            or header.generation != read.generation
            or header.length != read.length
        ):
            return Bytes(code=LeaseExpired.code)
        if not self.holds(read.offset, read.length, header.generation):
            self.history.damaged(header.generation)
            return Bytes(code=ChecksumMismatch.code)
        return Bytes(header.generation)

    def holds(self, offset: int, length: int, generation: int) -> bool:
        """Are all the bytes there of this generation?"""
        units = self._units(offset, length)
        return set(self.memory[units.start : units.stop]) == {generation}

    @staticmethod
    def _units(offset: int, length: int) -> range:
        return range(offset // 64, (offset + extent_bytes(length)) // 64)

    def _pull(self, pull: Pull, answer: Callable[[object], None]) -> None:
        rows = list(EXTENT_ROW.iter_unpack(pull.rows))
        statuses = [33] * len(rows)
        self.world.start(
            self.name,
            self._copy(pull, rows, statuses, answer),
            lambda life=self.incarnation: self.alive(life),  # type: ignore[misc]
        )

    def _copy(
        self,
        pull: Pull,
        rows: list[tuple[int, ...]],
        statuses: list[int],
        answer: Callable[[object], None],
    ) -> Script:
        begun: list[tuple[int, int, int, int, int]] = []
        for at, row in enumerate(rows):
            _, _, offset, length, generation, expires_ms, _, _ = row
            units = self._units(offset, length)
            if self._refuses(pull, offset, units, generation, expires_ms):
                continue
            number = self._begin(units, Header(generation, length, pull.keys[at]), offset)
            begun.append((at, number, offset, length, generation))
        woken_ms = self.world.now_ms + pull.take_ms
        yield Sleep(pull.take_ms)
        on_time = self.world.now_ms == woken_ms  # else this process was stopped meanwhile
        for at, number, offset, length, generation in begun:
            if self.running.pop(number, None) is None:
                continue  # ended by a mount meanwhile
            if on_time:
                self.history.judge_write(self.segment_id, self._units(offset, length), generation)
            self._write(self._units(offset, length), generation, first_half=False)
            header = self.headers.get(offset)
            if header is not None and header.generation == generation:
                header.sealed = True
                statuses[at] = 0
        answer(tuple(statuses))

    def _refuses(
        self, pull: Pull, offset: int, units: range, generation: int, expires_ms: int
    ) -> bool:
        if pull.segment_id != self.segment_id or pull.secret != self.secret or not self.secret:
            return True
        if expires_ms <= self._master_now_ms():
            return True
        header = self.headers.get(offset)
        if header is not None and header.generation >= generation:
            return True
        return any(start < units.stop and units.start < end for start, end in self.running.values())

    def _forget_headers(self, units: range) -> None:
        for offset in [each for each in self.headers if each // 64 in units]:
            del self.headers[offset]

    def _write(self, units: range, generation: int, first_half: bool) -> None:
        middle = (units.start + units.stop) // 2
        part = range(units.start, middle + 1) if first_half else range(middle, units.stop)
        for unit in part:
            if unit < units.stop:
                self.memory[unit] = generation

    def _unseal(self, rows: bytes) -> None:
        for _, _, offset, _, generation, *_ in EXTENT_ROW.iter_unpack(rows):
            header = self.headers.get(offset)
            if header is not None and header.generation == generation:
                header.sealed = False
