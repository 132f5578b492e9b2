"""The catalog alone: cost a key of every hot verb, memory an object, what eviction costs, how full
the allocator gets a segment, hit rates of policies.

    python -m benchmarks.catalog                     all of it; verbs at 1 k, 100 k and 1 M objects
    python -m benchmarks.catalog --what allocator    one of verbs, eviction, allocator, policies
    python -m benchmarks.catalog --trace FILE        policies on a request trace, beside LRU without
                                                     overhead and a cache that knows the future
                                                     (MOONCAKE_TRACES: a folder of such files)

No network, no processes: what is measured is `Catalog.apply`. Times are p50 in microseconds a key;
keys are drawn at random, so that large catalogs pay for their cache misses.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from mooncake_py.master.allocator import UNIT_BYTES, Allocator
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import (
    Exists,
    Granted,
    Heartbeat,
    Locate,
    Located,
    Mount,
    Mounted,
    PutEnd,
    PutStart,
    Remove,
    Tick,
)
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.model import extent_bytes
from mooncake_py.ops.ideal import clairvoyant_hits, count_pages, lru_hits
from mooncake_py.ops.trace import generate_trace, read_trace

PAGE = 64 * 1024
BATCHES = (1, 128, 1024)
SIZES = (1_000, 100_000, 1_000_000)
ROUNDS = 200
WHAT = ("verbs", "eviction", "allocator", "policies")
POLICIES = ("lru", "s3fifo", "cost")
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)


def _key(i: int) -> bytes:
    """69 bytes, as SGLang's HiCache makes them."""
    return hashlib.sha256(b"%d" % i).hexdigest().encode() + b"_0_k"


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


