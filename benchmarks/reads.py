"""Reads that must never bring a wrong byte: `python -m benchmarks.reads [--reads 1000000]`.

A cluster whose memory is a fraction of what is written into it, so that everything is evicted all
the time; a writer that also removes objects by force and stores successors under their keys; and
readers on every path (single, into a buffer, batch, range, view, session; shared memory and TCP;
with --disk what memory has no room for comes from a disk).
Every object says of itself which key and which version it is and what its bytes must be, so every
read is judged: right, a miss, or wrong. A version whose removal was acknowledged before the read
began is wrong, too. Exit code 1 when one is.
"""

from __future__ import annotations

import random
import struct
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import click

from mooncake_py import StoreClient
from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.errors import MooncakeError, ObjectExists, ObjectNotFound, OutOfSpace
from mooncake_py.master.client import MasterClient
from mooncake_py.ops.cluster import Cluster, ClusterOptions

_HEAD = struct.Struct("<QQ")  # key's number, version
_POOL_BYTES = 1 << 20
_SIZES = (100, 4_000, 30_000, 120_000)
_BATCH = 24
_RANGE = 512


class World:
    """What was written: of every key the versions that a read may bring."""

    def __init__(self, count: int, seed: int) -> None:
        self._pool = random.Random(seed).randbytes(_POOL_BYTES + max(_SIZES))
        self.count = count
        self.begun = [0] * count  # the youngest version whose put was begun
        self.ended = [0] * count  # the youngest one whose removal was acknowledged

    @staticmethod
    def key(number: int) -> str:
        return f"reads/{number}"

    @staticmethod
    def nbytes(number: int) -> int:
        return _SIZES[number % len(_SIZES)] + number % 97

    def value(self, number: int, version: int) -> bytes:
        at = (number * 7919 + version * 104_729) % _POOL_BYTES
        head = _HEAD.pack(number, version)
        return head + self._pool[at : at + self.nbytes(number) - _HEAD.size]

    def fault(self, number: int, found: bytes | memoryview, floor: int) -> str:
        """Why this is not the object; "" when it is. `floor`: `ended` before the read."""
        if len(found) != self.nbytes(number):
            return f"{len(found)} bytes instead of {self.nbytes(number)}"
        whose, version = _HEAD.unpack_from(found)
        if whose != number:
            return f"the object of key {whose}"
        if not floor < version <= self.begun[number]:
            return f"version {version}, of {floor + 1} to {self.begun[number]}"
        return "" if found == self.value(number, version) else f"wrong bytes of version {version}"

    def part_fault(self, number: int, start: int, found: bytes, floor: int) -> str:
        """Likewise of a range that does not say its version."""
        versions = range(self.begun[number], floor, -1)
        parts = (self.value(number, each)[start : start + len(found)] for each in versions)
        return "" if found in parts else f"wrong bytes from {start}"


