"""Order of eviction: which object goes next. Cost is proportional to what is asked, never a scan.

Rules. Every tenant has a `Pool` with one policy; `EvictionPool.victim(now_ms)` names an object that
may go now, or -1. Objects with a running lease or a hard pin are never named; soft-pinned ones only
when nothing else is left in the pool. `EvictionOrder` compares the pools: the victim of the cluster
is the one of all pools' victims that was accessed longest ago. Policies are `Lru` here, `S3Fifo`
in `s3fifo.py` and `Worth` in `worth.py`; what they share (links, parking, pins) is `Pool`.

Lists are doubly linked through two packed columns (`Links`): a slot is its own node, list heads lie
behind the slots.

*Parking.* A protected object that a policy meets at the cold end is taken out of its list and
entered in a heap by the end of its protection, from where it returns to the cold end. Each lease is
met at most once, so protection costs its own share and hides nothing.

`Lru` keeps three lists: `fresh` (never located since the commit, oldest first), `read` (located,
oldest access first) and `soft` (soft-pinned). The victim is the older of the first two heads. It
parks only long leases: every Locate grants at least `lease_ms`, and `read` is in order of access,
so if its head is within that plain lease, all of `read` is; `fresh` holds no leases at all.
While everything that was read is leased, and that is at least half of all, what was stored, or
wanted to be stored again, less than `spare_ms` ago is spared: a full cluster does not drop what has
just been written because all that is older is being read. Puts find no space then, and clients try
again until the first lease, or `spare_ms`, has ended. (With few leases and many puts it would only
keep space from writers.)

*Chains.* The keys of one Locate or PutEnd are taken for a prefix: they enter the order from the
last to the first, so that the tail of a chain goes before its middle, and what is left is usable.

Not thread-safe; pure.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from mooncake_py._native.keys import move_to_end
from mooncake_py.master.objects import (
    HARD_PIN,
    LONG_LEASE,
    PARKED,
    READ,
    SOFT_PIN,
    Column,
    ObjectTable,
)

_FEW = 8  # slots that are not worth columns
_STALE_MIN = 1024  # entries of pins that were changed, and are never worth a clean-up


class Links:
    """Doubly linked lists of slots. A list is named by its head, a node that is no slot."""

    __slots__ = ("_columns", "_free", "_heads", "next", "previous")

    def __init__(self, slots_max: int, lists_max: int) -> None:
        self._columns = tuple(Column("u4", slots_max + lists_max) for _ in range(2))
        self.next, self.previous = (each.one for each in self._columns)
        self._heads = slots_max
        self._free: list[int] = []

    def new_list(self) -> int:
        if self._free:
            return self._free.pop()
        head = self._heads
        self._heads += 1
        self.next[head] = self.previous[head] = head
        return head

    def free_list(self, head: int) -> None:
        """The list must be empty."""
        assert self.next[head] == head
        self._free.append(head)

    def append(self, slot: int, head: int) -> None:
        last = self.previous[head]
        self.next[last] = slot
        self.previous[slot] = last
        self.next[slot] = head
        self.previous[head] = slot

    def prepend(self, slot: int, head: int) -> None:
        first = self.next[head]
        self.previous[first] = slot
        self.next[slot] = first
        self.previous[slot] = head
        self.next[head] = slot

    def move(self, slots: NDArray[np.int64], head: int) -> None:
        """These become the last ones of the list, one after the other."""
        following, previous = self._columns
        move_to_end(following.many, previous.many, slots, head)

    def unlink(self, slot: int) -> None:
        before, after = self.previous[slot], self.next[slot]
        self.next[before] = after
        self.previous[after] = before


class Pool(ABC):
    """The evictable objects of one tenant, in one policy's order.

    The table's flags and side dictionaries are set before `add` and `touch` are called; `remove`
    comes before the slot is dropped. `listed`: the `EvictionOrder` knows of it.
    """

    lists = 1  # how many lists a pool of this policy has

    def __init__(self, table: ObjectTable, links: Links, lease_ms: int, spare_ms: int = 0) -> None:
        self._table = table
        self._links = links
        self._lease_ms = lease_ms
        self._spare_ms = spare_ms
        self._heads = [links.new_list() for _ in range(self.lists)]
        self._parked: list[tuple[int, int, int]] = []  # heap: until ms, slot, generation
        self._pins: list[tuple[int, int, int]] = []  # heap: end of soft pin, slot, generation
        self.listed = False

    def close(self) -> None:
        """The tenant is forgotten; the pool must be empty."""
        for head in self._heads:
            self._links.free_list(head)

    def add(self, slot: int, now_ms: int, cold: bool = False) -> None:
        """A new object, or (`cold`) one that nobody has used lately."""
        table = self._table
        table.stamp[slot] = now_ms
        flags = table.flags[slot]
        if flags & SOFT_PIN:
            pin = (table.soft_pins[slot], slot, table.generation[slot])
            self._note_pin(pin)
        if not flags & HARD_PIN:
            (self._return if cold else self._enter)(slot)

    def pin(self, slot: int, hard: bool, soft_until_ms: int, now_ms: int) -> None:
        """Its pin is this from now on (False, 0: none), and none that it had before."""
        table = self._table
        self.remove(slot)
        table.soft_pins.pop(slot, None)
        flags = table.flags[slot] & ~(HARD_PIN | SOFT_PIN | PARKED)
        if hard:
            flags |= HARD_PIN
        elif soft_until_ms:
            flags |= SOFT_PIN
            table.soft_pins[slot] = soft_until_ms
        table.flags[slot] = flags
        idle = table.leased_until(slot, self._lease_ms) <= now_ms
        self.add(slot, table.stamp[slot], cold=idle and not flags & SOFT_PIN)

    def _note_pin(self, pin: tuple[int, int, int]) -> None:
        table = self._table
        if len(self._pins) > 2 * len(table.soft_pins) + _STALE_MIN:
            self._pins = [
                (until, slot, generation)
                for until, slot, generation in self._pins
                if table.soft_pins.get(slot) == until and table.generation[slot] == generation
            ]
            heapq.heapify(self._pins)
        heapq.heappush(self._pins, pin)

    @abstractmethod
    def _enter(self, slot: int) -> None:
        """Put a new object, or one whose soft pin begins or ends, into its list."""

    @abstractmethod
    def _return(self, slot: int) -> None:
        """Put a parked object, or one whose pin has ended, where it will soon be looked at."""

    @abstractmethod
    def touch(self, slots: Iterable[int], now_ms: int) -> None:
        """These were located: their stamps become now."""

    @abstractmethod
    def renew(self, slot: int, now_ms: int) -> None:
        """Somebody wanted to put this object again: it is wanted as if it were new."""

    @abstractmethod
    def _choose(self, now_ms: int) -> int:
        """The next to go, still in its list; or -1."""

    def remove(self, slot: int) -> None:
        if not self._table.flags[slot] & (HARD_PIN | PARKED):
            self._links.unlink(slot)

    def victim(self, now_ms: int) -> int:
        """The next to go, still in the order; or -1."""
        if self._parked:
            self._return_parked(now_ms)
        if self._pins:
            self._end_pins(now_ms)
        return self._choose(now_ms)

    def set_aside(self, slot: int, until_ms: int) -> None:
        """Park: do not name this one again before `until_ms`."""
        self._links.unlink(slot)
        self._table.flags[slot] |= PARKED
        heapq.heappush(self._parked, (until_ms, slot, self._table.generation[slot]))

    def bring_back(self, slot: int) -> None:
        """It was set aside for a reason that may have gone; nothing happens if it is not parked."""
        flags = self._table.flags[slot]
        if flags & PARKED:
            self._table.flags[slot] = flags & ~PARKED
            self._return(slot)

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
            self._return(slot)

    def _end_pins(self, now_ms: int) -> None:
        table, heap = self._table, self._pins
        while heap and heap[0][0] <= now_ms:
            _, slot, generation = heapq.heappop(heap)
            flags = table.flags[slot]
            if not flags & SOFT_PIN or table.generation[slot] != generation:
                continue
            if table.soft_pins.get(slot, 0) > now_ms:
                continue  # it was pinned again
            table.flags[slot] = flags & ~SOFT_PIN
            table.soft_pins.pop(slot, None)
            if flags & PARKED:
                continue  # returns by its own heap
            self._links.unlink(slot)
            if table.leased_until(slot, self._lease_ms) > now_ms:
                self._enter(slot)
            else:
                self._return(slot)

    def _soft_victim(self, head: int, now_ms: int) -> int:
        """The oldest soft-pinned object without a lease."""
        node = self._links.next[head]
        while node != head:
            until = self._table.leased_until(node, self._lease_ms)
            if until <= now_ms:
                return node
            after = self._links.next[node]
            self.set_aside(node, until)
            node = after
        return -1


class Lru(Pool):
    """Least recently located first."""

    lists = 3

    def __init__(self, table: ObjectTable, links: Links, lease_ms: int, spare_ms: int = 0) -> None:
        super().__init__(table, links, lease_ms, spare_ms)
        self._fresh, self._read, self._soft = self._heads
        self._count = 0
        self._unread = 0  # of them

    def add(self, slot: int, now_ms: int, cold: bool = False) -> None:
        self._count += 1
        self._unread += not self._table.flags[slot] & READ
        super().add(slot, now_ms, cold)

    def remove(self, slot: int) -> None:
        self._count -= 1
        self._unread -= not self._table.flags[slot] & READ
        super().remove(slot)

    def _list_of(self, slot: int) -> int:
        flags = self._table.flags[slot]
        if flags & SOFT_PIN:
            return self._soft
        return self._read if flags & READ else self._fresh

    def _enter(self, slot: int) -> None:
        self._links.append(slot, self._list_of(slot))

    def _return(self, slot: int) -> None:
        self._links.prepend(slot, self._list_of(slot))

    def touch(self, slots: Iterable[int], now_ms: int) -> None:
        slots = slots if isinstance(slots, list) else list(slots)
        if len(slots) >= _FEW and self._touch_many(np.array(slots, dtype=np.int64), now_ms):
            return
        stamp, all_flags = self._table.stamp, self._table.flags
        next_, previous, read = self._links.next, self._links.previous, self._read
        for slot in slots:
            stamp[slot] = now_ms
            flags = all_flags[slot]
            if flags & (HARD_PIN | SOFT_PIN | PARKED):
                self._touch_protected(slot, flags)
                continue
            if not flags & READ:
                all_flags[slot] = flags | READ
                self._unread -= 1
            after = next_[slot]
            if after == read:
                continue
            before = previous[slot]
            next_[before] = after
            previous[after] = before
            last = previous[read]
            next_[last] = slot
            previous[slot] = last
            next_[slot] = read
            previous[read] = slot

    def _touch_many(self, slots: NDArray[np.int64], now_ms: int) -> bool:
        """Column by column; False, and nothing is done: some are protected."""
        table = self._table
        flags = table.flags_column.many[slots]
        if (flags & np.uint16(HARD_PIN | SOFT_PIN | PARKED)).any():
            return False
        table.stamp_column.many[slots] = now_ms
        unread = slots[flags & np.uint16(READ) == 0]
        if len(unread):
            table.flags_column.many[unread] |= np.uint16(READ)
            self._unread -= len(np.unique(unread))
        self._links.move(slots, self._read)
        return True

    def _touch_protected(self, slot: int, flags: int) -> None:
        self._table.flags[slot] = (flags | READ) & ~PARKED
        self._unread -= not flags & READ
        if flags & HARD_PIN:
            return
        if not flags & PARKED:
            self._links.unlink(slot)
        self._enter(slot)

    def renew(self, slot: int, now_ms: int) -> None:
        table = self._table
        flags = table.flags[slot]
        if flags & (HARD_PIN | SOFT_PIN | PARKED):
            return
        if table.leased_until(slot, self._lease_ms) > now_ms:
            return  # it was located a moment ago
        table.flags[slot] = flags & ~READ  # so that the new stamp is not taken for a lease
        self._unread += bool(flags & READ)
        table.stamp[slot] = now_ms
        self._links.unlink(slot)
        self._enter(slot)

    def _choose(self, now_ms: int) -> int:
        table, next_ = self._table, self._links.next
        stamp = table.stamp
        read_locked = False
        while True:
            fresh, read = next_[self._fresh], next_[self._read]
            no_read = read_locked or read == self._read
            if fresh != self._fresh and (no_read or stamp[fresh] <= stamp[read]):
                return -1 if self._spares(fresh, read, now_ms) else fresh
            if no_read:
                return self._soft_victim(self._soft, now_ms)
            until = table.leased_until(read, self._lease_ms)
            if until <= now_ms:
                return read
            if table.flags[read] & LONG_LEASE:
                self.set_aside(read, until)
            else:
                read_locked = True

    def _spares(self, fresh: int, read: int, now_ms: int) -> bool:
        """Is the oldest unread one very young, and all the others, at least as many, leased?"""
        table = self._table
        if 2 * self._unread > self._count:
            return False
        young = table.stamp[fresh] > now_ms - self._spare_ms
        return young and read != self._read and table.leased_until(read, self._lease_ms) > now_ms


class EvictionOrder:
    """Whose object goes next, over all pools.

    A heap holds pools by a stamp that is never younger than that of their victim; the first pool
    whose stamp proves right has the oldest victim. Pools without a victim wait outside the heap and
    are asked again by `retry` (every tick) and when the heap is empty.
    """

    def __init__(self, table: ObjectTable) -> None:
        self._table = table
        self._heap: list[tuple[int, int, Pool]] = []
        self._without: list[Pool] = []
        self._count = 0

    def enlist(self, pool: Pool) -> None:
        """Know of a pool that got its first object."""
        pool.listed = True
        self._push(0, pool)

    def forget(self, pool: Pool) -> None:
        """The pool is empty and will not be used again."""
        if pool.listed:
            pool.listed = False
            self._heap = [each for each in self._heap if each[2] is not pool]
            heapq.heapify(self._heap)
            self._without = [each for each in self._without if each is not pool]

    def retry(self) -> None:
        """Time has passed: pools without a victim may have one."""
        for pool in self._without:
            self._push(0, pool)
        self._without.clear()

    def victim(self, now_ms: int) -> int:
        """The object of all pools that was accessed longest ago and may go; or -1."""
        slot = self._oldest(now_ms)
        if slot < 0 and self._without:
            self.retry()
            slot = self._oldest(now_ms)
        return slot

    def _oldest(self, now_ms: int) -> int:
        heap = self._heap
        while heap:
            pool = heap[0][2]
            slot = pool.victim(now_ms)
            if slot < 0:
                heapq.heappop(heap)
                self._without.append(pool)
                continue
            stamp = self._table.stamp[slot]
            if len(heap) == 1 or stamp <= min(each[0] for each in heap[1:3]):
                return slot
            heapq.heappop(heap)
            self._push(stamp, pool)
        return -1

    def _push(self, stamp: int, pool: Pool) -> None:
        self._count += 1
        heapq.heappush(self._heap, (stamp, self._count, pool))
