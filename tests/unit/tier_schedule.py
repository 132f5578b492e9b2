"""The tiered cache's threads and device, with a scheduler that decides by a seed.

`SeededWork` lets one task run at a time, and hands on wherever a task would wait: for the lock, for
a condition, for a flag, for a job. Time is its own: it moves when everybody waits, and now and then
although somebody could go on, so that waits run out in the middle of everything. `LateStreams` is a
device that does nothing at once: what the engine and the copies gave it happens later, in any order
that the marks allow. So the same seed is the same run, and a failure is its number.

Tasks are threads of Python, but a thread runs only while it has the turn.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence

from mooncake_py.hicache.kv_pages import KvPages, copy_layer

HASTE = 0.02  # how often time passes although somebody could go on ...
HASTE_NS = 15 * 10**9  # ... and how far: waits for the store run out, those for a copy do not
STEPS_MAX = 200_000


class Stuck(AssertionError):
    """Nobody can go on."""


class _Task:
    def __init__(self, name: str) -> None:
        self.name = name
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.until_ns: int | None = None
        self.done = False


class SeededWork:
    """`run(*bodies)` runs them to their ends, with all the lanes that they use."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tasks: list[_Task] = []
        self.steps: list[str] = []  # who had the turn: the run, as far as it matters
        self._now_ns = 0
        self._current: _Task | None = None
        self._failure: BaseException | None = None
        self._over = threading.Event()

    def now_ns(self) -> int:
        return self._now_ns

    def condition(self) -> _Condition:
        return _Condition(self)

    def flag(self) -> _Flag:
        return _Flag(self)

    def lane(self, name: str, count: int) -> _Lane:
        return _Lane(self, name, count)

    def run(self, *bodies: Callable[[], object]) -> None:
        """Raises what the first body that failed raised, or Stuck."""
        for number, body in enumerate(bodies):
            self.start(f"body{number}", body)
        self._hand_on()
        assert self._over.wait(60), "a task waits outside the scheduler"
        if self._failure is not None:
            raise self._failure

    def start(self, name: str, body: Callable[[], object]) -> None:
        task = _Task(name)
        self.tasks.append(task)

        def live() -> None:
            task.turn.acquire()
            try:
                if self._failure is None:
                    body()
            except BaseException as error:
                self._failure = self._failure or error
            task.done = True
            self.tasks.remove(task)
            self._hand_on()

        threading.Thread(target=live, name=name, daemon=True).start()

    def switch(
        self, ready: Callable[[], bool] = lambda: True, timeout: float | None = None
    ) -> bool:
        """The running task stops here until it is chosen again: when it is ready, or its time is
        out. Answers whether it is ready."""
        me = self._current
        if me is None:  # outside `run`: set-up and checks, with nobody else there
            return ready()
        me.ready = ready
        me.until_ns = None if timeout is None else self._now_ns + int(timeout * 1e9)
        self._hand_on()
        me.turn.acquire()
        if self._failure is not None:
            raise Stuck("another task failed")
        return ready()

    def _hand_on(self) -> None:
        task = self._choose()
        self._current = task
        if task is None:
            self._over.set()
        else:
            self.steps.append(task.name)
            task.turn.release()

    def _choose(self) -> _Task | None:
        if self._failure is not None or not self.tasks:
            return self.tasks[0] if self.tasks else None  # to unwind
        able = [task for task in self.tasks if task.ready()]
        timed = [task for task in self.tasks if task.until_ns is not None and task not in able]
        soon = [task for task in timed if (task.until_ns or 0) - self._now_ns < HASTE_NS]
        if (timed and not able) or (soon and self.random.random() < HASTE):
            task = min(timed, key=lambda each: each.until_ns or 0)
            self._now_ns = max(self._now_ns, task.until_ns or 0)
            return task
        if able and len(self.steps) < STEPS_MAX:
            return self.random.choice(able)
        names = [task.name for task in self.tasks]
        if not able and all(name.startswith("lane-") for name in names):
            return None  # the bodies are done, and no worker has anything to do
        self._failure = Stuck(f"nobody goes on: {names}")
        return self.tasks[0]


