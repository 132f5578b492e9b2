"""Run a command that dies with its parent, even when the parent is killed with SIGKILL.

    python -I -S leash.py PARENT_PID COMMAND...

Run by path, not imported: it must cost milliseconds, so it loads nothing of the package. The wish
to die with the parent survives execve. ctypes, because the standard library has no prctl and this
is no place for the native core.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before we could wish
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
