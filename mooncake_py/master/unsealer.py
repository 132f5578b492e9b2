"""Tells nodes at once what was removed, beside the record of it.

    owner ──push──▶ [queue] ──▶ unsealer thread ──NODE_UNSEAL──▶ nodes
      └─record──▶ writer ─────────────┐      │ told, or not within TELL_MS
                                      ▼      ▼
                              the removal is answered

A removal is durable with its record. But nodes are believed, too, when records are lost, so a
removal is answered only when the nodes that are there have unsealed what it removed: both are at
work at once, and a node is usually faster than a disk. A node that does not answer holds up a
removal by `TELL_MS` and others not at all for `DEAF_MS`; it is told again in its heartbeats.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_py.clock import Clock
from mooncake_py.errors import MooncakeError
from mooncake_py.transfer import Peer, TransferEngine
from mooncake_py.wire.node import UNSEAL_KIND, unseal_message
from mooncake_py.wire.rows import EXTENT, REPLICA

log = logging.getLogger(__name__)

TELL_MS = 200
DEAF_MS = 1_000
WAITING_MAX = 1_024  # pushes; more are left to the heartbeats
_PEERS_MAX = 1_024


@dataclass(frozen=True, slots=True)
class Order:
    """Extents of one segment that are to be unsealed. `rows`: EXTENT; `secret`: of its grants."""

    address: str
    segment_id: int
    secret: bytes
    rows: bytes


class Both:
    """A reply that leaves when its record is durable and the nodes are told. Thread-safe."""

    __slots__ = ("_left", "_lock", "_payload", "_reply")

    def __init__(self, reply: Callable[[bytes], None]) -> None:
        self._lock = threading.Lock()
        self._left = 2
        self._payload = b""
        self._reply = reply

    def durable(self, payload: bytes) -> None:
        self._payload = payload
        self._one()

    def told(self) -> None:
        self._one()

    def _one(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._reply(self._payload)


class Unsealer:
    """`push` is for the owner thread; `close` for the process."""

    def __init__(self, engine: TransferEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[tuple[Sequence[Order], Callable[[], None]]] = []
        self._closing = False
        self._peers: dict[str, Peer] = {}
        self._deaf: dict[str, int] = {}  # address -> until ms
        self._thread = threading.Thread(target=self._run, name="mooncake-unsealer", daemon=True)
        self._thread.start()

    def push(self, orders: Sequence[Order], told: Callable[[], None]) -> None:
        with self._changed:
            if len(self._waiting) < WAITING_MAX and not self._closing:
                self._waiting.append((orders, told))
                self._changed.notify()
                return
        told()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        for peer in self._peers.values():
            peer.close()

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                taken, self._waiting = self._waiting, []
                if not taken:
                    return
            try:
                self._tell([order for orders, _ in taken for order in orders])
            except Exception:
                log.exception("the unsealer met a defect")
            for _, told in taken:
                told()

    def _tell(self, orders: Sequence[Order]) -> None:
        by_segment: defaultdict[tuple[str, int, bytes], list[bytes]] = defaultdict(list)
        for order in orders:
            by_segment[order.address, order.segment_id, order.secret].append(order.rows)
        for (address, segment_id, secret), parts in by_segment.items():
            now_ms = self._clock.now_ms()
            if self._deaf.get(address, 0) > now_ms:
                continue
            extents = np.frombuffer(b"".join(parts), EXTENT)
            replicas = np.zeros(len(extents), dtype=REPLICA)
            for name in ("offset", "generation"):
                replicas[name] = extents[name]
            message = unseal_message(segment_id, replicas.tobytes(), secret)
            try:
                self._peer(address).request(UNSEAL_KIND, message, timeout_ms=TELL_MS)
            except MooncakeError as error:
                log.debug("%s was not told of a removal: %s", address, error)
                self._deaf[address] = now_ms + DEAF_MS
                self._forget(address)

    def _peer(self, address: str) -> Peer:
        peer = self._peers.get(address)
        if peer is None:
            if len(self._peers) >= _PEERS_MAX:
                for known in list(self._peers):
                    self._forget(known)
            peer = self._peers[address] = self._engine.open(address, timeout_ms=TELL_MS)
        return peer

    def _forget(self, address: str) -> None:
        peer = self._peers.pop(address, None)
        if peer is not None:
            peer.close()
