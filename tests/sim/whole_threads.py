"""Threads of the product under virtual time: one runs at a time, and only when the world says so.

Rules. A `Fiber` is a real thread that runs from one wait to the next, then hands back to the world.
`Threading` stands in for the module `threading` in the modules that are driven, so what they wait
for (locks, events, conditions, each other) waits in virtual time, and a run is repeated by its
seed. A `Host` is one operating system process: `kill` ends all its fibers where they wait, as
SIGKILL would, except that `finally` runs, on whom nobody listens any more; a host that is stopped
(`World.paused_until`) goes on later, and time has passed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from sim_world import World


class Killed(BaseException):
    """Not an Exception: nothing in the product catches it."""


class Host:
    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.born_ms = 0


class Fiber:
    def __init__(self, host: Host, target: Callable[[], object]) -> None:
        self.host = host
        self.target = target
        self.go = threading.Semaphore(0)
        self.ticket = 0
        self.value: object = None
        self.done = False
        self.joined: list[tuple[Fiber, int]] = []  # who waits for its end, with tickets
        self.thread: threading.Thread | None = None
        self.face: object = None  # the Thread that the product knows it as


class Scheduler:
    def __init__(self, world: World) -> None:
        self.world = world
        self.current: Fiber | None = None
        self.fibers: list[Fiber] = []
        self._back = threading.Semaphore(0)
        self._failure: BaseException | None = None

    def start(self, host: Host, target: Callable[[], object]) -> Fiber:
        fiber = Fiber(host, target)
        self.fibers.append(fiber)
        self.world.after(0, lambda: self._resume(fiber, 0, None))
        return fiber

    def me(self) -> Fiber:
        assert self.current is not None, "only fibers wait"
        return self.current

    def park(self, timeout_ms: float | None = None) -> object:
        """Wait until somebody wakes this fiber with its ticket; None: the time has passed."""
        fiber = self.me()
        if not fiber.host.alive:
            raise Killed
        if timeout_ms is not None:
            ticket, ms = fiber.ticket, max(0, -int(-timeout_ms // 1))
            self.world.after(ms, lambda: self._resume(fiber, ticket, None))
        self._back.release()
        fiber.go.acquire()
        if not fiber.host.alive:
            raise Killed
        return fiber.value

    def wake(self, fiber: Fiber, ticket: int, value: object = True) -> None:
        """Who does not wait with this ticket any more goes on sleeping."""
        self.world.after(0, lambda: self._resume(fiber, ticket, value))

    def kill(self, host: Host) -> None:
        """By the world, not by a fiber."""
        assert self.current is None
        host.alive = False
        for fiber in self.fibers:
            if fiber.host is host and not fiber.done:
                if fiber.thread is None:
                    fiber.done = True
                else:
                    self._run(fiber)
        self.fibers = [each for each in self.fibers if not each.done]

    def _resume(self, fiber: Fiber, ticket: int, value: object) -> None:
        if fiber.done or fiber.ticket != ticket:
            return
        pause = self.world.paused_until.get(fiber.host.name, 0)
        if pause > self.world.now_ms:
            wait_ms = pause - self.world.now_ms + 1
            self.world.after(wait_ms, lambda: self._resume(fiber, ticket, value))
            return
        fiber.value = value
        self._run(fiber)

    def _run(self, fiber: Fiber) -> None:
        fiber.ticket += 1
        self.current = fiber
        if fiber.thread is None:
            fiber.thread = threading.Thread(target=self._main, args=(fiber,), daemon=True)
            fiber.thread.start()
        else:
            fiber.go.release()
        self._back.acquire()
        self.current = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _main(self, fiber: Fiber) -> None:
        try:
            fiber.target()
        except Killed:
            pass
        except BaseException as error:  # the oracle's, or a defect that the product let through
            self._failure = error
        finally:
            fiber.done = True
            for waiting, ticket in fiber.joined:
                self.wake(waiting, ticket)
            self._back.release()


class _Waiters:
    """Fibers in the order of their coming."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue: deque[tuple[Fiber, int]] = deque()

    def wait(self, timeout_s: float | None) -> object:
        fiber = self._scheduler.me()
        self._queue.append((fiber, fiber.ticket))
        return self._scheduler.park(None if timeout_s is None else timeout_s * 1000)

    def wake(self, count: int) -> None:
        while self._queue and count:
            fiber, ticket = self._queue.popleft()
            if fiber.ticket == ticket and not fiber.done:
                count -= 1
                self._scheduler.wake(fiber, ticket)


