"""Tells nodes at once what was removed, beside the record of it.

    owner ──push──▶ [queue] ──▶ unsealer thread ──NODE_UNSEAL──▶ nodes
      └─record──▶ writer ─────────────┐      │ told; or not, and nobody may read it any more
                                      ▼      ▼
                              the removal is answered

Rule: an acknowledged removal is never followed by a read (lingering.py). So a removal is answered
when its record is durable and each node has said that it has unsealed what it had of it, or the
leases of that have ended. Both are at work at once, and a node is usually faster than a disk.

* What nobody has a lease of nobody reads. Its node is told as well, since nodes are believed when
  records are lost; but one that does not answer within `tell_ms` is left to the heartbeats.
* What somebody may read is told again, by a thread of its own, until it is told or over. A node
  that is silent costs others `tell_ms` once and then nothing for five times that: orders for it go
  to that thread at once. What can be told to nobody (the node is lost or away, there is no lane)
  waits for the lease.
* Whoever would have to wait beyond `give_up_ms` is answered an error then, which names the nodes
  and the time: the objects are not in the catalog any more and may be read for so long. Asking
  again is right, and waits for the rest. A third thread looks at the clock, so that neither this
  nor the end of a lease comes late while nodes are asked in vain.
* A node that answers with an error was not told. Nor was a part of it: a disk may be slow while
  memory answers, so silence counts for one segment only.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mooncake_py.clock import Clock
from mooncake_py.errors import OK, MooncakeError
from mooncake_py.master.lease import LEASE_MARGIN_MS
from mooncake_py.transfer import Peer, TransferEngine
from mooncake_py.wire.node import UNSEAL_KIND, HoldReply, unseal_message
from mooncake_py.wire.rows import EXTENT, REPLICA

log = logging.getLogger(__name__)

TELL_MS = 200
WAITING_MAX = 1_024  # pushes; more are left to the heartbeats
_PEERS_MAX = 1_024
_AGAIN_S = 0.02  # between two rounds of those that are told again, and two looks at the clock


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Extents of one segment that are to be unsealed. `rows`: EXTENT; `secret`: of its grants;
    `read_until_ms`: when the last lease of them ends. Without an address nobody can be told.
    `node`: its name, for people."""

    address: str
    segment_id: int
    secret: bytes
    rows: bytes
    read_until_ms: int = 0
    node: str = ""

    def over(self, now_ms: int) -> bool:
        """Does nobody read it, told or not?"""
        return self.read_until_ms + LEASE_MARGIN_MS <= now_ms


Ended = Callable[[int, Sequence[Order]], None]


