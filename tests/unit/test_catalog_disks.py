"""The disk tier in the catalog: offload ahead, evict for nothing, come back, end for good."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from catalog_disk import DISK_BYTES, DiskNode
from catalog_model import Driver, check_invariants, place_rows

from mooncake_py.errors import (
    OK,
    ChecksumMismatch,
    InternalError,
    LeaseExpired,
    ObjectNotFound,
    OutOfSpace,
    UsageError,
)
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import (
    Mounted,
    Refused,
    Remove,
    Report,
    SetQuota,
    Status,
    StatusInfo,
    Tick,
    Unmount,
    Unseal,
)
from mooncake_py.master.disk_commands import DiskTasks
from mooncake_py.master.membership import ALIVE, AWAY, GONE
from mooncake_py.master.settings import CatalogSettings

MEMORY = 64 * 4_096
LENGTH = 4_096 - 64
SETTINGS = CatalogSettings(
    objects_max=1 << 14, lease_ms=1_000, offload_ahead_ratio=0.2, disk_away_ms=60_000
)


class Tier(Driver):
    """One node with a disk behind its memory."""

    node: DiskNode

    def begin(self, nbytes: int = DISK_BYTES, memory: int = MEMORY) -> Tier:
        self.mount("n", memory)
        self.node = DiskNode("n", 77, nbytes)
        self.join(1)
        return self

    def join(self, incarnation: int) -> None:
        reply = self.apply(self.node.mount(incarnation)).reply
        assert isinstance(reply, Mounted)
        self.node.segment_id = reply.segment_id

    def work(self, code: int = OK, rounds: int = 3, **options: bool) -> None:
        """Ask, do, report, until nothing new comes."""
        for _ in range(rounds):
            applied = self.apply(self.node.ask(**options))
            assert isinstance(applied.reply, DiskTasks)
            self.node.carry_out(applied.reply, code)
            check_invariants(self.catalog)

    def keys(self, first: int, count: int) -> list[bytes]:
        return [b"k%d" % i for i in range(first, first + count)]

    def fill(self, count: int, first: int = 0) -> None:
        """Puts, and work of the disk in between."""
        for key in self.keys(first, count):
            assert self.put([key], LENGTH) == [OK]
            self.pass_time(100)
            self.drop_ended()
            self.work()

    def drop_ended(self) -> None:
        """What the heartbeats of a process would bring: deletions of ended objects."""
        for effect in self.ended:
            self.node.has -= effect
        self.ended.clear()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ended: list[set[int]] = []

    def apply(self, command):  # type: ignore[no-untyped-def]
        applied = super().apply(command)
        for effect in applied.effects:
            if isinstance(effect, Unseal) and effect.segment_id == self.node.segment_id:
                rows = [effect.rows[at : at + 64] for at in range(0, len(effect.rows), 64)]
                self.ended.append({int.from_bytes(row[24:32], "little") for row in rows})
        return applied

    def numbers(self) -> dict[str, float]:
        info = self.apply(Status()).reply
        assert isinstance(info, StatusInfo)
        return info.counters

    def where(self, key: bytes) -> list[str]:
        """disk or memory, a word a replica."""
        located = self.locate([key])
        disks = {each.segment_id for each in self.catalog.state.members.disks.values()}
        rows = place_rows(located)
        return ["disk" if row[1] in disks else "memory" for row in rows]


@pytest.fixture
def tier() -> Tier:
    made = Tier(SETTINGS)
    made.node = DiskNode("none", 1)
    return made.begin()


def test_f41_evicted_objects_live_on_on_the_disk(tier: Tier) -> None:
    tier.fill(100)
    assert tier.exists(tier.keys(0, 100)) == [1] * 100
    assert tier.where(b"k0") == ["disk"]
    assert "memory" in tier.where(b"k99")
    counted = tier.numbers()
    assert counted["evictions"] == 0
    assert counted["evictions_to_disk"] == counted["disk_cold_objects"] >= 40


def test_a79_what_was_used_longest_ago_leaves_a_full_disk(tier: Tier) -> None:
    small = Tier(SETTINGS)
    small.node = DiskNode("none", 1)
    small.begin(nbytes=40 * 4_096)
    small.fill(150)
    counted = small.numbers()
    small.pass_time(1_500)
    counted = small.numbers()
    assert counted["disk_used_bytes"] <= 40 * 4_096
    assert counted["disk_evictions"] > 0
    assert small.exists([b"k0", b"k149"]) == [0, 1]
    assert {len(small.node.has) * 4_096 <= 41 * 4_096} == {True}


def test_a79_a_disk_with_less_room_than_before_gives_up_objects(tier: Tier) -> None:
    tier.fill(100)
    tier.node.nbytes = 10 * 4_096  # the file system filled up
    tier.work()
    tier.pass_time(5_000)
    assert tier.numbers()["disk_used_bytes"] <= 10 * 4_096


def test_f42_the_second_read_promotes(tier: Tier) -> None:
    tier.fill(100)
    generation = place_rows(tier.locate([b"k0"]))[0][4]
    applied = tier.apply(tier.node.ask([("t", b"k0", generation)]))
    assert isinstance(applied.reply, DiskTasks)
    assert len(applied.reply.promotions) == 48
    tier.node.carry_out(applied.reply)
    tier.work(rounds=1)
    assert sorted(tier.where(b"k0")) == ["disk", "memory"]
    tier.pass_time(5_000)
    tier.fill(60, first=200)  # and back again, without a second write
    before = tier.node.offloaded
    assert tier.where(b"k0") in (["disk"], ["memory", "disk"], ["disk", "memory"])
    assert tier.node.offloaded == before


def test_f42_a_promotion_drops_nothing_that_is_on_no_disk_yet() -> None:
    """The disk is behind: what was put last is in memory alone, and so it stays."""
    tier = Tier(SETTINGS)
    tier.node = DiskNode("none", 1)
    tier.begin(4 * DISK_BYTES)
    tier.fill(100)
    everything = tier.keys(0, 100)
    wanted = []
    for key in tier.keys(0, 30):
        wanted.append(("t", key, place_rows(tier.locate([key]))[0][4]))
    tier.pass_time(2_000)
    for _ in range(3):
        for at in range(0, len(wanted), 8):
            tier.apply(tier.node.ask(wanted[at : at + 8]))
            tier.pass_time(50)
    assert tier.exists(everything) == [1] * 100
    assert tier.numbers()["disk_promotions_refused"] > 0
    check_invariants(tier.catalog)


def test_f42_a_removed_object_is_promoted_to_nothing(tier: Tier) -> None:
    tier.fill(100)
    generation = place_rows(tier.locate([b"k0"]))[0][4]
    used = tier.used_bytes()
    applied = tier.apply(tier.node.ask([("t", b"k0", generation)]))
    assert isinstance(applied.reply, DiskTasks)
    tier.remove([b"k0"], force=True)
    tier.node.carry_out(applied.reply)
    tier.work(rounds=1)
    assert tier.exists([b"k0"]) == [0]
    tier.pass_time(20_000)
    assert tier.used_bytes() <= used
    check_invariants(tier.catalog)


def test_f42_memory_that_leaves_takes_the_promotions_into_it_along(tier: Tier) -> None:
    """Its number is given to the next segment, which knows nothing of them."""
    tier.fill(100)
    generation = place_rows(tier.locate([b"k0"]))[0][4]
    applied = tier.apply(tier.node.ask([("t", b"k0", generation)]))
    assert isinstance(applied.reply, DiskTasks)
    assert applied.reply.promotions
    former = tier.catalog.state.members.of_node("n")[0]
    tier.apply(Unmount("n", 1, former.segment_id))
    tier.now_ms += 200
    tier.apply(Tick())
    tier.mount("other", MEMORY)
    assert tier.catalog.state.members.of_node("other")[0].index == former.index
    check_invariants(tier.catalog)
    tier.node.carry_out(applied.reply)  # the node was not told yet
    for _ in range((SETTINGS.grant_ttl_ms + SETTINGS.grant_margin_ms) // 500 + 1):
        tier.pass_time(500)
        tier.work(rounds=1)
    assert tier.where(b"k0") == ["disk"]
    check_invariants(tier.catalog)


def test_f41_removal_of_an_object_on_disk_only_waits_for_its_record(tier: Tier) -> None:
    tier.fill(100)
    assert tier.where(b"k0") == ["disk"]
    tier.pass_time(5_000)
    applied = tier.apply(Remove("t", [b"k0"]))
    assert applied.durable_first
    assert applied.records
    assert [each.segment_id for each in applied.effects] == [tier.node.segment_id]
    again = Catalog(SETTINGS)
    again.restore(None, tier.log, tier.now_ms)
    assert b"k0" not in again.state.tenants.find("t").complete  # type: ignore[union-attr]
    assert b"k1" in again.state.tenants.find("t").complete  # type: ignore[union-attr]


def test_a78_after_a_restart_of_both_the_disk_is_as_before(tier: Tier) -> None:
    tier.fill(100)
    cold = [key for key in tier.keys(0, 100) if tier.where(key) == ["disk"]]
    tier.catalog = Catalog(SETTINGS)
    tier.catalog.restore(None, tier.log, tier.now_ms)
    tier.catalog.begin_term(2)
    check_invariants(tier.catalog)
    assert tier.apply(tier.node.ask()).reply == Refused(
        ObjectNotFound.code, f"disk {tier.node.segment_id} of 'n' is not mounted here"
    )
    segment = tier.node.segment_id
    tier.pass_time(1_100, alive=False)
    tier.mount("n", MEMORY, incarnation=2)  # the memory is a new one, and empty
    tier.join(2)
    assert tier.node.segment_id == segment
    tier.pass_time(100)
    tier.pass_time(100)
    assert tier.exists(cold) == [1] * len(cold)
    tier.work(auditing=True)
    assert tier.exists(cold) == [1] * len(cold)
    assert [tier.where(key) for key in cold] == [["disk"]] * len(cold)


def test_a82_a_report_that_is_repeated_to_the_next_master_deletes_nothing(tier: Tier) -> None:
    """Its answer was lost with the master that had recorded it."""
    tier.fill(100)
    cold = [key for key in tier.keys(0, 100) if tier.where(key) == ["disk"]]
    tenant = tier.catalog.state.tenants.find("t")
    assert tenant is not None
    reported = [tier.catalog.state.table.generation[tenant.complete[key]] for key in cold]
    tier.catalog = Catalog(SETTINGS)
    tier.catalog.restore(None, tier.log, tier.now_ms)
    tier.catalog.begin_term(2)
    tier.pass_time(1_100, alive=False)
    tier.mount("n", MEMORY, incarnation=2)
    tier.join(2)
    never_placed = 12345
    tier.node.done = [(each, OK) for each in (*reported[:5], never_placed)]
    tier.node.has.add(never_placed)
    tier.work()
    assert never_placed not in tier.node.has
    assert set(reported) <= tier.node.has
    tier.work(auditing=True)
    assert tier.exists(cold) == [1] * len(cold)


def test_f41_readers_with_a_lease_keep_a_disk_replica_whatever_else_there_is(tier: Tier) -> None:
    tier.fill(100)
    (row,) = place_rows(tier.locate([b"k0"]))  # leases it, and knows this replica only
    generation = row[4]
    tasks = tier.apply(tier.node.ask([("t", b"k0", generation)])).reply
    assert isinstance(tasks, DiskTasks)
    tier.node.carry_out(tasks)
    tier.work(rounds=1)
    assert sorted(tier.where(b"k0")) == ["disk", "memory"]
    tier.apply(replace(tier.node.ask(), usable_bytes=0))
    tier.pass_time(300)
    assert generation in {
        tier.catalog.state.table.generation[slot]
        for each in tier.catalog.state.members.disks
        for slot in tier.catalog.state.table.slots_on(each, 0, 1 << 14)
    }


def test_a82_what_the_disk_lost_is_delisted_and_what_it_has_too_much_is_deleted(
    tier: Tier,
) -> None:
    tier.fill(100)
    cold = [key for key in tier.keys(0, 100) if tier.where(key) == ["disk"]]
    lost = sorted(tier.node.has)[:3]
    tier.node.has -= set(lost)
    tier.node.has |= {1 << 50, 12_345_678}
    tier.work(auditing=True)
    assert not tier.node.has & {1 << 50, 12_345_678}
    present = tier.exists(cold)
    assert present.count(0) <= 3
    counted = tier.numbers()
    assert counted["disk_objects_missing"] == 3
    assert counted["disk_strays"] == 2


def test_a80_an_object_that_cannot_be_offloaded_is_dropped_and_counted(tier: Tier) -> None:
    for code, cause in (
        (OutOfSpace.code, "disk_full"),
        (InternalError.code, "disk_failed"),
        (UsageError.code, "too_large"),
        (LeaseExpired.code, "stale"),
    ):
        made = Tier(SETTINGS)
        made.node = DiskNode("none", 1)
        made.begin()
        for key in made.keys(0, 150):
            assert made.put([key], LENGTH) == [OK], "puts never fail for a disk"
            made.pass_time(100)
            made.work(code, rounds=2)
        counted = made.numbers()
        assert counted[f"disk_drops.{cause}"] > 0
        assert counted["evictions"] > 40
        assert counted["disk_cold_objects"] == 0
        paused = cause in ("disk_full", "disk_failed")
        assert bool(counted["disks_paused"]) == paused


def test_a80_a_disk_that_failed_is_tried_again_and_recovers(tier: Tier) -> None:
    tier.fill(50)
    for key in tier.keys(50, 30):
        tier.put([key], LENGTH)
        tier.pass_time(100)
        tier.work(OutOfSpace.code, rounds=1)
    assert tier.numbers()["disks_paused"] == 1
    tier.pass_time(31_000)
    tier.fill(60, first=100)
    assert tier.numbers()["disks_paused"] == 0
    assert tier.exists([b"k100"]) == [1]


def test_a80_without_an_answer_of_the_disk_puts_go_on(tier: Tier) -> None:
    """Victims are dropped as not ready; nothing waits."""
    for key in tier.keys(0, 150):
        assert tier.put([key], LENGTH) == [OK]
        tier.pass_time(100)
    counted = tier.numbers()
    assert counted["disk_drops.not_ready"] > 40
    check_invariants(tier.catalog)


def test_a81_a_late_report_for_an_ended_object_is_answered_with_its_deletion(tier: Tier) -> None:
    tier.fill(55)
    tier.put([b"more"], LENGTH)
    tier.pass_time(100)
    reply = tier.apply(tier.node.ask()).reply
    assert isinstance(reply, DiskTasks)
    assert reply.keys
    tier.remove(list(reply.keys), force=True)
    tier.node.carry_out(reply)
    tier.work()
    assert not {task for task, _ in tier.node.done}
    placed = tier.numbers()["disk_used_bytes"] / 4_096
    tier.drop_ended()
    assert len(tier.node.has) == placed


def test_a81_a_report_that_comes_twice_changes_nothing(tier: Tier) -> None:
    tier.fill(60)
    has = set(tier.node.has)
    tier.node.done = [(generation, OK) for generation in has]
    tier.work(rounds=1)
    assert tier.node.has == has


def test_a20_a_disk_that_says_nothing_makes_nobody_suspect(tier: Tier) -> None:
    """The node's heartbeats stand for both: how busy a disk is does not say that it is dead."""
    tier.fill(100)
    tier.pass_time(2 * SETTINGS.dead_ms)
    assert {each.state for each in tier.catalog.state.members} == {ALIVE}
    assert tier.where(b"k0") == ["disk"]
    tier.pass_time(2 * SETTINGS.suspect_ms, alive=False)
    assert ALIVE not in {each.state for each in tier.catalog.state.members}


