"""Order of eviction: which object goes next. Cost is proportional to what is asked, never a scan.

Rules. `EvictionPolicy.victim(now_ms)` names an object that may go now, or -1. Objects with a
running lease or a hard pin are never named; soft-pinned ones only when nothing else is left.

`Lru` keeps three doubly linked lists in packed arrays: `fresh` (never located since the commit,
oldest first), `read` (located, oldest access first) and `soft` (soft-pinned). The victim is the
older of the two heads. Two facts make that O(1) although leases protect objects:

* Every Locate grants at least `lease_ms`, and `read` is in order of access, so if its head is
  within that plain lease, all of `read` is; `fresh` holds no leases at all.
* An object with a longer lease (`LONG_LEASE`) that reaches the head is *parked*: taken out of its
  list and entered in a heap by the end of the lease, from where it returns to the head.

Not thread-safe; pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Protocol

from mooncake_py.master.objects import (
    HARD_PIN,
    LONG_LEASE,
    PARKED,
    READ,
    SOFT_PIN,
    Column,
    ObjectTable,
)

_FRESH, _READ, _SOFT, _LISTS = 0, 1, 2, 3


class EvictionPolicy(Protocol):
    """One order of eviction over the slots of an `ObjectTable`.

    The table's flags and side dictionaries are set before `add` and `touch` are called; `remove`
    comes before the slot is dropped. A policy stores nothing about a slot it was told to remove.
    """

    def add(self, slot: int, now_ms: int) -> None: ...

    def touch(self, slots: Iterable[int], now_ms: int) -> None:
        """These were located: their stamps become now."""

    def renew(self, slot: int, now_ms: int) -> None:
        """Somebody wanted to put this object again: it goes as if it were new."""

    def remove(self, slot: int) -> None: ...

    def victim(self, now_ms: int) -> int:
        """The next to go, still in the order; or -1."""

    def set_aside(self, slot: int, until_ms: int) -> None:
        """Do not name this victim again before `until_ms`."""


class Lru:
    """Least recently located first."""

    def __init__(self, table: ObjectTable, lease_ms: int) -> None:
        self._table = table
        self._lease_ms = lease_ms
        self._next = Column("u4", table.capacity + _LISTS).one
        self._previous = Column("u4", table.capacity + _LISTS).one
        for sentinel in range(_LISTS):  # the first nodes stand for the lists
            self._next[sentinel] = self._previous[sentinel] = sentinel
        self._parked: list[tuple[int, int, int]] = []  # heap: until ms, slot, generation
        self._pins: list[tuple[int, int, int]] = []  # heap: end of soft pin, slot, generation

    def add(self, slot: int, now_ms: int) -> None:
        table = self._table
        table.stamp[slot] = now_ms
        flags = table.flags[slot]
        if flags & HARD_PIN:
            return
        if flags & SOFT_PIN:
            pin = (table.soft_pins[slot], slot, table.generation[slot])
            heapq.heappush(self._pins, pin)
            self._append(slot, _SOFT)
        else:
            self._append(slot, _FRESH)

    def touch(self, slots: Iterable[int], now_ms: int) -> None:
        stamp, all_flags = self._table.stamp, self._table.flags
        next_, previous = self._next, self._previous
        for slot in slots:
            stamp[slot] = now_ms
            flags = all_flags[slot]
            node = slot + _LISTS
            if flags & (HARD_PIN | SOFT_PIN | PARKED):
                self._touch_protected(slot, flags)
                continue
            if not flags & READ:
                all_flags[slot] = flags | READ
            after = next_[node]
            if after == _READ:
                continue
            before = previous[node]
            next_[before] = after
            previous[after] = before
            last = previous[_READ]
            next_[last] = node
            previous[node] = last
            next_[node] = _READ
            previous[_READ] = node

    def _touch_protected(self, slot: int, flags: int) -> None:
        self._table.flags[slot] = (flags | READ) & ~PARKED
        if flags & HARD_PIN:
            return
        if not flags & PARKED:
            self._unlink(slot)
        self._append(slot, _SOFT if flags & SOFT_PIN else _READ)

    def renew(self, slot: int, now_ms: int) -> None:
        table = self._table
        flags = table.flags[slot]
        if flags & (HARD_PIN | SOFT_PIN | PARKED):
            return
        if table.leased_until(slot, self._lease_ms) > now_ms:
            return  # it was located a moment ago
        table.flags[slot] = flags & ~READ  # so that the new stamp is not taken for a lease
        table.stamp[slot] = now_ms
        self._unlink(slot)
        self._append(slot, _FRESH)

    def remove(self, slot: int) -> None:
        if not self._table.flags[slot] & (HARD_PIN | PARKED):
            self._unlink(slot)

    def victim(self, now_ms: int) -> int:
        self._return_parked(now_ms)
        self._end_pins(now_ms)
        table, next_ = self._table, self._next
        stamp = table.stamp
        read_locked = False
        while True:
            fresh, read = next_[_FRESH] - _LISTS, next_[_READ] - _LISTS
            if fresh >= 0 and (read < 0 or read_locked or stamp[fresh] <= stamp[read]):
                return fresh
            if read < 0 or read_locked:
                return self._soft_victim(now_ms)
            until = table.leased_until(read, self._lease_ms)
            if until <= now_ms:
                return read
            if table.flags[read] & LONG_LEASE:
                self.set_aside(read, until)
            else:
                read_locked = True

    def _soft_victim(self, now_ms: int) -> int:
        node = self._next[_SOFT]
        while node != _SOFT:
            slot = node - _LISTS
            until = self._table.leased_until(slot, self._lease_ms)
            if until <= now_ms:
                return slot
            node = self._next[node]
            self.set_aside(slot, until)
        return -1

    def set_aside(self, slot: int, until_ms: int) -> None:
        self._unlink(slot)
        self._table.flags[slot] |= PARKED
        heapq.heappush(self._parked, (until_ms, slot, self._table.generation[slot]))

    def _return_parked(self, now_ms: int) -> None:
        table, heap = self._table, self._parked
        while heap and heap[0][0] <= now_ms:
            _, slot, generation = heapq.heappop(heap)
            flags = table.flags[slot]
            if not flags & PARKED or table.generation[slot] != generation:
                continue
            until = table.leased_until(slot, self._lease_ms)
            if until > now_ms:
                heapq.heappush(heap, (until, slot, generation))
                continue
            table.flags[slot] = flags & ~PARKED
            self._prepend(slot)

    def _end_pins(self, now_ms: int) -> None:
        table, heap = self._table, self._pins
        while heap and heap[0][0] <= now_ms:
            _, slot, generation = heapq.heappop(heap)
            flags = table.flags[slot]
            if not flags & SOFT_PIN or table.generation[slot] != generation:
                continue
            table.flags[slot] = flags & ~SOFT_PIN
            table.soft_pins.pop(slot, None)
            if flags & PARKED:
                continue  # returns by its own heap
            self._unlink(slot)
            if table.leased_until(slot, self._lease_ms) > now_ms:
                self._append(slot, _READ)
            else:
                self._prepend(slot)

    # --- linked lists ---------------------------------------------------------------------------

    def _append(self, slot: int, which: int) -> None:
        node, last = slot + _LISTS, self._previous[which]
        self._next[last] = node
        self._previous[node] = last
        self._next[node] = which
        self._previous[which] = node

    def _prepend(self, slot: int) -> None:
        """Back into the list it belongs to, as the oldest."""
        flags = self._table.flags[slot]
        which = _SOFT if flags & SOFT_PIN else _READ if flags & READ else _FRESH
        node, first = slot + _LISTS, self._next[which]
        self._previous[first] = node
        self._next[node] = first
        self._previous[node] = which
        self._next[which] = node

    def _unlink(self, slot: int) -> None:
        node = slot + _LISTS
        before, after = self._previous[node], self._next[node]
        self._next[before] = after
        self._previous[after] = before