class Both:
    """A reply that leaves when its record is durable and the nodes are told. Thread-safe."""

    __slots__ = ("_instead", "_left", "_lock", "_payload", "_reply")

    def __init__(self, reply: Callable[[bytes], None]) -> None:
        self._lock = threading.Lock()
        self._left = 2
        self._payload = self._instead = b""
        self._reply = reply

    def durable(self, payload: bytes) -> None:
        self._payload = payload
        self._one()

    def told(self, instead: bytes = b"") -> None:
        """`instead`: the reply, since they were not told."""
        self._instead = instead
        self._one()

    def _one(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._reply(self._instead or self._payload)


@dataclass(slots=True, eq=False)
class _Push:
    """Orders of one removal. `ended(0, ())`: told or over; else when it will be, and which not."""

    orders: list[Order]
    ended: Ended
    give_up_ms: int
    left: dict[Order, None] = field(init=False)

    def __post_init__(self) -> None:
        self.left = dict.fromkeys(self.orders)


_Waits = tuple[_Push, Order]


class _Teller:
    """The connections of one thread to nodes."""

    def __init__(self, engine: TransferEngine | None, timeout_ms: int) -> None:
        self._engine = engine
        self._timeout_ms = timeout_ms
        self._peers: dict[str, Peer] = {}

    def tell(self, address: str, segment_id: int, secret: bytes, rows: bytes) -> str:
        """Why the node was not told; "" when it was."""
        if self._engine is None or not address:
            return "nobody can be told"
        extents = np.frombuffer(rows, EXTENT)
        replicas = np.zeros(len(extents), dtype=REPLICA)
        for name in ("offset", "generation"):
            replicas[name] = extents[name]
        message = unseal_message(segment_id, replicas.tobytes(), secret)
        try:
            answer = self._peer(self._engine, address).request(
                UNSEAL_KIND, message, timeout_ms=self._timeout_ms
            )
            reply = HoldReply.decode(answer)
        except MooncakeError as error:
            self._forget(address)
            return str(error)
        return "" if reply.code == OK else reply.cause or f"code {reply.code}"

    def _peer(self, engine: TransferEngine, address: str) -> Peer:
        peer = self._peers.get(address)
        if peer is None:
            if len(self._peers) >= _PEERS_MAX:
                self.close()
            peer = self._peers[address] = engine.open(address, timeout_ms=self._timeout_ms)
        return peer

    def _forget(self, address: str) -> None:
        peer = self._peers.pop(address, None)
        if peer is not None:
            peer.close()

    def close(self) -> None:
        for address in list(self._peers):
            self._forget(address)


class Unsealer:
    """`push` and `take_told` are for the owner thread; `close` for the process. Without an engine
    leases are waited for."""

    def __init__(self, engine: TransferEngine | None, clock: Clock, tell_ms: int = TELL_MS) -> None:
        """tell_ms: what a node may take to answer. When it is told again, two and a half times
        that: a slow disk may need as long."""
        self._clock = clock
        self._deaf_ms = 5 * tell_ms
        self._changed = threading.Condition()
        self._waiting: list[_Push] = []
        self._again: dict[_Waits, None] = {}  # in the order of their coming
        self._open: dict[_Push, None] = {}  # that somebody waits for
        self._ended = threading.Event()
        self._closing = self._first_ended = False
        self._deaf: dict[tuple[str, int], int] = {}  # (address, segment id) -> until ms
        self._told: deque[tuple[int, list[int]]] = deque()
        self._first, self._second = _Teller(engine, tell_ms), _Teller(engine, tell_ms * 5 // 2)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in (
                (self._run, "mooncake-unsealer"), (self._run_again, "mooncake-unsealer-again"),
                (self._run_ends, "mooncake-unsealer-ends"),
            )
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def push(self, orders: Sequence[Order], ended: Ended, give_up_ms: int) -> None:
        """`ended` is called by any thread, once: with 0 when nobody reads what these name any more;
        with the time (ms) when that will be, if it is later than `give_up_ms`, and with the orders
        that were not carried out."""
        push = _Push(list(orders), ended, give_up_ms)
        with self._changed:
            if len(self._open) < WAITING_MAX and not self._closing:
                self._waiting.append(push)
                self._open[push] = None
                self._changed.notify_all()
                return
        now_ms = self._clock.now_ms()
        left = [each for each in orders if not each.over(now_ms)]
        ended(max((each.read_until_ms for each in left), default=0), left)

    def take_told(self) -> list[tuple[int, list[int]]]:
        """(segment id, generations) that nodes have unsealed since the last time, of those that
        somebody might have read."""
        return [self._told.popleft() for _ in range(len(self._told))]

    def close(self) -> None:
        """What is not told yet is answered with the end of its leases."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._first.close()
        self._second.close()

    # --- what becomes of an order ---------------------------------------------------------------

    def _settle(self, push: _Push, order: Order) -> None:
        """This order is told or over."""
        with self._changed:
            if order not in push.left:
                return
            del push.left[order]
            last = not push.left
            if last:
                self._open.pop(push, None)
        if last:
            push.ended(0, ())

    def _give_up(self, push: _Push) -> None:
        """What is left of it is not waited for any longer."""
        now_ms = self._clock.now_ms()
        with self._changed:
            waited = bool(push.left)
            left = [each for each in push.left if not each.over(now_ms)]
            push.left.clear()
            self._open.pop(push, None)
        if waited:
            push.ended(max((each.read_until_ms for each in left), default=0), left)

    def _note_told(self, order: Order) -> None:
        if order.read_until_ms:
            generations = np.frombuffer(order.rows, EXTENT)["generation"].tolist()
            self._told.append((order.segment_id, generations))

    # --- the first thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                taken, self._waiting = self._waiting, []
                if not taken:
                    self._first_ended = True
                    self._ended.set()
                    self._changed.notify_all()
                    return
            told: set[int] = set()
            try:
                told = self._tell(taken)
            except Exception:
                log.exception("the unsealer met a defect")
            for push in taken:
                for order in push.orders:
                    if id(order) in told or order.over(self._clock.now_ms()):
                        self._settle(push, order)
                        continue
                    with self._changed:
                        self._again[push, order] = None
                        self._changed.notify_all()

    def _tell(self, pushes: Sequence[_Push]) -> set[int]:
        """One message a segment. Which orders (by id) were carried out."""
        by_segment: defaultdict[tuple[str, int, bytes], list[Order]] = defaultdict(list)
        for order in (order for push in pushes for order in push.orders):
            by_segment[order.address, order.segment_id, order.secret].append(order)
        told: set[int] = set()
        for (address, segment_id, secret), orders in by_segment.items():
            now_ms = self._clock.now_ms()
            if self._deaf.get((address, segment_id), 0) > now_ms:
                continue
            rows = b"".join(order.rows for order in orders)
            why = self._first.tell(address, segment_id, secret, rows)
            if why:
                log.debug("%s was not told of a removal: %s", address, why)
                self._deaf[address, segment_id] = now_ms + self._deaf_ms
                continue
            for order in orders:
                told.add(id(order))
                self._note_told(order)
        return told

    # --- the second thread ----------------------------------------------------------------------

    def _run_again(self) -> None:
        """Time and again, until nobody waits."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._again or self._first_ended)
                if self._first_ended:
                    left = list(self._again)
                    break
                taken = list(self._again)
                self._changed.wait(_AGAIN_S)
            try:
                self._round(taken)
            except Exception:
                log.exception("the unsealer met a defect")
        for push, _ in left:
            self._give_up(push)

    def _round(self, taken: Sequence[_Waits]) -> None:
        """A segment that did not answer is not asked twice a round."""
        silent: set[tuple[str, int]] = set()
        for each in taken:
            push, order = each
            place = (order.address, order.segment_id)
            if order not in push.left:  # over, or given up
                self._drop(each)
            elif place not in silent:
                if self._second.tell(*place, order.secret, order.rows):
                    silent.add(place)
                    continue
                self._deaf.pop(place, None)
                self._note_told(order)
                self._settle(push, order)
                self._drop(each)

    def _drop(self, each: _Waits) -> None:
        with self._changed:
            self._again.pop(each, None)

    # --- the third thread -----------------------------------------------------------------------

    def _run_ends(self) -> None:
        """Lets orders be over and pushes be given up in time, whoever is asked in vain then."""
        while not self._first_ended:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._first_ended)
            self._ended.wait(_AGAIN_S)
            with self._changed:
                pushes = list(self._open)
            for push in pushes:
                self._end(push, self._clock.now_ms())

    def _end(self, push: _Push, now_ms: int) -> None:
        for order in list(push.orders):
            if order.read_until_ms and order.over(now_ms):
                self._settle(push, order)
        if push.give_up_ms <= now_ms:
            self._give_up(push)
