"""The master alone, as clients meet it: both doors beside upstream, at several sizes (P6, P8, P11).

    python -m benchmarks.metadata [--objects N] [--json FILE] [--upstream PYTHON]

One master of ours, asked over its hot lane and over gRPC, and one of upstream, each holding the
same keys of 69 bytes. No object byte moves here: segments are mounted that nobody backs. Within
every case the contenders take turns, so that a slow moment meets all of them. Every figure is the
p50 of one call, as its caller sees it.

`exists` and `locate` draw every key at random from all there are, which is the worst for the
processor's caches; `... run` asks for keys that were stored one after the other, as the pages of
a prompt are.

Upstream's wheel has no call for the two halves of a put; `put` is ours start plus end beside its
`batch_put_from` of one byte within its own process, the shortest way it has.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import click
from rich.console import Console
from rich.table import Table

from benchmarks import upstream
from benchmarks.peer import BenchError
from mooncake_py.clock import SystemClock
from mooncake_py.errors import MooncakeError
from mooncake_py.master.client import MasterClient
from mooncake_py.master.commands import Heartbeat, Mount
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.transfer import TransferEngine, options_for

BATCHES = (1, 128, 1024)
SIZES = (1_000, 100_000, 1_000_000)
READS = ("exists", "locate", "exists run", "locate run")
VERBS = (*READS, "put start", "put end", "put")
LANE, GRPC, UPSTREAM = "ours, hot lane", "ours, gRPC", "upstream"
P6_RATIO, P8_BYTES, P11_RATIO = 1.0, 250, 1.2
PAGE_BYTES = 64 << 10
FILL = 1024
T = 20_000
RECOVERY_MS = 100  # else a new cluster remembers for a minute what was removed: 300 bytes each
SETTLE_S, STILL_S, SETTLE_MIN = 60, 4, 100_000  # longest wait, how long unchanged, from how many on


def key_of(number: int) -> str:
    """As SGLang's HiCache makes them."""
    return hashlib.sha256(b"%d" % number).hexdigest() + "_0_k"


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


class Asked(Protocol):
    """Somebody whose calls are timed."""

    name: str

    def exists(self, keys: Sequence[str]) -> int:
        """All keys are there; nanoseconds."""

    def locate(self, keys: Sequence[str]) -> int:
        """Likewise."""

    def put(self, keys: Sequence[str]) -> dict[str, int]:
        """None is there, before and after; nanoseconds of each verb."""


def _timed(call: Callable[[], Any]) -> tuple[int, Any]:
    began = time.perf_counter_ns()
    found = call()
    return time.perf_counter_ns() - began, found


class Ours:
    """One door of our master."""

    def __init__(self, name: str, client: MasterClient) -> None:
        self.name = name
        self.client = client

    def exists(self, keys: Sequence[str]) -> int:
        names = [key.encode() for key in keys]
        ns, present = _timed(lambda: self.client.exists("t", names, timeout_ms=T))
        if not present.all():
            raise BenchError(f"{self.name}: a key is missing")
        return ns

    def locate(self, keys: Sequence[str]) -> int:
        names = [key.encode() for key in keys]
        ns, located = _timed(lambda: self.client.locate("t", names, timeout_ms=T))
        if located.status.any():
            raise BenchError(f"{self.name}: a key is missing")
        return ns

    def put(self, keys: Sequence[str]) -> dict[str, int]:
        names = [key.encode() for key in keys]
        start_ns, end_ns = self.store(names)
        self.client.remove("t", names, timeout_ms=T)
        return {"put start": start_ns, "put end": end_ns, "put": start_ns + end_ns}

    def store(self, names: Sequence[bytes]) -> tuple[int, int]:
        client = self.client
        sizes = [PAGE_BYTES] * len(names)
        start_ns, granted = _timed(lambda: client.put_start("t", names, sizes, timeout_ms=T))
        generations = granted.generations.tolist()
        end_ns, ended = _timed(lambda: client.put_end("t", names, generations, timeout_ms=T))
        if granted.status.any() or ended.any():
            raise BenchError(f"{self.name}: a put was refused")
        return start_ns, end_ns


class Theirs:
    """Upstream's client, in its own interpreter."""

    name = UPSTREAM

    def __init__(self, process: upstream.Answering) -> None:
        self._process = process

    def exists(self, keys: Sequence[str]) -> int:
        return self._process.ask("exists", keys=keys)["exists"]

    def locate(self, keys: Sequence[str]) -> int:
        return self._process.ask("locate", keys=keys)["locate"]

    def put(self, keys: Sequence[str]) -> dict[str, int]:
        return self._process.ask("put", keys=keys)


