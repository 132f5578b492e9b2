"""The threads behind the doors: order, bounds, deadlines, and a store that fails.

The service is played by the test, which holds the owner thread inside a call for as long as the
case needs; nothing here depends on how fast anything is.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, cast

import pytest

from mooncake_py.clock import ManualClock
from mooncake_py.errors import Backpressure, MasterUnavailable, MooncakeError
from mooncake_py.master.inbox import GRPC, LARGE_BYTES, LONG_TURN, Call, Inbox, Limits
from mooncake_py.master.metadata import Loaded
from mooncake_py.master.owner import APPEND_BYTES, SLICE_MS, Bell, Owner
from mooncake_py.master.service import Answer, Service
from mooncake_py.master.writer import Base, Writer
from mooncake_py.metrics import Metrics
from mooncake_py.wire.lane import EXISTS, HEARTBEAT, LIST, LOCATE, PUT_START, REMOVE, STATUS, Method

PATIENCE_S = 20.0
FOREVER_MS = 1 << 60
LIMITS = Limits(
    queue_calls_max=4,
    queue_bytes_max=1_000,
    urgent_calls_max=3,
    commit_bytes_max=10_000,
    commit_linger_ms=0,
    commit_retry_ms=5,
    snapshot_record_bytes=1 << 30,
    tick_ms=50,
    heartbeat_ms=100,
)


class PlayedService:
    """Answers `b"done <method>"`; a call with payload b"hold" waits for the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.holding = threading.Event()
        self.handled: list[str] = []
        self.steps = 0  # that calls with payload b"steps ..." take together
        self.answers: dict[str, Answer] = {}
        self.excused_ms = 0
        self.ticks: SimpleQueue[tuple[int, int | None]] = SimpleQueue()

    def handle(self, method: Method, payload: bytes, now_ms: int) -> Answer:
        self.handled.append(method.name)
        if payload == b"hold":
            self.holding.set()
            assert self.gate.wait(PATIENCE_S)
        if payload.startswith(b"steps ") and self.steps > 0:
            self.steps -= 1
            return Answer(b"", again=True)
        return self.answers.get(method.name, Answer(b"done " + method.name.encode()))

    def removes_all(self, payload: bytes) -> bool:
        return payload == b"all"

    def refuse(self, method: Method, error: MooncakeError) -> bytes:
        return f"refused {type(error).__name__} {error.cause}".encode()

    def tick(self, now_ms: int, evict_max: int | None = None, excused_ms: int = 0) -> list[bytes]:
        self.ticks.put((now_ms, evict_max))
        self.excused_ms += excused_ms
        return []

    def slices(self, now_ms: int) -> PlayedSlices:
        return PlayedSlices(b"snapshot after %d" % len(self.handled))


class PlayedSlices:
    """A snapshot that is there after its first step."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    def step(self) -> bool:
        return False


class PlayedStore:
    """Keeps what is appended; refuses while `broken`; a commit waits while `gate` is closed."""

    def __init__(self) -> None:
        self.groups: list[list[bytes]] = []
        self.snapshots: list[tuple[bytes, int]] = []
        self.broken = ""
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.closed = False

    def load(self) -> Loaded:
        return Loaded("c", b"s" * 32, 1)

    def append(self, records: Sequence[bytes]) -> int:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        if self.broken:
            raise MasterUnavailable(self.broken)
        self.groups.append(list(records))
        return sum(map(len, self.groups))

    def write_snapshot(self, snapshot: bytes, sequence: int) -> None:
        if self.broken:
            raise MasterUnavailable(self.broken)
        self.snapshots.append((snapshot, sequence))

    def describe(self) -> str:
        return "played"

    def close(self) -> None:
        self.closed = True


class Stage:
    """An owner and a writer around the played parts."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.service = PlayedService()
        self.store = PlayedStore()
        self.clock = ManualClock()
        self.metrics = Metrics("t")
        self.writer = Writer(self.store, 0, self.service.refuse, limits, self.metrics)
        self.owner = Owner(cast(Service, self.service), self.writer, Bell(), limits, self.clock)
        self.owner.count(self.metrics)
        self.writer.start()
        self.owner.start(0)

    def call(self, method: Method, payload: bytes = b"", expires_ms: int = FOREVER_MS) -> Any:
        replies: SimpleQueue[bytes] = SimpleQueue()
        self.owner.submit(Call(method, payload, replies.put, expires_ms, GRPC))
        return replies

    def hold(self) -> Any:
        """Keep the owner inside a call."""
        held = self.call(EXISTS, b"hold")
        assert self.service.holding.wait(PATIENCE_S)
        return held

    def close(self) -> None:
        self.service.gate.set()
        self.store.gate.set()
        self.owner.stop(20_000)
        self.writer.close(20_000)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def said(replies: Any) -> str:
    reply: bytes = replies.get(timeout=PATIENCE_S)
    return reply.decode()


