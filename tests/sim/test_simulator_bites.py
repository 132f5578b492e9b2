"""The simulator notices broken promises: each rule that is taken away here is found out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import seeds
from sim_run import simulate

from mooncake_py.master import (
    catalog,
    commits,
    copies,
    events,
    eviction,
    lifecycle,
    objects,
    quotas,
    tiering,
)
from mooncake_py.master.commands import Heartbeat, Remove
from mooncake_py.master.lifecycle import Event, Promise, State
from mooncake_py.master.state import CatalogState
from mooncake_py.master.work import Work

SEEDS = 40


def assert_found_out(words: str) -> None:
    seeds.assert_found_out(simulate, range(1, SEEDS + 1), words)


def test_space_of_a_revoked_put_that_is_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    row = (State.WRITING, Event.PUT_REVOKE)
    careless = replace(lifecycle.end(*row), promise=Promise.NONE)
    monkeypatch.setitem(lifecycle._BY_CAUSE, row, careless)
    assert_found_out("writes")


def test_leases_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects.ObjectTable, "leased_until", lambda self, slot, lease_ms: 0)
    assert_found_out("was leased and is gone")


def test_removals_that_are_acknowledged_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = catalog._VERBS[Remove]

    def hasty(*arguments: Any) -> Any:
        return replace(remove(*arguments), durable_first=False)

    monkeypatch.setitem(catalog._VERBS, Remove, hasty)
    assert_found_out("was removed and is read again")


def test_generations_without_a_term_or_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreserved(self: CatalogState, work: Work, count: int) -> None:
        self.generation_mark = self.next_generation + count

    monkeypatch.setattr(catalog.Catalog, "begin_term", lambda self, term, now_ms: [])
    monkeypatch.setattr(CatalogState, "reserve_generations", unreserved)
    assert_found_out("a generation is used again")


def test_placing_on_nodes_that_have_not_mounted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = catalog._VERBS[Heartbeat]

    def trusting(state: Any, command: Heartbeat, now_ms: int) -> Any:
        segment = state.members.known(command.node, command.incarnation, command.segment_id)
        if segment is not None:
            segment.mounted = True
        return heartbeat(state, command, now_ms)

    monkeypatch.setitem(catalog._VERBS, Heartbeat, trusting)
    assert_found_out("")


def test_a_quota_that_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas.Allowance, "take", lambda self, work, units, now_ms: True)
    assert_found_out("granted beyond the quota")


def test_groups_whose_members_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CatalogState, "_end_group", lambda *parts: 0)
    assert_found_out("group")


def test_books_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    release = CatalogState.release

    def careless(self: CatalogState, place: int, units: int, until_ms: int, now_ms: int) -> None:
        release(self, place, units, until_ms, now_ms)
        self.members.at(place >> objects.PLACE_BITS).used_units += 1

    monkeypatch.setattr(CatalogState, "release", careless)
    assert_found_out("used of")


def test_grants_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CatalogState, "expire_grants", lambda *arguments: False)
    assert_found_out("grant")


def test_copies_that_are_committed_for_whoever_is_in_the_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "_lives", lambda state, copy: True)
    assert_found_out("")


def test_commits_after_the_expiry_of_their_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "still_there", lambda *arguments: True)
    assert_found_out("committed after its expiry")


def test_ends_that_no_record_tells_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Work, "drop", lambda *arguments: None)
    assert_found_out("vanished")


def test_ends_that_no_event_tells_of(monkeypatch: pytest.MonkeyPatch) -> None:
    add = events.EventLog.add

    def forgetful(self: events.EventLog, what: str, *which: Any) -> None:
        if what != Event.EVICT.value:
            add(self, what, *which)

    monkeypatch.setattr(events.EventLog, "add", forgetful)
    assert_found_out("no event tells of the end")


def test_hard_pins_that_are_only_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(self: eviction.Pool, slot: int, hard: bool, until_ms: int, now_ms: int) -> None:
        self._table.flags[slot] |= objects.HARD_PIN * hard

    monkeypatch.setattr(eviction.Pool, "pin", noted)
    assert_found_out("")


def test_offloads_that_are_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = tiering._offload

    def anew(state: Any, slot: int, target: Any, *arguments: Any) -> str:
        if target is not None:
            target.disk.offloads.pop(state.table.generation[slot], None)
        return offload(state, slot, target, *arguments)

    monkeypatch.setattr(tiering, "_offload", anew)
    assert_found_out("")


def test_disk_work_that_is_believed_for_whoever_is_in_the_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiering, "lives", lambda state, slot, generation: True)
    assert_found_out("")
