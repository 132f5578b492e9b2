"""How long short calls and heartbeats take while others ask for much (A20, A33, fairness).

    python -m benchmarks.fairness [--objects N] [--callers N] [--seconds S] [--json FILE]

One master with N objects. A prober asks over the hot lane for one key and sends heartbeats, first
alone and then beside each *crowd*: so many callers, in a process of their own, that list
everything, remove by a pattern that is in no key, ask for 4,000 keys at once, or send their
requests over sockets from which they read the answers late and slowly. Then (A33) it looks up
20,000 keys, in turns alone and while a writer puts into the full cluster, so that every put evicts.
A crowd has come when each of it was served once, or after twenty seconds, whichever is first.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from mooncake_py.clock import SystemClock
from mooncake_py.errors import Backpressure, MooncakeError
from mooncake_py.master.client import MasterClient
from mooncake_py.master.commands import Heartbeat, Mount
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.transfer import TransferEngine

T = 60_000
FILL = 2_000
LENGTH = 64  # of an object, whose extent is twice that
LOOKUP = 20_000
BEAT_S = 0.25  # as nodes do
PAUSE_S = 0.002  # between two probes
COME_S = 20.0  # one removal by pattern of forty looks at a million keys, and takes its time
TURNS = 5  # alone and beside the writer, so that what else the machine does is in both
QUIET, EVICTING = "nobody", "a writer that evicts"


def key_of(number: int) -> bytes:
    return b"page/%08d" % number


# --- the crowd, in its own process --------------------------------------------------------------


def list_all(client: MasterClient, objects: int) -> None:
    client.list("t", limit=10_000, timeout_ms=T)


def look_for_a_pattern(client: MasterClient, objects: int) -> None:
    client.remove_all("t", pattern=rb"(p|a|g|e|/|0)*x", timeout_ms=T)


def ask_for_thousands(client: MasterClient, objects: int) -> None:
    first = random.randrange(max(1, objects - 4_000))
    client.exists("t", [key_of(first + i) for i in range(min(4_000, objects))], timeout_ms=T)


def write(client: MasterClient, objects: int) -> None:
    """A batch of puts into a cluster that is full."""
    names = [b"new/%016x" % random.getrandbits(64) for _ in range(128)]
    granted = client.put_start("t", names, [LENGTH] * len(names), timeout_ms=T)
    client.put_end("t", names, granted.generations.tolist(), timeout_ms=T)


CROWDS: dict[str, Callable[[MasterClient, int], None]] = {
    "listings": list_all,
    "patterns": look_for_a_pattern,
    "lookups of 4,000": ask_for_thousands,
    EVICTING: write,
}
SLOW = "readers that stall"


def crowd(kind: str, address: str, objects: int, callers: int) -> None:
    """Until standard input ends. Says so when every caller has been served once, or it has waited
    for that long enough."""
    served = threading.Semaphore(0)

    def work() -> None:
        client = MasterClient(address, clock=SystemClock())
        while True:
            try:
                CROWDS[kind](client, objects)
            except Backpressure:
                time.sleep(0.01)
            except MooncakeError as error:
                sys.stderr.write(f"{error}\n")
            served.release()

    def stall() -> None:
        """A caller of gRPC's port that says hello, and then takes a byte now and then."""
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            served.release()
            while line.recv(1):
                time.sleep(0.05)

    for _ in range(callers):
        threading.Thread(target=stall if kind == SLOW else work, daemon=True).start()
    come = time.perf_counter() + COME_S
    for _ in range(callers):
        served.acquire(timeout=max(0.0, come - time.perf_counter()))
    sys.stdout.write("served\n")
    sys.stdout.flush()
    sys.stdin.read()


