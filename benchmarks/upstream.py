"""Upstream Mooncake's processes, in an interpreter that has its wheel.

    tcp    master, a storage process, a client: three processes as ours
    local  master, one process that is storage and client
    dummy  master, upstream's standalone client (storage), a client attached to its shared memory

Each flavour has a master of its own, so that objects land where the flavour says.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks.peer import ANSWER_S, START_S, BenchError, Contender, Process
from benchmarks.plan import UP_DUMMY, UP_LOCAL, UP_TCP

WHEEL = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
HOST = "127.0.0.1"
VARIABLE = "MOONCAKE_BENCH_UPSTREAM"
_PROBE_S = 0.05


def find(option: str | None) -> tuple[str | None, str]:
    """(interpreter that can import upstream, or None; why, in words)."""
    python = option or os.environ.get(VARIABLE)
    if python is None:
        how = f"python3 -m venv DIR && DIR/bin/pip install {WHEEL}"
        return None, f"upstream skipped. To compare: {how}, then --upstream DIR/bin/python"
    try:
        probe = subprocess.run(
            [python, "-c", "import mooncake.store"], capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    except OSError as error:
        return None, f"upstream skipped: {python} does not run ({error.strerror})"
    if probe.returncode != 0:
        said = (probe.stderr.strip().splitlines() or ["no word"])[-1]
        return None, f"upstream skipped: {python} cannot import it ({said})"
    return python, f"upstream is that of {python}"


def _free_ports(count: int) -> list[int]:
    """Held at the same time, so that they differ. Upstream cannot be told to choose by itself."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


class Answering:
    """A process of `metadata_upstream.py`, and its master's process id."""

    def __init__(self, process: Process, master_pid: int) -> None:
        self._process = process
        self.master_pid = master_pid

    def ask(self, do: str, **fields: object) -> dict[str, int]:
        """Raises BenchError, with its own words."""
        self._process.say(json.dumps({"do": do} | fields))
        reply = json.loads(self._process.line(ANSWER_S))
        if "error" in reply:
            raise BenchError(f"{self._process.name}: {reply['error']}")
        return dict(reply)


class Upstream:
    """Starts flavours one by one; what it started ends with `stack`."""

    def __init__(self, python: str, folder: Path, stack: ExitStack) -> None:
        self._python = python
        self._bin = Path(python).parent
        self._folder = folder
        self._stack = stack

    def start(self, name: str, batch_bytes: int, segment_bytes: int) -> Contender:
        """Raises BenchError."""
        self._pids: list[int] = []
        contender = self._start(name, batch_bytes, segment_bytes)
        contender.pids += self._pids
        return contender

    def metadata(self, segment_bytes: int = 2 << 30) -> Answering:
        """One process that is storage and client, for calls of the master. Raises BenchError."""
        self._pids = []
        master = self._master("upstream")
        command = [self._python, "-m", "benchmarks.metadata_upstream", master, HOST]
        process = Process("upstream client", [*command, str(segment_bytes)], self._folder)
        self._stack.callback(process.stop)
        process.line(START_S)
        return Answering(process, self._pids[0])

    def _start(self, name: str, batch_bytes: int, segment_bytes: int) -> Contender:
        master = self._master(name)
        settings = {"master": master, "host": HOST, "segment_bytes": 0, "dummy": ""}
        if name == UP_TCP:
            storage = settings | {"segment_bytes": segment_bytes}
            self._pids += self._worker("upstream storage", storage, 4096).pids
        elif name == UP_LOCAL:
            settings["segment_bytes"] = segment_bytes
        elif name == UP_DUMMY:
            settings["dummy"] = self._standalone(master, segment_bytes)
        return self._worker(name, settings, batch_bytes)

    def _worker(self, name: str, settings: dict[str, object], batch_bytes: int) -> Contender:
        worker = Contender.start(
            name, "store_upstream", settings, batch_bytes, self._folder, python=self._python
        )
        self._stack.callback(worker.stop)
        return worker

    def _daemon(self, name: str, command: list[str], port: int) -> Process:
        process = Process(name, command, self._folder)
        self._stack.callback(process.stop)
        _wait_listening(process, port)
        self._pids.append(process.pid)
        return process

    def _master(self, name: str) -> str:
        port, metrics = _free_ports(2)
        command = [str(self._bin / "mooncake_master"), f"--rpc_port={port}"]
        command += [f"--metrics_port={metrics}", f"--rpc_address={HOST}"]
        self._daemon(f"{name} master", [*command, "--enable_metric_reporting=false"], port)
        return f"{HOST}:{port}"

    def _standalone(self, master: str, segment_bytes: int) -> str:
        (port,) = _free_ports(1)
        command = [str(self._bin / "mooncake_client"), f"--host={HOST}", f"--port={port}"]
        command += [f"--master_server_address={master}", "--metadata_server=P2PHANDSHAKE"]
        command += [f"--global_segment_size={segment_bytes}", "--protocol=tcp"]
        self._daemon("upstream standalone", command, port)
        return f"{HOST}:{port}"


def _wait_listening(process: Process, port: int) -> None:
    for _ in range(int(START_S / _PROBE_S)):
        if process.ends_within(_PROBE_S):
            raise BenchError(f"{process.name} ended: {process.complaint()}")
        with suppress(OSError):
            socket.create_connection((HOST, port), 1).close()
            return
    raise BenchError(f"{process.name} does not listen after {START_S:.0f} s")
