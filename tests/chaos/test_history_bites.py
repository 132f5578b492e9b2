"""The judge of chaos runs finds what is wrong, and nothing in what is right."""

from __future__ import annotations

from dataclasses import replace

import chaos_values
import pytest
from chaos_history import SECOND, Allowed, Excuse, History, Operation
from chaos_schedule import Shape, schedule
from chaos_suspects import suspicions

KEY = "red/k"
ALLOWED = Allowed(stale=3 * SECOND)


def op(
    kind: str, began: float, ended: float | None, outcome: str = "ok", **more: object
) -> Operation:
    given: dict[str, object] = {"client": "a", "key": KEY} | more
    return Operation(
        kind=kind,
        began=int(began * SECOND),
        ended=None if ended is None else int(ended * SECOND),
        outcome=outcome,
        **given,  # type: ignore[arg-type]
    )


def put(
    value: int, began: float, ended: float | None, outcome: str = "ok", **more: object
) -> Operation:
    return op("put", began, ended, outcome, value=value, **({"nodes": ("n0",)} | more))


def get(value: int, began: float, ended: float, **more: object) -> Operation:
    return op("get", began, ended, "ok" if value else "miss", value=value, **more)


def rules(*operations: Operation, **more: object) -> list[str]:
    given: dict[str, object] = {"allowed": ALLOWED} | more
    return [v.rule for v in History(operations, **given).violations()]  # type: ignore[arg-type]


def test_f59_a_right_history_is_right() -> None:
    assert (
        rules(
            get(0, 0, 0.1),
            put(1, 1, 2),
            get(1, 1.5, 1.6),  # while it is put
            get(0, 1.5, 1.6),
            get(1, 3, 4, client="b"),
            op("upsert", 5, 6, value=2, nodes=("n0",)),
            get(1, 5.5, 7, client="b"),
            get(1, 7, 8, client="b"),  # b may have a placement under a lease
            get(2, 7, 8),
            op("remove", 10, 11),
            get(0, 12, 13),
            op("exists", 12, 13, "miss"),
            put(3, 14, 15, "refused"),
            put(4, 16, None, "unknown"),  # a killed writer: it was stored, or not
            get(0, 17, 18),
            get(4, 19, 20),
            op("get", 21, 22, "error"),
        )
        == []
    )


def test_bytes_that_are_no_value_are_found() -> None:
    assert rules(put(1, 0, 1), op("get", 2, 3, "mixed", note="torn")) == ["mixed"]


def test_a_value_that_nobody_put_is_found() -> None:
    assert rules(put(1, 0, 1), get(2, 2, 3)) == ["unborn"]
    assert rules(put(1, 0, 1, "refused"), get(1, 2, 3)) == ["unborn"]
    assert rules(get(1, 0, 1), put(1, 2, 3)) == ["unborn"]


def test_a_value_is_not_read_long_after_it_was_removed_or_replaced() -> None:
    for kind, value in (("remove", 0), ("upsert", 2)):
        ended = op(kind, 2, 3, value=value)
        assert rules(put(1, 0, 1), ended, get(1, 6.5, 7, client="b")) == ["stale"]
        assert rules(put(1, 0, 1), ended, get(1, 5.5, 7, client="b")) == []
        assert rules(put(1, 0, 1), ended, get(1, 3.1, 7, client="a")) == ["stale"], "own write"
        assert rules(put(1, 0, 1), replace(ended, outcome="error"), get(1, 9, 10)) == []


def test_a_value_whose_put_failed_and_that_was_seen_does_not_come_back_after_a_removal() -> None:
    lingering = put(1, 0, 1, "error")
    removal = op("remove", 3, 4)
    assert rules(lingering, removal, get(1, 9, 10)) == [], "it may have been stored at last"
    assert rules(lingering, get(1, 2, 2.5), removal, get(1, 9, 10)) == ["stale"]


