"""Is this machine fit to run mooncake_py, and what would make it fit? One line a part.

A required part that is missing is a failure; an optional one is named with what it would take.
Each check looks at the thing itself (loads the core, makes the memory), not at version numbers.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import mmap
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mooncake_py.config import state_folder
from mooncake_py.ops.sizes import size_text

_OLDEST = (3, 11)
_MEMORY_COMFORT_BYTES = 2 << 30  # the replay with its defaults
_PROBE_BYTES = 1 << 20
_SEGMENT_BYTES = 1 << 30  # of a node, unless it is told otherwise
_RDMA_DEVICES = Path("/sys/class/infiniband")
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `fix` is empty when there is nothing to do."""

    part: str
    ok: bool
    required: bool
    found: str
    fix: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def line(self) -> str:
        mark = "ok     " if self.ok else "MISSING" if self.required else "absent "
        return f"{mark}  {self.part}: {self.found}" + (f". Remedy: {self.fix}" if self.fix else "")


def examine() -> list[Finding]:
    return [check() for check in _CHECKS]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= _OLDEST
    return Finding("Python", ok, True, version, "" if ok else "install Python 3.11 or newer")


def _native_core() -> Finding:
    try:
        importlib.import_module("mooncake_py._native._mooncake")
    except ImportError as error:
        fix = "build it: ./dev build in the source tree, or pip install with g++ present"
        return Finding("native core", False, True, f"does not load ({error})", fix)
    return Finding("native core", True, True, "loads")


def _anonymous_memory() -> Finding:
    """Segments are memfds: neither /dev/shm nor its size matters."""
    try:
        fd = os.memfd_create("mooncake-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _PROBE_BYTES)
            mmap.mmap(fd, _PROBE_BYTES).close()
        finally:
            os.close(fd)
    except OSError as error:
        fix = "run on Linux 3.17 or newer, and allow memfd_create in the container's seccomp rules"
        return Finding("shared memory", False, True, f"memfd_create: {error.strerror}", fix)
    return Finding("shared memory", True, True, "memfd works")


def _free_memory() -> Finding:
    free = min(_limits())
    enough = free >= _MEMORY_COMFORT_BYTES
    fix = "" if enough else "use smaller segments: --segment-bytes of nodes, --capacity of a replay"
    return Finding("free memory", enough, False, size_text(free), fix)


def _limits() -> Iterator[int]:
    """What the machine and the control group would still give."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) << 10
    group = Path("/sys/fs/cgroup")
    try:
        most, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        yield int(most) - int(used)
    except (OSError, ValueError):  # no such group, or "max": no limit
        return


def _ipv6() -> Finding:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        fix = "use IPv4 addresses, or turn IPv6 on in this kernel or container"
        return Finding("IPv6", False, False, error.strerror or str(error), fix)
    return Finding("IPv6", True, False, "the loopback address works")


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        fix = "pip install torch, if tensors are to be put and got"
        return Finding("torch", False, False, "not installed; every other buffer works", fix)
    return Finding("torch", True, False, "installed: CPU tensors can be put and got")


def _rdma() -> Finding:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        fix = "apt install libibverbs1 ibverbs-providers, if there are RDMA cards; else it is tcp"
        return Finding("RDMA", False, False, "libibverbs.so.1 does not load", fix)
    try:
        devices = sorted(os.listdir(_RDMA_DEVICES))
    except OSError:
        devices = []
    if not devices:
        fix = "load the driver, if there are RDMA cards, and give /dev/infiniband to a container"
        return Finding("RDMA", False, False, "libibverbs loads; no device", fix)
    return Finding("RDMA", True, False, f"libibverbs loads; devices: {', '.join(devices)}")


def _locked_memory() -> Finding:
    """Only RDMA locks memory: that of a node, and what clients register."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", True, False, "no limit")
    enough = soft >= _SEGMENT_BYTES
    fix = "" if enough else "for RDMA: ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit"
    return Finding("locked memory", enough, False, f"limit {size_text(soft)}", fix)


def _shm_folder() -> Finding:
    """Anonymous segments need no room there; files that outlive their node do."""
    fix = "for --segment-file there: mount a larger one (containers: --shm-size)"
    return _room("/dev/shm", _SHM, fix)


def _state_folder() -> Finding:
    fix = "make room there, or give the master --metadata PATH on another disk"
    return _room("state folder", Path(state_folder()), fix)


def _room(part: str, folder: Path, fix: str) -> Finding:
    """Of a folder, or of the one in which it will be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Finding(part, False, False, f"{folder} cannot be written", fix)
    enough = free >= _SEGMENT_BYTES
    return Finding(
        part, enough, False, f"{size_text(free)} free at {folder}", "" if enough else fix
    )


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _native_core,
    _anonymous_memory,
    _free_memory,
    _ipv6,
    _torch,
    _rdma,
    _locked_memory,
    _shm_folder,
    _state_folder,
)
