"""Leases of a read that takes long are renewed while it runs.

A read begins under leases, and what is read under none may be evicted before its bytes are here. So
a call for LARGE_BYTES or more asks the master again, from a thread of its own, whenever half of
what was left of its leases has passed. Smaller reads are over long before; they start no thread. A
renewal that fails is none: the headers decide about what was read, as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mooncake_py.errors import MooncakeError

LARGE_BYTES = 64 << 20
ASK_MS = 1_000  # for one renewal, and so the longest that the end of a read waits for it
_PAUSE_MIN_MS = 10


class LeaseRenewer:
    """For one read. ask: renew, and answer for how many ms the leases run now; it is called with at
    most ASK_MS to do so, from one thread, until close."""

    def __init__(self, left_ms: int, ask: Callable[[], int]) -> None:
        self._ask = ask
        self._left_ms = left_ms
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mooncake-leases", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(max(_PAUSE_MIN_MS, self._left_ms // 2) / 1000):
            try:
                self._left_ms = self._ask()
            except MooncakeError:
                self._left_ms = ASK_MS

    def close(self) -> None:
        """The read is over."""
        self._over.set()
        self._thread.join()
