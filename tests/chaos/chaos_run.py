"""One round: a world, its workers, the steps of a schedule, and the verdict."""

from __future__ import annotations

import json
import select
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import chaos_values
from chaos_faults import Faults, Undo
from chaos_history import (
    FOREVER,
    SECOND,
    WRITES,
    Allowed,
    Excuse,
    History,
    Operation,
    Violation,
)
from chaos_schedule import CALM_MS, SLOW, Shape, Step, schedule, slowly
from chaos_suspects import suspicions
from chaos_world import LEASE_MS, SUSPECT_MS, World

from mooncake_py import StoreClient
from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.errors import MooncakeError, ObjectNotFound
from mooncake_py.master.client import MasterClient

TENANTS = ("red", "blue")
SETTLE_MS = 30_000 * SLOW  # for everything to be back after the last step
QUIET_MS = 2_500 * SLOW
LAST_MS = 10_000 * SLOW  # of a call that reads all keys of a tenant
STALE = (LEASE_MS + 2 * SUSPECT_MS + 1_000 * SLOW) * 1_000_000
ALLOWED = Allowed(STALE, Allowed().young * SLOW, Allowed().slack_ms * SLOW, Allowed().leased * SLOW)
EVICTIONS = ("evict",)
DAMAGED = "damaged on every replica"


