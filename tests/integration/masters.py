"""Several masters on one etcd, nodes that know all of them, and a load: processes of a test."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count as numbers
from pathlib import Path
from typing import Any

from etcd_cluster import EtcdCluster, free_ports
from processes import states_of

from mooncake_py import StoreClient
from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.errors import ClusterError, MooncakeError
from mooncake_py.ops.child import Child

START_MS = 30_000
T = 5_000
CLOCK = SystemClock()


def until(condition: Callable[[], Any], timeout_ms: int, what: str) -> None:
    deadline = Deadline(timeout_ms, CLOCK)
    waiter = select.poll()
    while not condition():
        assert not deadline.passed(), f"{what}: not within {timeout_ms} ms"
        waiter.poll(5)


class Masters:
    """`count` masters, by number; `node_count` nodes."""

    def __init__(
        self,
        folder: Path,
        etcd: EtcdCluster,
        count: int,
        node_count: int = 0,
        options: Sequence[str] = (),
        node_options: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._etcd = etcd
        self._options, self._node_options = options, node_options
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.address = ",".join(self.addresses)
        self._masters: dict[int, Child] = {}
        self._roles: dict[int, str] = {}
        self.fields: dict[int, dict[str, str]] = {}  # of their ready lines
        self._nodes: list[Child] = []
        self._started = 0
        for number in range(count):
            self.start(number)
        until(self.warm, START_MS, "a leader and followers")
        for _ in range(node_count):
            self._start_node()

    def start(self, number: int) -> None:
        self._started += 1
        arguments = [
            "--listen",
            self.addresses[number],
            "--metadata",
            self._etcd.address("mooncake"),
            *self._options,
        ]
        name = f"master-{number}-{self._started}"
        child = Child(name, "mooncake_py.master.server", arguments, self._folder)
        self._masters[number] = child
        self._roles[number] = ""
        line = child.line(START_MS)
        assert line is not None, child.complaint()
        assert line.startswith("mooncake-master ready "), line
        self.fields[number] = dict(field.split("=", 1) for field in line.split()[2:])

    def _start_node(self) -> None:
        name = f"node-{len(self._nodes)}"
        arguments = ["--master", self.address, "--listen", "127.0.0.1:0", "--name", name]
        arguments += ["--segment-bytes", "256MiB", *self._node_options]
        node = Child(name, "mooncake_py.store.node", arguments, self._folder)
        self._nodes.append(node)
        line = node.line(START_MS)
        assert line is not None, node.complaint()

    def roles(self) -> dict[int, str]:
        """The last that each said: "leads" or "follows"."""
        for number, child in self._masters.items():
            with suppress(ClusterError):  # nothing new
                while (line := child.line(1)) is not None:
                    self._roles[number] = line.split()[1]
        return self._roles

    def processor_ms(self, number: int) -> int:
        """Time that this one has had of a processor."""
        stat = Path(f"/proc/{self._masters[number].pid}/stat").read_text().rpartition(") ")[2]
        ticks = sum(map(int, stat.split()[11:13]))
        return ticks * 1_000 // os.sysconf("SC_CLK_TCK")

    def leader(self) -> int | None:
        """The one that leads; None while there is none or it is not clear."""
        leading = [number for number, role in self.roles().items() if role == "leads"]
        return leading[0] if len(leading) == 1 else None

    def warm(self) -> bool:
        """One leads, and all others have read the log and follow it."""
        return sorted(self.roles().values()) == ["follows"] * (len(self.roles()) - 1) + ["leads"]

    def kill(self, number: int) -> None:
        self._masters.pop(number).kill()
        del self._roles[number]

    def signal(self, number: int, which: signal.Signals) -> None:
        """SIGSTOP, SIGCONT. A process is stopped when it says so: on a busy machine some of its
        threads run on for a while."""
        pid = self._masters[number].pid
        os.kill(pid, which)
        if which == signal.SIGSTOP:
            until(lambda: states_of(pid) == {"T"}, 10_000, "a stopped master")

    def stop(self, number: int) -> int:
        del self._roles[number]
        return self._masters.pop(number).stop(10_000)

    def said(self) -> str:
        """Everything on standard error, for a failed test."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}"
            for path in sorted(self._folder.glob("*.stderr"))
        )

    def close(self) -> None:
        for child in (*self._nodes, *self._masters.values()):
            child.kill()

    def __enter__(self) -> Masters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def value_of(key: str) -> bytes:
    return key.encode() * (4096 // len(key))


class Load:
    """Writers that put keys of their own all the time and remember what was acknowledged."""

    PUT_MS = 1_000

    def __init__(self, address: str, writers: int = 2) -> None:
        self.acknowledged: list[tuple[int, str]] = []  # when its put began, key
        self.failures: list[tuple[int, int, MooncakeError]] = []  # when it began and ended, why
        self._address = address
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._write, args=(f"w{number}",)) for number in range(writers)
        ]
        for thread in self._threads:
            thread.start()

    def _write(self, name: str) -> None:
        with StoreClient(self._address, timeout_ms=T) as client:
            for number in numbers():
                if self._stop.wait(0.002):
                    return
                key = f"{name}-{number}"
                began_ms = CLOCK.now_ms()
                try:
                    client.put(key, value_of(key), timeout_ms=self.PUT_MS)
                    self.acknowledged.append((began_ms, key))
                except MooncakeError as error:
                    self.failures.append((began_ms, CLOCK.now_ms(), error))

    def wait_for_success_after(self, since_ms: int, timeout_ms: int) -> int:
        """Milliseconds from then until a put that began later had succeeded."""
        try:
            until(
                lambda: self.acknowledged and self.acknowledged[-1][0] >= since_ms,
                timeout_ms,
                "a put that succeeds",
            )
        except AssertionError:
            raise AssertionError(
                f"no put succeeds; the last failures: {self.failures[-3:]}"
            ) from None
        return CLOCK.now_ms() - since_ms

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def check(self, client: StoreClient) -> None:
        """Everything that was acknowledged is there, byte by byte."""
        keys = [key for _, key in self.acknowledged]
        lost = [
            key
            for key, value in zip(keys, client.get_batch(keys), strict=True)
            if value != value_of(key)
        ]
        assert lost == [], f"{len(lost)} of {len(keys)} acknowledged objects are lost"