def test_a_deleted_database_brings_back_only_what_no_node_could_be_told_of() -> None:
    """Replaced on n0, which was away from then on, until the database was deleted."""
    history = [put(1, 0, 1), op("upsert", 2, 3, value=2, nodes=("n1",)), get(1, 40, 41)]
    presence = [put(1, 0, 1), op("remove", 2, 3), op("exists", 40, 41, client="b")]
    allowed = replace(ALLOWED, leased=2 * SECOND)

    def judged(operations: list[Operation], *away: tuple[str, float, float]) -> list[str]:
        excuses = [Excuse(n, int(a * SECOND), int(b * SECOND)) for n, a, b in away]
        return rules(*operations, excuses=excuses, wipes=[30 * SECOND], allowed=allowed)

    for operations, verdict in ((history, ["stale"]), (presence, ["ghost"])):
        assert judged(operations, ("n0", 4, 35)) == []
        assert judged(operations, ("n0", 4, 12), ("n0", 11, 35)) == []
        a_second = (("n0", 4, 12), ("n0", 13, 35))  # is missing
        assert judged(operations, *a_second) == verdict
        assert judged(operations, ("n0", 4, 29)) == verdict
        assert judged(operations, ("n0", 6, 35)) == verdict
        assert judged(operations, ("n1", 4, 35)) == verdict, "does not hold it"
        before = replace(operations[-1], began=10 * SECOND, ended=11 * SECOND)
        assert judged([*operations[:-1], before], ("n0", 4, 35)) == verdict, "not deleted yet"


def test_a_removed_key_does_not_exist() -> None:
    gone = [put(1, 0, 1), op("remove", 2, 3)]
    assert rules(*gone, op("exists", 9, 10, client="b")) == ["ghost"]
    assert rules(*gone, op("exists", 4, 5, client="b")) == []
    assert rules(*gone, put(2, 8, None, "unknown"), op("exists", 9, 10, client="b")) == []


def test_an_acknowledged_object_does_not_vanish() -> None:
    assert rules(put(1, 0, 1), get(0, 2, 3)) == ["lost"]
    assert rules(put(1, 0, 1), op("exists", 2, 3, "miss")) == ["lost"]
    assert rules(put(1, 0, 1), put(2, 2, 3)) == ["lost"], "put again as if it were absent"
    assert rules(put(1, 0, 1, "error"), get(0, 2, 3)) == []
    assert rules(put(1, 0, 1), op("remove", 1.5, 1.7, "refused"), get(0, 2, 3)) == ["lost"]


def test_what_may_have_been_removed_may_be_gone() -> None:
    assert rules(put(1, 0, 1), op("remove", 1.5, 2, "error"), get(0, 3, 4)) == []
    assert rules(put(1, 0, 1), op("remove", 1.5, None, "unknown"), get(0, 3, 4)) == []
    assert rules(op("remove", 0, 0.5), put(1, 1, 2), get(0, 3, 4)) == ["lost"], "removed before"


def test_a_put_is_only_refused_for_what_somebody_wrote() -> None:
    refused = put(2, 5, 6, "refused", note="ObjectExists: another writer is storing one")
    assert rules(refused) == ["phantom"]
    assert rules(put(1, 0, None, "unknown"), refused) == []
    assert rules(put(1, 0, 1), op("remove", 2, 3), refused) == ["phantom"]
    assert rules(put(1, 0, 1), op("remove", 2, 3), put(3, 4, 5.5), refused) == []