def test_a20_a73_liveness_overtakes_data_calls(stage: Stage) -> None:
    held = stage.hold()
    data = [stage.call(LOCATE) for _ in range(4)]
    urgent = [stage.call(HEARTBEAT), stage.call(STATUS)]
    stage.service.gate.set()
    for replies in [held, *data, *urgent]:
        assert said(replies).startswith("done")
    assert stage.service.handled == ["Exists", "Heartbeat", "Status", *["Locate"] * 4]


def test_a73_calls_of_many_steps_let_short_ones_and_heartbeats_in_between(stage: Stage) -> None:
    """Three slow callers in their slowest call: every round of them is followed by others."""
    held = stage.hold()
    stage.service.steps = 60
    slow = [stage.call(LIST, b"steps %d" % i) for i in range(3)]
    short = stage.call(LOCATE)
    beat = stage.call(HEARTBEAT)
    stage.service.gate.set()
    for replies in [held, beat, short, *slow]:
        assert said(replies).startswith("done")
    handled = stage.service.handled
    assert handled[:2] == ["Exists", "Heartbeat"]
    assert handled.index("Locate") <= 2 + 3, "not behind more than one step of each"
    assert handled.count("List") == 60 + 3


def test_a33_a_removal_of_all_lets_those_go_first_that_came_behind_it(stage: Stage) -> None:
    held = stage.hold()
    waiting = [stage.call(REMOVE, b"all"), stage.call(REMOVE, b"one"), stage.call(LOCATE)]
    stage.service.gate.set()
    for replies in [held, *waiting]:
        assert said(replies).startswith("done")
    assert stage.service.handled == ["Exists", "Remove", "Locate", "Remove"]


def test_a73_a_full_queue_answers_at_once(stage: Stage) -> None:
    stage.hold()
    waiting = [stage.call(LOCATE) for _ in range(4)]
    assert said(stage.call(LOCATE)).startswith("refused Backpressure")
    beats = [stage.call(HEARTBEAT) for _ in range(3)]
    assert said(stage.call(STATUS)).startswith("refused Backpressure")
    stage.service.gate.set()
    for replies in [*waiting, *beats]:
        assert said(replies).startswith("done")
    assert stage.metrics.values()["backpressure_total"] == 2
    assert said(stage.call(LOCATE)) == "done Locate"


def test_a74_queues_are_bounded_in_bytes(stage: Stage) -> None:
    stage.hold()
    fits = stage.call(LOCATE, b"x" * 900)
    assert said(stage.call(LOCATE, b"x" * 101)).startswith("refused Backpressure")
    small = stage.call(LOCATE, b"x" * 100)
    stage.service.gate.set()
    assert said(fits) == said(small) == "done Locate"
    assert said(stage.call(LOCATE, b"x" * 1_000)) == "done Locate"


def test_a_call_whose_caller_has_gone_is_not_carried_out(stage: Stage) -> None:
    held = stage.hold()
    late = stage.call(PUT_START, expires_ms=stage.clock.now_ms() + 10)
    stage.clock.advance(10)
    stage.service.gate.set()
    said(held)
    said(stage.call(LOCATE))
    assert late.empty()
    assert stage.service.handled == ["Exists", "Locate"]
    assert stage.metrics.values()["expired_calls_total"] == 1


