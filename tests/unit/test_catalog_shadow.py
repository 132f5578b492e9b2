"""A shadow that followed the records has the state that reading all of them again gives."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from catalog_disk import DiskNode

from mooncake_py.errors import ChecksumMismatch, LeaseExpired, OutOfSpace
from mooncake_py.master import records
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import (
    Heartbeat,
    Locate,
    Mount,
    PutEnd,
    PutRevoke,
    PutStart,
    Remove,
    Report,
    SetQuota,
    Tick,
    Unmount,
)
from mooncake_py.master.disk_commands import DiskTasks
from mooncake_py.master.objects import COLD, HARD_PIN, PLACE_BITS, PLACE_MASK, SOFT_PIN, TTL
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.shadow import Shadow
from mooncake_py.master.state import CatalogState
from mooncake_py.model import ReplicaPolicy

SETTINGS = CatalogSettings(objects_max=10_000, dead_ms=30_000, offload_ahead_ratio=0.4)
SEGMENT_BYTES = 1 << 16


def picture(state: CatalogState, now_ms: int) -> dict[str, Any]:
    """What a state means, without the order in which it came about."""
    table, members = state.table, state.members

    def extents(places: tuple[int, ...]) -> list[tuple[int, int]]:
        found = ((members.at(p >> PLACE_BITS).segment_id, p & PLACE_MASK) for p in places)
        return sorted(found)

    objects = {}
    for tenant in state.tenants:
        for key, slot in tenant.complete.items():
            flags = table.flags[slot]
            pin = table.soft_pins[slot] if flags & SOFT_PIN else 0
            objects[tenant.name, key] = (
                table.generation[slot],
                table.length[slot],
                extents(table.places(slot)),
                bool(flags & HARD_PIN),
                pin if pin > now_ms else 0,
                table.ttls[slot] if flags & TTL else 0,
                table.leased_until(slot, state.settings.lease_ms),
                table.groups.get(slot, 0),
            )
    return {
        "objects": objects,
        "grants": {
            (tenant.name, key): (
                put.first + index, put.lengths[index], extents(put.places[index]), put.expires_ms
            )
            for tenant in state.tenants
            for key, (put, index) in tenant.writing.items()
        },
        "segments": {
            s.segment_id: (
                s.node, s.incarnation, s.address, s.state, s.mounted, s.used_units,
                s.resting_units, s.allocator.holes(),
            )
            for s in members
        },
        "resting": sorted(each for each in state.resting if each[1] in members.by_id),
        "tenants": {
            t.name: (t.used_bytes, t.quota) for t in state.tenants if t.key_count or t.quota
        },
        "pinned": state.hard_pinned_units,
        "groups": {
            name: (sorted(group.open or ()), sorted(table.key[slot] or b"" for slot in group.slots))
            for name, group in state.groups._groups.items()
        },
        "open": state.open_grants,
        "marks": (state.next_generation, members.next_segment_id),
    }  # fmt: skip


class Driver:
    """A leader under random commands, and its log."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.catalog = Catalog(SETTINGS)
        self.catalog.begin_term(1)
        self.now_ms = 1_000_000
        self.log: list[bytes] = []
        self.nodes: dict[str, tuple[int, int]] = {}  # incarnation, segment id
        self.running: list[tuple[str, bytes, int]] = []
        self.disks: dict[str, DiskNode] = {}

    def do(self, command: Any) -> Any:
        applied = self.catalog.apply(command, self.now_ms)
        self.log += applied.records
        return applied.reply

    def step(self) -> None:
        usual = [self.put, self.end, self.end, self.time, self.read]
        usual += [self.work, self.work] if self.disks else []
        rare = [self.remove, self.revoke, self.damage, self.node, self.quota, self.disk]
        self.random.choice(usual if self.nodes and self.random.random() < 0.9 else rare)()

    def keys(self) -> list[bytes]:
        return [b"k%d" % self.random.randrange(40) for _ in range(self.random.randint(1, 4))]

    def put(self) -> None:
        keys = list(dict.fromkeys(self.keys()))
        policy = ReplicaPolicy(
            replica_count=self.random.choice([1, 1, 2]),
            hard_pin=self.random.random() < 0.1,
            soft_pin_ms=self.random.choice([0, 0, 5_000]),
            ttl_ms=self.random.choice([0, 0, 8_000]),
        )
        tenant = self.random.choice(["a", "b"])
        lengths = [self.random.randrange(6_000) for _ in keys]
        digests = bytes(16 * len(keys))
        seed = self.random.getrandbits(64)
        groups = self.random.choice([(), [1] * len(keys), [*range(len(keys))]])
        upsert = self.random.random() < 0.3
        reply = self.do(
            PutStart(
                tenant, keys, lengths, digests, policy, groups=groups, random=seed, upsert=upsert
            )
        )
        for key, generation in zip(keys, reply.generations, strict=True):
            if generation:
                self.running.append((tenant, key, generation))

    def _taken(self) -> tuple[str, bytes, int] | None:
        if not self.running:
            return None
        return self.running.pop(self.random.randrange(len(self.running)))

    def end(self) -> None:
        grant = self._taken()
        if grant is not None:
            tenant, key, generation = grant
            segments = [segment for _, segment in self.nodes.values()]
            failed = [(0, self.random.choice(segments))] if self.random.random() < 0.2 else []
            self.do(PutEnd(tenant, [key], [generation], failed if segments else []))

    def revoke(self) -> None:
        grant = self._taken()
        if grant is not None:
            self.do(PutRevoke(grant[0], [grant[1]], [grant[2]]))

    def read(self) -> None:
        self.do(Locate(self.random.choice(["a", "b"]), self.keys(), lease_ms=6_000))

    def remove(self) -> None:
        force = self.random.random() < 0.5
        self.do(Remove(self.random.choice(["a", "b"]), self.keys(), force=force))

    def damage(self) -> None:
        for tenant in self.catalog.state.tenants:
            for key, slot in list(tenant.complete.items())[:1]:
                table = self.catalog.state.table
                where = self.catalog.state.members.at(table.place[slot] >> PLACE_BITS).segment_id
                command = Report(
                    tenant.name, [key], [table.generation[slot]], [where], [ChecksumMismatch.code]
                )
                self.do(command)

    def time(self) -> None:
        self.now_ms += self.random.choice([1, 10, 100, 1_000])
        for name, (incarnation, segment) in self.nodes.items():
            self.do(Heartbeat(name, incarnation, segment))
        self.do(Tick())

    def quota(self) -> None:
        policy = self.random.choice(["reject", "evict_own", "borrow"])
        remove = self.random.random() < 0.3
        tenant = self.random.choice(["a", "b"])
        self.do(SetQuota(tenant, bytes_max=1 << 15, policy=policy, remove=remove))

    def node(self) -> None:
        name = self.random.choice(["n0", "n1", "n2"])
        known = self.nodes.get(name)
        if known is not None and self.random.random() < 0.3:
            self.do(Unmount(name, *known))
            del self.nodes[name]
            return
        incarnation = self.random.choice([1, known[0] if known else 1, self.random.randrange(99)])
        segment = known[1] if known and known[0] == incarnation else 0
        mount = Mount(name, incarnation, f"{name}:1", 3, SEGMENT_BYTES, f"h{name}", segment)
        reply = self.do(mount)
        self.nodes[name] = (incarnation, reply.segment_id)

    def disk(self) -> None:
        name = self.random.choice(list(self.nodes) or ["n0"])
        node = self.disks.setdefault(name, DiskNode(name, len(self.disks) + 1))
        if name in self.nodes:
            reply = self.do(node.mount(self.nodes[name][0]))
            node.segment_id = getattr(reply, "segment_id", 0)

    def work(self) -> None:
        node = self.random.choice(list(self.disks.values()))
        tenants = self.catalog.state.tenants
        cold = [
            (tenant.name, key, self.catalog.state.table.generation[slot])
            for tenant in tenants
            for key, slot in tenant.complete.items()
            if self.catalog.state.table.flags[slot] & COLD
        ]
        wanted = self.random.sample(cold, min(len(cold), self.random.randrange(3)))
        code = self.random.choice([0, 0, 0, 0, OutOfSpace.code, LeaseExpired.code])
        reply = self.do(node.ask(wanted, auditing=self.random.random() < 0.3))
        if isinstance(reply, DiskTasks):
            node.carry_out(reply, code)


