"""Disks after the database is lost: what lies on them alone is told, and back (recovery.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from catalog_model import check_invariants
from test_catalog_disks import LENGTH, MEMORY, SETTINGS, Tier, tier

from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import Inventoried, Inventory, List, Listed, Mounted, Name, Refused
from mooncake_py.master.membership import ALIVE, RETURNING
from mooncake_py.master.shadow import Shadow
from mooncake_py.model import EXTENT_ROW, MEMBERS_SHIFT

Told = dict[int, tuple[Name, int, int, int]]  # by generation: name, length, group, members
assert tier  # the fixture


def told_by(tier: Tier) -> Told:
    """What the node's index says of each object."""
    table = tier.catalog.state.table
    found: Told = {}
    for slot in table.live_slots().tolist():
        if table.generation[slot] in tier.node.has:
            name = Name("t", table.key[slot] or b"", 0, table.ttls.get(slot, 0))
            found[table.generation[slot]] = (name, table.length[slot], 0, 0)
    return found


def forget(tier: Tier, term: int = 9) -> None:
    """The database is deleted, and the node's memory is gone as well."""
    tier.catalog = Catalog(SETTINGS)
    tier.log.clear()
    tier.log += tier.catalog.begin_term(term, tier.now_ms, tier.now_ms + SETTINGS.recovery_ms)
    tier.mount("n", MEMORY, incarnation=term)


def join(tier: Tier, incarnation: int, *, foreign: bool = True, term: int = 1) -> Mounted:
    command = replace(
        tier.node.mount(incarnation), recovers=True, foreign=foreign, former_term=term
    )
    applied = tier.apply(command)
    if applied.term_wanted:  # by now it is durable
        tier.log += tier.catalog.raise_term(applied.term_wanted)
        applied = tier.apply(command)
    assert isinstance(applied.reply, Mounted)
    tier.node.segment_id = applied.reply.segment_id
    return applied.reply


def tell(tier: Tier, told: Told, *, last: bool = True) -> None:
    """What is not to stay is deleted."""
    everything = sorted(told.items())
    for at in range(0, len(everything), 7):
        rows, names = [], []
        for generation, (name, length, group, members) in everything[at : at + 7]:
            upper = members << MEMBERS_SHIFT
            rows.append(EXTENT_ROW.pack(0, upper, 0, length, generation, 0, bytes(16), group))
            names.append(name)
        page = Inventory("n", tier.node.incarnation, tier.node.segment_id, b"".join(rows), names)
        reply = tier.apply(page).reply
        assert isinstance(reply, Inventoried)
        tier.node.has -= {row[4] for row in EXTENT_ROW.iter_unpack(reply.unseal)}
    if last:
        end = Inventory("n", tier.node.incarnation, tier.node.segment_id, recorded=True)
        assert isinstance(tier.apply(end).reply, Inventoried)
    tier.drop_ended()
    check_invariants(tier.catalog)


def keys(tier: Tier) -> set[bytes]:
    reply = tier.apply(List("t", b"", b"", 1000)).reply
    assert isinstance(reply, Listed)
    return set(reply.keys)


def cold(tier: Tier) -> list[bytes]:
    return [key for key in tier.keys(0, 100) if tier.where(key) == ["disk"]]


def test_f64_objects_on_a_disk_alone_come_back_and_removed_ones_do_not(tier: Tier) -> None:
    tier.fill(100)
    removed = cold(tier)[:3]
    for key in removed:
        tier.remove([key], force=True)
    tier.drop_ended()
    told = told_by(tier)
    there = {name.key for name, *_ in told.values()}
    assert len(there) > 20
    forget(tier)
    mounted = join(tier, 9)
    assert mounted.recover
    assert mounted.unrecorded
    tell(tier, told)
    assert keys(tier) == there
    assert all(tier.where(key) == ["disk"] for key in there)
    assert {each.state for each in tier.catalog.state.members} == {ALIVE}
    held = set(tier.node.has)
    tier.work(auditing=True)
    assert held <= tier.node.has, "the lists agree"
    again = Catalog(SETTINGS)
    assert again.restore(None, tier.log, tier.now_ms).objects == len(there)
    follower = Shadow(SETTINGS)
    follower.feed(tier.log)
    assert follower.take_over(tier.now_ms)
    assert follower.report.objects == len(there)
    for key in list(there)[:2]:
        tier.remove([key], force=True)
    assert keys(tier) == there - set(list(there)[:2])
    tier.fill(100, first=200)  # and the disk goes on as before
    assert keys(tier) > set(tier.keys(200, 50))