@dataclass
class Report:
    """`outcomes`: (path, "right" or "miss") -> how many. `wrong`: in words."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    puts: int = 0
    removals: int = 0

    @property
    def reads(self) -> int:
        return self.outcomes.total()


class _Reader:
    """One thread with a client of its own."""

    def __init__(self, world: World, store: StoreClient, name: str, seed: int) -> None:
        self._world = world
        self._store = store
        self._name = name
        self._rng = random.Random(seed)
        self._buffer = bytearray(max(_SIZES) + 97)
        self.report = Report()

    def step(self) -> None:
        """One call on one path."""
        path = self._rng.choice((self.single, self.into, self.batch, self.part, self.view))
        if self._rng.random() < 0.02:
            path = self.session
        path()

    def _pick(self) -> int:
        """Recent keys more often: they are being changed."""
        return int(self._world.count * self._rng.random() ** 2)

    def _judge(self, path: str, number: int, found: object, floor: int) -> None:
        name = f"{path} {self._name}"
        if isinstance(found, ObjectNotFound):
            self.report.outcomes[name, "miss"] += 1
            return
        fault = (
            self._world.fault(number, found, floor)
            if isinstance(found, (bytes, memoryview))
            else repr(found)
        )
        if fault:
            self.report.wrong.append(f"{name}, key {number}: {fault}")
        self.report.outcomes[name, "right"] += not fault

    def _one(self, path: str, read: Callable[[str], object]) -> None:
        number = self._pick()
        floor = self._world.ended[number]
        try:
            found = read(self._world.key(number))
        except MooncakeError as error:
            found = error
        self._judge(path, number, found, floor)

    def single(self) -> None:
        self._one("single", self._store.get)

    def into(self) -> None:
        def read(key: str) -> memoryview:
            count = self._store.get(key, self._buffer)
            assert isinstance(count, int)
            return memoryview(self._buffer)[:count]

        self._one("into", read)

    def view(self) -> None:
        def read(key: str) -> bytes:
            with self._store.get_view(key) as view:
                return bytes(view.memory)

        self._one("view", read)

    def batch(self) -> None:
        numbers = [self._pick() for _ in range(_BATCH)]
        floors = [self._world.ended[number] for number in numbers]
        outcomes = self._store.get_batch([self._world.key(number) for number in numbers])
        for number, found, floor in zip(numbers, outcomes, floors, strict=True):
            self._judge("batch", number, found, floor)

    def part(self) -> None:
        number = self._pick()
        start = self._rng.randrange(_HEAD.size, self._world.nbytes(number))
        nbytes = min(_RANGE, self._world.nbytes(number) - start)
        floor = self._world.ended[number]
        name, world = f"range {self._name}", self._world
        (found,) = self._store.get_batch([world.key(number)], ranges=[(start, nbytes)])
        if isinstance(found, bytes):
            fault = world.part_fault(number, start, found, floor)
            if fault:
                self.report.wrong.append(f"{name}, key {number}: {fault}")
            self.report.outcomes[name, "right"] += not fault
        elif isinstance(found, ObjectNotFound):
            self.report.outcomes[name, "miss"] += 1
        else:
            self.report.wrong.append(f"{name}, key {number}: {found!r}")

    def session(self) -> None:
        """Heads and the rest apart: they must be of one object."""
        numbers = [self._pick() for _ in range(4)]
        floors = [self._world.ended[number] for number in numbers]
        with self._store.session([self._world.key(number) for number in numbers]) as reading:
            heads = reading.read(0, _HEAD.size)
            rests = reading.read(_HEAD.size, None)
        for at, number in enumerate(numbers):
            head, rest = heads[at], rests[at]
            whole = head + rest if isinstance(head, bytes) and isinstance(rest, bytes) else rest
            self._judge("session", number, whole, floors[at])


def _fill(world: World, store: StoreClient) -> None:
    """Everything once; what was put first is evicted already when the last is there."""
    for at in range(0, world.count, 32):
        numbers = range(at, min(at + 32, world.count))
        for number in numbers:
            world.begun[number] = 1
        store.put_batch(
            [world.key(number) for number in numbers], [world.value(n, 1) for n in numbers]
        )


def _write(world: World, store: StoreClient, done: threading.Event, report: Report) -> None:
    """Puts successors of what is gone; now and then makes something go."""
    rng = random.Random(1)
    while not done.is_set():
        numbers = [int(world.count * rng.random() ** 2) for _ in range(8)]
        numbers = list(dict.fromkeys(numbers))
        if rng.random() < 0.3:
            number = numbers[0]
            youngest = world.begun[number]
            if store.remove(world.key(number), force=True) is None:
                world.ended[number] = youngest
                report.removals += 1
        for number in numbers:
            world.begun[number] += 1
        values = [world.value(number, world.begun[number]) for number in numbers]
        outcomes = store.put_batch([world.key(number) for number in numbers], values)
        for outcome in outcomes:
            report.puts += outcome is None
            if outcome is not None and not isinstance(outcome, (ObjectExists, OutOfSpace)):
                report.wrong.append(f"put: {outcome!r}")


def with_disk(options: ClusterOptions, folder: str) -> ClusterOptions:
    """The same with one node, whose disk has room for everything: what memory has no room for is
    read from there, by every path."""
    return replace(
        options,
        node_count=1,
        node_arguments=["--disk", folder, "--disk-size", str(16 * options.segment_bytes)],
        master_arguments=["--set", "lease_ms=300"],
    )


def disk_numbers(cluster: Cluster) -> dict[str, int]:
    """What the master counts of disks: above all objects that are nowhere else."""
    master = MasterClient(cluster.address, role="tool")
    try:
        counters = master.status(timeout_ms=5_000).counters
    finally:
        master.close()
    wanted = ("disk_offloads", "disk_promotions", "disk_cold_objects")
    return {name: int(counters.get(name, 0)) for name in wanted}


def run(cluster: Cluster, reads: int, *, threads: int = 2, minutes: float = 30.0) -> Report:
    """Until so many reads were judged. `threads`: readers a transport."""
    segment_bytes = cluster.options.node_count * cluster.options.segment_bytes
    world = World(int(1.5 * segment_bytes / (sum(_SIZES) / len(_SIZES))), seed=7)
    done, total = threading.Event(), Report()
    deadline = Deadline(int(minutes * 60_000), SystemClock())
    stores = [StoreClient(cluster.address, transports=(each,)) for each in ("shm", "tcp")]
    readers = [
        _Reader(world, store, name, seed)
        for seed in range(threads)
        for store, name in zip(stores, ("shm", "tcp"), strict=True)
    ]

    def work(reader: _Reader) -> None:
        try:
            while not done.is_set():
                reader.step()
        except Exception as error:
            reader.report.wrong.append(repr(error))

    running = [threading.Thread(target=work, args=(reader,)) for reader in readers]
    with StoreClient(cluster.address) as store:
        _fill(world, store)
        writer = threading.Thread(target=_write, args=(world, store, done, total))
        for thread in (writer, *running):
            thread.start()
        pause = threading.Event()
        while sum(reader.report.reads for reader in readers) < reads and not deadline.passed():
            pause.wait(0.05)
            if any(reader.report.wrong for reader in readers) or not writer.is_alive():
                break
        done.set()
        for thread in (writer, *running):
            thread.join(60)
    for store in stores:
        store.close()
    for reader in readers:
        total.outcomes += reader.report.outcomes
        total.wrong += reader.report.wrong
    return total


@click.command()
@click.option("--reads", type=int, default=1_000_000, show_default=True, help="to be judged")
@click.option("--megabytes", type=int, default=24, show_default=True, help="of each of two nodes")
@click.option("--disk", is_flag=True, help="one node, and what is evicted from it is on its disk")
def main(reads: int, megabytes: int, disk: bool) -> None:
    """Read under constant eviction until so many reads were judged; say what came."""
    with tempfile.TemporaryDirectory(prefix="mooncake-reads-") as folder:
        options = ClusterOptions(node_count=2, segment_bytes=megabytes << 20)
        if disk:
            options = with_disk(options, folder)
        with Cluster(options) as cluster:
            report = run(cluster, reads)
            if disk:
                click.echo(f"{disk_numbers(cluster)}")
    for path in sorted({path for path, _ in report.outcomes}):
        right, miss = report.outcomes[path, "right"], report.outcomes[path, "miss"]
        click.echo(f"{path:<14}{right:>10} right{miss:>10} misses")
    click.echo(f"{report.reads} reads, {report.puts} puts, {report.removals} removals by force")
    for line in report.wrong[:20]:
        click.echo(f"WRONG: {line}")
    click.echo("no wrong byte" if not report.wrong else f"{len(report.wrong)} wrong")
    sys.exit(bool(report.wrong) or report.reads < reads)


if __name__ == "__main__":
    main()