@pytest.mark.parametrize("seed", range(30))
def test_a_shadow_equals_a_restored_catalog(seed: int) -> None:
    driver = Driver(seed)
    shadow = Shadow(SETTINGS)
    base, snapshot = 0, None
    if seed % 3 == 2:  # it joins late, by a snapshot
        for _ in range(150):
            driver.step()
        snapshot, base = driver.catalog.snapshot(driver.now_ms), len(driver.log)
        shadow.feed(records.unpack(snapshot))
    fed = base
    for _ in range(400):
        driver.step()
        if driver.random.random() < 0.2:
            shadow.feed(driver.log[fed:])
            fed = len(driver.log)
    shadow.feed(driver.log[fed:])
    restored, taken = Catalog(SETTINGS), Catalog(SETTINGS)
    restored.restore(snapshot, driver.log[base:], driver.now_ms)
    report = taken.take_over(shadow, driver.now_ms)
    assert report is not None
    assert report.segments > 0
    assert picture(taken.state, driver.now_ms) == picture(restored.state, driver.now_ms)
    driver.catalog = taken  # and it can decide
    driver.catalog.begin_term(2)
    driver.nodes.clear()
    driver.disks.clear()
    for _ in range(100):
        driver.step()
    for segment in taken.state.members:
        free = sum(units for _, units in segment.allocator.holes())
        gone = segment.state == "gone" or segment.disk is not None
        assert gone or free + segment.used_units + segment.resting_units == segment.allocator.units