class Bench:
    """A catalog with room for everything, filled step by step."""

    def __init__(self) -> None:
        self.catalog = Catalog(CatalogSettings())
        self.now_ms = 1_000_000
        self.count = 0
        self.random = random.Random(1)
        self.segments = []
        for i in range(4):
            mount = Mount(f"n{i}", 1, f"h:{i}", 1, 256 << 30, f"host{i}")
            reply = self.catalog.apply(mount, self.now_ms).reply
            assert isinstance(reply, Mounted)
            self.segments.append((mount.node, reply.segment_id))
        self.empty_bytes = _resident_bytes()

    def put(self, keys: list[bytes]) -> tuple[float, float]:
        """Seconds of start and of end."""
        count = len(keys)
        start = PutStart(
            "", keys, [PAGE] * count, bytes(16 * count), random=self.random.getrandbits(64)
        )
        began = time.perf_counter()
        granted = self.catalog.apply(start, self.now_ms).reply
        granted_at = time.perf_counter()
        assert isinstance(granted, Granted)
        assert not any(granted.status)
        end = PutEnd("", keys, granted.generations)
        ending = time.perf_counter()
        self.catalog.apply(end, self.now_ms)
        return granted_at - began, time.perf_counter() - ending

    def fill(self, count: int) -> None:
        while self.count < count:
            size = min(512, count - self.count)
            self.put([_key(i) for i in range(self.count, self.count + size)])
            self.count += size
            self.now_ms += 1
        for node, segment_id in self.segments:
            self.catalog.apply(Heartbeat(node, 1, segment_id), self.now_ms)
        self.catalog.apply(Tick(), self.now_ms)

    def measure(self, batch: int) -> dict[str, float]:
        """p50 of every verb, microseconds a key; leaves the catalog as large as it was."""
        times: dict[str, list[float]] = {}
        for _ in range(max(20, ROUNDS * 16 // (batch + 15))):
            self.now_ms += 1
            keys = [_key(self.random.randrange(self.count)) for _ in range(batch)]
            for name, command in (("exists", Exists("", keys)), ("locate", Locate("", keys))):
                began = time.perf_counter()
                self.catalog.apply(command, self.now_ms)
                times.setdefault(name, []).append(time.perf_counter() - began)
            fresh = [_key(-self.random.getrandbits(60)) for _ in range(batch)]
            start, end = self.put(fresh)
            times.setdefault("put start", []).append(start)
            times.setdefault("put end", []).append(end)
            began = time.perf_counter()
            self.catalog.apply(Remove("", fresh), self.now_ms)
            times.setdefault("remove", []).append(time.perf_counter() - began)
        return {name: sorted(each)[len(each) // 2] * 1e6 / batch for name, each in times.items()}


def verbs(console: Console, sizes: Sequence[int]) -> None:
    bench = Bench()
    table = Table(title="microseconds a key, p50")
    for head in ("objects", "batch", "exists", "locate", "put start", "put end", "remove"):
        table.add_column(head, justify="right")
    for size in sizes:
        bench.fill(size)
        for batch in BATCHES:
            cost = bench.measure(batch)
            table.add_row(f"{size:,}", str(batch), *(f"{each:.2f}" for each in cost.values()))
    console.print(table)
    grown = _resident_bytes() - bench.empty_bytes
    console.print(f"{grown / bench.count:.0f} bytes of process memory an object, keys of 69 bytes")


def eviction(console: Console, sizes: Sequence[int], count: int = 20_000) -> None:
    """Puts into a full cluster: what each object costs that goes for a new one, by policy and by
    how many objects there are."""
    table = Table(title=f"microseconds a key of a put that evicts, batches of 128, {count:,} keys")
    for head in ("objects", *POLICIES, "evicted a put"):
        table.add_column(head, justify="right")
    for size in sizes:
        costs = [_evicting(policy, size, count) for policy in POLICIES]
        table.add_row(f"{size:,}", *(f"{us:.2f}" for us, _ in costs), f"{costs[0][1]:.3f}")
    console.print(table)


def _evicting(policy: str, objects: int, count: int) -> tuple[float, float]:
    """Microseconds a key, and objects evicted for each."""
    settings = CatalogSettings(eviction=policy, objects_max=max(4096, 2 * objects), lease_ms=1)
    catalog, now_ms = Catalog(settings), 1_000
    nbytes = int(objects * extent_bytes(PAGE) / settings.evict_high_ratio)
    catalog.apply(Mount("n", 1, "n:1", 1, nbytes, "n"), now_ms)

    def put(first: int, number: int) -> None:
        keys = [_key(i) for i in range(first, first + number)]
        start = PutStart("", keys, [PAGE] * number, bytes(16 * number), random=first)
        granted = catalog.apply(start, now_ms).reply
        assert isinstance(granted, Granted)
        assert not any(granted.status)
        catalog.apply(PutEnd("", keys, granted.generations), now_ms)

    for first in range(0, objects, 128):
        now_ms += 1
        put(first, min(128, objects - first))
    before = catalog.state.counters["evictions"]
    began = time.perf_counter()
    for first in range(objects, objects + count, 128):
        now_ms += 1
        put(first, 128)
    took = time.perf_counter() - began
    keys = 128 * len(range(0, count, 128))
    return took * 1e6 / keys, (catalog.state.counters["evictions"] - before) / keys


def allocator(console: Console, rounds: int = 200_000) -> None:
    """A segment that is always as full as it gets: what does not fit is made room for by giving
    back ranges at random, until it fits."""
    table = Table(title=f"how full a segment is, mean of {rounds:,} allocations")
    for head in ("sizes", "full", "least", "holes", "us an allocation"):
        table.add_column(head, justify="right")
    generator = random.Random(3)
    pages = [extent_bytes(nbytes) for nbytes in (256 << 10, 64 << 10, 16 << 10)]
    spread = [generator.randrange(1 << 10, 1 << 20) for _ in range(5_000)]
    for name, sizes in (("KV pages of 16, 64, 256 KiB", pages), ("1 KiB to 1 MiB", spread)):
        units = [-(-nbytes // UNIT_BYTES) for nbytes in sizes]
        table.add_row(name, *_churn(units, 4_000_000, rounds))
    console.print(table)


def _churn(sizes: Sequence[int], units: int, rounds: int) -> list[str]:
    generator = random.Random(5)
    segment = Allocator(units)
    taken: list[tuple[int, int]] = []
    full: list[float] = []
    began = time.perf_counter()
    for _ in range(rounds):
        size = generator.choice(sizes)
        start = segment.take(size)
        while start < 0:
            full.append(1 - segment.free / units)
            at = generator.randrange(len(taken))
            taken[at], taken[-1] = taken[-1], taken[at]
            segment.give(*taken.pop())
            start = segment.take(size)
        taken.append((start, size))
    us = (time.perf_counter() - began) * 1e6 / rounds
    mean = sum(full) / len(full)
    return [f"{mean:.1%}", f"{min(full):.1%}", f"{segment.hole_count:,}", f"{us:.2f}"]


def replay(policy: str, prompts: Sequence[Sequence[int]], capacity_pages: int) -> int:
    """Page hits of the real catalog: locate the longest prefix, put what is missing."""
    length = 64 * 15
    settings = CatalogSettings(
        lease_ms=1, eviction=policy, evict_high_ratio=1.0, evict_low_ratio=1.0,
        suspect_ms=1 << 40, dead_ms=1 << 41, disk_away_ms=1 << 41,
        objects_max=max(4096, 2 * capacity_pages),
    )  # fmt: skip
    catalog = Catalog(settings)
    now_ms = 1_000
    nbytes = capacity_pages * extent_bytes(length)
    catalog.apply(Mount("n", 1, "n:1", 1, nbytes, "n"), now_ms)
    hits = 0
    for prompt in prompts:
        now_ms += 2
        keys = [b"%d" % page for page in prompt]
        located = catalog.apply(Locate("", keys, prefix=True), now_ms).reply
        assert isinstance(located, Located)
        run = located.status.count(0)
        hits += run
        rest = list(dict.fromkeys(keys[run:]))
        if rest:
            now_ms += 2
            count = len(rest)
            granted = catalog.apply(
                PutStart("", rest, [length] * count, bytes(16 * count), random=now_ms), now_ms
            ).reply
            assert isinstance(granted, Granted)
            going = [i for i, code in enumerate(granted.status) if code == 0]
            catalog.apply(
                PutEnd("", [rest[i] for i in going], [granted.generations[i] for i in going]),
                now_ms,
            )
    return hits


def policies(console: Console, path: Path | None, limit: int | None) -> None:
    """Of that trace; without one, of the published ones in the folder that MOONCAKE_TRACES names;
    without those, of one that is made up."""
    folder = os.environ.get("MOONCAKE_TRACES")
    paths = [path] if path else sorted(Path(folder).glob("*.jsonl")) if folder else []
    for each in paths:
        _compare(console, each.stem, [request.hash_ids for request in read_trace(each, limit)])
    if not paths:
        made_up = generate_trace(limit or 2_000)
        _compare(console, "made up", [request.hash_ids for request in made_up])


def _compare(console: Console, load: str, prompts: Sequence[Sequence[int]]) -> None:
    pages = count_pages(prompts)
    distinct = len({page for prompt in prompts for page in prompt})
    table = Table(title=f"{load}: hit rate of {pages:,} pages, {distinct:,} different ones")
    contenders: dict[str, Callable[[int], int]] = {
        "lru": lambda capacity: replay("lru", prompts, capacity),
        "s3fifo": lambda capacity: replay("s3fifo", prompts, capacity),
        "cost": lambda capacity: replay("cost", prompts, capacity),
        "lru, no overhead": lambda capacity: lru_hits(prompts, capacity),
        "knows the future": lambda capacity: clairvoyant_hits(prompts, capacity),
    }
    table.add_column("capacity", justify="right")
    for name in contenders:
        table.add_column(name, justify="right")
    for share in SHARES:
        capacity = max(16, int(distinct * share))
        rates = [f"{hits(capacity) / pages:.4f}" for hits in contenders.values()]
        table.add_row(f"{share:.0%}", *rates)
    console.print(table)


@click.command(help=__doc__)
@click.option("--objects", "objects", type=int, default=SIZES[-1], help="largest catalog measured")
@click.option("--trace", type=click.Path(exists=True, path_type=Path), default=None)
@click.option("--requests", type=int, default=None, help="of the trace")
@click.option("--what", type=click.Choice(["all", *WHAT]), default="all")
def main(objects: int, trace: Path | None, requests: int | None, what: str) -> None:
    console = Console()
    sizes = [size for size in SIZES if size < objects] + [objects]
    parts: dict[str, Callable[[], None]] = {
        "verbs": lambda: verbs(console, sizes),
        "eviction": lambda: eviction(console, sizes),
        "allocator": lambda: allocator(console),
        "policies": lambda: policies(console, trace, requests),
    }
    for name in WHAT if what == "all" else (what,):
        parts[name]()


if __name__ == "__main__":
    main()
