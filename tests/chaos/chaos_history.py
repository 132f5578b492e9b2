"""Was everything kept that was promised? The judge of a chaos run. Pure: no process, no clock.

Every key is a register. Values are unique and describe themselves (`chaos_values.py`), so a read
names the write that it saw. Times are nanoseconds of one monotonic clock that all processes of a
run share; an operation took effect at some moment between `began` and `ended`, or, when its outcome
is unknown, at any moment after `began` or never.

Rules, each with the name under which a violation is reported.

    mixed     a read gave bytes that are no whole value, or the value of another key (sessions read
              parts, which have no checksum, so a byte that was flipped excuses it)
    unborn    a read gave a value that nobody had begun to put, or whose put had said that it failed
    stale     a read that began later than allowed after a write was acknowledged gave a value that
              this write had replaced or removed. The client that wrote is allowed nothing.
    ghost     a key is said to exist which can hold no value any more
    lost      a key is a miss, or could be put again, though an acknowledged value was there that
              nobody may have removed, and its nodes give no excuse
    phantom   a put is told that the key holds an object, or that somebody is storing one, though
              nobody can have
    late      a call took longer than its deadline and the slack

A value is *superseded* by every acknowledged write that began after the value was in place. It is
in place when its put was acknowledged or when somebody has read it, whichever is earlier. (A value
that was read may still vanish with the leader, as long as its put is not acknowledged.)

An excuse for a miss is a node: one that lost its memory after the value was put, or that could not
be reached at the time. Known replicas need an excuse each; unknown ones need as many excused nodes
as the value had replicas. Where evictions were counted, `evicted` excuses everything. While a
leader is cut off from etcd, it may not know what another has stored within the last moments
(`Allowed.young`).

A database that was deleted (`wipes`) may bring back what had been replaced or removed on a node
that was away all the time until then: both witnesses of its end are gone (design/recovery.md). Away
is who cannot be reached, or has no master that could tell it. What readers had a lease of is not
told before the lease ends (`Allowed.leased`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

READS = ("get", "view", "session")
WRITES = ("put", "upsert", "remove")
SECOND = 1_000_000_000
FOREVER = 1 << 62


@dataclass(slots=True)
class Operation:
    """One key of one call. `ended` None: its client was killed before the call returned."""

    client: str
    kind: str  # of READS, WRITES, or "exists"
    key: str  # tenant/key
    began: int
    ended: int | None = None
    outcome: str = "unknown"  # ok, miss, refused (nothing was done), error, mixed
    value: int = 0  # written, or read with outcome ok; 0: none
    replicas: int = 1  # asked for
    nodes: tuple[str, ...] = ()  # where the replicas are, when the writer has asked
    note: str = ""  # the error, in words
    limit_ms: int = 0  # deadline of the call
    batch: int = 1

    @property
    def end(self) -> int:
        return FOREVER if self.ended is None else self.ended

    @property
    def may_have_written(self) -> bool:
        return self.kind in WRITES and self.outcome not in ("refused", "mixed")


@dataclass(frozen=True, slots=True)
class Excuse:
    """Node `node` was away from `began` to `ended`. `lost`: with what it held, or, if `keys` are
    named, with these."""

    node: str
    began: int
    ended: int
    lost: bool = False
    keys: frozenset[str] = frozenset()

    def covers(self, key: str, put_began: int, read_began: int, read_ended: int) -> bool:
        if self.keys and key not in self.keys:
            return False
        if self.lost:
            return self.ended >= put_began and self.began <= read_ended
        return self.began <= read_ended and self.ended >= read_began


@dataclass(frozen=True, slots=True)
class Allowed:
    stale: int = 7 * SECOND  # a lease, and the second in which a former leader may still answer
    young: int = 2_500_000_000  # a value that a former leader need not know
    slack_ms: int = 1_500  # of a call beyond its deadline, on a machine with more work than cores
    leased: int = 3 * SECOND  # until a node is told of the end of what was being read
    evicted: bool = False  # objects were evicted in this run


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    key: str
    text: str
    at: int

    def __str__(self) -> str:
        return f"{self.rule}: {self.key}: {self.text}"


@dataclass(slots=True)
class History:
    operations: Sequence[Operation]
    excuses: Sequence[Excuse] = ()
    pauses: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # of clients
    allowed: Allowed = field(default_factory=Allowed)
    doubts: Sequence[tuple[int, int]] = ()  # when two may have taken themselves for the leader
    wipes: Sequence[int] = ()  # when the master's database was deleted

    def violations(self) -> list[Violation]:
        by_key: dict[str, list[Operation]] = defaultdict(list)
        for operation in self.operations:
            by_key[operation.key].append(operation)
        found = list(self._late())
        for key, operations in by_key.items():
            found += _Register(key, operations, self).violations()
        return sorted(found, key=lambda violation: violation.at)

    def _late(self) -> Iterator[Violation]:
        for o in self.operations:
            if o.ended is None or not o.limit_ms:
                continue
            took_ms = (o.ended - o.began - self._paused(o)) // 1_000_000
            if took_ms > o.limit_ms + self.allowed.slack_ms:
                text = f"{o.kind} of {o.client} took {took_ms} of {o.limit_ms} ms: {o.outcome}"
                yield Violation("late", o.key, f"{text} {o.note}", o.began)

    def _paused(self, operation: Operation) -> int:
        """How much of it its client was stopped."""
        process = operation.client.split("/")[0]
        return sum(
            max(0, min(end, operation.end) - max(start, operation.began))
            for start, end in self.pauses.get(process, ())
        )


class _Register:
    """One key."""

    def __init__(self, key: str, operations: Iterable[Operation], history: History) -> None:
        self._key = key
        self._operations = sorted(operations, key=lambda o: o.began)
        self._excuses = history.excuses
        self._allowed = history.allowed
        self._doubts = history.doubts
        self._wipes = history.wipes
        self._writes = [o for o in self._operations if o.may_have_written]
        self._puts = {o.value: o for o in self._writes if o.value}
        self._refused = {o.value for o in self._operations if o.outcome == "refused" and o.value}
        self._placed: dict[int, int] = {}  # value -> since when it is certainly in place
        for o in self._operations:
            if o.outcome == "ok" and o.value in self._puts and o.kind != "remove":
                self._placed[o.value] = min(self._placed.get(o.value, FOREVER), o.end)

    def violations(self) -> Iterator[Violation]:
        for o in self._operations:
            if o.outcome == "mixed" and not self._flipped_part(o):
                yield self._violation("mixed", o, o.note)
            elif o.kind in READS and o.outcome == "ok":
                yield from self._judge_read(o)
            elif o.kind == "exists" and o.outcome == "ok":
                yield from self._judge_presence(o)
            elif o.kind == "put" and o.note.startswith("ObjectExists"):
                yield from self._judge_refusal(o)
            elif o.outcome == "miss" or (o.kind == "put" and o.outcome == "ok"):
                yield from self._judge_absence(o)

    def _violation(self, rule: str, o: Operation, text: str) -> Violation:
        return Violation(rule, self._key, f"{o.kind} of {o.client}: {text}", o.began)

    def _judge_read(self, read: Operation) -> Iterator[Violation]:
        put = self._puts.get(read.value)
        if put is None or put.began > read.end:
            why = "its put was refused" if read.value in self._refused else "nobody has put it"
            yield self._violation("unborn", read, f"value {read.value:x}: {why}")
            return
        for write in self._superseders(read.value):
            own = write.client == read.client
            allowed = 0 if own else self._allowed.stale
            if read.began > write.end + allowed and not self._untold(put, write, read):
                late_ms = (read.began - write.end) // 1_000_000
                yield self._violation(
                    "stale",
                    read,
                    f"value {read.value:x} is read {late_ms} ms after the {write.kind} of "
                    f"{write.client} was acknowledged",
                )
                return

    def _superseders(self, value: int) -> list[Operation]:
        """Acknowledged writes that began when the value was in place, the first first."""
        since = self._placed.get(value, FOREVER)
        found = [
            o for o in self._writes if o.outcome == "ok" and o.value != value and o.began > since
        ]
        return sorted(found, key=lambda o: o.end)

    def _untold(self, put: Operation, write: Operation, seen: Operation) -> bool:
        """Was a node that holds the value away from the write, which ended it, to the deletion of
        the database?"""
        nodes = put.nodes or {excuse.node for excuse in self._excuses}
        return any(
            self._away_all(node, write.end + self._allowed.leased, wipe)
            for wipe in self._wipes
            if write.end < wipe < seen.end
            for node in nodes
        )

    def _away_all(self, node: str, start: int, end: int) -> bool:
        for excuse in sorted(self._excuses, key=lambda e: e.began):
            if excuse.node == node and not excuse.keys and excuse.began <= start:
                start = max(start, excuse.ended)
        return start >= end

    def _judge_presence(self, seen: Operation) -> Iterator[Violation]:
        for value, put in self._puts.items():
            if put.began > seen.end:
                continue
            writes = self._superseders(value)
            own = bool(writes) and writes[0].client == seen.client
            allowed = 0 if own else self._allowed.stale
            if not writes or seen.began <= writes[0].end + allowed:
                return
            if self._untold(put, writes[0], seen):
                return
        yield self._violation("ghost", seen, "it is said to exist and can hold no value")

    def _judge_absence(self, seen: Operation) -> Iterator[Violation]:
        if self._allowed.evicted:
            return
        for value, put in self._puts.items():
            since = put.end
            if (
                put.outcome != "ok"
                or since >= seen.began
                or value == seen.value
                or self._may_be_gone(put, seen)
            ):
                continue
            if seen.began - since < self._allowed.young and self._in_doubt(seen):
                continue
            if not self._excused(put, seen):
                how = "a miss" if seen.outcome == "miss" else "put again as if it were absent"
                age_ms = (seen.began - since) // 1_000_000
                where = ", ".join(put.nodes) or "unknown nodes"
                text = f"value {value:x} ({put.replicas} replicas, on {where}) is {how} after "
                yield self._violation("lost", seen, f"{text}{age_ms} ms")
                return

    def _judge_refusal(self, put: Operation) -> Iterator[Violation]:
        """Since the last removal that was acknowledged, or ever, somebody else has written."""
        removals = [
            o.began for o in self._writes
            if o.kind == "remove" and o.outcome == "ok" and o.end < put.began
        ]  # fmt: skip
        since = max(removals, default=0)
        others = (o for o in self._writes if o.value and since < o.end and o.began < put.end)
        if not any(others):
            yield self._violation("phantom", put, f"value {put.value:x}: {put.note}")

    def _flipped_part(self, seen: Operation) -> bool:
        """Sessions read parts, and only whole objects are compared with their checksum."""
        return seen.kind == "session" and any(
            self._key in excuse.keys and excuse.began <= seen.end for excuse in self._excuses
        )

    def _in_doubt(self, seen: Operation) -> bool:
        return any(start <= seen.end and seen.began <= end for start, end in self._doubts)

    def _may_be_gone(self, put: Operation, seen: Operation) -> bool:
        """Is there another write that may have ended this value before it was missed?"""
        return any(
            o is not put
            and o is not seen
            and o.began < seen.end
            and o.end > put.began
            and (o.kind != "put" or o.outcome == "ok")
            for o in self._writes
        )

    def _excused(self, put: Operation, seen: Operation) -> bool:
        away = {
            excuse.node
            for excuse in self._excuses
            if excuse.covers(self._key, put.began, seen.began, seen.end)
        }
        if put.nodes:
            return away.issuperset(put.nodes)
        return len(away) >= put.replicas