class Lock:
    def __init__(self, scheduler: Scheduler) -> None:
        self._waiters = _Waiters(scheduler)
        self._scheduler = scheduler
        self._locked = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        end_ms = None if timeout < 0 else self._scheduler.world.now_ms + timeout * 1000
        while self._locked:
            left_ms = None if end_ms is None else end_ms - self._scheduler.world.now_ms
            if not blocking or (left_ms is not None and left_ms <= 0):
                return False
            self._waiters.wait(None if left_ms is None else left_ms / 1000)
        self._locked = True
        return True

    def release(self) -> None:
        self._locked = False
        self._waiters.wake(1)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock or Lock(scheduler)
        self._waiters = _Waiters(scheduler)

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        self._lock.release()
        woken = self._waiters.wait(timeout)
        self._lock.acquire()
        return woken is not None

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        world = self._scheduler.world
        end_ms = None if timeout is None else world.now_ms + timeout * 1000
        while not (result := predicate()):
            left_ms = None if end_ms is None else end_ms - world.now_ms
            if left_ms is not None and left_ms <= 0:
                return result
            self.wait(None if left_ms is None else left_ms / 1000)
        return result

    def notify(self, n: int = 1) -> None:
        self._waiters.wake(n)

    def notify_all(self) -> None:
        self._waiters.wake(1 << 30)


class Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._waiters = _Waiters(scheduler)
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake(1 << 30)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set and (timeout is None or timeout > 0):
            self._waiters.wait(timeout)
        return self._set


class Thread:
    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool = True,
    ) -> None:
        self._scheduler = scheduler
        self._target = lambda: target(*args)
        self.name = name
        self.ident: int | None = None
        self.fiber: Fiber | None = None

    def start(self) -> None:
        self.fiber = self._scheduler.start(self._scheduler.me().host, self._target)
        self.fiber.face = self
        self.ident = id(self.fiber)

    def is_alive(self) -> bool:
        return self.fiber is not None and not self.fiber.done

    def join(self, timeout: float | None = None) -> None:
        if self.fiber is not None and not self.fiber.done:
            me = self._scheduler.me()
            self.fiber.joined.append((me, me.ticket))
            self._scheduler.park(None if timeout is None else timeout * 1000)


class Threading:
    """Stands in for the module."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def Lock(self) -> Lock:
        return Lock(self._scheduler)

    def Condition(self, lock: Lock | None = None) -> Condition:
        return Condition(self._scheduler, lock)

    def Event(self) -> Event:
        return Event(self._scheduler)

    def current_thread(self) -> object:
        return self._scheduler.me().face

    def Thread(self, *args: Any, **options: Any) -> Thread:
        return Thread(self._scheduler, *args, **options)


class Executor:
    """Stands in for ThreadPoolExecutor; every call is a fiber."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def submit(self, call: Callable[..., Any], *args: Any) -> Future:
        future = Future(self._scheduler)
        self._scheduler.start(self._scheduler.me().host, lambda: future.run(call, args))
        return future

    def shutdown(self, **_: object) -> None: ...


class Future:
    def __init__(self, scheduler: Scheduler) -> None:
        self._event = Event(scheduler)
        self._result: Any = None
        self._error: Exception | None = None

    def run(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self._result = call(*args)
        except Exception as error:
            self._error = error
        self._event.set()

    def result(self) -> Any:
        self._event.wait()
        if self._error is not None:
            raise self._error
        return self._result


class SimpleQueue:
    """Stands in for that of `queue`."""

    def __init__(self, scheduler: Scheduler, empty: type[Exception]) -> None:
        self._items: deque[object] = deque()
        self._waiters = _Waiters(scheduler)
        self._empty = empty

    def put(self, item: object) -> None:
        self._items.append(item)
        self._waiters.wake(1)

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        if not self._items and block:
            self._waiters.wait(timeout)
        if not self._items:
            raise self._empty
        return self._items.popleft()


class Clock:
    """A host's own: with an offset and a rate."""

    def __init__(self, world: World, offset_ms: int, rate: float = 1.0) -> None:
        self._world = world
        self._offset_ms = offset_ms
        self._rate = rate

    def now_ms(self) -> int:
        return self._offset_ms + int(self._world.now_ms * self._rate)