class Nodes:
    """Four segments that live and hold nothing: puts are granted, nobody writes."""

    def __init__(self, client: MasterClient, stack: ExitStack) -> None:
        self._client = client
        self._ended = threading.Event()
        mounts = [Mount(f"n{i}", 1, f"127.0.0.1:{i + 1}", 1, 64 << 30, f"h{i}") for i in range(4)]
        self._beats = [
            Heartbeat(each.node, 1, client.mount(each, timeout_ms=T).segment_id) for each in mounts
        ]
        thread = threading.Thread(target=self._live, name="heartbeats", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(self._ended.set)

    def _live(self) -> None:
        while not self._ended.wait(0.25):
            for beat in self._beats:
                self._client.heartbeat(beat, timeout_ms=T)


@dataclass(frozen=True, slots=True)
class Row:
    contender: str
    verb: str
    objects: int
    batch: int
    p50_us: float
    p99_us: float
    us_a_key: float


class Bench:
    """Both masters with the same objects; what it started ends with `stack`."""

    def __init__(self, python: str | None, folder: Path, stack: ExitStack) -> None:
        # the beats end before the master does: the stack unwinds in reverse
        options = ClusterOptions(
            node_count=0, master_arguments=["--set", f"recovery_ms={RECOVERY_MS}"]
        )
        self.cluster = stack.enter_context(Cluster(options))
        engine = stack.enter_context(TransferEngine(options_for(("tcp",))))
        lane = MasterClient(self.cluster.address, engine=engine, clock=SystemClock())
        grpc = MasterClient(self.cluster.address, clock=SystemClock())
        beats = MasterClient(self.cluster.address, clock=SystemClock())
        for client in (lane, grpc, beats):
            client.connect(timeout_ms=T)
            stack.callback(client.close)
        Nodes(beats, stack)
        self.asked: list[Asked] = [Ours(LANE, lane), Ours(GRPC, grpc)]
        self._ours = Ours(LANE, lane)
        self._theirs: upstream.Answering | None = None
        self.pids = {LANE: self.cluster.master.child.pid}
        if python is not None:
            self._theirs = upstream.Upstream(python, folder, stack).metadata()
            self.pids[UPSTREAM] = self._theirs.master_pid
            self.asked.append(Theirs(self._theirs))
        self.count = 0
        self.empty_bytes = {name: resident_bytes(pid) for name, pid in self.pids.items()}
        self._random = random.Random(1)

    def fill(self, count: int) -> None:
        for start in range(self.count, count, FILL):
            keys = [key_of(i) for i in range(start, min(start + FILL, count))]
            self._ours.store([key.encode() for key in keys])
            if self._theirs is not None:
                self._theirs.ask("fill", keys=keys)
        self.count = count

    def bytes_an_object(self) -> dict[str, float]:
        """Growth of both processes, once ours has written the snapshot that it may be making: that
        takes as much again as its keys and columns, for as long as it takes."""
        still, last = 0, 0
        for _ in range(SETTLE_S):
            now = resident_bytes(self.pids[LANE])
            still = still + 1 if abs(now - last) < 1 << 20 else 0
            last = now
            if still == STILL_S or self.count < SETTLE_MIN:
                break
            threading.Event().wait(1)
        return {
            name: (resident_bytes(pid) - self.empty_bytes[name]) / self.count
            for name, pid in self.pids.items()
        }

    def measure(self, batch: int, rounds: int) -> list[Row]:
        found: dict[tuple[str, str], list[int]] = {}
        for turn in range(rounds):
            keys = {verb: self._keys(batch, "run" in verb) for verb in READS}
            fresh = [key_of(-1 - self._random.getrandbits(60)) for _ in range(batch)]
            first = turn % len(self.asked)
            for asked in self.asked[first:] + self.asked[:first]:
                took = {verb: getattr(asked, verb.split()[0])(keys[verb]) for verb in READS}
                for verb, ns in (took | asked.put(fresh)).items():
                    found.setdefault((asked.name, verb), []).append(ns)
        return [self._row(name, verb, batch, ns) for (name, verb), ns in found.items()]

    def _keys(self, batch: int, run: bool) -> list[str]:
        if not run:
            return [key_of(self._random.randrange(self.count)) for _ in range(batch)]
        first = self._random.randrange(self.count)
        return [key_of((first + i) % self.count) for i in range(batch)]

    def _row(self, name: str, verb: str, batch: int, ns: list[int]) -> Row:
        ns.sort()
        p50, p99 = ns[len(ns) // 2] / 1000, ns[len(ns) * 99 // 100] / 1000
        return Row(name, verb, self.count, batch, p50, p99, p50 / batch)


def judge(rows: Sequence[Row], nbytes: dict[str, float]) -> list[dict[str, Any]]:
    """The bars, as far as both sides of them were measured."""
    at = {(row.contender, row.verb, row.objects, row.batch): row.p50_us for row in rows}
    sizes = sorted({row.objects for row in rows})
    batches = sorted({row.batch for row in rows})
    bars: list[dict[str, Any]] = []

    def bar(name: str, case: str, figure: float, limit: float) -> None:
        bars.append(
            {"bar": name, "case": case, "figure": round(figure, 3), "limit": limit,
             "met": figure <= limit}
        )  # fmt: skip

    for objects in sizes:
        for batch in batches:
            theirs = at.get((UPSTREAM, "exists", objects, batch))
            if theirs:
                case = f"exists, batch {batch}, {objects:,} objects, lane beside upstream"
                bar("P6", case, at[LANE, "exists", objects, batch] / theirs, P6_RATIO)
    bar("P8", f"bytes an object at {sizes[-1]:,}", nbytes[LANE], P8_BYTES)
    for name in dict.fromkeys(row.contender for row in rows):
        for verb in VERBS:
            for batch in batches:
                small = at.get((name, verb, sizes[0], batch))
                if small and len(sizes) > 1:
                    case = f"{name}: {verb}, batch {batch}, {sizes[-1]:,} against {sizes[0]:,}"
                    bar("P11", case, at[name, verb, sizes[-1], batch] / small, P11_RATIO)
    return bars


def show(console: Console, rows: Sequence[Row], bars: Sequence[dict[str, Any]]) -> None:
    table = Table(title="microseconds a call, p50 (a key)")
    names = list(dict.fromkeys(row.contender for row in rows))
    for head in ("verb", "batch", "objects", *names):
        table.add_column(head, justify="right")
    cells: dict[tuple[str, int, int], dict[str, str]] = {}
    for row in rows:
        cell = f"{row.p50_us:,.0f} ({row.us_a_key:.2f})"
        cells.setdefault((row.verb, row.batch, row.objects), {})[row.contender] = cell
    for (verb, batch, objects), found in sorted(
        cells.items(), key=lambda item: (VERBS.index(item[0][0]), item[0][1:])
    ):
        table.add_row(verb, str(batch), f"{objects:,}", *(found.get(each, "-") for each in names))
    console.print(table)
    judged = Table(title="bars")
    for head in ("bar", "case", "figure", "limit", ""):
        judged.add_column(head)
    for each in bars:
        word = "met" if each["met"] else "missed"
        judged.add_row(each["bar"], each["case"], str(each["figure"]), str(each["limit"]), word)
    console.print(judged)


@click.command(help=__doc__)
@click.option("--objects", type=click.IntRange(min=1), default=SIZES[-1], help="in the largest")
@click.option("--rounds", type=click.IntRange(min=1), default=120, help="calls of each kind a case")
@click.option("--json", "json_file", type=click.File("w"), help="write every figure here too")
@click.option("--upstream", "python", metavar="PYTHON", help=f"interpreter with {upstream.WHEEL}")
def main(objects: int, rounds: int, json_file: IO[str] | None, python: str | None) -> None:
    console = Console()
    sizes = [size for size in SIZES if size < objects] + [objects]
    rows: list[Row] = []
    found, note = upstream.find(python)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-")))
        try:
            bench = Bench(found, folder, stack)
            for size in sizes:
                bench.fill(size)
                nbytes = bench.bytes_an_object()
                for batch in BATCHES:
                    rows += bench.measure(batch, rounds if batch < 1024 else max(1, rounds // 3))
        except (BenchError, MooncakeError) as error:
            raise click.ClickException(str(error)) from None
    bars = judge(rows, nbytes)
    show(console, rows, bars)
    for name, each in nbytes.items():
        console.print(
            f"{name}: {each:.0f} bytes of the master's memory an object, {objects:,} of them"
        )
    console.print(note)
    if json_file is not None:
        json.dump(
            {"rows": [asdict(row) for row in rows], "bars": bars, "bytes_an_object": nbytes,
             "notes": [note]},
            json_file, indent=1,
        )  # fmt: skip


if __name__ == "__main__":
    main()
