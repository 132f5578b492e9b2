"""Where calls wait for the owner of the catalog: bounded, liveness first, long calls last.

A call that takes several steps, or is one step of a removal of all, waits behind the others (the
former from its second step on), as does one of `LARGE_BYTES` (some four hundred keys), and gets one
turn in `LONG_TURN` whatever else waits. So a short call waits for about one step of a long one,
or for one large one, however many of these there are, and none starves.

Sizes: at most `queue_calls_max` calls and `queue_bytes_max` bytes of data calls, and
`urgent_calls_max` small calls beside them, so the memory of all waiting requests is bounded by
queue_bytes_max + urgent_calls_max * (a few hundred bytes).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mooncake_py.wire.lane import Method

GRPC = "grpc"
LANE = "lane"
DOORS = (GRPC, LANE)
LONG_TURN = 8
LARGE_BYTES = 32 << 10


class Call:
    """One call from one door. `reply` may be called by any thread, once."""

    __slots__ = ("begun", "door", "expires_ms", "method", "payload", "reply")

    def __init__(
        self,
        method: Method,
        payload: bytes,
        reply: Callable[[bytes], None],
        expires_ms: int,
        door: str,
    ) -> None:
        self.method = method
        self.payload = payload
        self.reply = reply
        self.expires_ms = expires_ms
        self.door = door
        self.begun = False  # it takes more than one step, or is one of many


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the queues, and times of the threads."""

    queue_calls_max: int
    queue_bytes_max: int
    urgent_calls_max: int
    commit_bytes_max: int
    commit_linger_ms: int
    commit_retry_ms: int
    snapshot_record_bytes: int
    tick_ms: int
    heartbeat_ms: int
    durable_puts: bool = False  # answer a put end only once its record is durable


class Inbox:
    """Calls that wait for the owner, bounded; urgent ones first, begun ones last. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._urgent: deque[Call] = deque()
        self._normal: deque[Call] = deque()
        self._long: deque[Call] = deque()  # begun and not through, or large
        self._turns = 0
        self._nbytes = 0

    def put(self, call: Call) -> bool:
        """False: full."""
        limits = self._limits
        with self._lock:
            if call.method.urgent:
                if len(self._urgent) >= limits.urgent_calls_max:
                    return False
                self._urgent.append(call)
                return True
            if (
                len(self._normal) + len(self._long) >= limits.queue_calls_max
                or self._nbytes + len(call.payload) > limits.queue_bytes_max
            ):
                return False
            later = call.begun or len(call.payload) >= LARGE_BYTES
            (self._long if later else self._normal).append(call)
            self._nbytes += len(call.payload)
            return True

    def take(self) -> Call | None:
        with self._lock:
            if self._urgent:
                return self._urgent.popleft()
            self._turns += 1
            long_first = not self._normal or not self._turns % LONG_TURN
            queue = self._long if self._long and long_first else self._normal
            if not queue:
                return None
            call = queue.popleft()
            self._nbytes -= len(call.payload)
            return call

    def empty(self) -> bool:
        return not (self._normal or self._urgent or self._long)

    def depth(self) -> tuple[int, int]:
        """Waiting (urgent, normal) calls."""
        return len(self._urgent), len(self._normal) + len(self._long)
