"""The simulator of whole processes notices what breaks in each module that it drives: one rule of
it is taken away, and a user's promise is found broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import seeds
from whole_run import simulate_standby, simulate_whole

from mooncake_py.master import owner, standby, unsealer
from mooncake_py.store import get, inventory, node_process, put, session
from mooncake_py.store.placement_cache import PlacementCache
from mooncake_py.wire.node import HoldReply

SEEDS = 150  # some need misfortune of a kind that comes once in fifty


def assert_found_out(words: str, first: int = 1) -> None:
    """From a seed on that is known to notice, so that it is found soon."""
    seeds.assert_found_out(
        lambda seed: simulate_whole(seed, 8_000), range(first, first + SEEDS), words
    )


def test_placement_cache_rows_that_are_learnt_for_another_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrive = PlacementCache.arrive

    def mixed_up(self: Any, flight: Any, names: Any, entries: Any) -> None:
        arrive(self, flight, names, list(entries)[::-1])

    monkeypatch.setattr(PlacementCache, "arrive", mixed_up)
    assert_found_out("bytes of")


def test_reader_stale_placements_that_are_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(get, "QUESTIONS_MAX", 0)
    assert_found_out("is there and was not read", 47)


def test_reader_bytes_that_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came is taken for what was wanted, whatever the headers say."""
    judge = get.BatchReader._judge

    def trusting(self: Any, call: Any, todo: Any, rows: Any, statuses: Any, late: bool) -> Any:
        taken = [0 if status == -get._STALE else status for status in statuses]
        return judge(self, call, todo, rows, taken, late)

    monkeypatch.setattr(get.BatchReader, "_judge", trusting)
    assert_found_out("", 3)


def test_writer_own_attempts_that_are_taken_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put.BatchWriter, "_recognise", lambda *arguments: None)
    assert_found_out("was refused, and is read", 302)


def test_node_objects_that_a_new_master_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    name_all = inventory.Teller._name_all

    def silent(self: Any, job: Any, ranges: Any, mark: int, counts: Any) -> None:
        name_all(self, job, np.zeros(0, dtype=ranges.dtype), mark, counts)

    monkeypatch.setattr(inventory.Teller, "_name_all", silent)
    assert_found_out("vanished", 6)


def test_node_orders_to_unseal_that_are_not_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_process.Node, "_unseal", lambda self, payload: HoldReply().encode())
    assert_found_out("was removed at", 6)


def test_master_nodes_that_are_taken_for_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsealer._Teller, "tell", lambda *arguments: "")
    assert_found_out("was removed at", 6)


def test_master_removals_that_are_answered_before_they_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = owner.Owner._send

    def hasty(self: Any, call: Any, answer: Any) -> None:
        send(self, call, replace(answer, durable_first=False))

    monkeypatch.setattr(owner.Owner, "_send", hasty)
    assert_found_out("was removed at", 3)


def test_master_puts_that_are_acknowledged_before_a_standby_can_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On etcd a put is durable before it is acknowledged, or whoever takes over ends what it does
    not know of."""
    claim = standby.Claim

    def hasty(*given: Any, **options: Any) -> Any:
        return claim(*given, **{**options, "durable_puts": False})

    monkeypatch.setattr(standby, "Claim", hasty)
    seeds.assert_found_out(lambda seed: simulate_standby(seed, 12_000), range(6, 60), "vanished")


def test_reader_sessions_that_go_on_with_another_object(monkeypatch: pytest.MonkeyPatch) -> None:
    def renew(self: Any, deadline: Any) -> None:
        self._rows, self._objects = self._locate(deadline)
        self._renew_at_ms = self._renewal()

    monkeypatch.setattr(session.ReadSession, "_renew", renew)
    seeds.assert_found_out(lambda seed: simulate_standby(seed, 12_000), range(35, 90), "torn")