def test_f41_an_object_in_use_is_not_given_to_the_disk(tier: Tier) -> None:
    tier.fill(45)
    tier.locate([b"k0"])
    for key in tier.keys(45, 12):
        tier.put([key], LENGTH)
    tier.pass_time(100)
    tier.work()
    assert "memory" in tier.where(b"k0")


def test_f41_damage_on_the_disk_ends_that_replica_only(tier: Tier) -> None:
    tier.fill(100)
    row = place_rows(tier.locate([b"k0"]))[0]
    tier.apply(Report("t", [b"k0"], [row[4]], [row[1]], [ChecksumMismatch.code]))
    assert tier.exists([b"k0"]) == [0]
    tier.drop_ended()
    assert row[4] not in tier.node.has
    check_invariants(tier.catalog)


def test_f41_a_node_that_is_gone_leaves_its_disk_away_and_brings_it_back(tier: Tier) -> None:
    tier.fill(100)
    cold = [key for key in tier.keys(0, 100) if tier.where(key) == ["disk"]]
    tier.pass_time(11_000, alive=False)
    tier.pass_time(100, alive=False)
    (disk,) = tier.catalog.state.members.disks.values()
    assert disk.state == AWAY
    assert tier.exists(cold) == [0] * len(cold)
    assert tier.locate(cold).status == bytes([ObjectNotFound.code]) * len(cold)
    tier.mount("m", MEMORY)
    assert tier.put([cold[0]], LENGTH) == [OK], "a key on a disk that is away can be put anew"
    tier.remove([cold[1]], force=True)
    tier.mount("n", MEMORY, incarnation=2)
    tier.join(2)
    tier.work(auditing=True)
    assert tier.exists(cold[1:]) == [0] + [1] * (len(cold) - 2)
    assert tier.where(cold[0]) == ["memory"]
    check_invariants(tier.catalog)


