"""What runs the tiered cache's work: threads, a condition, time.

A seam. The product has threads (`ThreadWork`); the tests put a scheduler in their place that
decides by a seed who goes on, and whose time is its own, so that a failure is repeated by a number.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self

from mooncake_py.clock import stopwatch_ns
from mooncake_py.errors import UsageError

log = logging.getLogger(__name__)


class Condition(Protocol):
    """As threading.Condition; not entered twice by one thread."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None, /,
    ) -> object: ...  # fmt: skip

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...

    def notify_all(self) -> None: ...


class Flag(Protocol):
    """As threading.Event, that is set once."""

    def set(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Lane(Protocol):
    """Workers that take tasks in the order in which they were given."""

    def submit(self, task: Callable[[], object]) -> None:
        """UsageError: it was closed."""

    def close(self) -> None:
        """Ends the workers, when everything that was submitted is done."""


class Work(Protocol):
    def condition(self) -> Condition: ...

    def flag(self) -> Flag: ...

    def lane(self, name: str, count: int) -> Lane:
        """`count` workers."""

    def now_ns(self) -> int:
        """For durations only."""


class _ThreadLane:
    def __init__(self, name: str, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, name)

    def submit(self, task: Callable[[], object]) -> None:
        try:
            self._threads.submit(_logged, task)
        except RuntimeError as error:
            raise UsageError("the cache was closed") from error

    def close(self) -> None:
        self._threads.shutdown()


def _logged(task: Callable[[], object]) -> None:
    try:
        task()
    except BaseException:
        log.exception("a task of the tiered cache failed")
        raise


class ThreadWork:
    def condition(self) -> Condition:
        return threading.Condition()

    def flag(self) -> Flag:
        return threading.Event()

    def lane(self, name: str, count: int) -> Lane:
        return _ThreadLane(f"mooncake-tier-{name}", count)

    def now_ns(self) -> int:
        return stopwatch_ns()


class Seconds:
    """`with Seconds(work) as took: ...`, then `took.s`."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._began_ns = work.now_ns()

    def __enter__(self) -> Self:
        self._began_ns = self._work.now_ns()
        return self

    def __exit__(self, *_: object) -> None:
        """The time is asked for afterwards."""

    @property
    def s(self) -> float:
        """Since the beginning."""
        return (self._work.now_ns() - self._began_ns) / 1e9