@dataclass(slots=True)
class Outcome:
    shape: Shape
    seed: int
    steps: list[Step]
    operations: list[Operation] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    leader_kills: list[int] = field(default_factory=list)
    excuses: list[Excuse] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    evictions: int = 0
    disk_nbytes: int = 0  # on the nodes' disks at the end
    device_nbytes: int = 0  # that devices of RDMA brought in the last reads
    suspected: int = 0  # misses while their nodes were suspect, though nobody had hurt them

    def write_gaps_ms(self) -> list[int]:
        """From each kill of a leader to the end of the first write that began after it."""
        gaps = []
        for killed in self.leader_kills:
            ends = [
                o.end
                for o in self.operations
                if o.kind in WRITES and o.outcome == "ok" and o.began >= killed
            ]
            gaps.append((min(ends, default=FOREVER) - killed) // 1_000_000)
        return gaps

    def read_times_ms(self, *, hurt: bool, replicas: int = 2) -> list[float]:
        """Times of single gets of objects with so many replicas, while a node was away or not."""
        return sorted(
            (o.end - o.began) / 1e6
            for o in self.operations
            if o.kind == "get" and o.batch == 1 and o.replicas == replicas and o.ended
            and o.outcome == "ok" and hurt == any(e.covers(o.key, o.began, o.began, o.end)
            for e in self.excuses if not e.keys)
        )  # fmt: skip


class Run:
    def __init__(self, world: World, steps: Sequence[Step]) -> None:
        self.world = world
        self.faults = Faults(world)
        self._steps = list(steps)
        self._undo: list[tuple[int, Undo]] = []
        self._extra: list[Violation] = []
        self._device_nbytes = 0
        self._quiet_since = FOREVER

    def play(self) -> None:
        """The schedule, in real time."""
        start_ms = _now_ms()
        for step in self._steps:
            self._until(start_ms + step.at_ms)
            undo = self.faults.do(step)
            self._undo.append((_now_ms() + step.for_ms, undo))
        self._until(max((due for due, _ in self._undo), default=start_ms + CALM_MS * SLOW))

    def _until(self, due_ms: int) -> None:
        """Undo what is due, and listen."""
        waiter = select.poll()
        while (now_ms := _now_ms()) < due_ms or self._is_due(now_ms):
            for entry in [e for e in self._undo if e[0] <= now_ms]:
                self._undo.remove(entry)
                entry[1]()
            self.world.poll()
            self._look_for_casualties()
            self.faults.look()
            waiter.poll(20 * SLOW)

    def _is_due(self, now_ms: int) -> bool:
        return any(due <= now_ms for due, _ in self._undo)

    def _look_for_casualties(self) -> None:
        for name, words in self.world.casualties().items():
            if name in self.faults.supervised and words.startswith("exit code 1:"):
                self.world.start(name)
            elif not any(v.key == name for v in self._extra):
                self._complain("crash", name, words)

    def _complain(self, rule: str, key: str, text: str) -> None:
        self._extra.append(Violation(rule, key, text, time.monotonic_ns()))

    # --- the end --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everything is healed: the cluster is whole again by itself, and then nothing fails."""
        deadline = Deadline(SETTLE_MS, SystemClock())
        while not (self.world.all_ready() and self._is_whole()):
            self._until(_now_ms() + 100 * SLOW)
            if deadline.passed():
                self._complain(
                    "broken", "cluster", f"not whole after {SETTLE_MS} ms: {self._state()}"
                )
                break
        self._until(_now_ms() + 3_000 * SLOW)  # doubts and avoided nodes end
        for name in self.world.names("c"):
            self.world.signal(name, signal.SIGCONT)  # one that stopped itself in the last moment
        self._quiet_since = time.monotonic_ns()
        self._until(_now_ms() + QUIET_MS)
        for name, code in self.world.stop_clients().items():
            if code:
                self._complain("crash", name, f"exit code {code}: {self.world.last_words(name)}")

    def _state(self) -> str:
        try:
            with closing(MasterClient(self.world.master_address)) as master:
                segments = master.status(timeout_ms=1_000 * SLOW).segments
        except MooncakeError as error:
            return f"{error}; ready: {sorted(self.world.ready_at)}"
        return f"{[(s.node, s.state) for s in segments]}; ready: {sorted(self.world.ready_at)}"

    def _is_whole(self) -> bool:
        try:
            with closing(MasterClient(self.world.master_address)) as master:
                segments = master.status(timeout_ms=1_000 * SLOW).segments
        except MooncakeError:
            return False
        each = 2 if self.world.shape.disk_mib else 1  # a segment of memory, and one of disk
        expected = sorted(self.world.names("n") * each)
        alive = sorted(s.node for s in segments if s.state == "alive")
        return alive == expected == sorted(s.node for s in segments)

    def count_evictions(self) -> int:
        """As far as the master that leads now remembers."""
        with closing(MasterClient(self.world.master_address)) as master:
            after = count = 0
            while True:
                page = master.events(after, limit=10_000, timeout_ms=5_000)
                count += sum(event.what in EVICTIONS for event in page.events)
                if not page.events:
                    return count
                after = page.events[-1].sequence

    def _disk_nbytes(self) -> int:
        with closing(MasterClient(self.world.master_address)) as master:
            segments = master.status(timeout_ms=5_000).segments
        return sum(each.used_bytes for each in segments if each.disk_id)

    def last_reads(self, keys: Sequence[str]) -> list[Operation]:
        """Every key once more, by a client that knows nothing."""
        found: list[Operation] = []
        ways: dict[str, Any] = {"timeout_ms": LAST_MS}
        if self.world.shape.ports:
            ways["transports"] = self.world.transports("c0")
        for tenant in TENANTS:
            mine = [key.partition("/")[2] for key in keys if key.startswith(tenant + "/")]
            if not mine:
                continue
            with StoreClient(self.world.master_address, tenant=tenant, **ways) as store:
                began = time.monotonic_ns()
                outcomes = store.get_batch(mine)
                ended = time.monotonic_ns()
                peers = store._engine.describe()["peers"]
                by_device = (peer for peer in peers if peer["transport"] == "rdma")
                self._device_nbytes += sum(
                    path["bytes_read"] for peer in by_device for path in peer["paths"]
                )
            for key, outcome in zip(mine, outcomes, strict=True):
                found.append(_seen(f"{tenant}/{key}", began, ended, outcome))
        return found

    def verdict(self, shape: Shape, seed: int) -> Outcome:
        operations = read_histories(sorted(self.world.folder.glob("*.history")))
        keys = sorted({o.key for o in operations if o.kind in WRITES})
        evictions = self.count_evictions() if shape.streams else 0
        disk_nbytes = self._disk_nbytes() if shape.disk_mib else 0
        try:
            operations += self.last_reads(keys)
        except MooncakeError as error:
            self._complain("broken", "last reads", str(error))
        history = History(
            operations,
            self.faults.excuses,
            self.faults.pauses,
            replace(ALLOWED, evicted=shape.streams),
            self.faults.doubts,
            self.faults.wipes,
        )
        found = history.violations()
        suspected = 0
        if shape.ports and found:
            history.excuses = [*self.faults.excuses, *self._suspicions()]
            suspected, found = len(found), history.violations()
            suspected -= len(found)
        violations = [*self._extra, *found, *self._quiet_failures(operations)]
        return Outcome(
            shape, seed, self._steps, operations, violations, self.faults.done,
            self.faults.leader_kills, self.faults.excuses, self.faults.said, evictions,
            disk_nbytes, self._device_nbytes, suspected,
        )  # fmt: skip

    def _suspicions(self) -> list[Excuse]:
        paths = sorted(self.world.folder.glob("m*.stderr"))
        lines = sorted(line for path in paths for line in path.read_text().splitlines())
        return suspicions(lines, time.time_ns() - time.monotonic_ns(), SECOND * SLOW)

    def _quiet_failures(self, operations: Sequence[Operation]) -> list[Violation]:
        """A bit that was flipped is found when its object is read, be it now."""
        flipped = {key for excuse in self.faults.excuses for key in excuse.keys}
        return [
            Violation("unquiet", o.key, f"{o.kind} of {o.client}: {o.note}", o.began)
            for o in operations
            if o.began > self._quiet_since
            and o.outcome == "error"
            and not (o.key in flipped and DAMAGED in o.note)
        ]


def _seen(key: str, began: int, ended: int, outcome: object) -> Operation:
    read = Operation("last", "get", key, began, ended)
    if isinstance(outcome, MooncakeError):
        read.outcome = "miss" if isinstance(outcome, ObjectNotFound) else "error"
        read.note = str(outcome)
        return read
    assert isinstance(outcome, bytes)
    try:
        read.value, read.outcome = chaos_values.number_of(key, outcome), "ok"
    except chaos_values.NotWhole as error:
        read.outcome, read.note = "mixed", str(error)
    return read


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def read_histories(paths: Sequence[Path]) -> list[Operation]:
    """Later lines of an operation replace earlier ones; reads of killed clients are not there."""
    operations: list[Operation] = []
    for path in paths:
        lines: dict[int, dict[str, object]] = {}
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # the last one of a killed client
                entry = json.loads(line)
                lines[entry.pop("id")] = entry
        for number in sorted(lines):
            entry = lines[number]
            entry["nodes"] = tuple(entry.get("nodes", ()))  # type: ignore[arg-type]
            operations.append(Operation(**entry))  # type: ignore[arg-type]
    return operations


def play(
    shape: Shape, seed: int, seconds: int, folder: Path, database: Path | None = None
) -> Outcome:
    """A round of about `seconds`, without starting and settling."""
    steps = slowly(schedule(seed, shape, 1_000 * seconds))
    folder.mkdir(parents=True, exist_ok=True)
    world = World(shape, seed, folder, database)
    try:
        run = Run(world, steps)
        run.play()
        run.settle()
        return run.verdict(shape, seed)
    finally:
        world.close()


def percentile(times: Sequence[float], ratio: float) -> float:
    return times[min(len(times) - 1, int(len(times) * ratio))] if times else 0.0


def summary(outcome: Outcome) -> str:
    counts: dict[str, dict[str, int]] = {}
    for o in outcome.operations:
        by = counts.setdefault(o.kind, {})
        by[o.outcome] = by.get(o.outcome, 0) + 1
    lines = [
        f"{outcome.shape.name}, seed {outcome.seed}: {len(outcome.operations)} operations, "
        f"{sum(outcome.faults.values())} faults, {len(outcome.violations)} violations"
    ]
    lines += [f"  {kind}: {by}" for kind, by in sorted(counts.items())]
    lines.append(f"  faults: {dict(sorted(outcome.faults.items()))}")
    lines.append(f"  from a leader's kill to a successful write: {outcome.write_gaps_ms()} ms")
    for hurt in (False, True):
        times = outcome.read_times_ms(hurt=hurt)
        lines.append(
            f"  gets of two replicas, {'a node away' if hurt else 'all nodes there'}: "
            f"{len(times)}, p50 {percentile(times, 0.5):.1f}, p99 {percentile(times, 0.99):.1f}, "
            f"worst {percentile(times, 1):.1f} ms"
        )
    if outcome.shape.streams:
        on_disk = f", on disks {outcome.disk_nbytes >> 10} KiB" if outcome.shape.disk_mib else ""
        lines.append(f"  evictions: {outcome.evictions}{on_disk}")
    if outcome.shape.ports:
        lines.append(f"  read by the devices at the end: {outcome.device_nbytes} bytes")
        lines.append(f"  misses while nodes were suspect for no fault: {outcome.suspected}")
    notes = Counter(o.note.split(" [")[0][:90] for o in outcome.operations if o.outcome == "error")
    lines += [f"  {count} x {note}" for note, count in notes.most_common(8)]
    return "\n".join(lines)