@pytest.mark.parametrize(
    ("excuse", "verdict"),
    [
        (Excuse("n0", 2 * SECOND, 4 * SECOND), []),  # away at that time
        (Excuse("n0", 5 * SECOND, 6 * SECOND), ["lost"]),  # back before
        (Excuse("n0", 5 * SECOND, 6 * SECOND, lost=True), []),  # back with nothing
        (Excuse("n1", 5 * SECOND, 20 * SECOND, lost=True), ["lost"]),  # another node
        (Excuse("n0", 0, SECOND // 2, lost=True), ["lost"]),  # before it was put
        (Excuse("n0", 5 * SECOND, 6 * SECOND, lost=True, keys=frozenset({"x"})), ["lost"]),
    ],
)
def test_only_its_own_nodes_excuse_a_miss(excuse: Excuse, verdict: list[str]) -> None:
    moment = 3 if not excuse.lost and excuse.began < 3 * SECOND else 10
    history = [put(1, 1, 1.5), get(0, moment, moment + 0.5)]
    assert rules(*history, excuses=[excuse]) == verdict


SUSPECT = (
    "1970-01-01T00:00:{:06.3f}Z WARNING master.node_log node {} (segment 7) "
    "is suspect: last heard of 557 ms ago; not used until it is heard again"
)
BACK = "1970-01-01T00:00:{:06.3f}Z INFO master.node_log node {} (segment 7) {}"


def test_a_node_that_its_master_suspected_excuses_misses_of_that_time_and_no_loss() -> None:
    lines = [SUSPECT.format(13, "n0"), "something else", BACK.format(15, "n0", "is back")]
    found = suspicions(lines, wall_ahead_ns=10 * SECOND, grace_ns=SECOND // 2)
    assert found == [Excuse("n0", 5 * SECOND // 2, 11 * SECOND // 2)]
    for at, verdict in ((4, []), (7, ["lost"])):
        assert rules(put(1, 1, 1.5), get(0, at, at + 0.1), excuses=found) == verdict
        other = put(1, 1, 1.5, nodes=("n1",))
        assert rules(other, get(0, at, at + 0.1), excuses=found) == ["lost"]
    gone = BACK.format(15, "n0", "was silent for too long; 77 bytes go with it")
    assert suspicions([*lines[:2], gone, lines[2]], 0, 0) == []
    assert suspicions(lines[:2], 0, 0) == []


def test_two_replicas_need_two_excuses() -> None:
    two = put(1, 1, 1.5, nodes=("n0", "n1"), replicas=2)
    one_lost = [Excuse("n0", 5 * SECOND, 6 * SECOND, lost=True)]
    assert rules(two, get(0, 8, 9), excuses=one_lost) == ["lost"]
    both = [*one_lost, Excuse("n1", 7 * SECOND, 9 * SECOND)]
    assert rules(two, get(0, 8, 9), excuses=both) == []
    somewhere = replace(two, nodes=())
    assert rules(somewhere, get(0, 8, 9), excuses=one_lost) == ["lost"]
    assert rules(somewhere, get(0, 8, 9), excuses=both) == []


def test_a_leader_that_is_cut_off_need_not_know_what_is_new() -> None:
    doubts = [(2 * SECOND, 9 * SECOND)]
    assert rules(put(1, 3, 4), get(0, 5, 6), doubts=doubts) == []
    assert rules(put(1, 3, 4), get(0, 8, 8.5), doubts=doubts) == ["lost"]


def test_a_call_beyond_its_deadline_is_found_unless_its_client_was_stopped() -> None:
    late = get(1, 2, 9, client="c1/red/0", limit_ms=3_000)
    assert rules(put(1, 0, 1), late) == ["late"]
    assert rules(put(1, 0, 1), late, pauses={"c1": [(3 * SECOND, 8 * SECOND)]}) == []
    assert rules(put(1, 0, 1), replace(late, outcome="error")) == ["late"]


def test_values_show_every_kind_of_damage() -> None:
    whole = chaos_values.make(KEY, 77, 4096)
    assert chaos_values.number_of(KEY, whole) == 77
    other = chaos_values.make(KEY, 78, 4096)
    for wrong in (
        whole[:2048] + other[2048:],
        whole[:-8],
        whole[:100] + b"!" + whole[101:],
        chaos_values.make("blue/k", 77, 4096),
        bytes(4096),
        b"",
    ):
        with pytest.raises(chaos_values.NotWhole):
            chaos_values.number_of(KEY, wrong)


def test_f59_a_seed_is_a_schedule() -> None:
    shape = Shape("etcd", 3, network=True, clocks=True)
    steps = schedule(5, shape, 60_000)
    assert steps == schedule(5, shape, 60_000)
    assert steps != schedule(6, shape, 60_000)
    assert len({step.kind for seed in range(5) for step in schedule(seed, shape, 60_000)}) >= 7
    assert all(step.at_ms + step.for_ms <= 60_000 for step in steps)


def test_only_a_file_system_of_its_own_is_filled() -> None:
    def kinds(**more: bool) -> set[str]:
        shape = Shape("embedded", 0, master_count=1, **more)  # type: ignore[arg-type]
        return {step.kind for seed in range(5) for step in schedule(seed, shape, 60_000)}

    assert "fill" in kinds(fills=True)
    assert "fill" not in kinds()
