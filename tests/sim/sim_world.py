"""One seed decides everything: the order of events, the network, who dies when.

Processes are generators. `reply = yield Call(...)` waits for an answer or its time-out (None),
`yield Sleep(ms)` waits. Time is virtual milliseconds; nothing here reads a clock.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Call:
    to: str
    message: object
    timeout_ms: int


@dataclass(frozen=True)
class Sleep:
    ms: int


Script = Generator[Call | Sleep, Any, None]


class Process(Protocol):
    """Somebody who is sent messages. `answer(reply)` may be called later, or never."""

    def receive(self, sender: str, message: object, answer: Callable[[object], None]) -> None: ...


@dataclass
class Weather:
    """How bad the network is."""

    loss: float = 0.0
    twice: float = 0.0
    delay_ms: int = 2
    slow: float = 0.0  # share of messages that take up to `slow_ms`
    slow_ms: int = 0


class World:
    """Virtual time, the network, and the running scripts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_ms = 0
        self.weather = Weather()
        self.processes: dict[str, Process] = {}
        self.cut: set[frozenset[str]] = set()  # pairs that do not hear each other
        self.paused_until: dict[str, int] = {}
        self.steps = 0
        self.trace: list[str] = []
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, ms: int, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_ms + ms, self._count, what))

    def run_until(self, end_ms: int) -> None:
        while self._events and self._events[0][0] <= end_ms:
            self.now_ms, _, what = heapq.heappop(self._events)
            self.steps += 1
            what()
        self.now_ms = end_ms

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now_ms:7} {text}")
        del self.trace[:-400]

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    # --- network --------------------------------------------------------------------------------

    def send(self, sender: str, to: str, message: object, answer: Callable[[object], None]) -> None:
        """One way; the answer travels back through the same network."""
        copies = 2 if self.chance(self.weather.twice) else 1
        for _ in range(copies):
            if not self.chance(self.weather.loss):
                self.after(self._delay(), lambda: self._deliver(sender, to, message, answer))

    def _deliver(
        self, sender: str, to: str, message: object, answer: Callable[[object], None]
    ) -> None:
        pause = self.paused_until.get(to, 0)
        if pause > self.now_ms:
            self.after(pause - self.now_ms + 1, lambda: self._deliver(sender, to, message, answer))
            return
        process = self.processes.get(to)
        if process is None or frozenset((sender, to)) in self.cut:
            return

        def back(reply: object) -> None:
            if not self.chance(self.weather.loss) and frozenset((sender, to)) not in self.cut:
                self.after(self._delay(), lambda: answer(reply))

        process.receive(sender, message, back)

    def _delay(self) -> int:
        if self.chance(self.weather.slow):
            return self.random.randrange(1 + self.weather.slow_ms)
        return self.random.randrange(1 + self.weather.delay_ms)

    # --- scripts --------------------------------------------------------------------------------

    def start(self, name: str, script: Script, alive: Callable[[], bool]) -> None:
        """Run a script in the name of a process, for as long as `alive`."""
        self._step(name, script, None, alive)

    def _step(self, name: str, script: Script, value: object, alive: Callable[[], bool]) -> None:
        pause = self.paused_until.get(name, 0)
        if pause > self.now_ms:
            self.after(pause - self.now_ms + 1, lambda: self._step(name, script, value, alive))
            return
        if not alive():
            script.close()
            return
        try:
            wish = script.send(value)
        except StopIteration:
            return
        if isinstance(wish, Sleep):
            self.after(wish.ms, lambda: self._step(name, script, None, alive))
            return
        answered = False

        def once(reply: object) -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._step(name, script, reply, alive)

        self.after(wish.timeout_ms, lambda: once(None))
        self.send(name, wish.to, wish.message, once)