def test_a78_a_disk_that_stays_away_is_forgotten(tier: Tier) -> None:
    tier.fill(100)
    tier.pass_time(11_000, alive=False)
    for _ in range(3):
        tier.pass_time(61_000, alive=False)
    assert not [each for each in tier.catalog.state.members.disks.values() if each.state != GONE]
    assert len(tier.catalog.state.table) == 0
    check_invariants(tier.catalog)


def test_f41_two_nodes_do_not_share_a_disk(tier: Tier) -> None:
    tier.mount("m", MEMORY)
    other = DiskNode("m", 77)
    reply = tier.apply(other.mount(2)).reply
    assert isinstance(reply, Refused)
    assert "in use by the node 'n'" in reply.cause


def test_f41_a_clean_leave_keeps_the_disk_for_the_next_incarnation(tier: Tier) -> None:
    tier.fill(100)
    tier.apply(Unmount("n", 1, tier.node.segment_id))
    (disk,) = tier.catalog.state.members.disks.values()
    assert disk.state == AWAY
    assert disk.used_units > 0


def test_a09_quotas_count_memory_and_evict_to_the_disk(tier: Tier) -> None:
    tier.apply(SetQuota("t", bytes_max=20 * 4_096, policy="evict_own"))
    for key in tier.keys(0, 60):
        assert tier.put([key], LENGTH) == [OK]
        tier.pass_time(100)
        tier.work()
    info = tier.apply(Status()).reply
    assert isinstance(info, StatusInfo)
    assert info.tenants[0].used_bytes <= 20 * 4_096


