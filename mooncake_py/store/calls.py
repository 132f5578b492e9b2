"""Counts the running calls of a client, so that close waits for them, and refuses new ones."""

from __future__ import annotations

import os
import threading

from mooncake_py.errors import UsageError


class CallGate:
    """`with gate:` around every call. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._running = 0
        self._pid = os.getpid()
        self.closing = threading.Event()

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "this client was opened before a fork and belongs to the parent process",
                remedy="open a StoreClient in the child",
            )
        with self._lock:
            if self.closing.is_set():
                raise UsageError("the client is closed", remedy="open a new StoreClient")
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0 and self.closing.is_set():
                self._idle.notify_all()

    def close(self, timeout_ms: int) -> bool:
        """Refuse new calls and wait for the running ones. False: there is nothing to release, since
        it was closed already, or belongs to the parent of a fork, whose threads are not here."""
        if os.getpid() != self._pid:
            return False  # the lock may be held for ever by a thread that was not copied
        with self._lock:
            if self.closing.is_set():
                return False
            self.closing.set()
            self._idle.wait_for(lambda: self._running == 0, timeout_ms / 1000)
            return True
