"""The processes of a run, by name: masters m0.., members of etcd e0.., nodes n0.., clients c0.. .

Each is on a host of its own when there is a network (client c0 shares that of node n0, so that it
uses shared memory), else all are on this one. Ports are fixed, so what is started again is found
where it was. All methods are called by one thread, the one that made the world.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from chaos_inside import faketime
from chaos_network import Network
from chaos_schedule import LEADER, SLOW, STANDBY, Shape
from etcd_cluster import EtcdCluster, free_ports

from mooncake_py.errors import ClusterError
from mooncake_py.ops import leash
from mooncake_py.ops.child import Child

MODULE = "tests.chaos.chaos_inside"
START_MS = 90_000 * SLOW  # a guest on one processor takes long to start them
LEASE_MS, DEAD_MS, SUSPECT_MS = 2_000 * SLOW, 4_000 * SLOW, 1_000 * SLOW
MASTER_SETTINGS = (
    f"lease_ms={LEASE_MS}", f"dead_ms={DEAD_MS}", f"suspect_ms={SUSPECT_MS}",
    f"grant_ttl_ms={4_000 * SLOW}", f"grant_margin_ms={1_000 * SLOW}", f"doubt_ms={1_000 * SLOW}",
    f"tell_ms={200 * SLOW}", f"start_ms={30_000 * SLOW}",
    "events_max=200000",
)  # fmt: skip


class World:
    def __init__(self, shape: Shape, seed: int, folder: Path, database: Path | None = None) -> None:
        """database: folder of the embedded database, when there is no etcd."""
        self.shape = shape
        self.folder = folder
        self.network = Network(seed) if shape.network else None
        self.ready_at: dict[str, int] = {}  # ns; absent while a process is not ready
        self.events: list[tuple[int, str]] = []  # lines of the masters
        self._seed = seed
        if SLOW > 1:  # a node has no option for it
            os.environ["MOONCAKE_NODE_START_MS"] = str(30_000 * SLOW)
        self.database = database
        self._children: dict[str, Child] = {}
        self._lives: dict[str, int] = {}
        self._terms: dict[str, tuple[int, str]] = {}
        self._after: dict[str, Callable[[], None]] = {}
        self._hosts = self._make_hosts()
        self._ports = dict(zip(self.names("m") + self.names("n"), self._free(), strict=False))
        self.etcd: EtcdCluster | None = None
        if shape.etcd_count:
            self.etcd = EtcdCluster(
                folder / "etcd",
                shape.etcd_count,
                hosts=[self.ip(name) for name in self.names("e")],
                wrap=lambda number: [
                    *(sys.executable, "-I", "-S", leash.__file__, str(os.getpid())),
                    *(sys.executable, "-m", MODULE, self._namespace(f"e{number}"), "-"),
                ],
            )
        for kind in "mnc":
            for name in self.names(kind):
                self.start(name)
            self.wait(lambda kind=kind: self._all_ready(kind))  # type: ignore[misc]
            if kind == "m":
                self.wait(lambda: self.leader() is not None)

    def _free(self) -> Iterator[int]:
        count = self.shape.master_count + self.shape.node_count
        return iter(range(7_000, 7_000 + count) if self.network else free_ports(count))

    def names(self, kind: str) -> list[str]:
        count = {
            "m": self.shape.master_count, "n": self.shape.node_count,
            "c": self.shape.client_count, "e": self.shape.etcd_count,
        }[kind]  # fmt: skip
        return [f"{kind}{number}" for number in range(count)]

    def _make_hosts(self) -> dict[str, str]:
        """Process -> its host."""
        names = [name for kind in "menc" for name in self.names(kind)]
        hosts = {name: "n0" if name == "c0" else name for name in names}
        if self.network is not None:
            for host in sorted(set(hosts.values())):
                self.network.add(host)
        return hosts

    def host(self, name: str) -> str:
        return self._hosts[name]

    def ip(self, name: str) -> str:
        return self.network.ip(self._hosts[name]) if self.network else "127.0.0.1"

    def _namespace(self, name: str) -> str:
        return self.network.namespace(self._hosts[name]) if self.network else "-"

    @property
    def master_address(self) -> str:
        return ",".join(self.address(name) for name in self.names("m"))

    def address(self, name: str) -> str:
        return f"{self.ip(name)}:{self._ports[name]}"

    # --- life and death -------------------------------------------------------------------------

    def start(self, name: str, then: Callable[[], None] | None = None) -> None:
        """Returns at once; `then` is called when it is ready (see `poll`)."""
        if name[0] == "e":
            assert self.etcd is not None
            self.etcd.start(int(name[1:]))
            return
        life = self._lives[name] = self._lives.get(name, -1) + 1
        module, arguments = self.command(name, life)
        clock = "-"
        if self.shape.clocks:
            self.set_clock(name, 0)
            clock = str(self.clock_file(name))
        inside = [self._namespace(name), clock, module, *arguments]
        self._children[name] = Child(f"{name}-{life}", MODULE, inside, self.folder)
        self._after[name] = then or (lambda: None)

    def command(self, name: str, life: int) -> tuple[str, list[str]]:
        """Module and arguments."""
        if name[0] == "m":
            metadata = self.etcd.address("chaos") if self.etcd else str(self.database)
            options = ["--listen", self.address(name), "--metadata", metadata]
            options += [f"--set={setting}" for setting in MASTER_SETTINGS]
            return "mooncake_py.master.server", options
        if name[0] == "n":
            options = ["--master", self.master_address, "--listen", self.address(name)]
            options += ["--name", name, "--segment-bytes", f"{self.shape.segment_mib}MiB"]
            if self.shape.disk_mib:
                options += ["--disk", str(self.folder / f"disk-{name}")]
                options += ["--disk-size", f"{self.shape.disk_mib}MiB"]
            options += ["--transports", ",".join(self.transports(name))]
            return "mooncake_py.store.node", options
        spec = {
            "name": name, "master": self.master_address, "seed": self._seed, "life": life,
            "history": str(self.history(name, life)), "transports": self.transports(name),
            "streams": self.shape.streams, "timeout_ms": 3_000 * SLOW,
            "calls_per_second": self.shape.calls_per_second / SLOW,
        }  # fmt: skip
        return "tests.chaos.chaos_worker", [json.dumps(spec)]

    def transports(self, name: str) -> tuple[str, ...]:
        if self.shape.ports:
            place = int(name[1:]) + (name[0] == "c")
            return (f"rdma:{self.shape.ports[place % len(self.shape.ports)]}",)
        return ("tcp",) if name == "c1" else ("local", "shm", "tcp")

    def history(self, name: str, life: int) -> Path:
        return self.folder / f"{name}-{life}.history"

    def clock_file(self, name: str) -> Path:
        """What libfaketime reads: seconds that the wall clock is ahead."""
        return self.folder / f"{name}.clock"

    def set_clock(self, name: str, seconds: int) -> None:
        self.clock_file(name).write_text(f"{seconds:+d}\n")

    def kill(self, name: str) -> None:
        self.ready_at.pop(name, None)
        self._terms.pop(name, None)
        if name[0] == "e":
            assert self.etcd is not None
            self.etcd.kill(int(name[1:]))
        else:
            self._children[name].kill()

    def signal(self, name: str, number: signal.Signals) -> None:
        if name[0] == "e":
            assert self.etcd is not None
            self.etcd.signal(int(name[1:]), number)
        else:
            with suppress(ProcessLookupError):
                os.kill(self._children[name].pid, number)

    def pid(self, name: str) -> int:
        return self._children[name].pid

    def stop_clients(self) -> dict[str, int]:
        """Ask them to end; their exit codes."""
        for name in self.names("c"):
            self._children[name].ask_to_stop()
        return {name: self._children[name].wait(15_000 * SLOW) for name in self.names("c")}

    def last_words(self, name: str) -> str:
        """The end of what it wrote to standard error."""
        path = self.folder / f"{name}-{self._lives[name]}.stderr"
        return path.read_text(errors="replace")[-1_500:]

    def casualties(self) -> dict[str, str]:
        """Processes that have ended though nobody killed them, with their last words."""
        return {
            name: f"exit code {child.exit_code()}: {child.complaint()}"
            for name, child in self._children.items()
            if child.exit_code() not in (None, -signal.SIGKILL)
        }

    # --- what they say --------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in what the processes have said."""
        for name, child in self._children.items():
            with suppress(ClusterError):  # nothing new
                while (line := child.line(1)) is not None:
                    self._heard(name, line)

    def _heard(self, name: str, line: str) -> None:
        now = time.monotonic_ns()
        word = line.split()[1]
        if name[0] == "m":
            self.events.append((now, f"{name} {line}"))
            if word in ("leads", "follows"):
                fields = dict(part.split("=", 1) for part in line.split()[2:])
                self._terms[name] = (int(fields.get("term", "0")), word)
            elif not self.shape.etcd_count:
                self._terms[name] = (1, "leads")
        if word == "ready":
            self.ready_at[name] = now
            self._after.pop(name)()

    def wait(self, condition: Callable[[], bool], timeout_ms: int = START_MS) -> None:
        end = time.monotonic_ns() + timeout_ms * 1_000_000
        while not condition():
            assert time.monotonic_ns() < end, f"not within {timeout_ms} ms"
            assert not self.casualties(), self.casualties()
            self.poll()

    def _all_ready(self, kind: str) -> bool:
        return all(name in self.ready_at for name in self.names(kind))

    def all_ready(self) -> bool:
        return all(map(self._all_ready, "mnc"))

    def leader(self) -> str | None:
        """Who leads as far as is known: the one that said so last."""
        leading = [(term, name) for name, (term, word) in self._terms.items() if word == "leads"]
        return max(leading)[1] if leading else None

    def follows(self, name: str) -> bool:
        return self._terms.get(name, (0, ""))[1] == "follows"

    def resolve(self, victim: str) -> str | None:
        """A name for LEADER and STANDBY; None when there is none just now."""
        if victim not in (LEADER, STANDBY):
            return victim
        leader = self.leader()
        if victim == LEADER:
            return leader
        return next((n for n in self.names("m") if n != leader and n in self.ready_at), None)

    def close(self) -> None:
        for kind in "cnm":
            for name in self.names(kind):
                if name in self._children:
                    self._children[name].kill()
        if self.etcd is not None:
            self.etcd.close()
        if self.network is not None:
            self.network.close()
        sweep_clocks()


def sweep_clocks() -> None:
    """What libfaketime leaves in /dev/shm for processes that were killed: named by their pid."""
    for left in Path("/dev/shm").glob("*faketime_s*_*"):
        pid = left.name.rpartition("_")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            left.unlink(missing_ok=True)


def has_faketime() -> bool:
    return bool(faketime())
