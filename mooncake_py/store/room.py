"""Why an object found no room, and whether waiting for some can be of use.

The master answers OutOfSpace and no more, because a put start must stay small and quick. A client
that gets it asks for the status instead, rarely (`RoomView`), and decides here.

* What other objects occupy becomes free by eviction and by the ends of leases: that is waited for.
* So is a node that the master knows and that is silent, returning or away: it may come back.
* What would not fit if all known nodes were there and empty needs a new node. One that is just
  being started mounts within `GRACE_MS`; nothing else is worth a caller's time, which is an
  engine's, after that.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_py.clock import Clock, Deadline
from mooncake_py.errors import MooncakeError
from mooncake_py.master.client import MasterClient
from mooncake_py.master.commands import SegmentInfo
from mooncake_py.model import ReplicaPolicy, extent_bytes

GRACE_MS = 1_500  # a node whose master was restarted mounts again within two heartbeats
LOOK_MS = 500  # a status is not asked for more often than this, whatever the number of threads
_CALL_MS = 1_000
_ALIVE, _LEAVING = "alive", "draining"


@dataclass(frozen=True, slots=True)
class Reason:
    """hopeless: no node that the master knows could change it."""

    cause: str
    remedy: str | None = None  # None: that of OutOfSpace
    hopeless: bool = False


FULL = Reason("no space for the object within the deadline")


def reason(segments: Sequence[SegmentInfo], nbytes: int, policy: ReplicaPolicy) -> Reason:
    """Of an object of so many bytes that found no room among these segments."""
    memory = [each for each in segments if not each.disk_id]
    alive = [each for each in memory if each.state == _ALIVE]
    hoped = [each for each in memory if each.state != _LEAVING]
    if not alive:
        return _nobody(memory, not hoped)
    if policy.strict and policy.replica_count > 1:
        return _strict(alive, hoped, nbytes, policy.replica_count)
    need, have = extent_bytes(nbytes), sum(each.nbytes for each in alive)
    if need <= have:
        return FULL
    return Reason(
        f"the object is larger than all memory of the cluster ({have} bytes on {len(alive)} nodes)",
        "add nodes or larger segments, or split the object",
        need > sum(each.nbytes for each in hoped),
    )


def _nobody(memory: Sequence[SegmentInfo], hopeless: bool) -> Reason:
    states = ", ".join(f"{n} {state}" for state, n in Counter(s.state for s in memory).items())
    return Reason(
        f"no node takes objects now ({states})" if memory else "no node is mounted",
        "start a mooncake-node whose --master is this master; `mooncake status` lists the nodes",
        hopeless,
    )


def _strict(
    alive: Sequence[SegmentInfo], hoped: Sequence[SegmentInfo], nbytes: int, count: int
) -> Reason:
    """Strict replicas lie on distinct nodes, each in one piece."""
    nodes = len({each.node for each in alive})
    known = len({each.node for each in hoped})
    if nodes < count:
        are = "node is" if nodes == 1 else "nodes are"
        return Reason(
            f"{count} replicas were asked for strictly, and {nodes} {are} alive",
            "add nodes, or put with strict=False: missing replicas are made when there is a place",
            known < count,
        )
    need = extent_bytes(nbytes)
    if sum(each.nbytes >= need for each in alive) >= count:
        return FULL
    return Reason(
        f"{count} strict replicas need {count} nodes of {need} bytes or more each",
        "add larger segments, or split the object, or put with strict=False",
        sum(each.nbytes >= need for each in hoped) < count,
    )


class RoomView:
    """The segments of the cluster as of a moment ago. Thread-safe."""

    def __init__(self, master: MasterClient, clock: Clock) -> None:
        self._master = master
        self._clock = clock
        self._lock = threading.Lock()
        self._segments: Sequence[SegmentInfo] | None = None
        self._until_ms = 0

    def segments(self, deadline: Deadline) -> Sequence[SegmentInfo] | None:
        """None: nobody says. While one thread asks, the others go by what was known before."""
        if self._clock.now_ms() < self._until_ms or not self._lock.acquire(blocking=False):
            return self._segments
        try:
            timeout_ms = max(1, min(_CALL_MS, deadline.left_ms()))
            self._segments = self._master.status(timeout_ms=timeout_ms).segments
        except MooncakeError:
            self._segments = None
        finally:
            self._until_ms = self._clock.now_ms() + LOOK_MS
            self._lock.release()
        return self._segments