def test_f41_hard_pins_and_groups_keep_their_promises(tier: Tier) -> None:
    tier.put([b"pinned"], LENGTH, hard_pin=True)
    tier.put([b"g0", b"g1"], LENGTH, groups=[1, 1])
    tier.fill(100)
    assert tier.where(b"pinned") == ["memory"]
    assert tier.exists([b"g0", b"g1"]) == [1, 1]
    tier.pass_time(5_000)
    tier.remove([b"g0"], force=True)
    assert tier.exists([b"g0", b"g1"]) == [0, 0]
    check_invariants(tier.catalog)


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "cost"])
@pytest.mark.parametrize("seed", range(4))
def test_f41_random_histories_keep_the_books_and_the_promise(policy: str, seed: int) -> None:
    """Whatever happens: what Locate names on the disk is there, and the disk has nothing else
    once all orders are carried out."""
    dice = random.Random(seed)
    tier = Tier(replace(SETTINGS, eviction=policy))
    tier.node = DiskNode("none", 1)
    tier.begin(nbytes=60 * 4_096)
    for step in range(400):
        act = dice.random()
        key = b"k%d" % dice.randrange(150)
        if act < 0.45:
            upsert = dice.random() < 0.2
            ttl = dice.choice([0, 0, 0, 3_000])
            pin = dice.choice([0, 0, 2_000])
            tier.put(
                [key],
                dice.choice([0, 100, LENGTH, 9_000]),
                upsert=upsert,
                ttl_ms=ttl,
                soft_pin_ms=pin,
            )
        elif act < 0.65:
            tier.locate([key])
        elif act < 0.72:
            tier.remove([key], force=dice.random() < 0.7)
        elif act < 0.9:
            tier.pass_time(dice.choice([10, 100, 1_000, 5_000]))
        if dice.random() < 0.5:
            cold = [
                ("t", key, row[4])
                for key in [b"k%d" % dice.randrange(150) for _ in range(3)]
                if tier.where(key) == ["disk"] and (row := place_rows(tier.locate([key]))[0])
            ]
            tier.drop_ended()
            reply = tier.apply(tier.node.ask(cold, auditing=dice.random() < 0.2)).reply
            assert isinstance(reply, DiskTasks)
            tier.node.carry_out(reply, dice.choice([OK] * 40 + [OutOfSpace.code]))
        check_invariants(tier.catalog)
        if step % 50 == 49:
            tier.work()
            tier.drop_ended()
            disk = tier.catalog.state.members.disks
            placed = {
                tier.catalog.state.table.generation[slot]
                for slot in tier.catalog.state.table.live()
                for place in tier.catalog.state.table.places(slot)
                if place >> 44 in disk
            }
            assert placed <= tier.node.has, "listed and not there"
            tier.work(auditing=True)
            tier.drop_ended()
            assert tier.node.has <= placed | set(disk[next(iter(disk))].disk.offloads) | {
                tier.catalog.state.table.generation[slot]
                for slot in tier.catalog.state.table.live()
            }  # type: ignore[union-attr]
    assert tier.node.offloaded > 4
