"""Who may act as the leader, decided from what was heard of etcd and one's own clock. Pure.

A leader holds a lease at etcd, and a key that hangs on it; the revision at which it put the key
stands for its term, and every transaction compares it. What this module adds is knowing *when to
stop* without being told:

* Each renewal proves the lease until the moment it was *sent* plus the lease's length, minus a
  margin for clocks that run at different speeds. etcd counts from when the renewal arrived, so
  the proof always ends before the lease can. The clock goes on while the process is stopped.
* LEADING: proven. Everything is served.
* DOUBT: not proven and nothing known; also what a process finds itself in that was stopped and
  wakes up. Nothing is served until etcd has answered or has been found unreachable.
* OUTAGE: not proven, and the last renewal reached no member of etcd. Nothing that changes the
  catalog is served. Reads are, since nodes tell an outage from a deposition: a heartbeat is
  answered `NotLeader` then, so each node looks for a newer leader on its own, and as soon as it
  follows one it is silent here. When most nodes are silent nothing is served: what is not known
  here may be known to the newer leader.
* ENDED: etcd said that the lease or the key is gone. For ever; a new term begins with a new object.

A follower may take over in two ways: when the key is gone, and when the leader's *process* is
gone, which shows sooner than the end of its lease: the connection to it broke and its address
refuses a new one. That is no proof of death, and needs none: taking the key over fences the former
leader like the end of its lease does. It only must not happen without need, see `Suspicion`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

RENEWALS = 5  # a lease's length


class Stand(Enum):
    LEADING = "leading"
    DOUBT = "doubt"
    OUTAGE = "outage"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """`lease_ms`: length of the lease at etcd, whole seconds (etcd's own least is 2 s with its
    default settings)."""

    lease_ms: int

    @property
    def renew_ms(self) -> int:
        return self.lease_ms // RENEWALS

    @property
    def attempt_ms(self) -> int:
        """What one renewal may take."""
        return self.lease_ms // 2

    @property
    def touch_ms(self) -> int:
        """A renewal that is older than this should have been followed by another."""
        return max(1_500, 2 * self.renew_ms + self.renew_ms // 2)

    @property
    def margin_ms(self) -> int:
        """By how much the proof ends before the lease: clocks may differ by a tenth."""
        return self.lease_ms // 10

    @property
    def stall_ms(self) -> int:
        """A keeper that has not come round for this long was stopped."""
        return self.lease_ms


class Leadership:
    """One term. `sent_ms` is when a renewal, or the grant of the lease, was sent."""

    __slots__ = (
        "_came_round_ms",
        "_ended",
        "_outage",
        "_proof_ms",
        "_renewed_ms",
        "_times",
        "term",
    )

    def __init__(self, times: LeaseTimes, term: int, sent_ms: int, ttl_ms: int) -> None:
        self._times = times
        self.term = term
        self._ended = False
        self._outage = False
        self._came_round_ms = sent_ms
        self._proof_ms = 0
        self._renewed_ms = sent_ms
        self.renewed(sent_ms, ttl_ms)

    def renewed(self, sent_ms: int, ttl_ms: int) -> None:
        """etcd holds the lease for `ttl_ms` from some moment after `sent_ms`."""
        self._proof_ms = max(self._proof_ms, sent_ms + ttl_ms - self._times.margin_ms)
        self._outage = False
        self._renewed_ms = max(self._renewed_ms, sent_ms)

    def in_touch(self, now_ms: int) -> bool:
        """Has etcd answered lately? For people: nothing is decided by it."""
        return not self._outage and now_ms - self._renewed_ms < self._times.touch_ms

    def unreached(self, sent_ms: int, now_ms: int) -> None:
        """A renewal reached no member of etcd. One that took longer than it may says nothing: the
        process was stopped meanwhile."""
        if now_ms - sent_ms <= self._times.attempt_ms + self._times.renew_ms:
            self._outage = True

    def came_round(self, now_ms: int) -> None:
        """The keeper is about to renew. If it was stopped, what it knew is old."""
        if now_ms - self._came_round_ms > self._times.stall_ms:
            self._outage = False
        self._came_round_ms = now_ms

    def end(self) -> None:
        """etcd said that lease or key are gone, or they were given up."""
        self._ended = True

    def stand(self, now_ms: int) -> Stand:
        if self._ended:
            return Stand.ENDED
        if now_ms < self._proof_ms:
            return Stand.LEADING
        stalled = now_ms - self._came_round_ms > self._times.stall_ms
        return Stand.OUTAGE if self._outage and not stalled else Stand.DOUBT


class Suspicion:
    """Is the leader's process gone? Only who was connected to it may say so, so that a wrong
    address or a wall between the two is no reason to depose it; and whoever has deposed one waits
    `rest_ms` before the next, so that two masters that cannot reach each other do not take turns.
    """

    __slots__ = ("_deposed_ms", "_met", "_rest_ms")

    def __init__(self, rest_ms: int) -> None:
        self._rest_ms = rest_ms
        self._met = ""
        self._deposed_ms: int | None = None

    def connected(self, address: str) -> None:
        self._met = address

    def refused(self, address: str, now_ms: int) -> bool:
        """Its address refused a connection. True: take over."""
        if self._met != address:
            return False
        if self._deposed_ms is not None and now_ms - self._deposed_ms < self._rest_ms:
            return False
        self._met = ""
        return True

    def deposed(self, now_ms: int) -> None:
        """It was taken over from, by us."""
        self._deposed_ms = now_ms
