"""What a small call costs beside its copy: within a host no memory, no system call, two locks."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PROGRAM = HERE / "small_calls.py"
CALLS = 200  # as in there
PTRACE_GETREGS, PTRACE_SYSCALL, PTRACE_SEIZE, PTRACE_INTERRUPT = 12, 24, 0x4206, 0x4207
PTRACE_DETACH, TRACE_SYSGOOD = 17, 1
ORIG_RAX, GETSID = 15, 124  # of x86-64

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


def trace(request: int, pid: int, data: Any = None) -> None:
    if libc.ptrace(request, pid, None, data) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def syscalls_between_markers(pid: int, go: Any) -> list[int]:
    """How many system calls the main thread makes between each two calls of getsid."""
    registers = (ctypes.c_ulonglong * 64)()
    trace(PTRACE_SEIZE, pid, TRACE_SYSGOOD)
    trace(PTRACE_INTERRUPT, pid)
    os.waitpid(pid, 0)
    go()
    found: list[int] = []
    counted, inside, entering = 0, False, True
    while len(found) < 2:
        trace(PTRACE_SYSCALL, pid)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSTOPPED(status), "it ended"
        if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80:
            continue
        if entering:
            trace(PTRACE_GETREGS, pid, registers)
            if registers[ORIG_RAX] != GETSID:
                counted += 1
            elif inside:
                found.append(counted)
                inside = False
            else:
                counted, inside = 0, True
        entering = not entering
    trace(PTRACE_DETACH, pid)
    return found


def start(transport: str, folder: Path) -> subprocess.Popen[str]:
    library = folder / "counted.so"
    build = ["gcc", "-O2", "-shared", "-fPIC", str(HERE / "counted.c"), "-o", str(library), "-ldl"]
    subprocess.run(build, check=True)
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), transport, str(library)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "LD_PRELOAD": str(library),
            "PYTHONPATH": str(HERE.parents[1]),
        },
    )


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc for the counting library")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="registers of x86-64 are looked at")
def test_a45_a_small_copy_within_a_host_needs_no_memory_and_no_system_call(tmp_path: Path) -> None:
    process = start("shm", tmp_path)
    assert process.stdin
    assert process.stdout
    try:
        assert process.stdout.readline() == "ready\n"

        def go() -> None:
            process.stdin.write("go\n")
            process.stdin.flush()

        try:
            syscalls = syscalls_between_markers(process.pid, go)
        except PermissionError:
            pytest.skip("tracing is not permitted here")
        found = json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()
    sys.stdout.write(f"allocations and locks a call: {found}; system calls: {syscalls}\n")
    per_call = {name: [round(count) for count in counts] for name, counts in found.items()}
    # A lock for the table of peers and one for what is known of the peer's regions; a write looks
    # also whether a cancelled one may still land before it.
    assert per_call == {"read": [0, 2], "write": [0, 3]}
    assert all(count < CALLS / 10 for count in syscalls), "the interpreter makes one now and then"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc for the counting library")
def test_a45_a_small_call_over_tcp_allocates_for_its_batch_and_its_frame_only(
    tmp_path: Path,
) -> None:
    process = start("tcp", tmp_path)
    try:
        said, _ = process.communicate("go\n", timeout=60)
    finally:
        process.kill()
    found = json.loads(said.splitlines()[-1])
    sys.stdout.write(f"allocations and locks a call: {found}\n")
    for allocations, locks in found.values():
        # What it is, its slices, that it runs; its frame and the place of that in the queue.
        assert round(allocations) <= 5
        assert locks <= 26  # 20; some more where the progress thread looks in between
