"""Run a module inside a host of the run, perhaps with a wall clock of its own.

    python -m tests.chaos.chaos_inside NAMESPACE CLOCK_FILE MODULE ARGUMENTS...

NAMESPACE: file to enter, or "-". CLOCK_FILE: what libfaketime reads its offset from, or "-"; the
clocks that count from the start of the machine stay right. The program is replaced, so the process
that its parent knows is the module's.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWNET = 0x40000000
_FAKETIME = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1")


def faketime() -> str:
    """Path of libfaketime; empty when it is not installed."""
    found = [path for pattern in _FAKETIME for path in Path("/").glob(pattern[1:])]
    return str(found[0]) if found else ""


def enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns({namespace})")
    os.close(descriptor)


def main() -> None:
    namespace, clock, module, *arguments = sys.argv[1:]
    if namespace != "-":
        enter(namespace)
    environment = dict(os.environ)
    if clock != "-":
        environment |= {
            "LD_PRELOAD": faketime(),
            "FAKETIME_TIMESTAMP_FILE": clock,
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
    command = [module, *arguments]
    if not module.startswith("/"):
        command = [sys.executable, "-m", *command]
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    main()
