"""The catalog's state, and the few steps that change it.

Everything that ends an attempt is here (`end_object`, `end_grant`), so that accounting, promises,
records and effects cannot be forgotten by a verb; what happens then is read from `lifecycle.TABLE`.
Owner thread only; pure.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice

from mooncake_py.master import records
from mooncake_py.master.disks import DiskLists
from mooncake_py.master.events import EventLog
from mooncake_py.master.eviction import EvictionOrder, Links, Lru, Pool
from mooncake_py.master.groups import Groups, is_named
from mooncake_py.master.lease import RestingExtents
from mooncake_py.master.lifecycle import COUNTERS, Event, Promise, State, Unseal, end
from mooncake_py.master.lingering import Lingering, end_extents, extents_of
from mooncake_py.master.membership import ALIVE, AWAY, GONE, Leaving, Membership
from mooncake_py.master.objects import (
    COLD,
    GROUP,
    HARD_PIN,
    ON_DISK,
    PARKED,
    PLACE_BITS,
    PLACE_MASK,
    READ,
    REPLICAS,
    SOFT_PIN,
    TTL,
    ObjectTable,
)
from mooncake_py.master.pattern import Pattern
from mooncake_py.master.s3fifo import S3Fifo
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.stripes import is_part
from mooncake_py.master.taskbook import TaskBook
from mooncake_py.master.tenant import Grant, Put, Tenant, Tenants
from mooncake_py.master.ttls import TtlWatch
from mooncake_py.master.unrecorded import Unrecorded
from mooncake_py.master.work import Work
from mooncake_py.master.worth import Worth
from mooncake_py.model import EXTENT_ALIGN_BYTES, FOLLOWS, extent_bytes

_POLICIES: dict[str, type[Pool]] = {"lru": Lru, "s3fifo": S3Fifo, "cost": Worth}
_UNTOLD_MS = 1_000  # until a grant is looked at again that nodes have yet to tell of


def extent_units(length: int) -> int:
    return extent_bytes(length) // EXTENT_ALIGN_BYTES


class CatalogState:
    """What the catalog knows. Fields are read by the verbs; changes go through the methods."""

    def __init__(self, settings: CatalogSettings) -> None:
        settings.validate()
        self.settings = settings
        self.table = ObjectTable(settings.objects_max)
        links = Links(settings.objects_max, 3 * settings.tenants_max)
        policy = _POLICIES[settings.eviction]
        self.tenants = Tenants(
            settings.tenants_max,
            self.table,
            lambda: policy(self.table, links, settings.lease_ms, settings.spare_ms),
        )
        self.disks = DiskLists(self.table, settings.objects_max)
        self.members = Membership(settings, self.disks)
        self.order, self.resting = EvictionOrder(self.table), RestingExtents()
        self.counters: defaultdict[str, int] = defaultdict(int, dict.fromkeys(COUNTERS, 0))
        self.term = self.housekeeping_ms = 0
        # Generations below the mark may be used: a durable record says so.
        self.next_generation = self.generation_mark = 1
        self.groups, self.events = Groups(), EventLog(settings.events_max)
        self.unrecorded_drops: list[tuple[int, int]] = []  # (generation, rests until ms)
        self.open_grants = self.hard_pinned_units = 0
        self.reservations: list[Put] = []  # with open ones among them (reservations.py)
        self.doubts: dict[tuple[int, int], int] = {}  # (generation, segment index) -> until ms
        self.leaving: list[Leaving] = []  # segments that are gone, and not yet forgotten
        self.tasks = TaskBook()
        self.unrecorded = Unrecorded()
        self.lingering = Lingering()
        self.before_drop: Callable[[int], None] | None = None  # of the snapshot in the making
        self._expiries: list[tuple[int, int, Put]] = []
        self._put_count = self._expiry_index = 0  # of the first: grants before it were looked at
        self.ttls = TtlWatch(self.table)
        self.patterns: dict[bytes, Pattern] = {}  # of removals in progress
        self.aside: dict[int, int] = {}  # slots whose end frees nothing useful, with generation
        self.aside_version = 0  # of the membership then
        self.evicting = False  # between the watermarks, on the way down
        # Keys whose writing began or ended since somebody who mirrors them looked (quick.py).
        self.touched: list[tuple[Tenant, bytes]] | None = None

    # --- grants ---------------------------------------------------------------------------------

    def watch_grants(self, put: Put) -> None:
        """What of this put is not committed by its expiry ends then."""
        self._put_count += 1
        if self.touched is not None:
            self.touched += [(put.tenant, key) for key in put.keys]
        if put.groups:
            self.groups.begin(put)
        self.open_grants += put.open_count
        heapq.heappush(self._expiries, (put.expires_ms, self._put_count, put))

    def expire_grants(self, work: Work, now_ms: int, count_max: int) -> bool:
        """Look at no more than so many grants and puts that are due; are there others?"""
        while self._expiries and self._expiries[0][0] <= now_ms:
            put = self._expiries[0][2]
            if self.may_be_stored(put):
                heapq.heapreplace(self._expiries, (now_ms + _UNTOLD_MS, *self._expiries[0][1:]))
                continue
            writing = put.tenant.writing
            while self._expiry_index < len(put.keys):
                if not count_max:
                    return True
                count_max -= 1
                grant = (put, self._expiry_index)
                self._expiry_index += 1
                if writing.get(put.keys[grant[1]]) == grant:
                    self.end_grant(work, grant, Event.GRANT_EXPIRED, now_ms)
            if not count_max:
                return True
            count_max -= 1
            heapq.heappop(self._expiries)
            self._expiry_index = 0
        return False

    def may_be_stored(self, put: Put, *, waits: bool = True) -> bool:
        """Was this granted by a master that ended, and has a node yet to tell whether it holds it?
        Its writer may have been told that it is stored, so its expiry ends nothing before. Not
        `waits`: for somebody who would write the key, nodes that are away are not waited for."""
        return self.unrecorded.may_be_stored(put.first) and self.members.owe(put, waits)

    def end_grant(self, work: Work, grant: Grant, event: Event, now_ms: int) -> None:
        """The attempt ends without an object."""
        put, index = grant
        transition = end(State.WRITING, event)
        promised = transition.promise is Promise.GRANT
        until = put.expires_ms + self.settings.grant_margin_ms if promised else 0
        group = put.groups[index] if put.groups else 0
        if transition.unseal is Unseal.AT_ONCE:
            for place in put.places[index]:
                segment = self.members.at(place >> PLACE_BITS)
                extent = (segment.segment_id, place & PLACE_MASK, put.lengths[index])
                work.unseal(*extent, put.first + index)
        nbytes = self.give_up_grant(put, index, until, now_ms)
        work.drop(put.first + index, until if until > now_ms else 0)
        work.durable |= transition.durable
        self.counters[transition.counter] += 1
        if event is Event.GRANT_EXPIRED:
            self.counters["grants_reclaimed_bytes"] += nbytes
        if group and not is_named(group):  # of such a one it was no member yet
            self._end_group(work, group, now_ms)

    def give_up_grant(self, put: Put, index: int, until_ms: int, now_ms: int) -> int:
        """The grant is not there any more, and its extents rest; how many bytes that is."""
        key = put.keys[index]
        del put.tenant.writing[key]
        put.tenant.part_count -= is_part(key)
        if self.touched is not None:
            self.touched.append((put.tenant, key))
        nbytes = self._give_up(put, index, put.places[index], until_ms, now_ms)
        if put.groups and put.groups[index]:
            self.groups.leave(put.groups[index], key, -1)
        self.close_grants(put, 1)
        return nbytes

    def close_grants(self, put: Put, count: int) -> None:
        self.open_grants -= count
        put.close(count)

    def fail_replicas(self, put: Put, index: int, segment_ids: set[int], now_ms: int) -> None:
        """These nodes did not seal their replicas; they may still be writing."""
        lost = tuple(
            place
            for place in put.places[index]
            if self.members.at(place >> PLACE_BITS).segment_id in segment_ids
        )
        put.places[index] = tuple(each for each in put.places[index] if each not in lost)
        self._give_up(put, index, lost, put.expires_ms + self.settings.grant_margin_ms, now_ms)

    def _give_up(
        self, put: Put, index: int, places: tuple[int, ...], until_ms: int, now_ms: int
    ) -> int:
        """These extents do not belong to the grant any more; how many bytes that is."""
        units = extent_units(put.lengths[index])
        for place in places:
            self.release(place, units, until_ms, now_ms)
        if put.hard_pin:
            self.pin(put.tenant, -units * len(places))
        nbytes = units * EXTENT_ALIGN_BYTES * len(places)
        put.tenant.used_bytes -= nbytes
        return nbytes

    def running_puts(self) -> list[Put]:
        """With grants that may not have ended."""
        return [put for _, _, put in self._expiries]

    def lose_grant(self, work: Work, grant: Grant, index: int, now_ms: int) -> None:
        """The segment with this index is gone, and with it what was to be written there."""
        put, entry = grant
        places = put.places[entry]
        lost = tuple(each for each in places if each >> PLACE_BITS == index)
        if len(lost) == len(places):
            self.end_grant(work, grant, Event.NODE_LOST, now_ms)
        elif lost:
            put.places[entry] = tuple(each for each in places if each not in lost)
            self._give_up(put, entry, lost, 0, now_ms)

    # --- objects --------------------------------------------------------------------------------

    def end_object(
        self, work: Work, slot: int, event: Event, now_ms: int, removed: bool = False
    ) -> int:
        """The object ends. Returns the units its replicas took on placeable segments. `removed`:
        as part of one that is removed; nobody may read it once that is acknowledged."""
        transition = end(State.COMPLETE, event)
        table = self.table
        flags, generation, length = table.flags[slot], table.generation[slot], table.length[slot]
        leased = table.leased_until(slot, self.settings.lease_ms)
        until = leased if transition.promise is Promise.LEASE else 0
        units = extent_units(length)
        places = table.places(slot)
        freed = 0
        for place in places:
            segment = self.members.at(place >> PLACE_BITS)
            if segment.state == ALIVE and segment.disk is None:
                freed += units
        group = table.groups[slot] if flags & GROUP else 0
        owner, key = self.tenants.at(table.tenant[slot]), table.key[slot]
        removed |= event is Event.REMOVE
        if removed:
            leased = max(leased, self.lingering.former_lease(generation))
        end_extents(self, work, slot, transition, (leased, now_ms), removed)
        self.events.add(event.value, owner.name, key or b"", generation)
        if self.unrecorded.open and key is not None:
            below = generation if event is Event.NODE_LOST else self.next_generation
            work.records.append(self.unrecorded.bury(owner.name, (key,), below))
        self.drop_object(slot, until, now_ms)
        work.drop(generation, until if until > now_ms else 0)
        self.counters[transition.counter] += 1
        work.durable |= transition.durable
        if group and not (event is Event.REPLACED and is_named(group)):
            freed += self._end_group(work, group, now_ms, removed)
        return freed

    def drop_object(self, slot: int, until_ms: int, now_ms: int) -> None:
        """The object is not there any more, and its extents rest."""
        if self.before_drop is not None:
            self.before_drop(slot)
        table = self.table
        units = extent_units(table.length[slot])
        places = table.places(slot)
        for place in places:
            self.release(place, units, until_ms, now_ms)
        tenant = self.tenants.at(table.tenant[slot])
        count = self.members.in_memory(places)
        tenant.used_bytes -= units * EXTENT_ALIGN_BYTES * count
        key = table.key[slot]
        assert key is not None
        if tenant.complete.leave(slot):
            tenant.part_count -= is_part(key)
        if table.flags[slot] & HARD_PIN:
            self.pin(tenant, -units * count)
        if table.flags[slot] & SOFT_PIN:
            tenant.end_soft_pin(table.generation[slot])
        if table.flags[slot] & ON_DISK:
            self.disks.leave(slot)
        if table.flags[slot] & COLD:
            self.disks.warm(slot)
        else:
            tenant.pool.remove(slot)
        group = table.groups[slot] if table.flags[slot] & GROUP else 0
        table.drop(slot)
        if group:
            self.groups.leave(group, key, slot)

    def pin(self, tenant: Tenant, units: int) -> None:
        """So many more units are hard-pinned."""
        self.hard_pinned_units += units
        tenant.hard_pinned_units += units

    def join_group(self, name: int, tenant: Tenant, key: bytes, slot: int) -> None:
        """This complete object is a member, unless there can be no more."""
        if self.groups.join(name, tenant, key, slot):
            self.table.flags[slot] |= GROUP
            self.table.groups[slot] = name

    def _end_group(self, work: Work, name: int, now_ms: int, removed: bool = False) -> int:
        """The other members end too; units that became free. `removed`: one was, with its parts."""
        (slots, grants), groups = self.groups.dissolve(name), self.table.groups
        for grant in grants:
            self.end_grant(work, grant, Event.GROUP_LOST, now_ms)
        return sum(
            self.end_object(work, slot, Event.GROUP_LOST, now_ms, removed and is_part(key))
            for slot in slots
            if (key := self.table.key[slot]) is not None and groups.get(slot, 0) & ~FOLLOWS == name
        )

    def drop_group(self, name: int, now_ms: int) -> None:
        """A member was lost with its node before this master's time: the others are not there any
        more either. Their space will be granted again, so the term begins by recording this."""
        slots, grants = self.groups.dissolve(name)
        for put, index in grants:
            until = put.expires_ms + self.settings.grant_margin_ms
            self.give_up_grant(put, index, until, now_ms)
            self.unrecorded_drops.append((put.first + index, until))
        for slot in slots:
            until = now_ms + self.settings.lease_ms
            self.unrecorded_drops.append((self.table.generation[slot], until))
            self.drop_object(slot, until, now_ms)

    def leased_until(self, slot: int) -> int:
        """End of the lease of the object or, if later, of any that ends with it."""
        table, lease_ms = self.table, self.settings.lease_ms
        if not table.flags[slot] & GROUP:
            return table.leased_until(slot, lease_ms)
        mates = self.groups.end_with(table.groups[slot], slot)
        return max(table.leased_until(each, lease_ms) for each in mates)

    def find_live(self, work: Work, tenant: Tenant, key: bytes, now_ms: int) -> int | None:
        """Slot of the object. One whose nodes are all gone or away, or whose TTL is over, but which
        is not yet forgotten, ends now."""
        slot = tenant.complete.get(key)
        if slot is None:
            return None
        table, members, lost = self.table, self.members, (GONE, AWAY)
        if table.flags[slot] & TTL and table.ttls[slot] <= now_ms:
            self.end_object(work, slot, Event.TTL_ENDED, now_ms)
            return None
        if members.impaired and all(
            members.at(place >> PLACE_BITS).state in lost for place in table.places(slot)
        ):
            self.end_object(work, slot, Event.NODE_LOST, now_ms)
            return None
        return slot

    def enter(self, tenant: Tenant, key: bytes, slot: int, now_ms: int) -> None:
        """The object is visible, and evictable unless it is protected."""
        tenant.complete.enter(slot)
        if self.touched is not None:
            self.touched.append((tenant, key))
        if self.members.disks and self._settle_on_disk(slot):
            self.table.stamp[slot] = now_ms
            return
        self._add_to_pool(tenant, slot, now_ms)

    def touch(self, tenant: Tenant, slots: Sequence[int], now_ms: int) -> None:
        """These were located, or count as if they were."""
        if self.disks.cold_count:
            table = self.table
            cold = [slot for slot in slots if table.flags[slot] & COLD]
            for slot in cold:
                table.stamp[slot] = now_ms
                table.flags[slot] |= READ
                for disk in self.members.disks_at(self.table.places(slot)):
                    self.disks.used(slot, disk)
            if cold:
                slots = [slot for slot in slots if not table.flags[slot] & COLD]
        tenant.pool.touch(slots, now_ms)

    def note_short(self, slot: int) -> None:
        """The object may have fewer replicas than it wants: `repair.py` looks after it."""
        table = self.table
        wanted = table.wanted.get(slot, 1) if table.flags[slot] & REPLICAS else 1
        if wanted > 1 and self.members.in_memory(table.places(slot)) < wanted:
            entry = (-table.heat[slot], -table.stamp[slot], slot, table.generation[slot])
            heapq.heappush(self.tasks.short, entry)

    def lose_replica(self, work: Work, slot: int, index: int, event: Event, now_ms: int) -> None:
        """The replica on this segment ends; with the last one the object does."""
        if all(place >> PLACE_BITS == index for place in self.table.places(slot)):
            self.end_object(work, slot, event, now_ms)
        else:
            self.shed_replica(work, slot, index, now_ms)

    def shed_replica(
        self, work: Work, slot: int, index: int, now_ms: int, rest_ms: int = 0
    ) -> None:
        """The replica on this segment ends; it is not the last one. Its extent rests for `rest_ms`
        at least: after a move the durable log knows no other, until it has caught up."""
        table = self.table
        places = table.places(slot)
        kept = tuple(place for place in places if place >> PLACE_BITS != index)
        if len(kept) == len(places):
            return
        leased = table.leased_until(slot, self.settings.lease_ms)
        until = max(leased, now_ms + rest_ms)
        if leased > now_ms:
            lost = [place for place in places if place not in kept]
            name = (self.tenants.at(table.tenant[slot]).name, table.key[slot] or b"")
            self.lingering.add(name, leased, extents_of(table, self.members, slot, lost))
        for place in places:
            segment = self.members.at(place >> PLACE_BITS)
            if place not in kept and segment.state != GONE:
                rests = until if until > now_ms else 0
                work.lose(table.generation[slot], segment.segment_id, rests)
                if segment.disk and segment.state != AWAY:
                    generation, length = table.generation[slot], table.length[slot]
                    work.unseal(segment.segment_id, place & PLACE_MASK, length, generation)
        self.drop_replicas(slot, kept, until, now_ms)
        self.note_short(slot)

    def drop_replicas(self, slot: int, kept: tuple[int, ...], until_ms: int, now_ms: int) -> None:
        """Of the object's replicas these are left (at least one); the extents of others rest."""
        table = self.table
        units = extent_units(table.length[slot])
        lost = [place for place in table.places(slot) if place not in kept]
        for place in lost:
            self.release(place, units, until_ms, now_ms)
        tenant = self.tenants.at(table.tenant[slot])
        count = self.members.in_memory(lost)
        tenant.used_bytes -= units * EXTENT_ALIGN_BYTES * count
        if table.flags[slot] & HARD_PIN:
            self.pin(tenant, -units * count)
        if count < len(lost):
            self.disks.leave(slot)
        table.keep_places(slot, kept)
        if table.flags[slot] & (ON_DISK | COLD) == ON_DISK and not self.members.in_memory(kept):
            tenant.pool.remove(slot)
            table.flags[slot] &= ~(PARKED | SOFT_PIN)
            table.soft_pins.pop(slot, None)
            tenant.end_soft_pin(table.generation[slot])
            self.disks.chill(slot)

    def add_replica(self, slot: int, place: int, generation: int) -> None:
        """The object has one more replica, whose extent is counted as used already. One on a disk
        has the object's own generation."""
        table = self.table
        disk = self.members.at(place >> PLACE_BITS).disk
        if disk is not None:
            table.keep_places(slot, (*table.places(slot), place))
            self.disks.join(slot, disk)
            return
        units = extent_units(table.length[slot])
        tenant = self.tenants.at(table.tenant[slot])
        tenant.used_bytes += units * EXTENT_ALIGN_BYTES
        if table.flags[slot] & HARD_PIN:
            self.pin(tenant, units)
        table.add_place(slot, place, generation)
        if table.flags[slot] & COLD:
            self.disks.warm(slot)
            self._add_to_pool(tenant, slot, table.stamp[slot])

    def _add_to_pool(self, tenant: Tenant, slot: int, now_ms: int) -> None:
        tenant.pool.add(slot, now_ms)
        if not tenant.pool.listed:
            self.order.enlist(tenant.pool)

    def _settle_on_disk(self, slot: int) -> bool:
        """A restored object takes its place in the order of its disk. Has it no other replica?"""
        for disk in self.members.disks_at(self.table.places(slot)):
            self.disks.join(slot, disk)
        cold = not self.members.in_memory(self.table.places(slot))
        if cold:
            self.disks.chill(slot)
        return cold

    # --- extents --------------------------------------------------------------------------------

    def release(self, place: int, units: int, until_ms: int, now_ms: int) -> None:
        """An extent has no owner any more; it is free once the promise has run out."""
        segment = self.members.at(place >> PLACE_BITS)
        segment.used_units -= segment.charge(units)
        start = place & PLACE_MASK
        if until_ms > now_ms:
            segment.resting_units += units
            self.resting.add(until_ms, segment.segment_id, start, units)
        else:
            segment.allocator.give(start, units)

    def free_rested(self, now_ms: int, count_max: int | None = None) -> bool:
        """Free (at most so many) extents whose promise is over; are there others?"""
        for segment_id, start, units in islice(self.resting.ended(now_ms), count_max):
            segment = self.members.by_id.get(segment_id)
            if segment is not None:
                segment.resting_units -= units
                segment.allocator.give(start, units)
        return self.resting.due(now_ms)

    def reserve_generations(self, work: Work, count: int) -> None:
        """Make sure that `count` more generations may be used. Within a term they may; without
        terms (or beyond 2 ** 21 puts in one) a durable record reserves a block."""
        if self.next_generation + count <= self.generation_mark:
            return
        self.generation_mark = self.next_generation + count + self.settings.generation_block
        self.mark(work)

    def mark(self, work: Work) -> None:
        marks = records.Marks(self.generation_mark, self.members.next_segment_id)
        work.records.append(records.encode(marks))
        work.durable = True
