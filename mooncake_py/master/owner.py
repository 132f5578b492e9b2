"""The master's threads behind its doors: one owns the catalog, one writes records.

    gRPC loop ──submit──▶ Inbox ──▶ owner thread ──▶ Catalog.apply
    hot lane  ──receive─────┘           │ records, replies that wait for them
                                        ▼
                                   writer thread ──▶ MetadataStore.append (group commit)

Rules:
* Only the owner thread touches the `Service` and its catalog. It waits at the lane when there is
  one and at a bell when there is none; `wake` interrupts both.
* Every queue is bounded, in calls and in bytes. A call that finds it full is answered
  `Backpressure` by whoever brought it, at once. Calls about liveness (`Method.urgent`) have a queue
  of their own which is emptied first, so that heartbeats and status never wait behind data work.
  Calls that take several steps wait behind those that have not begun (inbox.py).
* A call whose deadline has passed while it waited is dropped: its caller has gone.
* Replies marked durable-first leave from the writer thread after the commit, those of removals
  once nobody can read what they removed, too (unsealer.py). While the store
  refuses writes, calls that change the catalog are refused with its words; what is already in the
  catalog stays queued and is written, in order, once the store accepts writes again.
* A mount may have to wait for a greater term (recovery.py): the writer makes it durable, the owner
  begins it with a later mount. Until then what the node holds is not taken over.
* What the process may do at all the gate says, call by call: a leader that cannot prove its lease
  serves nothing, or reads only. With a store that others may take over, commits of puts are
  durable-first, too.
* An owner that was itself stopped for a while does not judge nodes by their silence: the heartbeats
  may lie in its own queues. It waits two heartbeat periods before the next tick.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from mooncake_py.clock import Clock
from mooncake_py.errors import Backpressure, MooncakeError, PeerUnreachable
from mooncake_py.master.inbox import DOORS, LANE, Call, Inbox, Limits
from mooncake_py.master.service import Answer, Service
from mooncake_py.master.snapshots import Slices
from mooncake_py.master.unsealer import Both, Order, Unsealer
from mooncake_py.master.writer import Base, Writer
from mooncake_py.metrics import Metrics
from mooncake_py.wire.lane import (
    EXISTS,
    HEARTBEAT,
    METHODS,
    MOUNT,
    PUT_END,
    REMOVE,
    Method,
)
from mooncake_py.wire.status import unfinished

log = logging.getLogger(__name__)

LANE_BURST = 64  # messages taken from the lane between two served calls
SLICE_MS = 5  # between two steps of a snapshot, which take about one
BEHIND_MS = 10  # from a tick that left work to the next one; calls are served in between
DEFECT_PAUSE_MS = 1_000  # until the next tick after one that failed
APPEND_BYTES = 256  # what a store keeps beside the records of one append, at most
UNREAD_MS = 3_000  # that a removal waits for its readers' leases, and less than `link.ASK_MS`
ANSWER_MS = 100  # an answer that comes too late is worth nothing
STALLED_MS = 2_000  # an owner that has not come round for this long makes the process unhealthy


class Source(Protocol):
    """Where the owner waits: the hot lane, or a bell when there is no lane."""

    def receive(self, timeout_ms: int) -> Call | None:
        """The next call that came this way; None after the timeout or a `wake`."""

    def wake(self) -> None:
        """End the waiting of a `receive`, or the next one. Any thread."""


Gate = Callable[[Method, int], MooncakeError | None]
"""Why a method may not be served at this time (ms); None: it may."""


def opened(method: Method, now_ms: int) -> MooncakeError | None:
    return None


class Bell:
    """A `Source` that brings nothing and only wakes."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def receive(self, timeout_ms: int) -> Call | None:
        with suppress(Empty):
            self._rings.get(block=timeout_ms > 0, timeout=timeout_ms / 1000)
        return None

    def wake(self) -> None:
        self._rings.put(None)


