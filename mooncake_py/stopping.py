"""SIGTERM and SIGINT of a daemon: the first one asks it to stop, a second one ends it at once.

The interpreter runs Python's handlers on the main thread only, between two steps of a program. A
signal that comes on another thread, or just before the main thread goes to sleep, would wait until
that wakes up by itself. So the main thread sleeps at a pipe which the interpreter's own C handler
writes to (`signal.set_wakeup_fd`), whichever thread it runs on.
"""

from __future__ import annotations

import os
import signal


class Stopped(BaseException):
    """A signal came while `StopSignals.raises` was set."""


class StopSignals:
    """Installed when constructed; for the main thread, once a process.

    `raises`: the first signal raises Stopped in the main thread, which ends a start that waits.
    """

    def __init__(self, *, raises: bool = False) -> None:
        self.raises = raises
        self._numbers: list[int] = []
        self._wake, ring = os.pipe()
        os.set_blocking(ring, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(ring, warn_on_full_buffer=False)

    def came(self) -> bool:
        return bool(self._numbers)

    def wait(self) -> None:
        """Sleep until the first signal has come."""
        while not self._numbers:
            os.read(self._wake, 64)

    def _on_signal(self, number: int, _: object) -> None:
        """May be interrupted by another signal, so it takes no lock."""
        self._numbers.append(number)
        if len(self._numbers) > 1:
            os._exit(128 + number)
        if self.raises:
            raise Stopped
