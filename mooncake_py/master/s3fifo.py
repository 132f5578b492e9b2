"""S3-FIFO: queues instead of an order of access (after Yang et al., SOSP 2023).

Rules. New objects enter `small`, which may hold a tenth of the pool's objects. At its cold end an
object that was located since goes on to `main`, one that was not goes away and leaves its
fingerprint in `ghost`; a key that comes back while its fingerprint is there enters `main` at once.
At the cold end of `main` an object that was located since its last visit there goes round again (up
to `_FREQUENCY_MAX` times), one that was not goes away. So a scan of keys that are used once passes
through `small` and never displaces what is used again. Protected objects are parked when they are
met (see `eviction.py`). Pure.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable

from mooncake_py.master.eviction import Links, Pool
from mooncake_py.master.objects import HARD_PIN, READ, SOFT_PIN, ObjectTable

_FREQUENCY_MAX = 3
_SMALL_SHARE = 10  # small holds one of so many objects


class S3Fifo(Pool):
    lists = 3

    def __init__(self, table: ObjectTable, links: Links, lease_ms: int, spare_ms: int = 0) -> None:
        super().__init__(table, links, lease_ms, spare_ms)
        self._small, self._main, self._soft = self._heads
        self._frequency: dict[int, int] = {}  # of slots located since they were last looked at
        self._in_small: set[int] = set()
        self._count = 0
        self._ghost: OrderedDict[int, None] = OrderedDict()  # fingerprints, oldest first

    def add(self, slot: int, now_ms: int, cold: bool = False) -> None:
        super().add(slot, now_ms, cold)
        self._count += not self._table.flags[slot] & HARD_PIN

    def _enter(self, slot: int) -> None:
        if self._table.flags[slot] & SOFT_PIN:
            self._links.append(slot, self._soft)
            return
        fingerprint = self._fingerprint(slot)
        if fingerprint in self._ghost:
            del self._ghost[fingerprint]
            self._links.append(slot, self._main)
        else:
            self._in_small.add(slot)
            self._links.append(slot, self._small)

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
            full = len(self._in_small) * _SMALL_SHARE >= self._count
            if small != self._small and (full or no_main):
                if self._stays(small, now_ms):
                    continue
                self._remember(small)
                return small
            if no_main:
                return self._soft_victim(self._soft, now_ms)
            if not self._stays(main, now_ms):
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

    def _remember(self, slot: int) -> None:
        self._ghost[self._fingerprint(slot)] = None
        while len(self._ghost) > max(self._count, 64):
            self._ghost.popitem(last=False)

    def _fingerprint(self, slot: int) -> int:
        """Equal in every process, unlike `hash`."""
        return zlib.crc32(self._table.key[slot] or b"")
