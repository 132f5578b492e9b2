"""A master and some nodes on this machine, in a temporary folder, for as long as a `with` block.

Nothing outlives the block, whatever ends it: leaving it stops the nodes before their master;
SIGTERM and Ctrl-C leave it; after a SIGKILL of this process the kernel kills the daemons (leash)
and the janitor removes the folder. Segments are anonymous memory, so none is left in /dev/shm.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.errors import ClusterError
from mooncake_py.ops.child import Child

_JANITOR = Path(__file__).with_name("janitor.py")


class Scratch:
    """A temporary folder that is removed when closed, or when this process is gone."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mooncake-"))
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_JANITOR), str(self.folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        self._janitor.wait()

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What to start. Arguments are appended to the command lines as they are."""

    node_count: int = 2
    segment_bytes: int = 512 << 20  # of each node
    host: str = "127.0.0.1"  # as it stands in addresses: an IPv6 literal in brackets
    master_arguments: Sequence[str] = ()
    node_arguments: Sequence[str] = ()
    start_timeout_ms: int = 60_000  # populating a large segment takes a while
    stop_timeout_ms: int = 10_000


class Daemon:
    """A daemon and the fields of its ready line (`design/daemons.md`)."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.fields: dict[str, str] = {}

    def wait_ready(self, timeout_ms: int) -> None:
        """Raises ClusterError when it ends before it is ready, or is not ready in time."""
        deadline = Deadline(timeout_ms, SystemClock())
        while (line := self.child.line(deadline.left_ms())) is not None:
            words = line.split()
            if words[1:2] == ["ready"]:
                self.fields = dict(word.split("=", 1) for word in words[2:])
                return
        self.child.stop(1000)
        raise ClusterError(f"{self.child.name} did not start: {self.child.complaint()}", remedy="")


class Cluster:
    """Starts on entering its `with` block. Not thread-safe.

    Raises ClusterError, in the daemon's own words, when one of them does not start.
    """

    def __init__(self, options: ClusterOptions | None = None) -> None:
        self.options = options or ClusterOptions()
        self.nodes: list[Daemon] = []
        self._masters: list[Daemon] = []
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        try:
            self.folder = self._stack.enter_context(Scratch()).folder
            self.start_master()
            launched = [self._launch_node() for _ in range(self.options.node_count)]
            for node in launched:
                node.wait_ready(self.options.start_timeout_ms)
        except BaseException:
            self.close()
            raise
        return self

    @property
    def master(self) -> Daemon:
        return self._masters[-1]

    @property
    def address(self) -> str:
        """host:port of the master's API."""
        return self.master.fields["grpc"]

    def start_master(self, port: int = 0) -> Daemon:
        """The first one, or another on the same metadata once the one before is gone."""
        arguments = ["--listen", f"{self.options.host}:{port}"]
        arguments += ["--lane-listen", f"{self.options.host}:0"]
        arguments += ["--metadata", str(self.folder / "metadata")]
        arguments += self.options.master_arguments
        name = f"master-{len(self._masters)}" if self._masters else "master"
        master = self._launch(name, "mooncake_py.master.server", arguments)
        self._masters.append(master)
        master.wait_ready(self.options.start_timeout_ms)
        return master

    def start_node(self) -> Daemon:
        """One more node; returns once it has mounted its segment."""
        node = self._launch_node()
        node.wait_ready(self.options.start_timeout_ms)
        return node

    def _launch_node(self) -> Daemon:
        name = f"node-{len(self.nodes)}"
        arguments = ["--master", self.address, "--listen", f"{self.options.host}:0"]
        arguments += ["--name", name, "--segment-bytes", str(self.options.segment_bytes)]
        arguments += self.options.node_arguments
        node = self._launch(name, "mooncake_py.store.node", arguments)
        self.nodes.append(node)
        return node

    def _launch(self, name: str, module: str, arguments: Sequence[str]) -> Daemon:
        return Daemon(Child(name, module, arguments, self.folder))

    def has_nodes(self) -> bool:
        """Does any node still run?"""
        return any(node.child.exit_code() is None for node in self.nodes)

    def casualties(self) -> list[str]:
        """Daemons that have ended though nobody stopped them, in words."""
        return [
            f"{daemon.child.name} ended with {_how(code)}"
            for daemon in (self.master, *self.nodes)
            if (code := daemon.child.exit_code()) is not None
        ]

    def close(self) -> None:
        """Stop nodes, then the master, each within `stop_timeout_ms` or by SIGKILL; remove the
        folder. May be called twice."""
        for daemons in (self.nodes, self._masters):
            for daemon in daemons:
                daemon.child.ask_to_stop()
            for daemon in daemons:
                daemon.child.stop(self.options.stop_timeout_ms)
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _how(exit_code: int) -> str:
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