@contextmanager
def running(kind: str, address: str, objects: int, callers: int) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.fairness", "--crowd", kind, "--address", address]
    command += ["--objects", str(objects), "--callers", str(callers)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "served\n":
                raise click.ClickException(f"the crowd of {kind} did not come")
            yield
        finally:
            process.kill()


# --- the prober ---------------------------------------------------------------------------------


class Prober:
    """Owner of a segment that nobody backs; full, once `fill` is through."""

    def __init__(self, address: str, engine: TransferEngine, objects: int) -> None:
        self.objects = objects
        self._lane = MasterClient(address, engine=engine, clock=SystemClock())
        self._lane.connect(timeout_ms=T)
        nbytes = int(objects * 2 * LENGTH / 0.95)
        mount = Mount("paper", 1, "127.0.0.1:1", 1, nbytes, "h")
        self._beat = Heartbeat("paper", 1, self._lane.mount(mount, timeout_ms=T).segment_id)
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        """Also while a crowd comes, or the master would forget a million objects beside it."""
        while True:
            with suppress(MooncakeError):
                self._lane.heartbeat(self._beat, timeout_ms=T)
            time.sleep(BEAT_S)

    def fill(self) -> None:
        for start in range(0, self.objects, FILL):
            names = [key_of(i) for i in range(start, min(start + FILL, self.objects))]
            granted = self._lane.put_start("t", names, [LENGTH] * len(names), timeout_ms=T)
            self._lane.put_end("t", names, granted.generations.tolist(), timeout_ms=T)

    def short_calls(self, seconds: float) -> dict[str, list[float]]:
        """Milliseconds of every call, by its name."""
        calls: dict[str, Callable[[], object]] = {
            "heartbeat": lambda: self._lane.heartbeat(self._beat, timeout_ms=T),
            "exists": lambda: self._lane.exists("t", [key_of(7)], timeout_ms=T),
            "locate": lambda: self._lane.locate("t", [key_of(8)], timeout_ms=T),
        }
        return _timed(calls, seconds)

    def lookups(self, seconds: float) -> list[float]:
        def look() -> None:
            names = [key_of(random.randrange(self.objects)) for _ in range(LOOKUP)]
            began = time.perf_counter()
            self._lane.exists("t", names, timeout_ms=T)
            found.append((time.perf_counter() - began) * 1e3)

        found: list[float] = []
        _timed({"": look}, seconds)
        return found


def _timed(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            found[name].append((time.perf_counter() - began) * 1e3)
        time.sleep(PAUSE_S)
    return found


def _at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(objects: int, callers: int, seconds: float) -> list[dict[str, object]]:
    """A row for each call beside each crowd: p50, p99 and longest in ms, and how many."""
    rows: list[dict[str, object]] = []

    def note(beside: str, found: dict[str, list[float]]) -> None:
        for call, values in found.items():
            rows.append({
                "call": call, "beside": beside, "p50_ms": _at(values, 0.5),
                "p99_ms": _at(values, 0.99), "max_ms": max(values), "count": len(values),
            })  # fmt: skip

    with Cluster(ClusterOptions(node_count=0)) as cluster, TransferEngine() as engine:
        prober = Prober(cluster.address, engine, objects)
        prober.fill()
        lookup = f"exists of {LOOKUP:,}"
        note(QUIET, prober.short_calls(seconds))
        for kind in ("listings", "patterns", "lookups of 4,000", SLOW):
            with running(kind, cluster.address, objects, callers):
                note(f"{callers} {kind}", prober.short_calls(seconds))
        times: dict[str, list[float]] = {QUIET: [], EVICTING: []}
        for _ in range(TURNS):
            times[QUIET] += prober.lookups(seconds)
            with running(EVICTING, cluster.address, objects, 1):
                times[EVICTING] += prober.lookups(seconds)
        for beside, values in times.items():
            note(beside, {lookup: values})
    return rows


@click.command(help=__doc__)
@click.option("--objects", type=click.IntRange(1), default=100_000, show_default=True)
@click.option("--callers", type=click.IntRange(1), default=40, show_default=True)
@click.option("--seconds", type=float, default=5.0, show_default=True, help="of every case")
@click.option("--json", "path", type=click.Path(path_type=Path), default=None)
@click.option("--crowd", "kind", type=click.Choice([*CROWDS, SLOW]), default=None, hidden=True)
@click.option("--address", default="", hidden=True)
def main(
    objects: int, callers: int, seconds: float, path: Path | None, kind: str | None, address: str
) -> None:
    if kind is not None:
        crowd(kind, address, objects, callers)
        return
    rows = measure(objects, callers, seconds)
    table = Table(title=f"ms a call, {objects:,} objects")
    for head in ("call", "beside", "p50", "p99", "longest", "calls"):
        table.add_column(head, justify="right")
    for row in rows:
        times = (f"{row[name]:.2f}" for name in ("p50_ms", "p99_ms", "max_ms"))
        table.add_row(str(row["call"]), str(row["beside"]), *times, str(row["count"]))
    Console().print(table)
    if path is not None:
        path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
