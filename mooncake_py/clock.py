"""The one door to time. Everything that waits or compares times takes a `Clock`.

Times are integer milliseconds. `now_ms` never runs backwards within a process and goes on while
the process is stopped (CLOCK_BOOTTIME), so a writer that slept for an hour sees that an hour
passed. It is anchored to the wall clock at start, so that times of successive masters compare
sensibly; nothing depends on two machines agreeing.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Protocol


def stopwatch_ns() -> int:
    """For measuring how long something took: finest monotonic clock, unrelated to `now_ms`."""
    return time.perf_counter_ns()


def boot_ms() -> int:
    """Milliseconds since the machine started, also while it or a process stood still."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def duration(ms: int) -> timedelta:
    """As libraries want it that take no number."""
    return timedelta(milliseconds=ms)


class Clock(Protocol):
    def now_ms(self) -> int: ...


class SystemClock:
    """Wall clock at construction plus boot-time clock since. Thread-safe."""

    def __init__(self) -> None:
        self._anchor_ms = time.time_ns() // 1_000_000 - boot_ms()

    def now_ms(self) -> int:
        return self._anchor_ms + boot_ms()


class ManualClock:
    """A clock that a test moves by hand."""

    def __init__(self, start_ms: int = 1_000_000) -> None:
        self._now_ms = start_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, ms: int) -> None:
        if ms < 0:
            raise ValueError("a clock does not run backwards")
        self._now_ms += ms


class Deadline:
    """One deadline for everything below one public call."""

    __slots__ = ("_clock", "at_ms")

    def __init__(self, timeout_ms: int, clock: Clock) -> None:
        self._clock = clock
        self.at_ms = clock.now_ms() + timeout_ms

    def left_ms(self) -> int:
        """Milliseconds left, never negative."""
        return max(0, self.at_ms - self._clock.now_ms())

    def passed(self) -> bool:
        return self._clock.now_ms() >= self.at_ms
