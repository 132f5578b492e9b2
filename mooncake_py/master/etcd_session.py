"""Leadership at etcd: campaign, the lease and its keeper, the compare that fences every write.

What may be done at which moment is decided in `election.py`; here it is asked of etcd. The keeper
thread renews the lease and looks whether the key is still this master's, several times a lease. A
session that has ended is not used again; a new campaign makes a new one.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from mooncake_py.clock import Clock, Deadline
from mooncake_py.errors import MasterUnavailable, NotLeader
from mooncake_py.master.election import Leadership, LeaseTimes, Stand
from mooncake_py.master.etcd import EtcdClient, Unclear
from mooncake_py.master.metadata import next_term
from mooncake_py.wire.etcd import pb

log = logging.getLogger(__name__)

_EQUAL, _CREATE, _MOD = 0, 1, 2
_LOOK_MS = 50


def absent(key: bytes) -> pb.Compare:
    return pb.Compare(result=_EQUAL, target=_CREATE, key=key, create_revision=0)


def unchanged(key: bytes, mod_revision: int) -> pb.Compare:
    """The key was last put at this revision (0: it is absent)."""
    return pb.Compare(result=_EQUAL, target=_MOD, key=key, mod_revision=mod_revision)


def put(key: bytes, value: bytes, lease: int = 0) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))


def get(key: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))


@dataclass(frozen=True, slots=True)
class Leader:
    """Who holds the key. `revision`: when it was put. `term` 0: the value cannot be read."""

    revision: int
    term: int
    address: str  # of its gRPC API; "": it serves none


def leader_of(kv: pb.KeyValue | None) -> Leader | None:
    if kv is None:
        return None
    try:
        value = json.loads(kv.value)
        return Leader(kv.mod_revision, int(value["term"]), str(value["grpc"]))
    except (ValueError, KeyError, TypeError):
        return Leader(kv.mod_revision, 0, "")


class Session:
    """A term of leadership, from a won campaign until it ends. Thread-safe."""

    def __init__(
        self, client: EtcdClient, prefix: str, lease: int, won: Leader, leadership: Leadership
    ) -> None:
        self._client = client
        self._leader_key = f"{prefix}leader".encode()
        self._lease = lease
        self._won = won
        self._leadership = leadership
        self.term = won.term
        self.successor = ""  # who leads instead, once that is known
        self._clock: Clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, times: LeaseTimes, clock: Clock) -> None:
        """Start the keeper."""
        self._clock = clock
        self._thread = threading.Thread(
            target=self._run, args=(times,), name="mooncake-lease", daemon=True
        )
        self._thread.start()

    @property
    def revision(self) -> int:
        """Of the transaction that began the term."""
        return self._won.revision

    def fence(self) -> pb.Compare:
        """Holds only while nobody else has taken over and the lease has not ended."""
        return unchanged(self._leader_key, self._won.revision)

    def look(self) -> pb.RequestOp:
        """Asks, in the same transaction, why the fence did not hold."""
        return get(self._leader_key)

    def check(self, kvs: Sequence[pb.KeyValue]) -> None:
        """Raise NotLeader, and end, when `look` shows that the term is over."""
        holder = leader_of(kvs[0] if kvs else None)
        if holder is None or holder.revision != self._won.revision:
            self.successor = holder.address if holder is not None else ""
            self.end()
            raise NotLeader(f"term {self.term} is over", leader=self.successor)

    def stand(self, now_ms: int) -> Stand:
        return self._leadership.stand(now_ms)

    def in_touch(self, now_ms: int) -> bool:
        """Has etcd answered lately?"""
        return self._leadership.in_touch(now_ms)

    def end(self) -> None:
        self._leadership.end()
        self._stop.set()

    def wait_for_end(self, stop: threading.Event) -> None:
        """Until the term is over, or `stop` is set."""
        while not self._stop.wait(_LOOK_MS / 1000) and not stop.is_set():
            pass

    def resign(self, timeout_ms: int) -> None:
        """End, and give the lease back so that another may lead at once. Harmless twice."""
        self.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_ms / 1000)
        with suppress(MasterUnavailable):
            self._client.lease_revoke(self._lease, timeout_ms)

    def _run(self, times: LeaseTimes) -> None:
        pause_ms = times.renew_ms
        while not self._stop.wait(pause_ms / 1000):
            pause_ms = times.renew_ms
            now_ms = self._clock.now_ms()
            self._leadership.came_round(now_ms)
            try:
                self._renew(now_ms, times.attempt_ms)
            except NotLeader:
                log.warning("another master has taken over from term %d", self.term)
            except MasterUnavailable as error:
                self._leadership.unreached(now_ms, self._clock.now_ms())
                log.warning("the lease of term %d was not renewed: %s", self.term, error)
                pause_ms = _LOOK_MS

    def _renew(self, sent_ms: int, timeout_ms: int) -> None:
        deadline = Deadline(timeout_ms, self._clock)
        ttl_ms = 1000 * self._client.lease_keep_alive(self._lease, timeout_ms)
        if ttl_ms <= 0:
            log.warning("the lease of term %d has ended at etcd", self.term)
            self.end()
            return
        kv, _ = self._client.get(self._leader_key, max(1, deadline.left_ms()))
        self.check([] if kv is None else [kv])
        self._leadership.renewed(sent_ms, ttl_ms)


class Campaign:
    """One process that wants to lead under `prefix`, reachable at `address`. One thread."""

    def __init__(
        self, client: EtcdClient, prefix: str, address: str, times: LeaseTimes, clock: Clock
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._address = address
        self._times = times
        self._clock = clock
        self._leader_key = f"{prefix}leader".encode()
        self._term_key = f"{prefix}term".encode()

    def leader(self, timeout_ms: int) -> Leader | None:
        kv, _ = self._client.get(self._leader_key, timeout_ms)
        return leader_of(kv)

    def run(self, deposed: Leader | None, timeout_ms: int) -> Session | Leader:
        """One attempt: a session of a new term, or who leads instead.

        `deposed`: this leader is to be replaced, by nobody else meanwhile. MasterUnavailable: etcd
        cannot be reached; the attempt may have won, its lease then ends by itself.
        """
        deadline = Deadline(timeout_ms, self._clock)
        sent_ms = self._clock.now_ms()
        lease = self._client.lease_grant(self._times.lease_ms // 1000, deadline.left_ms())
        term_kv, _ = self._client.get(self._term_key, deadline.left_ms())
        term = next_term(sent_ms, int(term_kv.value) if term_kv is not None else 0)
        value = json.dumps({"term": term, "grpc": self._address, "lease": lease}).encode()
        compares = [
            unchanged(self._term_key, term_kv.mod_revision if term_kv is not None else 0),
            unchanged(self._leader_key, deposed.revision if deposed is not None else 0),
        ]
        then = [put(self._term_key, b"%d" % term), put(self._leader_key, value, lease)]
        holder: pb.KeyValue | None
        try:
            reply = self._client.txn(
                compares, then, [get(self._leader_key)], timeout_ms=deadline.left_ms()
            )
            if reply.succeeded:
                return self._begin(lease, Leader(reply.header.revision, term, ""), sent_ms)
            kvs = reply.responses[0].response_range.kvs
            holder = kvs[0] if kvs else None
        except Unclear:
            holder, _ = self._client.get(self._leader_key, deadline.left_ms())
            if holder is not None and holder.value == value:
                return self._begin(lease, Leader(holder.mod_revision, term, ""), sent_ms)
        with suppress(MasterUnavailable):
            self._client.lease_revoke(lease, deadline.left_ms())
        return leader_of(holder) or Leader(0, 0, "")

    def _begin(self, lease: int, won: Leader, sent_ms: int) -> Session:
        leadership = Leadership(self._times, won.term, sent_ms, self._times.lease_ms)
        session = Session(self._client, self._prefix, lease, won, leadership)
        session.keep(self._times, self._clock)
        return session
