"""What the catalog's tests share: invariants that hold after every step, a small driver that reads
replies, and (`Model`) the obvious reference: dictionaries, no space, no speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import (
    Applied,
    Command,
    CopyTask,
    Exists,
    Granted,
    Heartbeat,
    Locate,
    Located,
    Mount,
    Mounted,
    Present,
    PutEnd,
    PutRevoke,
    PutStart,
    Remove,
    Statuses,
    TaskList,
    Tasks,
    Tick,
)
from mooncake_py.master.disks import Disk
from mooncake_py.master.eviction import Lru
from mooncake_py.master.groups import is_named
from mooncake_py.master.membership import GONE, SUSPECT, Segment
from mooncake_py.master.objects import (
    COLD,
    HARD_PIN,
    ON_DISK,
    PARKED,
    PLACE_BITS,
    PLACE_MASK,
    READ,
)
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.state import extent_units
from mooncake_py.master.stripes import is_part
from mooncake_py.model import EXTENT_ROW, FOLLOWS, PLACEMENT_ROW, ReplicaPolicy


class _Books:
    """Everything that lives, added up independently of the catalog's own sums."""

    def __init__(self, catalog: Catalog) -> None:
        self.state = catalog.state
        self.claims: dict[int, list[tuple[int, int, str]]] = {}
        self.used: dict[int, int] = {}
        self.resting: dict[int, int] = {}
        self.tenant_bytes: dict[str, int] = {}
        self.pinned_units = 0
        self.on_disk: dict[int, set[int]] = {}
        self.generations: list[int] = []
        for segment in self.state.members:
            self.claims[segment.index] = []
            self.used[segment.index] = self.resting[segment.index] = 0

    def add_objects(self) -> None:
        table = self.state.table
        for slot in table.live():
            key = table.key[slot]
            assert key is not None
            tenant = self.state.tenants.at(table.tenant[slot])
            assert tenant.complete[key] == slot, f"{key!r} is not indexed"
            places = table.places(slot)
            homes = [self.state.members.at(place >> PLACE_BITS) for place in places]
            nodes = {(home.node, home.disk is None) for home in homes}
            assert len(nodes) == len(places), f"{key!r} is twice on a node"
            self._check_flags(slot, homes)
            self.generations.append(table.generation[slot])
            self.generations += [table.copied[each] for each in places if each in table.copied]
            pinned = bool(table.flags[slot] & HARD_PIN)
            self._own(tenant.name, places, table.length[slot], f"object {key!r}", pinned)

    def _check_flags(self, slot: int, homes: list[Segment]) -> None:
        flags = self.state.table.flags[slot]
        on_disk = [home for home in homes if home.disk is not None]
        assert bool(flags & ON_DISK) == bool(on_disk)
        assert bool(flags & COLD) == (len(on_disk) == len(homes))
        assert not flags & COLD or not flags & PARKED
        for home in on_disk:
            self.on_disk.setdefault(home.index, set()).add(slot)

    def add_grants(self) -> None:
        watched = {id(put) for _, _, put in self.state._expiries}
        for tenant in self.state.tenants:
            for key, (put, index) in tenant.writing.items():
                assert put.keys[index] == key
                assert put.tenant is tenant
                assert id(put) in watched, "a grant without an end"
                self.generations.append(put.first + index)
                places, length = put.places[index], put.lengths[index]
                self._own(tenant.name, places, length, f"grant {key!r}", put.hard_pin)

    def add_copies(self) -> None:
        for copy in self.state.tasks.running.values():
            self.generations.append(copy.generation)
            index = copy.target >> PLACE_BITS
            self.claims[index].append((copy.target & PLACE_MASK, copy.units, "a copy"))
            self.used[index] += copy.units

    def add_gathered(self) -> None:
        """Parts that wait for the others to be told of have their place already."""
        unrecorded = self.state.unrecorded
        found_in = [found for group in unrecorded.gathered.values() for found in group.values()]
        for segment, found in chain.from_iterable([unrecorded.contested, *found_in]):
            if found.claimed and segment in list(self.state.members):
                self.claims[segment.index].append((found.start, found.units, "gathered"))
                self.used[segment.index] += segment.charge(found.units)

    def add_promotions(self) -> None:
        for segment in self.state.members.disks.values():
            assert segment.disk is not None
            for each in segment.disk.promotions.values():
                self.generations.append(each.own)
                index = each.place >> PLACE_BITS
                self.claims[index].append((each.place & PLACE_MASK, each.units, "a promotion"))
                self.used[index] += each.units

    def add_resting(self) -> None:
        for _, segment_id, start, units in self.state.resting:
            segment = self.state.members.by_id.get(segment_id)
            if segment is not None:
                self.claims[segment.index].append((start, units, "resting"))
                self.resting[segment.index] += units

    def _own(
        self, tenant: str, places: tuple[int, ...], length: int, what: str, pinned: bool
    ) -> None:
        units = extent_units(length)
        for place in places:
            self.claims[place >> PLACE_BITS].append((place & PLACE_MASK, units, what))
            segment = self.state.members.at(place >> PLACE_BITS)
            self.used[segment.index] += segment.charge(units)
            if segment.disk is None:
                self.tenant_bytes[tenant] = self.tenant_bytes.get(tenant, 0) + units * 64
                self.pinned_units += units * pinned

    def check(self) -> None:
        state = self.state
        table = state.table
        owned = {place for slot in table.live() for place in table.places(slot)}
        assert set(table.copied) <= owned, "a generation of a replica that is not there"
        assert set(table.wanted) <= set(table.live())
        for name, group in state.groups._groups.items():
            assert group.open or group.slots, "an empty group"
            for slot in group.slots:
                assert state.table.groups[slot] & ~FOLLOWS == name
                assert (slot in (group.followers or ())) == bool(state.table.groups[slot] & FOLLOWS)
            for key in group.open or ():
                put, index = group.tenant.writing[key]
                assert put.groups[index] == name
        assert state.groups.hiding == sum(not is_named(name) for name in state.groups._groups)
        assert len(state.table.groups) == sum(
            len(each.slots) for each in state.groups._groups.values()
        )
        assert self.pinned_units == state.hard_pinned_units
        assert self.pinned_units == sum(each.hard_pinned_units for each in state.tenants)
        assert state.open_grants == sum(len(each.writing) for each in state.tenants)
        assert len(set(self.generations)) == len(self.generations), "a generation lives twice"
        assert all(each < state.next_generation for each in self.generations)
        assert state.next_generation <= state.generation_mark
        for tenant in state.tenants:
            keys = [*tenant.complete, *tenant.writing]
            assert tenant.part_count == sum(map(is_part, keys)), "parts are no keys"
            if isinstance(tenant.pool, Lru):
                inside = [s for s in tenant.complete.values() if not table.flags[s] & COLD]
                assert tenant.pool._count == len(inside)
                unread = sum(not table.flags[s] & READ for s in inside)
                assert tenant.pool._unread == unread, "unread objects"
            assert tenant.used_bytes == self.tenant_bytes.get(tenant.name, 0), "tenant's bytes"
        assert len(state.table) == sum(len(each.complete) for each in state.tenants)
        assert state.disks.cold_count == sum(bool(table.flags[s] & COLD) for s in table.live())
        assert state.disks.ready_units == sum(each.units for each in state.disks.ready)
        for segment in state.members:
            if segment.disk is not None:
                self._check_disk(segment, segment.disk)
            if segment.state != GONE:
                self._check_segment(segment)

    def _check_disk(self, segment: Segment, disk: Disk) -> None:
        links = self.state.disks._links
        assert links is not None
        found, slot = [], links.next[disk.head]
        while slot != disk.head:
            found.append(slot)
            slot = links.next[slot]
        assert len(set(found)) == len(found)
        assert set(found) == self.on_disk.get(segment.index, set()), "the disk's list"
        assert disk.pending_units == sum(each.units for each in disk.offloads.values())
        assert disk.promoting == {each.slot for each in disk.promotions.values()}

    def _check_segment(self, segment: Segment) -> None:
        assert segment.used_units == self.used[segment.index], f"used of {segment.node}"
        assert segment.resting_units == self.resting[segment.index], f"resting of {segment.node}"
        holes = [(start, units, "hole") for start, units in segment.allocator.holes()]
        position = 0
        for start, units, what in sorted(self.claims[segment.index] + holes):
            assert start == position, f"{what} at {start} of {segment.node}, expected {position}"
            position = start + units
        assert position == segment.allocator.units
        assert segment.allocator.free == sum(units for _, units, _ in holes)