class _Condition:
    def __init__(self, work: SeededWork) -> None:
        self._work = work
        self._owner: _Task | None = None
        self._held = False

    def __enter__(self) -> None:
        me = self._work._current
        assert not self._held or self._owner is not me, "entered twice"
        self._work.switch(lambda: not self._held)
        assert not self._held
        self._held, self._owner = True, me

    def __exit__(self, *_: object) -> None:
        self._held = False

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        assert self._held
        if not predicate():
            self._held = False
            self._work.switch(lambda: not self._held and predicate(), timeout)
            if self._held:
                self._work.switch(lambda: not self._held)
            self._held, self._owner = True, self._work._current
        return predicate()

    def notify_all(self) -> None:
        """Predicates are looked at before each turn."""
        assert self._held


class _Flag:
    def __init__(self, work: SeededWork) -> None:
        self._work, self._is_set = work, False

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        return self._work.switch(lambda: self._is_set, timeout)


class _Lane:
    def __init__(self, work: SeededWork, name: str, count: int) -> None:
        self._work = work
        self._jobs: deque[Callable[[], object]] = deque()
        self._closed = False
        self._running = 0
        for number in range(count):
            work.start(f"lane-{name}{number}", self._live)

    def submit(self, task: Callable[[], object]) -> None:
        assert not self._closed
        self._jobs.append(task)

    def close(self) -> None:
        self._closed = True
        self._work.switch(lambda: not self._jobs and not self._running)

    def _live(self) -> None:
        while True:
            self._work.switch(lambda: bool(self._jobs) or self._closed)
            if not self._jobs:
                return
            self._running += 1
            try:
                self._jobs.popleft()()
            finally:
                self._running -= 1


class LateStreams:
    """Three queues: what the engine computes, copies up, copies down. Each is done in order; an
    operation waits for the mark that it was given. A mark is (queue, how many of it)."""

    def __init__(self, work: SeededWork) -> None:
        self._work = work
        self._queues: dict[str, deque[tuple[Callable[[], object], list[tuple[str, int]]]]] = {
            name: deque() for name in ("engine", "up", "down")
        }
        self._given = dict.fromkeys(self._queues, 0)
        self._reached = dict.fromkeys(self._queues, 0)
        self._speeds = [work.random.choice([0.05, 1, 5]) for _ in self._queues]
        self._behind: list[tuple[str, int]] = []  # what the engine's next operation waits for

    def compute(self, operation: Callable[[], object]) -> None:
        """The engine gives the device something to do."""
        behind, self._behind = self._behind, []
        self._give("engine", operation, behind)

    def produced(self) -> tuple[str, int]:
        return ("engine", self._given["engine"])

    def copy(
        self, source: KvPages, target: KvPages, layer: int, from_pages: Sequence[int],
        to_pages: Sequence[int], after: tuple[str, int],
    ) -> tuple[str, int]:  # fmt: skip
        name = "up" if target.layout == "layer_first" else "down"  # the device of these tests is
        here, there = list(from_pages), list(to_pages)
        self._give(name, lambda: copy_layer(source, target, layer, here, there), [after])
        self._work.switch()
        return (name, self._given[name])

    def order(self, mark: tuple[str, int]) -> None:
        self._behind.append(mark)

    def finish(self, mark: tuple[str, int]) -> None:
        while self._reached[mark[0]] < mark[1]:
            if self._work._current is None or self._work.random.random() < 0.3:
                self._do(mark[0])
            self._work.switch()

    def some(self) -> None:
        """The device does a little, as it likes."""
        for name in self._work.random.choices(list(self._queues), self._speeds, k=3):
            self._do(name)

    def _give(
        self, name: str, operation: Callable[[], object], after: list[tuple[str, int]]
    ) -> None:
        self._queues[name].append((operation, after))
        self._given[name] += 1

    def _do(self, name: str) -> None:
        if self._queues[name]:
            operation, after = self._queues[name].popleft()
            for queue, count in after:
                while self._reached[queue] < count:
                    self._do(queue)
            operation()
            self._reached[name] += 1