class Owner:
    """The owner thread. `submit` is for any thread; `start` and `stop` for the process."""

    def __init__(
        self,
        service: Service,
        writer: Writer,
        source: Source,
        limits: Limits,
        clock: Clock,
        gate: Gate = opened,
    ) -> None:
        self._service = service
        self._writer = writer
        self._source = source
        self._limits = limits
        self._clock = clock
        self._gate = gate
        self._unsealer: Unsealer | None = None
        self._inbox = Inbox(limits)
        self._asleep = False
        self._rounds = 0
        self._stopping = False
        self._round_ms = clock.now_ms()
        self._excused_ms = 0  # that this process stood still since the last tick
        self._next_tick_ms = self._round_ms
        self._record_nbytes = 0
        self._slices: Slices | None = None
        self._base = Base()
        self._next_slice_ms = 0
        self._thread = threading.Thread(target=self._run, name="mooncake-owner", daemon=True)

    def count(self, metrics: Metrics) -> None:
        """Make the cells. Before `start`."""
        self._calls = {
            (door, method.number): metrics.counter(
                "calls_total", "Calls served", door=door, method=method.name
            )
            for door in DOORS
            for method in METHODS
        }
        self._failed = {
            method.number: metrics.counter(
                "failed_calls_total", "Calls refused as a whole", method=method.name
            )
            for method in METHODS
        }
        self._busy = metrics.counter("backpressure_total", "Calls answered Backpressure")
        self._late = metrics.counter("expired_calls_total", "Calls dropped after their deadline")
        self._quick = metrics.counter(
            "quick_answers_total", "Calls of the lane answered without the catalog"
        )
        self._snapshots = metrics.counter("catalog_snapshots_total", "Snapshots taken")
        metrics.source("queues", self._depths)

    def tell_nodes(self, unsealer: Unsealer) -> None:
        """Let removals be answered after the nodes were told. Before `start`."""
        self._unsealer = unsealer

    def settle(
        self, tenant: str, keys: Sequence[bytes], generations: Sequence[int], at_ms: int
    ) -> None:
        """Apply commits that were acknowledged at that time (quick.py). This thread only."""
        records = self._service.settle(tenant, keys, generations, at_ms)
        if records:
            self._record(records, [])

    def count_quick(self, exists: int, commits: int) -> None:
        """So many calls of the lane were answered quickly. This thread only."""
        self._quick.value += exists + commits
        self._calls[LANE, EXISTS.number].value += exists
        self._calls[LANE, PUT_END.number].value += commits

    def start(self, record_nbytes: int) -> None:
        """`record_nbytes`: how much the log holds above its snapshot."""
        self._record_nbytes = record_nbytes
        self._thread.start()

    def stop(self, timeout_ms: int) -> None:
        """Answer what waits, then end."""
        self._stopping = True
        self._source.wake()
        self._thread.join(timeout_ms / 1000)

    def submit(self, call: Call) -> None:
        """Queue a call; it is answered through its `reply`, at once if the queue is full."""
        if not self._inbox.put(call):
            self._refuse_busy(call)
        elif self._asleep:
            self._source.wake()

    def alive(self) -> bool:
        """The thread runs and came round lately. Any thread."""
        idle_ms = self._clock.now_ms() - self._round_ms
        return self._thread.is_alive() and idle_ms < STALLED_MS + self._limits.tick_ms

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._stopping and self._inbox.depth() == (0, 0)):
            try:
                self._round()
            except Exception:
                log.exception("the owner thread met a defect")
                self._next_tick_ms = self._clock.now_ms() + DEFECT_PAUSE_MS

    def _round(self) -> None:
        """With nothing in the inbox the next call of the source is served as it comes. Only now and
        then everything that waits there is fetched, so that urgent calls find their queue."""
        self._rounds += 1
        if self._unsealer is not None and (told := self._unsealer.take_told()):
            self._service.told(told)
        if self._rounds % LANE_BURST and self._inbox.empty() and not self._stopping:
            call = self._wait()
        else:
            self._take_from_source(0, LANE_BURST)
            call = self._inbox.take()
        if call is not None:
            self._serve(call)
        self._tick_if_due()
        if self._slices is not None:
            self._slice(self._slices)

    def _wait(self) -> Call | None:
        """Sleep until a call comes or a tick is due. `asleep` is set before the inbox is looked
        at once more, so that no call can slip in between unheard."""
        self._asleep = True
        call = None
        if self._inbox.empty() and not self._stopping:
            left_ms = self._next_tick_ms - self._clock.now_ms()
            longest_ms = SLICE_MS if self._slices is not None else self._limits.tick_ms
            call = self._source.receive(max(1, min(left_ms, longest_ms)))
        self._asleep = False
        return call

    def _take_from_source(self, timeout_ms: int, count: int) -> None:
        for _ in range(count):
            call = self._source.receive(timeout_ms)
            if call is None:
                return
            if not self._inbox.put(call):
                self._refuse_busy(call)

    def _serve(self, call: Call) -> None:
        method = call.method
        now_ms = self._clock.now_ms()
        if call.expires_ms <= now_ms:
            self._late.value += 1
            if method is HEARTBEAT:  # it lived when it was sent, which is better than nothing
                self._service.handle(method, call.payload, now_ms)
            return
        obstacle = self._gate(method, now_ms)
        if obstacle is not None and method is HEARTBEAT:
            self._service.handle(method, call.payload, now_ms)  # the node lives, whatever we are
        if obstacle is None and method.changes:
            obstacle = self._writer.obstacle()
        if obstacle is not None:
            self._failed[method.number].value += 1
            call.reply(self._service.refuse(method, obstacle))
            return
        if self._can_wait(call):
            self._put_back(call)
            return
        if method is MOUNT and (records := self._service.raise_term(self._writer.raised_term)):
            self._record(records, [])
        answer = self._service.handle(method, call.payload, now_ms)
        if answer.term_wanted:
            self._writer.raise_term(answer.term_wanted)
        if answer.again:
            self._put_back(call)
            return
        self._calls[call.door, method.number].value += 1
        if answer.code:
            self._failed[method.number].value += 1
        self._send(call, answer)

    def _can_wait(self, call: Call) -> bool:
        """Is it long, has not waited for others yet, and are there any?"""
        if call.begun or call.method is not REMOVE or self._inbox.empty():
            return False
        return self._service.removes_all(call.payload)

    def _put_back(self, call: Call) -> None:
        call.begun = True
        if not self._inbox.put(call):
            self._refuse_busy(call)

    def _send(self, call: Call, answer: Answer) -> None:
        if not (answer.records or answer.durable_first):
            call.reply(answer.payload)
            return
        durable = answer.durable_first or (self._limits.durable_puts and call.method is PUT_END)
        waits = [(self._told(call, answer), answer.payload)] if durable else []
        self._record(answer.records, waits)
        if not waits:
            call.reply(answer.payload)

    def _told(self, call: Call, answer: Answer) -> Call:
        """The call as the writer answers it: once nodes have carried out their orders, too."""
        if self._unsealer is None or not answer.orders:
            return call
        both, clock = Both(call.reply), self._clock

        def ended(until_ms: int, left: Sequence[Order]) -> None:
            left_ms = until_ms - clock.now_ms()
            both.told(self._not_told(call.method, answer, left_ms, left) if until_ms else b"")

        patience_ms = min(UNREAD_MS, answer.patience_ms or UNREAD_MS)
        give_up_ms = min(clock.now_ms() + patience_ms, call.expires_ms - ANSWER_MS)
        self._unsealer.push(answer.orders, ended, give_up_ms)
        return Call(call.method, call.payload, both.durable, call.expires_ms, call.door)

    def _not_told(
        self, method: Method, answer: Answer, left_ms: int, left: Sequence[Order]
    ) -> bytes:
        there = sorted({f"{each.node} ({each.address})" for each in left if each.address})
        if not all(each.address for each in left):
            there.append("a node that is gone or has yet to tell what it holds")
        who = " and ".join(there)
        error = PeerUnreachable(
            f"what was to be removed is in the catalog no more, but {who} could not be told of it, "
            f"and whoever has a lease may read it for {max(0, left_ms)} ms from now on",
        )
        return unfinished(method, answer.payload, error)

    def _record(self, records: Sequence[bytes], replies: list[tuple[Call, bytes]]) -> None:
        self._writer.commit(records, replies)
        self._record_nbytes += APPEND_BYTES + sum(map(len, records))
        if self._record_nbytes >= self._limits.snapshot_record_bytes and self._slices is None:
            self._slices = self._service.slices(self._clock.now_ms())
            self._base = self._writer.begin_snapshot()
            self._record_nbytes = 0

    def _slice(self, slices: Slices) -> None:
        """A step of the snapshot in the making, now and then."""
        now_ms = self._clock.now_ms()
        if now_ms < self._next_slice_ms:
            return
        self._next_slice_ms = now_ms + SLICE_MS
        if not slices.step():
            self._writer.snapshot(slices.packed, self._base)
            self._snapshots.value += 1
            self._slices = None

    def _tick_if_due(self) -> None:
        now_ms = self._clock.now_ms()
        away_ms, self._round_ms = now_ms - self._round_ms, now_ms
        if away_ms > self._limits.heartbeat_ms + self._limits.tick_ms:
            log.warning("this process stood still for %d ms; nodes may report first", away_ms)
            self._next_tick_ms = now_ms + 2 * self._limits.heartbeat_ms
            self._excused_ms += away_ms
        if now_ms < self._next_tick_ms:
            return
        self._next_tick_ms = now_ms + self._limits.tick_ms
        free = self._writer.obstacle() is None and self._gate(PUT_END, now_ms) is None
        evict_max = None if free else 0
        records = self._service.tick(now_ms, evict_max, self._excused_ms)
        self._excused_ms = 0
        if self._service.behind:
            self._next_tick_ms = now_ms + min(BEHIND_MS, self._limits.tick_ms)
        if records:
            self._record(records, [])

    def _refuse_busy(self, call: Call) -> None:
        self._busy.value += 1
        busy = Backpressure("the master has as many waiting calls as it accepts")
        call.reply(self._service.refuse(call.method, busy))

    def _depths(self) -> dict[str, float]:
        urgent, normal = self._inbox.depth()
        return {"waiting_urgent_calls": urgent, "waiting_calls": normal}