def check_invariants(catalog: Catalog) -> None:
    """No extent belongs to two things, books equal what lives, every grant has an end."""
    books = _Books(catalog)
    books.add_objects()
    books.add_grants()
    books.add_copies()
    books.add_gathered()
    books.add_promotions()
    books.add_resting()
    books.check()


@dataclass
class Driver:
    """A catalog with a clock, and replies in plain form."""

    settings: CatalogSettings = field(default_factory=lambda: CatalogSettings(objects_max=1 << 14))
    now_ms: int = 1_000_000
    log: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.catalog = Catalog(self.settings)
        self.random = 1

    def apply(self, command: Command) -> Applied:
        applied = self.catalog.apply(command, self.now_ms)
        self.log += applied.records
        return applied

    def mount(self, node: str, nbytes: int, incarnation: int = 1, host_id: str = "") -> int:
        command = Mount(node, incarnation, f"{node}:{incarnation}", 1, nbytes, host_id or node)
        reply = self.apply(command).reply
        assert isinstance(reply, Mounted), reply
        return reply.segment_id

    def start(
        self,
        keys: list[bytes],
        length: int = 4096,
        *,
        upsert: bool = False,
        groups: Sequence[int] = (),
        **options: object,
    ) -> Granted:
        self.random += 1
        policy = ReplicaPolicy(**options)  # type: ignore[arg-type]
        command = PutStart(
            "t", keys, [length] * len(keys), bytes(16 * len(keys)), policy, random=self.random,
            upsert=upsert, groups=groups,
        )  # fmt: skip
        reply = self.apply(command).reply
        assert isinstance(reply, Granted), reply
        return reply

    def end(self, keys: list[bytes], generations: list[int], **options: object) -> list[int]:
        reply = self.apply(PutEnd("t", keys, generations, **options)).reply  # type: ignore[arg-type]
        assert isinstance(reply, Statuses), reply
        return list(reply.status)

    def put(self, keys: list[bytes], length: int = 4096, **options: object) -> list[int]:
        """Statuses of start, then end where start was granted."""
        granted = self.start(keys, length, **options)  # type: ignore[arg-type]
        going = [i for i, code in enumerate(granted.status) if code == 0]
        ends = self.end([keys[i] for i in going], [granted.generations[i] for i in going])
        status = list(granted.status)
        for i, code in zip(going, ends, strict=True):
            status[i] = code
        return status

    def revoke(self, keys: list[bytes], generations: list[int]) -> list[int]:
        reply = self.apply(PutRevoke("t", keys, generations)).reply
        assert isinstance(reply, Statuses)
        return list(reply.status)

    def exists(self, keys: list[bytes]) -> list[int]:
        reply = self.apply(Exists("t", keys)).reply
        assert isinstance(reply, Present)
        return list(reply.present)

    def locate(self, keys: list[bytes], **options: object) -> Located:
        reply = self.apply(Locate("t", keys, **options)).reply  # type: ignore[arg-type]
        assert isinstance(reply, Located)
        return reply

    def remove(self, keys: list[bytes], **options: object) -> Statuses:
        reply = self.apply(Remove("t", keys, **options)).reply  # type: ignore[arg-type]
        assert isinstance(reply, Statuses)
        return reply

    def beat(self, *nodes: tuple[str, int, int]) -> None:
        for node, incarnation, segment_id in nodes:
            self.apply(Heartbeat(node, incarnation, segment_id))

    def beat_all(self) -> None:
        for segment in list(self.catalog.state.members):
            if segment.state != GONE and segment.disk is None:
                self.apply(Heartbeat(segment.node, segment.incarnation, segment.segment_id))

    def pass_time(self, ms: int, alive: bool = True) -> None:
        """Move the clock in ticks; with `alive` every node keeps sending heartbeats."""
        end = self.now_ms + ms
        while self.now_ms < end:
            self.now_ms = min(end, self.now_ms + self.settings.tick_ms)
            if alive:
                self.beat_all()
            self.apply(Tick())

    def fetch_tasks(self, segment_id: int, done: list[tuple[int, int]], limit: int) -> TaskList:
        segment = self.catalog.state.members.by_id[segment_id]
        command = Tasks(segment.node, segment.incarnation, segment_id, done, limit)
        reply = self.apply(command).reply
        assert isinstance(reply, TaskList), reply
        return reply

    def work_off(self, code: int = 0, limit: int = 64) -> list[CopyTask]:
        """Every node fetches its tasks once and reports all of them with this code."""
        found: list[CopyTask] = []
        for segment in list(self.catalog.state.members):
            if segment.state not in (GONE, SUSPECT) and segment.disk is None:
                tasks = self.fetch_tasks(segment.segment_id, [], limit).copies
                done = [(task.generation, code) for task in tasks]
                self.fetch_tasks(segment.segment_id, done, 0)
                found += tasks
        return found

    def used_bytes(self) -> int:
        return sum(each.used_units * 64 for each in self.catalog.state.members)


