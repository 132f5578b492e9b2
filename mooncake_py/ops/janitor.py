"""Remove a folder once the process that made it is gone, however it went.

    python -I -S janitor.py FOLDER      (standard input: a pipe whose other end the maker holds)

The pipe ends when the maker ends or closes it. Run by path, in a session of its own, so that a
Ctrl-C meant for the maker does not reach it.
"""

from __future__ import annotations

import os
import shutil
import sys

_ATTEMPTS_MAX = 5  # a daemon that is just dying may still be creating files


def main() -> None:
    folder = sys.argv[1]
    while os.read(0, 4096):
        pass
    for _ in range(_ATTEMPTS_MAX):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return


if __name__ == "__main__":
    main()