def test_durable_first_replies_leave_after_the_commit(stage: Stage) -> None:
    stage.service.answers["Remove"] = Answer(b"removed", 0, [b"r1", b"r2"], durable_first=True)
    stage.store.gate.clear()
    removed = stage.call(REMOVE)
    assert stage.store.entered.wait(PATIENCE_S)
    assert said(stage.call(EXISTS)) == "done Exists"
    assert removed.empty()
    stage.store.gate.set()
    assert said(removed) == "removed"
    assert stage.store.groups == [[b"r1", b"r2"]]


def test_other_replies_do_not_wait_and_commits_are_grouped(stage: Stage) -> None:
    stage.service.answers["PutStart"] = Answer(b"granted", 0, [b"g"])
    stage.service.answers["Remove"] = Answer(b"removed", 0, [b"r"], durable_first=True)
    stage.store.gate.clear()
    first = stage.call(REMOVE)
    assert stage.store.entered.wait(PATIENCE_S)
    assert [said(stage.call(PUT_START)) for _ in range(3)] == ["granted"] * 3
    last = stage.call(REMOVE)
    said(stage.call(EXISTS))
    stage.store.gate.set()
    assert (said(first), said(last)) == ("removed", "removed")
    assert stage.store.groups == [[b"r"], [b"g", b"g", b"g", b"r"]]


def test_while_the_store_refuses_writes_so_does_the_master(stage: Stage) -> None:
    stage.service.answers["Remove"] = Answer(b"removed", 0, [b"lost?"], durable_first=True)
    stage.store.broken = "the disk is full"
    reply = said(stage.call(REMOVE))
    assert reply == "refused MasterUnavailable the change may or may not last: the disk is full"
    assert said(stage.call(REMOVE)) == "refused MasterUnavailable the disk is full"
    assert said(stage.call(EXISTS)) == "done Exists"
    assert said(stage.call(HEARTBEAT)) == "done Heartbeat"
    handled = list(stage.service.handled)
    assert handled.count("Remove") == 1
    stage.store.broken = ""
    while said(stage.call(REMOVE)) != "removed":
        pass
    assert stage.store.groups[0] == [b"lost?"], "what the catalog already had is written first"


def test_records_faster_than_the_disk_are_backpressure() -> None:
    stage = Stage(replace(LIMITS, commit_bytes_max=10))
    stage.service.answers["PutStart"] = Answer(b"granted", 0, [b"x" * 11])
    stage.store.gate.clear()
    assert said(stage.call(PUT_START)) == "granted"
    assert said(stage.call(PUT_START)).startswith("refused Backpressure")
    assert said(stage.call(EXISTS)) == "done Exists"
    stage.store.gate.set()
    while said(stage.call(PUT_START)) != "granted":
        pass
    stage.close()


class Payload(bytearray):
    """One whose end can be seen."""