def grant_rows(granted: Granted) -> list[tuple[int, int, int, int, int]]:
    """(key index, segment id, offset, length, generation) of every replica."""
    found = []
    for segment_id, rows in zip(granted.segment_ids, granted.rows, strict=True):
        for index, _, offset, length, generation, _, _, _ in EXTENT_ROW.iter_unpack(rows):
            found.append((index, segment_id, offset, length, generation))
    return sorted(found)


def place_rows(located: Located) -> list[tuple[int, int, int, int, int]]:
    """(key index, segment id, offset, length, generation) of every replica."""
    return [
        (index, located.segment_ids[entry], offset, length, generation)
        for index, entry, offset, length, generation in PLACEMENT_ROW.iter_unpack(
            located.placements
        )
    ]


def picture(catalog: Catalog) -> dict[str, object]:
    """What a restart must keep, in comparable form."""
    state = catalog.state
    table, members = state.table, state.members

    def extents(places: tuple[int, ...]) -> list[tuple[int, int]]:
        found = []
        for place in places:
            segment = members.at(place >> PLACE_BITS)
            if segment.state != GONE:
                found.append((segment.segment_id, place & PLACE_MASK))
        return sorted(found)

    objects = {
        (
            state.tenants.at(table.tenant[slot]).name,
            table.key[slot],
            table.generation[slot],
            table.length[slot],
            table.soft_pins.get(slot, 0),
            table.ttls.get(slot, 0),
            table.flags[slot] & HARD_PIN,
            table.groups.get(slot, 0),
        ): extents(table.places(slot))
        for slot in table.live()
    }
    grants = {
        (
            tenant.name,
            key,
            put.first + index,
            put.lengths[index],
            put.expires_ms,
            put.soft_pin_ms,
            put.ttl_ms,
            put.hard_pin,
            put.groups[index] if put.groups else 0,
        ): extents(put.places[index])
        for tenant in state.tenants
        for key, (put, index) in tenant.writing.items()
    }
    return {
        "objects": {what: where for what, where in objects.items() if where},
        "grants": {what: where for what, where in grants.items() if where},
        "quotas": {each.name: each.quota for each in state.tenants if each.quota is not None},
        "segments": {
            (each.segment_id, each.node, each.incarnation, each.address, each.nbytes)
            for each in members
            if each.state != GONE
        },
        "resting": sorted(
            entry
            for entry in state.resting
            if (segment := members.by_id.get(entry[1])) is not None and segment.state != GONE
        ),
    }
