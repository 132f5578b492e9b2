"""Objects that put sessions have begun and not ended: how many bytes they may take, for how long.

A writer that is aborted between its parts ends nothing. So an object whose last part came
`IDLE_MS` ago is given up when its room is needed, or any object is begun; and what is open takes at
most `BYTES_MAX` and `COUNT_MAX`: a start beyond that is refused, as by a full store. Thread-safe.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake_py.clock import Clock, SystemClock

log = logging.getLogger(__name__)

BYTES_MAX = 16 << 30
COUNT_MAX = 65_536
IDLE_MS = 600_000  # as long as upstream's master keeps room for a put that is not ended


@dataclass(slots=True)
class OpenPut:
    value: npt.NDArray[np.uint8]
    config: Any
    touched_ms: int


class OpenPuts:
    def __init__(self, clock: Clock | None = None, bytes_max: int = BYTES_MAX) -> None:
        self._clock = clock or SystemClock()
        self._bytes_max = bytes_max
        self._open: dict[str, OpenPut] = {}  # the one that was touched longest ago first
        self._lock = threading.Lock()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, key: str, nbytes: int, config: Any) -> bool:
        """A key that is open already is begun anew. False: there is no room."""
        with self._lock:
            self._give_up_idle()
            self._pop(key)
            if self.nbytes + nbytes > self._bytes_max or len(self._open) >= COUNT_MAX:
                return False
            try:
                value = np.zeros(nbytes, np.uint8)
            except MemoryError:
                return False
            self._open[key] = OpenPut(value, config, self._clock.now_ms())
            self.nbytes += nbytes
            return True

    def find(self, key: str) -> OpenPut | None:
        """One that is about to be written to."""
        with self._lock:
            found = self._open.pop(key, None)
            if found is not None:
                found.touched_ms = self._clock.now_ms()
                self._open[key] = found
            return found

    def take(self, keys: Sequence[str]) -> list[OpenPut | None]:
        """They are not open any more."""
        with self._lock:
            return [self._pop(key) for key in keys]

    def clear(self) -> None:
        with self._lock:
            self._open.clear()
            self.nbytes = 0

    def _pop(self, key: str) -> OpenPut | None:
        found = self._open.pop(key, None)
        if found is not None:
            self.nbytes -= found.value.nbytes
        return found

    def _give_up_idle(self) -> None:
        before, count = self._clock.now_ms() - IDLE_MS, 0
        while self._open and next(iter(self._open.values())).touched_ms <= before:
            self._pop(next(iter(self._open)))
            count += 1
        if count:
            log.warning(
                "%d objects whose put sessions were never ended are given up after %d s",
                count, IDLE_MS // 1000,
            )  # fmt: skip