def test_f60_nobody_keeps_a_snapshot_that_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while nothing more is written for a long time."""
    stage = Stage()
    monkeypatch.setattr(stage.store, "write_snapshot", lambda snapshot, sequence: None)
    gone = threading.Event()
    payload = Payload(b"all objects")
    weakref.finalize(payload, gone.set)
    stage.writer.snapshot(payload, Base())
    del payload
    assert gone.wait(PATIENCE_S)
    stage.close()


def test_snapshots_stand_behind_the_records_they_contain() -> None:
    stage = Stage(replace(LIMITS, snapshot_record_bytes=2 * (APPEND_BYTES + 5)))
    stage.service.answers["Remove"] = Answer(b"removed", 0, [b"12345"], durable_first=True)
    for _ in range(5):
        said(stage.call(REMOVE))
        stage.clock.advance(SLICE_MS)
        said(stage.call(EXISTS))  # a round in which the next slice is due
    stage.close()
    assert stage.store.snapshots == [(b"snapshot after 3", 2), (b"snapshot after 7", 4)]
    assert stage.store.closed


def test_a20_an_owner_that_stood_still_waits_before_it_judges(stage: Stage) -> None:
    held = stage.hold()
    while not stage.service.ticks.empty():
        stage.service.ticks.get()
    stage.clock.advance(10_000)
    resumed_ms = stage.clock.now_ms()
    stage.service.gate.set()
    said(held)
    for step_ms in (1, 149, 149):
        said(stage.call(EXISTS))
        stage.clock.advance(step_ms)
    said(stage.call(EXISTS))
    next_ms, _ = stage.service.ticks.get(timeout=PATIENCE_S)
    assert next_ms >= resumed_ms + 2 * LIMITS.heartbeat_ms
    assert stage.service.excused_ms == 10_000, "and that silence is not the nodes'"


def test_no_call_is_lost_between_many_callers(stage: Stage) -> None:
    """A call that arrives while the owner falls asleep must wake it."""
    wrong: list[str] = []

    def caller() -> None:
        for _ in range(200):
            reply = said(stage.call(EXISTS))
            if reply != "done Exists" and "Backpressure" not in reply:
                wrong.append(reply)

    threads = [threading.Thread(target=caller) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_stop_answers_what_waits(stage: Stage) -> None:
    stage.service.answers["Remove"] = Answer(b"removed", 0, [b"r"], durable_first=True)
    held = stage.hold()
    waiting = [stage.call(LOCATE), stage.call(REMOVE)]
    stopper = threading.Thread(target=stage.close)
    stage.service.gate.set()
    stopper.start()
    stopper.join(PATIENCE_S)
    assert [said(replies) for replies in [held, *waiting]] == [
        "done Exists", "done Locate", "removed",
    ]  # fmt: skip
    assert stage.store.groups == [[b"r"]]


def test_inbox_gives_back_what_was_put() -> None:
    inbox = Inbox(LIMITS)
    assert inbox.take() is None
    call = Call(EXISTS, b"x" * 1_000, print, 0, GRPC)
    for _ in range(3):
        assert inbox.put(call)
        assert not inbox.put(call)
        assert inbox.depth() == (0, 1)
        assert inbox.take() is call
    assert Backpressure.retryable


def test_a20_a33_a_short_call_waits_for_one_step_of_forty_long_ones_and_none_starves() -> None:
    inbox = Inbox(replace(LIMITS, queue_calls_max=200))

    def call(name: bytes) -> Call:
        found = Call(EXISTS, name, lambda payload: None, FOREVER_MS, GRPC)
        found.begun = name == b"long"
        return found

    for _ in range(40):
        assert inbox.put(call(b"long"))
    for _ in range(30):
        inbox.put(call(b"short"))
        taken = [inbox.take(), inbox.take()]
        assert b"short" in [each.payload for each in taken if each is not None]
        inbox.put(call(b"long"))
    for _ in range(80):
        inbox.put(call(b"short"))
    found = [each.payload for _ in range(80) if (each := inbox.take()) is not None]
    assert found.count(b"long") == 80 // LONG_TURN, "they have their turn whatever else waits"
    while (each := inbox.take()) is not None:
        found.append(each.payload)
    assert found.count(b"long") == 40
    assert inbox.empty()
    assert inbox.depth() == (0, 0)


def test_a33_a_short_call_waits_for_one_large_one_of_forty() -> None:
    inbox = Inbox(replace(LIMITS, queue_calls_max=200, queue_bytes_max=64 * LARGE_BYTES))
    for _ in range(40):
        assert inbox.put(Call(EXISTS, bytes(LARGE_BYTES), print, FOREVER_MS, GRPC))
    assert inbox.put(Call(EXISTS, b"short", print, FOREVER_MS, GRPC))
    taken = [inbox.take(), inbox.take()]
    assert b"short" in [each.payload for each in taken if each is not None]
    for _ in range(39):
        assert inbox.take() is not None, "none is forgotten"
    assert inbox.empty()
