"""The stocks of reservations that puts are made with: what a fetch that fails leaves behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from mooncake_py.clock import ManualClock
from mooncake_py.errors import Backpressure
from mooncake_py.store.reservations import ReservationPool


class Master:
    """Reserves nothing; `error` is raised instead."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None

    def reserve(self, *_: object, **__: object) -> tuple[list[Any], int]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return [], 0


class Later:
    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def submit(self, call: Callable[..., object], *args: object) -> None:
        self.calls.append(lambda: call(*args))

    def run(self) -> None:
        with contextlib.suppress(ValueError):  # as an executor, whose future nobody looks at
            while self.calls:
                self.calls.pop()()


@pytest.mark.parametrize("error", [None, Backpressure("busy"), ValueError("an odd answer")])
def test_a_fetch_that_fails_is_made_again_after_a_pause(error: Exception | None) -> None:
    master, clock, later = Master(), ManualClock(), Later()
    master.error = error
    pool = ReservationPool(master, "default", "host", later, clock)  # type: ignore[arg-type]
    for asked in (0, 1, 1):
        assert pool.take(100, 1) is None
        later.run()
        assert master.asked == asked
    clock.advance(2_000)
    assert pool.take(100, 1) is None
    later.run()
    assert master.asked == 2
