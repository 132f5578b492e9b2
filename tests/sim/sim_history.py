"""What was promised to whom, and whether it was kept. Knows everything, decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from catalog_model import grant_rows

from mooncake_py.master import records
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import (
    Applied,
    Command,
    CopyObjects,
    Granted,
    PutEnd,
    PutStart,
    Remove,
    Report,
    Statuses,
    TaskList,
    Tasks,
)
from mooncake_py.master.disk_commands import DiskTasks
from mooncake_py.master.events import STORED
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.objects import HARD_PIN, PLACE_BITS, PLACE_MASK
from mooncake_py.master.state import extent_units
from mooncake_py.master.stripes import whole_key
from mooncake_py.master.tenant import BORROW
from mooncake_py.model import EXTENT_ROW
from mooncake_py.wire.rows import DISK_TASK


class History:
    def __init__(self) -> None:
        self.catalog: Catalog | None = None
        self.keys: dict[int, bytes] = {}  # generation -> key
        self.segments: dict[int, set[int]] = {}  # generation -> where it was granted
        self.committed: set[int] = set()  # acknowledged or about to be
        self.durable_commits: set[int] = set()
        self.durable_grants: set[int] = set()
        self.durable_drops: set[int] = set()
        self.gone_segments: set[int] = set()
        self.causes: dict[int, str] = {}  # why a generation is not there any more
        self.orphans: set[int] = set()  # granted by a master whose log was lost
        self.risen: set[int] = set()  # dropped, and back because the log was lost
        self.floors: dict[bytes, int] = {}  # removed: generations below must not be read
        self.lives = 0
        self.groups: dict[int, set[int]] = {}  # name -> generations granted with it, in this life
        self.mates: dict[int, set[int]] = {}  # generation -> those of its group
        self.copy_of: dict[int, int] = {}  # generation of a copied replica -> of its object
        self.counts: dict[str, int] = {}
        self.expiries: dict[int, tuple[int, int]] = {}  # of grants: master's clock, its life
        self.accepted: set[int] = set()  # commits that were answered with OK
        self.parts: set[int] = set()  # further parts of objects, which have no events
        self.events_seen = 0
        self.moved = 0  # evicted to a disk, by this master
        self.hard: set[int] = set()  # pinned hard before the present command

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # --- the master -----------------------------------------------------------------------------

    def applied(self, catalog: Catalog, command: Command, applied: Applied, now_ms: int) -> None:
        self.catalog = catalog
        self.count(type(command).__name__)
        self._learn_reply(command, applied.reply, now_ms)
        self._judge_groups(catalog)
        if isinstance(command, PutStart):
            self._judge_quota(catalog, command, applied.reply)
        for record in map(records.decode, applied.records):
            if isinstance(record, records.Drops):
                self.causes.update(dict.fromkeys(record.generations, self._cause(command)))
            elif isinstance(record, records.Lost) and not isinstance(command, Tasks | CopyObjects):
                for generation, _ in record.pairs:
                    self.causes.setdefault(generation, "a replica was lost")
            elif isinstance(record, records.Copies):
                for generation, _, segment_id, _ in record.rows:
                    self.segments.setdefault(generation, set()).add(segment_id)
                    self.count("copies committed")
            elif isinstance(record, records.Gone):
                self.gone_segments.add(record.segment_id)
        if isinstance(command, Remove):
            self._learn_removal(applied)
        told = self._judge_events(catalog, command)
        for generation in self.committed - self._live(catalog):
            assert generation in self.causes, f"generation {generation} vanished"
            known = generation in told or generation in self.parts
            assert known, f"no event tells of the end of {generation}"
            self.committed.discard(generation)
        self.hard = self._hard(catalog)

    def _judge_events(self, catalog: Catalog, command: Command) -> set[int]:
        """Every end has an event with its cause; what is pinned hard is never evicted."""
        page = catalog.state.events.page(self.events_seen, 1 << 10)
        assert not page.gap, "events are missing"
        self.events_seen = page.newest
        told: set[int] = set()
        for event in page.events:
            assert self.keys[event.generation] == event.key, "an event of another object"
            if event.what == STORED:
                continue
            told.add(event.generation)
            self.count(f"ended: {event.what}")
            if event.what == Event.EVICT.value:
                assert event.generation not in self.hard, "what was pinned hard was evicted"
        moved = catalog.state.counters["evictions_to_disk"]
        self.counts["evictions to disk"] = self.counts.get("evictions to disk", 0) + (
            moved - self.moved
        )
        self.moved = moved
        return told

    @staticmethod
    def _hard(catalog: Catalog) -> set[int]:
        table = catalog.state.table
        return {table.generation[slot] for slot in table.live() if table.flags[slot] & HARD_PIN}

    def _learn_removal(self, applied: Applied) -> None:
        """With a key goes what it had before and somebody may still read."""
        for effect in applied.effects:
            if effect.read_until_ms:
                for row in EXTENT_ROW.iter_unpack(effect.rows):
                    origin = self.copy_of.get(row[4], row[4])
                    assert origin in self.causes, "a living object is unsealed"
                    self.causes[origin] = "forced"
                    self.count("leased extents of removed keys")

    def _learn_reply(self, command: Command, reply: object, now_ms: int) -> None:
        if isinstance(command, PutStart) and isinstance(reply, Granted):
            for key, generation in zip(command.keys, reply.generations, strict=True):
                if generation:
                    assert generation > max(self.keys, default=0), "a generation is used again"
                    self.keys[generation] = key
            for index, segment_id, _, _, generation in grant_rows(reply):
                if generation not in self.keys:
                    self.keys[generation] = command.keys[index]
                    self.parts.add(generation)
                self.segments.setdefault(generation, set()).add(segment_id)
            self._learn_groups(reply)
        elif isinstance(reply, TaskList):
            self._learn_copies(reply)
        elif isinstance(reply, DiskTasks):
            self._learn_promotions(reply)
        elif isinstance(command, PutEnd) and isinstance(reply, Statuses):
            for generation, code in zip(command.generations, reply.status, strict=True):
                if code == 0:
                    # (What a master that has ended granted may have been stored in its time.)
                    expires_ms, life = self.expiries[generation]
                    in_time = life < self.lives or now_ms < expires_ms
                    known = generation in self.accepted or in_time
                    assert known, f"generation {generation} was committed after its expiry"
                    self.accepted.add(generation)
                    self.committed.add(generation)

    def _learn_groups(self, reply: Granted) -> None:
        for rows in reply.rows:
            for _, _, _, _, generation, expires_ms, _, name in EXTENT_ROW.iter_unpack(rows):
                self.expiries[generation] = (expires_ms, self.lives)
                if name:
                    self.groups.setdefault(name, set()).add(generation)
                    self.mates[generation] = self.groups[name]

    def _judge_groups(self, catalog: Catalog) -> None:
        """As long as one member is there, all are."""
        table = catalog.state.table
        for name, group in catalog.state.groups._groups.items():
            there = {table.generation[slot] for slot in group.slots}
            grants = (group.tenant.writing[key] for key in group.open or ())
            there |= {put.first + index for put, index in grants}
            assert self.groups.get(name, set()) <= there, f"a member of group {name} is missing"

    @staticmethod
    def _judge_quota(catalog: Catalog, command: PutStart, reply: object) -> None:
        """Who was granted something is within the quota, unless idle space may be borrowed."""
        tenant = catalog.state.tenants.find(command.tenant)
        granted = isinstance(reply, Granted) and any(reply.generations)
        if granted and tenant is not None and tenant.quota and tenant.quota.policy != BORROW:
            assert not tenant.over_quota, "granted beyond the quota"

    def _learn_copies(self, reply: TaskList) -> None:
        for task in reply.copies:
            assert task.generation not in self.keys, "a generation is used again"
            key = whole_key(task.name.key)
            assert self.keys[task.source_generation] == key, "a copy of another object"
            self.keys[task.generation] = key
            origin = self.copy_of.get(task.source_generation, task.source_generation)
            self.copy_of[task.generation] = origin
            assert self.catalog is not None
            copy = self.catalog.state.tasks.running[task.generation]
            assert copy.of == origin

    def _learn_promotions(self, reply: DiskTasks) -> None:
        for task in np.frombuffer(reply.promotions, DISK_TASK):
            generation, own = int(task["generation"]), int(task["memory_generation"])
            assert own not in self.keys, "a generation is used again"
            self.keys[own] = self.keys[generation]
            self.copy_of[own] = generation

    @staticmethod
    def _cause(command: Command) -> str:
        if isinstance(command, Remove):
            return "forced" if command.force else "removed"
        return "damaged" if isinstance(command, Report) else "space, time or node"

    @staticmethod
    def _live(catalog: Catalog) -> set[int]:
        table = catalog.state.table
        return {table.generation[slot] for slot in table.live()}

    def durable(self, written: Sequence[bytes]) -> None:
        for record in map(records.decode, written):
            if isinstance(record, records.Commits):
                self.durable_commits.update(record.generations)
            elif isinstance(record, records.GrantFields):
                self.durable_grants.update(record.generations)
            elif isinstance(record, records.Drops):
                self.durable_drops.update(record.generations)

    def master_restarted(self, catalog: Catalog, now_ms: int) -> None:
        """Only what had not reached the disk may be different now."""
        self.catalog = catalog
        self.events_seen, self.moved = catalog.state.events.next - 1, 0
        self.hard = self._hard(catalog)
        self.lives += 1
        self.groups.clear()  # of what was granted last, parts may be lost with the log
        live = self._live(catalog)
        running = {
            put.first + index
            for tenant in catalog.state.tenants
            for put, index in tenant.writing.values()
        }
        for generation in self.committed - live:
            assert (
                generation not in self.durable_commits & self.durable_grants
                or generation in self.durable_drops
                or generation in self.causes
                or self._lost_with_its_node(generation)
            ), f"generation {generation} was durable and is lost"
            self.causes.setdefault(generation, "the log was lost")
        self.committed = live | (self.committed & live)
        for generation in live | running:
            assert generation not in self.durable_drops, "back from the dead"
            if generation in self.causes:
                self.risen.add(generation)
                self.causes.pop(generation)
        copied = set(catalog.state.table.copied.values())
        self.orphans = set(self.keys) - live - running - copied

    def _lost_with_its_node(self, generation: int) -> bool:
        """Its own node, or that of another one of its group."""
        mates = self.mates.get(generation, {generation})
        return any(self.segments[each] & self.gone_segments for each in mates)

    def removal_acknowledged(self, keys: Sequence[bytes], reply: object, floor: int) -> None:
        if isinstance(reply, Statuses):
            for key, code in zip(keys, reply.status, strict=True):
                if code == 0:
                    self.floors[key] = max(floor, self.floors.get(key, 0))

    def all_removed(self, floor: int) -> None:
        """A removal of all that began when generations below this were known is through."""
        self.count("removals of all")
        for generation, key in self.keys.items():
            if generation < floor:
                self.floors[key] = max(floor, self.floors.get(key, 0))

    # --- the nodes ------------------------------------------------------------------------------

    def node_lost(self, segment_id: int) -> None:
        self.gone_segments.add(segment_id)

    def judge_write(self, segment_id: int, units: range, generation: int) -> None:
        """A node writes: nothing that lives, and no other grant, may be there."""
        assert self.catalog is not None
        if generation in self.orphans or segment_id in self.gone_segments:
            return
        state = self.catalog.state
        segment = state.members.by_id.get(segment_id)
        if segment is None:
            return
        for other, units_of, place in self._extents():
            if place >> PLACE_BITS != segment.index or other == generation:
                continue
            start = place & PLACE_MASK
            end = start + units_of
            assert end <= units.start or units.stop <= start, (
                f"generation {generation} writes {units} over generation {other} at {start}..{end}"
            )

    def _extents(self) -> list[tuple[int, int, int]]:
        assert self.catalog is not None
        table = self.catalog.state.table
        found = [
            (table.replica_generation(slot, place), extent_units(table.length[slot]), place)
            for slot in table.live()
            for place in table.places(slot)
        ]
        found += [
            (copy.generation, copy.units, copy.target)
            for copy in self.catalog.state.tasks.running.values()
        ]
        found += [
            (each.own, each.units, each.place)
            for segment in self.catalog.state.members.disks.values()
            if segment.disk is not None
            for each in segment.disk.promotions.values()
        ]
        for tenant in self.catalog.state.tenants:
            for put, index in tenant.writing.values():
                found += [
                    (put.first + index, extent_units(put.lengths[index]), place)
                    for place in put.places[index]
                ]
        return found

    def damaged(self, generation: int) -> None:
        """A sealed extent does not hold its own bytes: only if it had ended before."""
        self.count("checksum mismatches")
        if generation in self.copy_of:
            assert self.catalog is not None
            assert generation not in self.catalog.state.table.copied.values()
            return
        assert generation in self.causes or generation in self.risen, (
            f"bytes of living generation {generation} were overwritten"
        )

    # --- the clients ----------------------------------------------------------------------------

    def judge_read(self, key: bytes, generation: int, floor: int) -> None:
        assert self.keys[generation] == key, "bytes of another object"
        generation = self.copy_of.get(generation, generation)
        assert generation >= floor, f"{key!r} was removed and is read again"
        self.count("good reads")

    def judge_stale(self, generation: int, segment_id: int, lives: int, leased: bool) -> None:
        """A reader found something else there."""
        self.count("stale reads")
        if not leased or lives != self.lives or segment_id in self.gone_segments:
            return
        generation = self.copy_of.get(generation, generation)
        cause = self.causes.get(generation, "")
        assert cause in ("forced", "damaged") or generation in self.risen, (
            f"generation {generation} was leased and is gone ({cause or 'no cause'})"
        )
