"""What becomes of the extents that a node tells of: the table of `recovery.py`. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from mooncake_py.master import records
from mooncake_py.master.allocator import UNIT_BYTES
from mooncake_py.master.commands import Inventory, Name
from mooncake_py.master.commits import commit, dress, replace_former
from mooncake_py.master.events import STORED
from mooncake_py.master.groups import is_named
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.membership import GONE, Segment
from mooncake_py.master.objects import PLACE_BITS, PLACE_MASK
from mooncake_py.master.snapshots import record_replica
from mooncake_py.master.state import CatalogState, extent_units
from mooncake_py.master.stripes import is_part
from mooncake_py.master.tenant import Grant, Tenant
from mooncake_py.master.work import Work
from mooncake_py.model import EXTENT_ROW, MEMBERS_SHIFT, RESERVED_ROW, reserved_key


@dataclass(slots=True)
class _Found:
    """An extent that a node told of."""

    name: Name
    start: int = field(compare=False)  # of one on a disk: once its place is taken
    units: int
    length: int
    own: int  # generation in its header
    group: int
    members: int  # of the group
    free_only: bool  # granted without a key: the put was refused if the key was taken
    claimed: bool = field(default=False, compare=False)  # its place is taken already

    @property
    def generation(self) -> int:
        return self.name.generation or self.own


def release(state: CatalogState, segment: Segment, found: _Found, now_ms: int) -> None:
    """The place that was taken for it, if it still is."""
    if found.claimed and state.members.by_index[segment.index] is segment:
        state.release(segment.index << PLACE_BITS | found.start, found.units, 0, now_ms)
    found.claimed = False


class Page:
    """Judges the extents of one page."""

    def __init__(self, state: CatalogState, work: Work, segment: Segment, now_ms: int) -> None:
        self.state, self.work, self.segment, self.now_ms = state, work, segment, now_ms
        self.adopted: defaultdict[tuple[str, int, int, bool], list[_Found]] = defaultdict(list)
        self.touched: defaultdict[Tenant, list[int]] = defaultdict(list)
        state.free_rested(now_ms)

    def judge(self, command: Inventory) -> bytes:
        """Rows that the node is to unseal."""
        rows, size = command.rows, EXTENT_ROW.size
        ended = []
        for at, name in enumerate(command.names):
            _, upper, offset, length, own, _, _, group = EXTENT_ROW.unpack_from(rows, at * size)
            if own >= self.state.next_generation:
                continue
            units = extent_units(length)
            start = offset // UNIT_BYTES
            free_only = group == RESERVED_ROW
            if free_only:
                group = 0
            members = upper >> MEMBERS_SHIFT
            found = name and _Found(name, start, units, length, own, group, members, free_only)
            if not found or not self._stays(found):
                self.state.counters["extents_unsealed" if found else "extents_nameless"] += 1
                ended.append(rows[at * size : (at + 1) * size])
        self.end()
        return b"".join(ended)

    def _stays(self, found: _Found) -> bool:
        state, name = self.state, found.name
        tenant = state.tenants.find(name.tenant)
        if tenant is not None:
            slot = tenant.complete.get(name.key)
            if slot is not None and state.table.generation[slot] == found.generation:
                return self._is_replica(slot, found) or self._add_replica(slot, found)
            grant = tenant.writing.get(name.key) or tenant.writing.get(reserved_key(found.own))
            if grant is not None and grant[0].first + grant[1] == found.generation:
                return self._settle(grant, found)
        if found.own in state.tasks.running:
            return True
        if not self._owed(found):
            return self._waits(found)
        together = found.group and not is_named(found.group)
        return self._gather(found) if together else self._adopt(found)

    def _waits(self, found: _Found) -> bool:
        """Has this node told of this one before, and is its place taken?"""
        unrecorded = self.state.unrecorded
        of_group = unrecorded.gathered.get((found.name.tenant, found.group), {})
        told = of_group.get(found.name.key, []) if found.group else unrecorded.contested
        return (self.segment, found) in told

    def _gather(self, found: _Found) -> bool:
        """A member of a group, or a part of an object: all are adopted when all are there, for one
        alone may be worse than none. Until then its place is taken: nothing may be put there."""
        if self._waits(found):
            return True  # told again
        if not self._claim(found):
            return False
        found.claimed = True
        gathered = self.state.unrecorded.gathered
        name = (found.name.tenant, found.group)
        group = gathered.setdefault(name, {})
        group.setdefault(found.name.key, []).append((self.segment, found))
        if len(group) < found.members or not found.members:
            return True
        del gathered[name]
        pages: dict[int, Page] = {self.segment.segment_id: self}
        everything = [each for replicas in group.values() for each in replicas]
        if not all(
            Page(self.state, self.work, segment, self.now_ms).fits(each)
            for segment, each in everything
        ):
            for segment, each in everything:
                self._let_go(segment, each)
            return False
        for segment, each in everything:
            page = pages.setdefault(
                segment.segment_id, Page(self.state, self.work, segment, self.now_ms)
            )
            page.take(each)
            release(self.state, segment, each, self.now_ms)
        for page in pages.values():
            if page is not self:
                page.end()
        return self._whole(group)

    def _let_go(self, segment: Segment, found: _Found) -> None:
        """It is not adopted: its place is free."""
        release(self.state, segment, found, self.now_ms)
        if segment.state != GONE:
            self.work.unseal(segment.segment_id, found.start, found.length, found.own)

    def _whole(self, group: dict[bytes, list[tuple[Segment, _Found]]]) -> bool:
        """Was all of it adopted? Else it ends again."""
        tenant, table = None, self.state.table
        slots = []
        for replicas in group.values():
            found = replicas[0][1]
            tenant = self.state.tenants.find(found.name.tenant)
            slot = tenant.complete.get(found.name.key) if tenant is not None else None
            if slot is not None and table.generation[slot] == found.generation:
                slots.append(slot)
        if len(slots) == len(group):
            return True
        if slots:
            self.state.end_object(self.work, slots[0], Event.GROUP_LOST, self.now_ms)
        return False

    def fits(self, found: _Found) -> bool:
        """Would it be adopted?"""
        state, name = self.state, found.name
        tenant = state.tenants.find(name.tenant)
        former = None if tenant is None else tenant.complete.get(name.key)
        return (
            self.segment.state != GONE
            and not state.unrecorded.buried(name.tenant, name.key, found.generation)
            and not (name.ttl_until_ms and name.ttl_until_ms <= self.now_ms)
            and (former is None or state.table.generation[former] < found.generation)
        )

    def take(self, found: _Found) -> None:
        tenant = self.state.tenants.find(found.name.tenant)
        slot = None if tenant is None else tenant.complete.get(found.name.key)
        if slot is not None and self.state.table.generation[slot] == found.generation:
            self._add_replica(slot, found, owed=True)
        else:
            self._adopt(found)

    def end(self) -> None:
        """After the last extent: records, and the order of eviction."""
        self._record()
        for tenant, slots in self.touched.items():
            live = [slot for slot in slots if self.state.table.key[slot] is not None]
            self.state.touch(tenant, live, self.now_ms)

    def _owed(self, found: _Found) -> bool:
        return any(start <= found.own < below for start, below in self.segment.owed)

    # --- known objects --------------------------------------------------------------------------

    def _is_replica(self, slot: int, found: _Found) -> bool:
        table, index = self.state.table, self.segment.index
        return any(
            place >> PLACE_BITS == index
            and (self.segment.disk is not None or place & PLACE_MASK == found.start)
            and table.replica_generation(slot, place) == found.own
            for place in table.places(slot)
        )

    def _add_replica(self, slot: int, found: _Found, owed: bool = False) -> bool:
        state, table = self.state, self.state.table
        if not (owed or self._owed(found)) or table.length[slot] != found.length:
            return False
        if any(place >> PLACE_BITS == self.segment.index for place in table.places(slot)):
            return False
        if not self._claim(found):
            return False
        place = self.segment.index << PLACE_BITS | found.start
        state.add_replica(slot, place, found.own)
        record_replica(state, self.work, slot, place, found.own, self.now_ms)
        state.counters["replicas_adopted"] += 1
        return True

    def _settle(self, grant: Grant, found: _Found) -> bool:
        """The put may have been acknowledged: it counts (unless its record came first). Its
        replicas elsewhere are believed in until their nodes tell."""
        state, (put, index) = self.state, grant
        if state.unrecorded.durable_puts or put.first >= state.unrecorded.first_generation:
            return True  # its writer will say
        place = self.segment.index << PLACE_BITS | found.start
        if place not in put.places[index] or put.lengths[index] != found.length:
            return False
        others = {
            segment.segment_id
            for each in put.places[index]
            if (segment := state.members.at(each >> PLACE_BITS)) is not self.segment
            and segment.recorded
        }
        if others:
            state.fail_replicas(put, index, others, self.now_ms)
        tenant, key = put.tenant, put.keys[index]
        replace_former(state, self.work, tenant, key, self.now_ms)
        commit(state, put, index, self.now_ms)
        lost = [(found.generation, each) for each in others]
        self.work.records.append(
            records.encode(records.Commits(self.now_ms, [found.generation], lost))
        )
        state.counters["objects_settled"] += 1
        return True

    # --- objects that no record tells of --------------------------------------------------------

    def _adopt(self, found: _Found) -> bool:
        state, name = self.state, found.name
        if name.ttl_until_ms and name.ttl_until_ms <= self.now_ms:
            return False
        if state.unrecorded.buried(name.tenant, name.key, found.generation):
            return False
        tenant = state.tenants.obtain(name.tenant)
        if isinstance(tenant, str) or len(state.table) >= state.table.capacity:
            state.counters["extents_no_room"] += 1
            return False
        former = tenant.complete.get(name.key)
        if former is not None and (
            state.table.generation[former] > found.generation
            or (found.free_only and self._surely_there(former))
        ):
            return False
        if self._waits(found):
            return True  # told again
        if not self._claim(found):
            return False
        if found.free_only and former is not None and tenant.complete.get(name.key) == former:
            found.claimed = True
            state.unrecorded.contested.append((self.segment, found))
            return True
        if former is not None and tenant.complete.get(name.key) == former:
            state.end_object(self.work, former, Event.REPLACED, self.now_ms)
        self._install(tenant, found)
        return True

    def _surely_there(self, slot: int) -> bool:
        """Has a node said that it holds the object?"""
        places = self.state.table.places(slot)
        homes = (self.state.members.at(place >> PLACE_BITS) for place in places)
        return any(each.compared and each.state != GONE for each in homes)

    def settle(self, found: _Found) -> bool:
        """A put through a reservation was refused if its key was taken, as the log believes it was.
        The nodes of that object say whether it was there still; False: they have yet to."""
        state, name = self.state, found.name
        if self.segment.state == GONE:
            return True
        tenant = state.tenants.find(name.tenant)
        former = None if tenant is None else tenant.complete.get(name.key)
        if (
            former is not None
            and state.table.generation[former] < found.generation
            and not self._surely_there(former)
        ):
            return False
        state.unrecorded.contested.remove((self.segment, found))
        if not self._adopt(found):
            self._let_go(self.segment, found)
        self.end()
        return True

    def _install(self, tenant: Tenant, found: _Found) -> None:
        state, name, units = self.state, found.name, found.units
        place = self.segment.index << PLACE_BITS | found.start
        slot = state.table.add(name.key, found.generation, found.length, place, tenant.number)
        in_memory = units if self.segment.disk is None else 0
        tenant.used_bytes += in_memory * UNIT_BYTES
        tenant.part_count += is_part(name.key)
        pinned = name.hard_pin and self._may_pin(tenant, in_memory)
        if pinned:
            state.pin(tenant, in_memory)
        dress(state, slot, (place,), pinned, name.soft_pin_until_ms, name.ttl_until_ms)
        if found.own != found.generation:
            state.table.name_copy(slot, place, found.own)
        if found.group:
            state.join_group(found.group, tenant, name.key, slot)
        state.enter(tenant, name.key, slot, self.now_ms)
        state.events.add(STORED, tenant.name, name.key, found.generation)
        self.touched[tenant].append(slot)
        kind = (name.tenant, name.soft_pin_until_ms, name.ttl_until_ms, pinned)
        self.adopted[kind].append(found)
        state.counters["objects_adopted"] += 1

    def _may_pin(self, tenant: Tenant, units: int) -> bool:
        """What a node says of a pin holds only within what may be pinned at all."""
        state, settings = self.state, self.state.settings
        capacity = sum(each.allocator.units for each in state.members)
        return (
            state.hard_pinned_units + units <= capacity * settings.hard_pin_max_ratio
            and tenant.hard_pinned_units + units <= capacity * settings.tenant_hard_pin_max_ratio
        )

    def _claim(self, found: _Found) -> bool:
        """Take its place, unless that is done. What the catalog believes there and is older has
        ended: the record of its end is among the lost ones."""
        allocator = self.segment.allocator
        if found.claimed:
            found.claimed = False  # from now on it is the object's
            return True
        if self.segment.disk is not None:
            found.start = allocator.take(found.units)
            self.segment.used_units += self.segment.charge(found.units)
            return True
        if found.start + found.units > allocator.units:
            return False
        if not allocator.claim(found.start, found.units):
            for slot in self._older_in_place(found):
                self._displace(slot)
            if not allocator.claim(found.start, found.units):
                self.state.counters["extents_overlapping"] += 1
                return False
        self.segment.used_units += found.units
        return True

    def _older_in_place(self, found: _Found) -> list[int]:
        table, index = self.state.table, self.segment.index
        end = found.start + found.units
        slots = []
        for slot in table.slots_on(index, 0, len(table.key)):
            units = extent_units(table.length[slot])
            slots += [
                slot
                for place in table.places(slot)
                if place >> PLACE_BITS == index
                and (start := place & PLACE_MASK) < end
                and start + units > found.start
                and table.replica_generation(slot, place) < found.own
            ]
        return slots

    def _displace(self, slot: int) -> None:
        """The replica here ends, and its extent with it: another one has been written over it."""
        state, table = self.state, self.state.table
        places = table.places(slot)
        kept = tuple(place for place in places if place >> PLACE_BITS != self.segment.index)
        if not kept:
            state.end_object(self.work, slot, Event.NODE_LOST, self.now_ms)
            return
        self.work.lose(table.generation[slot], self.segment.segment_id, 0)
        state.drop_replicas(slot, kept, 0, self.now_ms)
        state.note_short(slot)

    def _record(self) -> None:
        segment_id = self.segment.segment_id
        for (tenant, soft_pin, ttl, pinned), found in self.adopted.items():
            fields = records.GrantFields(
                now_ms=self.now_ms,
                expires_ms=0,
                tenant=tenant,
                soft_pin_ms=soft_pin,
                ttl_ms=ttl,
                hard_pin=pinned,
                keys=[each.name.key for each in found],
                generations=[each.generation for each in found],
                lengths=[each.length for each in found],
                replicas=[1] * len(found),
                extents=[n for each in found for n in (segment_id, each.start * UNIT_BYTES)],
                groups=[each.group for each in found] if any(e.group for e in found) else (),
                complete=True,
            )
            self.work.records.append(records.encode(fields))
            copies = [
                (each.generation, each.own, segment_id, each.start * UNIT_BYTES)
                for each in found
                if each.own != each.generation
            ]
            if copies:
                self.work.records.append(records.encode(records.Copies(copies)))
