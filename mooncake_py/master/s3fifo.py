"""S3-FIFO: queues instead of an order of access (after Yang et al., SOSP 2023).

Rules. New objects enter `small`. At its cold end an object that was located since goes on to
`main`, one that was not goes away. At the cold end of `main` an object that was located since its
last visit there goes round again (up to `_FREQUENCY_MAX` times), one that was not goes away. So a
scan of keys that are used once passes through `small` and never displaces what is used again.
What goes leaves its fingerprint; a key that comes back while that is there enters `main` at once.

`small` may hold a tenth of the pool's objects to begin with, as in the paper. Conversations come
back later than that (`design/catalog-figures.md`), so the share adapts itself as in ARC (Megiddo
and Modha, FAST 2003): it grows with what comes back to `small`, and shrinks with what to `main`.

Protected objects are parked when they are met (see `eviction.py`). Pure.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable

from mooncake_py.master.eviction import Links, Pool
from mooncake_py.master.objects import HARD_PIN, READ, SOFT_PIN, ObjectTable

_FREQUENCY_MAX = 3
_SMALL_LEAST, _SMALL_MOST = 0.1, 0.9  # of the pool's objects
_STEP = (
    5.0  # objects by which one that comes back moves the share, in the traces that are published
)

Ghost = OrderedDict[int, None]


class S3Fifo(Pool):
    lists = 3

    def __init__(self, table: ObjectTable, links: Links, lease_ms: int, spare_ms: int = 0) -> None:
        super().__init__(table, links, lease_ms, spare_ms)
        self._small, self._main, self._soft = self._heads
        self._frequency: dict[int, int] = {}  # of slots located since they were last looked at
        self._in_small: set[int] = set()
        self._count = 0
        self._small_share = _SMALL_LEAST
        # Fingerprints of what went from `small` and from `main`, oldest first.
        self._ghosts: tuple[Ghost, Ghost] = (OrderedDict(), OrderedDict())

    def add(self, slot: int, now_ms: int, cold: bool = False) -> None:
        super().add(slot, now_ms, cold)
        self._count += not self._table.flags[slot] & HARD_PIN

    def _enter(self, slot: int) -> None:
        if self._table.flags[slot] & SOFT_PIN:
            self._links.append(slot, self._soft)
            return
        if self._came_back(self._fingerprint(slot)):
            self._links.append(slot, self._main)
        else:
            self._in_small.add(slot)
            self._links.append(slot, self._small)

    def _came_back(self, fingerprint: int) -> bool:
        """Has it gone not long ago? Then the queue that it went from was too short."""
        for ghost, other, sign in zip(self._ghosts, reversed(self._ghosts), (1, -1), strict=True):
            if fingerprint in ghost:
                step = _STEP * max(1.0, len(other) / len(ghost)) / max(self._count, 64)
                share = self._small_share + sign * step
                self._small_share = min(_SMALL_MOST, max(_SMALL_LEAST, share))
                del ghost[fingerprint]
                return True
        return False

    def _return(self, slot: int) -> None:
        if self._table.flags[slot] & SOFT_PIN:
            self._links.prepend(slot, self._soft)
        elif self._frequency.get(slot):
            self._links.append(slot, self._main)
        else:  # nobody has used it: in `main` it would outlast every scan
            self._in_small.add(slot)
            self._links.prepend(slot, self._small)

    def touch(self, slots: Iterable[int], now_ms: int) -> None:
        stamp, flags, frequency = self._table.stamp, self._table.flags, self._frequency
        for slot in slots:
            stamp[slot] = now_ms
            flags[slot] |= READ
            frequency[slot] = min(_FREQUENCY_MAX, frequency.get(slot, 0) + 1)

    def renew(self, slot: int, now_ms: int) -> None:
        self._frequency[slot] = min(_FREQUENCY_MAX, self._frequency.get(slot, 0) + 1)

    def remove(self, slot: int) -> None:
        super().remove(slot)
        self._count -= not self._table.flags[slot] & HARD_PIN
        self._in_small.discard(slot)
        self._frequency.pop(slot, None)

    def _choose(self, now_ms: int) -> int:
        next_ = self._links.next
        while True:
            small, main = next_[self._small], next_[self._main]
            no_main = main == self._main
            full = len(self._in_small) >= self._count * self._small_share
            if small != self._small and (full or no_main):
                if self._stays(small, now_ms):
                    continue
                self._remember(small, self._ghosts[0])
                return small
            if no_main:
                return self._soft_victim(self._soft, now_ms)
            if not self._stays(main, now_ms):
                self._remember(main, self._ghosts[1])
                return main

    def _stays(self, slot: int, now_ms: int) -> bool:
        """Move on, go round again, or park; False: this one goes."""
        self._in_small.discard(slot)
        until = self._table.leased_until(slot, self._lease_ms)
        if until > now_ms:
            self.set_aside(slot, until)
            return True
        frequency = self._frequency.pop(slot, 0)
        if not frequency:
            return False
        if frequency > 1:
            self._frequency[slot] = frequency - 1
        self._links.unlink(slot)
        self._links.append(slot, self._main)
        return True

    def _remember(self, slot: int, ghost: Ghost) -> None:
        ghost[self._fingerprint(slot)] = None
        while len(ghost) > max(self._count, 64):
            ghost.popitem(last=False)

    def _fingerprint(self, slot: int) -> int:
        """Equal in every process, unlike `hash`."""
        return zlib.crc32(self._table.key[slot] or b"")
