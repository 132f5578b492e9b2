"""Staging: the bounded memory through which readers get bytes of a disk.

A segment of its own that clients map or read one-sidedly like any other. An object that is read
from the disk lies here as an ordinary sealed extent, under a number of this process that only
grows, so a reader that comes late finds another number and never other bytes.

Rules.
* An extent is *busy* until everybody who asked for it has said that he is done, his connection has
  ended, or his time is over. Busy ones are never overwritten; idle ones stay, as a cache for equal
  questions, until their space is needed, the one used longest ago first.
* No room: whoever wants some waits, within his deadline.

Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from mooncake_py._native.segment import OwnedSegment
from mooncake_py.clock import Clock, Deadline
from mooncake_py.errors import OK, Backpressure, InternalError, MooncakeError
from mooncake_py.master.allocator import UNIT_BYTES, Allocator
from mooncake_py.model import EXTENT_HEADER_BYTES, extent_bytes
from mooncake_py.transfer import Memory, TransferEngine
from mooncake_py.wire.rows import EXTENT

_NEVER_MS = 1 << 62
_LOOK_S = 0.05  # between two looks whether somebody's time is over, while waiting for room
GRACE_MS = 1_000  # beyond what a reader said it would wait: it may be copying still


@dataclass(slots=True, eq=False)
class Staged:
    """One object in staging. `users`: (peer, until ms) of everybody who may be reading it."""

    generation: int
    serial: int
    offset: int
    length: int
    users: list[tuple[int, int]] = field(default_factory=list)
    filled: threading.Event = field(default_factory=threading.Event)
    failure: MooncakeError | None = None
    doomed: bool = False  # it ended while it was read

    @property
    def units(self) -> int:
        return extent_bytes(self.length) // UNIT_BYTES

    def row(self) -> np.ndarray:
        row = np.zeros(1, dtype=EXTENT)
        row["offset"], row["length"], row["generation"] = self.offset, self.length, self.serial
        row["expires_ms"] = _NEVER_MS
        return row


class Staging:
    """Raises OutOfSpace when the memory cannot be had."""

    def __init__(self, engine: TransferEngine, nbytes: int, name: str, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._changed = threading.Condition()
        self._stopped = False
        self._serial = 0
        self._staged: OrderedDict[int, Staged] = OrderedDict()  # by generation, oldest use first
        self._by_serial: dict[int, Staged] = {}
        self._busy: dict[int, Staged] = {}  # by serial
        self._stack = ExitStack()
        with ExitStack() as opening:
            self._memory = Memory(nbytes, name=name, sole_writer=True)
            opening.callback(self._memory.close)
            self._segment = OwnedSegment(self._memory.base, self._memory.nbytes)
            opening.callback(self._segment.close)
            self._region = engine.register(self._memory, access="read")
            opening.callback(self._region.close)
            self._stack = opening.pop_all()
        self._allocator = Allocator(self._memory.nbytes // UNIT_BYTES)

    @property
    def region_id(self) -> int:
        return self._region.id

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def used_bytes(self) -> int:
        return (self._allocator.units - self._allocator.free) * UNIT_BYTES

    def take(
        self, generation: int, length: int, peer_id: int, patience: Deadline, until: Deadline
    ) -> tuple[Staged, bool]:
        """A place for the object with this reader as a user `until` then; True: the caller must
        `fill` it, else somebody has or does (wait for `filled`). Raises Backpressure: no room
        within `patience`, or the object is larger than staging."""
        with self._changed:
            while True:
                found = self._staged.get(generation)
                if found is None:
                    found = self._make(generation, length)
                    if found is not None:
                        self._use(found, peer_id, until)
                        return found, True
                else:
                    self._use(found, peer_id, until)
                    return found, False
                if self._stopped or patience.passed() or extent_bytes(length) > self.nbytes:
                    raise Backpressure(
                        "staging of the disk tier is full of objects that are being read",
                        staging=self.nbytes,
                    )
                self._changed.wait(min(_LOOK_S, max(1, patience.left_ms()) / 1000))
                self._end_overdue()

    def _use(self, found: Staged, peer_id: int, deadline: Deadline) -> None:
        until = self._clock.now_ms() + deadline.left_ms() + GRACE_MS
        found.users.append((peer_id, until))
        self._busy[found.serial] = found
        self._staged.move_to_end(found.generation)

    def _make(self, generation: int, length: int) -> Staged | None:
        units = extent_bytes(length) // UNIT_BYTES
        start = self._allocator.take(units)
        while start < 0:
            idle = next((each for each in self._staged.values() if self._idle(each)), None)
            if idle is None:
                return None
            self._drop(idle)
            start = self._allocator.take(units)
        self._serial += 1
        made = Staged(generation, self._serial, start * UNIT_BYTES, length)
        statuses = np.zeros(1, dtype=np.int32)
        self._segment.begin(made.row(), 0, statuses)
        if statuses[0]:
            self._allocator.give(start, units)
            raise InternalError("staging refused an extent", status=int(statuses[0]))
        self._staged[generation] = made
        self._by_serial[made.serial] = made
        return made

    @staticmethod
    def _idle(staged: Staged) -> bool:
        return not staged.users and staged.filled.is_set()

    def fill(self, staged: Staged, read: Callable[[memoryview], int]) -> None:
        """`read` fills the payload and answers its crc. Wakes everybody who waits for it; its
        MooncakeError is theirs, too, and raised here."""
        start = staged.offset + EXTENT_HEADER_BYTES
        crcs = np.zeros(1, dtype=np.uint32)
        statuses = np.zeros(1, dtype=np.int32)
        try:
            crcs[0] = read(self._memory.view()[start : start + staged.length])
        except MooncakeError as error:
            staged.failure = error
            statuses[0] = -error.code
            raise
        except BaseException:
            staged.failure = InternalError("a read of the disk tier failed")
            statuses[0] = -InternalError.code
            raise
        finally:
            self._segment.seal(staged.row(), crcs, 0, statuses)
            with self._changed:
                staged.filled.set()
                if statuses[0] != OK:
                    self._forget(staged)
                elif staged.doomed:
                    self._drop(staged)

    def done(self, serial: int, peer_id: int) -> None:
        """One use by this reader is over."""
        with self._changed:
            staged = self._by_serial.get(serial)
            if staged is None:
                return
            for user in staged.users:
                if user[0] == peer_id:
                    staged.users.remove(user)
                    break
            if not staged.users:
                self._busy.pop(serial, None)
                self._changed.notify_all()

    def forget(self, generation: int) -> None:
        """The object has ended: no reader accepts it from here on, not even one that is at it."""
        with self._changed:
            staged = self._staged.get(generation)
            if staged is None:
                return
            if staged.filled.is_set():
                self._drop(staged)
            else:
                staged.doomed = True

    def sweep(self) -> None:
        """End uses of connections that have ended, and of readers whose time is over."""
        with self._changed:
            self._end_overdue()

    def _end_overdue(self) -> None:
        now_ms = self._clock.now_ms()
        for serial, staged in list(self._busy.items()):
            staged.users = [
                (peer, until)
                for peer, until in staged.users
                if until > now_ms and not self._gone(peer)
            ]
            if not staged.users:
                del self._busy[serial]
        self._changed.notify_all()

    def _gone(self, peer_id: int) -> bool:
        try:
            _ = self._engine.peer(peer_id).transport
        except MooncakeError:
            return True
        return False

    def _drop(self, staged: Staged) -> None:
        self._segment.unseal(staged.row())
        self._forget(staged)

    def _forget(self, staged: Staged) -> None:
        if self._staged.get(staged.generation) is staged:
            del self._staged[staged.generation]
        self._give(staged)

    def _give(self, staged: Staged) -> None:
        self._busy.pop(staged.serial, None)
        if self._by_serial.pop(staged.serial, None) is not None:
            self._allocator.give(staged.offset // UNIT_BYTES, staged.units)
            self._changed.notify_all()

    def stop(self) -> None:
        """Nobody waits for room any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        self._stack.close()