@pytest.mark.parametrize("group", [0, 7])
def test_a08_a_shadow_knows_an_object_whose_last_replica_came_just_in_time(group: int) -> None:
    """Its node is gone, the object is not forgotten yet, and now a disk reports that it has it."""
    driver = Driver(1)
    segment_id = driver.do(Mount("n", 1, "n:1", 3, SEGMENT_BYTES, "h")).segment_id
    disk = DiskNode("n", 1)
    disk.segment_id = driver.do(disk.mount(1)).segment_id
    keys, lengths = [b"k", b"l"], [40_000, 20_000]
    generations = driver.do(PutStart("a", keys, lengths, bytes(32), groups=[group] * 2)).generations
    driver.do(PutEnd("a", keys, generations))
    driver.do(Tick())
    disk.carry_out(driver.do(disk.ask()))
    driver.do(Unmount("n", 1, segment_id))
    driver.do(disk.ask())
    driver.do(Tick())
    shadow, taken = Shadow(SETTINGS), Catalog(SETTINGS)
    shadow.feed(driver.log)
    assert taken.take_over(shadow, driver.now_ms) is not None
    objects = picture(taken.state, driver.now_ms)["objects"]
    known = picture(driver.catalog.state, driver.now_ms)["objects"]
    assert objects.keys() == known.keys()
    assert len(objects) == 2


def test_claims_that_contradict_each_other_are_noticed() -> None:
    driver = Driver(1)
    driver.do(Mount("n", 1, "n:1", 3, SEGMENT_BYTES, "h"))
    driver.do(PutStart("a", [b"k"], [100], bytes(16)))
    (honest,) = (r for r in map(records.decode, driver.log) if isinstance(r, records.GrantFields))
    forged = replace(honest, keys=[b"other"], generations=[honest.generations[0] + 1])
    log = [*driver.log, records.encode(forged)]
    shadow = Shadow(SETTINGS)
    shadow.feed(log)
    assert Catalog(SETTINGS).take_over(shadow, driver.now_ms) is None
    report = Catalog(SETTINGS).restore(None, log, driver.now_ms)
    assert (report.grants, report.extents_overlapping) == (1, 1)


def test_damaged_records_are_counted_and_left_out() -> None:
    driver = Driver(1)
    driver.do(Mount("n", 1, "n:1", 3, SEGMENT_BYTES, "h"))
    driver.do(PutStart("a", [b"k"], [100], bytes(16)))
    newer = b"\x02" + driver.log[-1][1:]
    shadow = Shadow(SETTINGS)
    shadow.feed([b"short", driver.log[0][:-1] + b"?", *driver.log, newer])
    report = Catalog(SETTINGS).take_over(shadow, driver.now_ms)
    assert report is not None
    assert (report.damaged_records, report.segments, report.grants) == (3, 1, 1)