def test_f64_a_disk_and_memory_with_the_same_object_are_one_object(tier: Tier) -> None:
    tier.fill(60)
    both = [key for key in tier.keys(0, 60) if len(tier.where(key)) == 2]
    told = told_by(tier)
    rows = {
        name.key: EXTENT_ROW.pack(0, 0, at * 8_192, LENGTH, generation, 0, bytes(16), 0)
        for at, (generation, (name, *_)) in enumerate(told.items())
        if name.key in both[:5]
    }
    forget(tier)
    join(tier, 9)
    tell(tier, told)
    tier.catalog.state.members.of_node("n")[0].owed = [(1, 1 << 62)]
    segment = tier.catalog.state.members.of_node("n")[0].segment_id
    page = Inventory("n", 9, segment, b"".join(rows.values()), [Name("t", key) for key in rows])
    reply = tier.apply(page).reply
    assert isinstance(reply, Inventoried)
    assert not reply.unseal
    assert [sorted(tier.where(key)) for key in rows] == [["disk", "memory"]] * len(rows)
    check_invariants(tier.catalog)


def test_f64_a_disk_is_not_compared_before_it_has_told(tier: Tier) -> None:
    """Also by the next master, when the first one is killed in the middle of it."""
    tier.fill(100)
    told = told_by(tier)
    forget(tier)
    join(tier, 9)
    tell(tier, dict(list(sorted(told.items()))[:14]), last=False)
    tier.work(auditing=True)
    assert set(told) <= tier.node.has
    assert tier.catalog.state.members.by_id[tier.node.segment_id].state == RETURNING
    tier.catalog = Catalog(SETTINGS)
    tier.catalog.restore(None, tier.log, tier.now_ms)
    tier.log += tier.catalog.begin_term(10, tier.now_ms)
    tier.mount("n", MEMORY, incarnation=9)
    assert join(tier, 9, foreign=False).recover
    tell(tier, told)
    assert keys(tier) == {name.key for name, *_ in told.values()}
    tier.work(auditing=True)
    assert set(told) <= tier.node.has
    assert not join(tier, 9, foreign=False).recover


@pytest.mark.parametrize("whole", [False, True])
def test_f64_parts_on_a_disk_come_back_with_all_others_or_not_at_all(
    tier: Tier, whole: bool
) -> None:
    tier.fill(100)
    told = told_by(tier)
    some = sorted(told)[:4]
    grouped = {each: (told[each][0], told[each][1], 7, 4 if whole else 5) for each in some}
    forget(tier)
    join(tier, 9)
    tell(tier, grouped, last=False)
    tell(tier, grouped)  # the answer was lost: told again
    assert keys(tier) == ({told[each][0].key for each in some} if whole else set())
    tier.work(auditing=True)
    assert (set(some) <= tier.node.has) is whole


def test_f64_what_is_over_or_of_no_name_is_deleted(tier: Tier) -> None:
    tier.fill(100)
    told = told_by(tier)
    first, second, *_ = sorted(told)
    over = replace(told[first][0], ttl_until_ms=tier.now_ms - 1)
    forget(tier)
    join(tier, 9)
    tell(tier, {first: (over, LENGTH, 0, 0), second: (None, LENGTH, 0, 0)})  # type: ignore[dict-item]
    assert keys(tier) == set()
    assert not {first, second} & tier.node.has


def test_f64_a_disk_that_looks_younger_waits_for_a_greater_term(tier: Tier) -> None:
    tier.fill(100)
    told = told_by(tier)
    forget(tier)
    refused = tier.apply(
        replace(tier.node.mount(9), recovers=True, foreign=True, former_term=20)
    ).reply
    assert isinstance(refused, Refused)
    join(tier, 9, term=20)
    assert tier.catalog.state.term == 21
    tell(tier, told)
    assert keys(tier) == {name.key for name, *_ in told.values()}
    assert tier.put([b"new"], LENGTH) == [0]
    table = tier.catalog.state.table
    newest = tier.catalog.state.tenants.find("t").complete[b"new"]  # type: ignore[union-attr]
    assert table.generation[newest] > max(told)
