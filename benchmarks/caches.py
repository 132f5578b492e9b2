"""Redis and memcached as peers: started when they are installed (Debian: redis-server, memcached),
listening on a unix socket in the benchmark's own folder, storing nothing on disk."""

from __future__ import annotations

import shutil
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks.peer import START_S, BenchError, Contender, Process
from benchmarks.plan import MEMCACHED, REDIS

_PROBE_S = 0.05
_MIB = 1 << 20


def _command(name: str, path: Path, segment_bytes: int) -> list[str] | None:
    """None: it is not installed."""
    binary = shutil.which({REDIS: "redis-server", MEMCACHED: "memcached"}[name])
    if binary is None:
        return None
    if name == REDIS:
        options = ["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket", str(path)]
        return [binary, *options, "--maxmemory", str(2 * segment_bytes)]
    memory = str(max(64, 2 * segment_bytes // _MIB))
    user = ["-u", "root"] if Path("/proc/self").stat().st_uid == 0 else []
    item = f"{max(1, segment_bytes // _MIB // 2)}m"
    return [binary, "-s", str(path), "-m", memory, "-I", item, "-t", "2", *user]


def start(
    name: str, batch_bytes: int, segment_bytes: int, folder: Path, stack: ExitStack
) -> Contender | str:
    """The contender, or why there is none."""
    path = folder / f"{name}.sock"
    command = _command(name, path, segment_bytes)
    if command is None:
        return f"{name} skipped: it is not installed"
    try:
        server = Process(f"{name} server", command, folder)
        stack.callback(server.stop)
        _wait_listening(server, path)
        settings = {"kind": name, "socket": str(path)}
        contender = Contender.start(name, "store_caches", settings, batch_bytes, folder)
    except BenchError as error:
        return f"{name} skipped: {error}"
    stack.callback(contender.stop)
    contender.pids.append(server.pid)
    return contender


def _wait_listening(server: Process, path: Path) -> None:
    for _ in range(int(START_S / _PROBE_S)):
        if server.ends_within(_PROBE_S):
            raise BenchError(f"{server.name} ended: {server.complaint()}")
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
            return
    raise BenchError(f"{server.name} does not listen after {START_S:.0f} s")
