"""A batch get: placements from the cache or one Locate, one native read, replicas in turn.

    names --cache--> rows --native read, one call for all mapped segments--> done
              |                  | another generation there: forget, ask the master
              +--Locate----------+ node or memory broken: report, next replica

Every key carries the rows of its replicas. A round reads the first row of each key that is open
and judges it by header and checksum. Rows of segments that are not mapped here go through the
engine, one batch a node, all nodes at once. A row from the cache that does not fit is nobody's
fault: the key is asked for again. One that the master has just given and that cannot be read is
broken: it is reported, avoided for a while, and the next replica is tried. As long as there is
another one, a node that does not answer gets a part of the deadline only; with hedging that is a
few ms, and late replicas are asked once more if no other has answered. A key with none left is a
miss, or an integrity error when memory contradicted its own checksum. The number of questions in
one call is bounded, and so is everything by the deadline.

Leases are looked at before the read begins, and those of a large one renewed while it runs
(`renewal.py`). What was read is judged by what its headers say, not by a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np

from mooncake_py import errors
from mooncake_py._native.reading import NOT_MAPPED, Destinations, read_mapped
from mooncake_py.clock import Clock, Deadline
from mooncake_py.errors import MooncakeError
from mooncake_py.master.client import MasterClient, Placements
from mooncake_py.store.fetch import DiskFetcher
from mooncake_py.store.placement_cache import ROW_BYTES, PlacementCache
from mooncake_py.store.remote import RemoteReader, select
from mooncake_py.store.renewal import ASK_MS, LARGE_BYTES, LeaseRenewer
from mooncake_py.store.segments import SegmentDirectory
from mooncake_py.store.stripes import (
    PartRead,
    destinations,
    is_striped,
    object_length,
    plan_parts,
    with_parts,
)
from mooncake_py.transfer import TransferEngine
from mooncake_py.wire.rows import EXTENT

QUESTIONS_MAX = 4  # Locates of one call: the first, and after placements that proved stale
PATIENCE_MS = 500  # with a node while there are other replicas, besides the time for the bytes
PATIENCE_BYTES_PER_MS = 100_000
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_MISS = errors.ObjectNotFound.code
_STALE = errors.LeaseExpired.code
_BUSY = errors.Backpressure.code
_TOO_SMALL = errors.UsageError.code
_LATE = errors.TransferTimeout.code
_UNREACHED = (errors.PeerUnreachable.code, errors.TransferTimeout.code)


class Targets(Protocol):
    """Where the bytes of each key go."""

    def place(self, keys: Sequence[int], lengths: Sequence[int]) -> Destinations:
        """Room for these keys, whose objects have these lengths. Keys may come again, with other
        lengths, when their objects turned out to be others."""
        ...


@dataclass(slots=True)
class BrokenPlacement:
    """A replica that could not be read: for the report to the master."""

    key_index: int
    generation: int
    segment_id: int
    incarnation: int
    code: int


@dataclass(slots=True)
class ReadResult:
    """`codes[i]` of key i: 0 when its target holds the object; `lengths[i]`: of the object, as far
    as it is known."""

    codes: list[int]
    lengths: list[int]
    broken: list[BrokenPlacement] = field(default_factory=list)


class _Open:
    """The keys of one call that are not done."""

    __slots__ = ("deadline", "fresh", "hedged", "names", "plans", "questions", "result", "retried")

    def __init__(self, names: Sequence[bytes], deadline: Deadline) -> None:
        self.names = names
        self.deadline = deadline
        self.plans: list[bytes] = []  # rows of the replicas that are still to be tried
        self.fresh: set[int] = set()  # keys whose rows the master has given in this call
        self.hedged: dict[int, int] = {}  # how many replicas of a key were late, and come last now
        self.questions = 0
        self.retried = False
        self.result = ReadResult([], [0] * len(names))


class BatchReader:
    """Reads objects into targets. Its state is the cache; any thread may use it."""

    def __init__(
        self,
        engine: TransferEngine,
        directory: SegmentDirectory,
        master: MasterClient,
        tenant: str,
        clock: Clock,
        hedge_ms: int = 0,
    ) -> None:
        self._directory = directory
        self._hedge_ms = hedge_ms
        self._master = master
        self._tenant = tenant
        self._clock = clock
        self._remote = RemoteReader(engine, directory)
        self._fetcher = DiskFetcher(directory, self._read_memory)
        self.cache = PlacementCache()
        self._any_striped = False  # none was met yet, so none need be looked for
        self.lap: Callable[[str], None] = lambda step: None  # told as one ends

    # --- where ---

    def locate(self, names: Sequence[bytes], deadline: Deadline) -> list[bytes]:
        """Rows of every key under new leases; empty for a miss. One Locate."""
        return self._ask(names, deadline)[0]

    def sight(self, names: Sequence[bytes], deadline: Deadline) -> tuple[list[bytes], list[int]]:
        """Like `locate`, and what each object is known by, wherever it moves; 0 for a miss."""
        entries, placements = self._ask(names, deadline)
        return entries, placements.objects().tolist()

    def recall(self, name: bytes) -> bytes | None:
        """Rows under a lease that runs, without asking anybody."""
        (rows,) = self.cache.find([name])
        return None if rows is None or self._ended(rows) else rows

    def leading(self, names: Sequence[bytes], deadline: Deadline) -> int:
        """How many leading keys have objects. Their placements are known afterwards, so reading
        them needs no more questions. One Locate, or none when all of them are known."""
        found = self.cache.find(names)
        if None not in found and not self._ended(b"".join(cast("list[bytes]", found))):
            return len(names)
        entries, _ = self._ask(names, deadline, prefix=True)
        for count, rows in enumerate(entries):
            if not rows:
                return count
        return len(entries)

    def _ended(self, rows: bytes) -> bool:
        """Has the lease of one of these rows ended?"""
        if not rows:
            return False
        leases = np.frombuffer(rows, EXTENT)["expires_ms"]
        return int(leases.min()) < self._clock.now_ms()

    def _plan(self, call: _Open) -> None:
        """From the cache; what it does not know, or whose lease has ended, from the master."""
        names = call.names
        found = self.cache.find(names)
        unknown: list[int] = []
        if None in found or self._ended(b"".join(cast("list[bytes]", found))):
            unknown = [i for i, rows in enumerate(found) if rows is None or self._ended(rows)]
        call.plans = cast("list[bytes]", found)  # None is replaced below
        call.result.codes = [errors.OK] * len(names)
        if unknown:
            self._question(call, unknown)
        failed = self._directory.failed_lately(self._clock.now_ms())
        if failed:  # what is cached was ordered before
            for i, rows in enumerate(call.plans):
                if len(rows) > ROW_BYTES and not is_striped(rows):
                    call.plans[i] = _failed_last(rows, failed)

    def _question(self, call: _Open, which: Sequence[int]) -> None:
        """Ask the master about some keys, once for all of them."""
        call.questions += 1
        call.fresh.update(which)
        names = call.names
        if len(which) < len(names):
            names = [names[i] for i in which]
        for i, rows in zip(which, self.locate(names, call.deadline), strict=True):
            call.plans[i] = rows
            if not rows:
                call.result.codes[i] = _MISS

    def _ask(
        self, names: Sequence[bytes], deadline: Deadline, prefix: bool = False
    ) -> tuple[list[bytes], Placements]:
        """One Locate. Rows a key, which the cache has learnt; with prefix up to the first miss."""
        flight = self.cache.depart()
        entries: list[bytes] = []
        try:
            asked_at_ms = self._clock.now_ms()
            placements = self._master.locate(
                self._tenant, names, prefix=prefix, timeout_ms=deadline.left_ms()
            )
            entries = self._entries(placements, asked_at_ms)
        finally:
            self.cache.arrive(flight, names[: len(entries)], entries)
        return entries, placements

    def _entries(self, placements: Placements, asked_at_ms: int) -> list[bytes]:
        rows = placements.rows
        extents = np.zeros(len(rows), dtype=EXTENT)
        for name in ("key_index", "offset", "length", "generation"):
            extents[name] = rows[name]
        indices = [self._directory.index(segment) for segment in placements.segments]
        if len(indices) == 1:
            extents["segment_index"] = indices[0]
        elif indices:
            extents["segment_index"] = np.array(indices, "<u4")[rows["segment_index"]]
        if len(placements.parts):
            self._any_striped = True
            extents = with_parts(extents, placements, indices)
        extents["expires_ms"] = asked_at_ms + placements.lease_ms
        usable = self.cache.usable(extents, asked_at_ms)
        if usable is not None:
            extents = extents[usable | (extents["tag"] > 0)]
        count = len(placements.status)
        keys = extents["key_index"]
        if len(indices) > 1 and len(extents) > count:
            extents = extents[self._nearest_first(extents, asked_at_ms)]
        if len(extents) == count and (np.diff(keys.astype(np.int64)) == 1).all():
            pieces: list[bytes] = extents.view(f"V{ROW_BYTES}").tolist()
            return pieces
        raw = extents.tobytes()
        ends = (np.searchsorted(keys, np.arange(count), "right") * ROW_BYTES).tolist()
        return [raw[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _nearest_first(self, extents: np.ndarray, now_ms: int) -> np.ndarray:
        """The order in which each key's replicas are tried: those of this host, then others, then
        nodes that failed lately; equals in another order for every object, so that load spreads."""
        indices = extents["segment_index"]
        distance = self._directory.distances(now_ms)[indices]
        shuffled = (extents["generation"] + indices) * _SPREAD
        return np.lexsort((shuffled, distance, extents["tag"], extents["key_index"]))

    # --- reading ---

    def read(
        self,
        names: Sequence[bytes],
        targets: Targets,
        deadline: Deadline,
        rows: list[bytes] | None = None,
    ) -> ReadResult:
        """Fill the targets. Raises nothing for a single key's failure. rows: read from these
        placements and ask for no others; empty for a key that is a miss."""
        call = _Open(names, deadline)
        if rows is None:
            self._plan(call)
        else:
            call.plans, call.questions = list(rows), QUESTIONS_MAX
            call.result.codes = [errors.OK if plan else _MISS for plan in rows]
        todo: Sequence[int] = range(len(names))
        if _MISS in call.result.codes:
            todo = [i for i in todo if call.plans[i]]
        if self._any_striped:
            striped = [i for i in todo if is_striped(call.plans[i])]
            todo = [i for i in todo if i not in set(striped)] if striped else todo
            for i in striped:
                self._read_striped(call, i, targets)
        while todo:
            if deadline.passed():
                for i in todo:
                    call.result.codes[i] = errors.TransferTimeout.code
                break
            todo = self._round(call, todo, targets)
            call.retried = True
        return call.result

    def _read_striped(self, call: _Open, i: int, targets: Targets) -> None:
        """Read an object in parts: all parts at once, then the next replicas of those that failed.
        What the cache said and does not fit is asked for again."""
        while True:
            entry = call.plans[i]
            length = object_length(entry)
            call.result.lengths[i] = length
            parts = plan_parts(entry, targets.place([i], [length]))
            if parts is None:
                call.result.codes[i] = _TOO_SMALL
            else:
                call.result.codes[i] = self._read_parts(call, i, parts)
            code = call.result.codes[i]
            if code == errors.OK or i in call.fresh or call.questions >= QUESTIONS_MAX:
                return
            self.cache.forget([call.names[i]])
            self._question(call, [i])
            if not is_striped(call.plans[i]):
                return self._read_alone(call, i, targets)

    def _read_alone(self, call: _Open, i: int, targets: Targets) -> None:
        """The object lies in one piece by now, or is not there any more."""
        todo = [i] if call.plans[i] else []
        while todo and not call.deadline.passed():
            call.retried = True
            todo = self._round(call, todo, targets)

    def _read_parts(self, call: _Open, i: int, parts: list[PartRead]) -> int:
        """The first code that is not OK when no replica of some part is left."""
        todo = parts
        while todo:
            if call.deadline.passed():
                return errors.TransferTimeout.code
            rows = b"".join(part.rows[0] for part in todo)
            statuses = self._attempt_long(call, rows, destinations(todo), call.deadline)
            statuses = statuses or [0] * len(todo)
            for part, status in zip(todo, statuses, strict=True):
                row = np.frombuffer(part.rows.pop(0), EXTENT)[0]
                part.code = -status
                if status:
                    self._broken(call, i, row, part.code)
            todo = [part for part in todo if part.code and part.rows]
        return next((part.code for part in parts if part.code), errors.OK)

    def _round(self, call: _Open, todo: Sequence[int], targets: Targets) -> list[int]:
        """Read the next row of each of these keys. Answers those that are to be tried again."""
        plans = call.plans if len(todo) == len(call.plans) else [call.plans[i] for i in todo]
        rows = b"".join(plans)
        if len(rows) != len(todo) * ROW_BYTES:
            rows = b"".join([plan[:ROW_BYTES] for plan in plans])
        lengths = np.frombuffer(rows, EXTENT)["length"].tolist()
        if len(todo) == len(call.plans):
            call.result.lengths = lengths
        else:
            for i, length in zip(todo, lengths, strict=True):
                call.result.lengths[i] = length
        deadline = call.deadline
        hurried = sum(map(len, plans)) > len(rows)  # some could be had elsewhere
        if hurried:
            patience_ms = self._hedge_ms
            if not patience_ms or any(not self._may_hedge(call, i) for i in todo):
                patience_ms = PATIENCE_MS
            patience_ms += sum(lengths) // PATIENCE_BYTES_PER_MS
            deadline = Deadline(min(patience_ms, deadline.left_ms()), self._clock)
        to = targets.place(todo, lengths)
        if sum(lengths) < LARGE_BYTES:
            statuses = self._attempt(rows, to, deadline)
        else:
            statuses = self._attempt_long(call, rows, to, deadline)
        if self._directory.disks:
            self._forget_cold(call, todo, rows)
        if statuses is None:
            for i in todo if call.retried else ():
                call.result.codes[i] = errors.OK
            return []
        return self._judge(call, todo, rows, statuses, hurried)

    def _attempt_long(
        self, call: _Open, rows: bytes, to: Destinations, deadline: Deadline
    ) -> list[int] | None:
        """As `_attempt`, with leases that are renewed if the bytes are many."""
        if sum(to.sizes) < LARGE_BYTES:  # a range of something large
            return self._attempt(rows, to, deadline)

        def renew() -> int:
            until = Deadline(max(1, min(ASK_MS, call.deadline.left_ms())), self._clock)
            return self._lease_left_ms(b"".join(self._ask(call.names, until)[0]))

        renewer = LeaseRenewer(self._lease_left_ms(rows), renew)
        try:
            return self._attempt(rows, to, deadline)
        finally:
            renewer.close()

    def _lease_left_ms(self, rows: bytes) -> int:
        leases = np.frombuffer(rows, EXTENT)["expires_ms"]
        return int(leases.min(initial=ASK_MS + self._clock.now_ms())) - self._clock.now_ms()

    def _attempt(self, rows: bytes, to: Destinations, deadline: Deadline) -> list[int] | None:
        """One status a row, native sign; None: all good. Never raises for what nodes do."""
        on_disk = self._on_disk(rows)
        if not on_disk:
            return self._read_memory(rows, to, deadline)
        table = np.frombuffer(rows, EXTENT)
        statuses = [0] * len(table)
        others = [at for at in range(len(table)) if at not in set(on_disk)]
        if others:
            found = self._read_memory(table[others].tobytes(), select(to, others), deadline)
            for n, at in enumerate(others):
                statuses[at] = found[n] if found else 0
        self._fetcher.read(table, on_disk, to, statuses, deadline)
        self.lap("disk")
        return statuses if any(statuses) else None

    def _on_disk(self, rows: bytes) -> list[int]:
        disks = self._directory.disks
        if not disks:
            return []
        indices = np.frombuffer(rows, EXTENT)["segment_index"].tolist()
        return [at for at, index in enumerate(indices) if index in disks]

    def _forget_cold(self, call: _Open, todo: Sequence[int], rows: bytes) -> None:
        """What is read from a disk may soon be in memory: ask again next time."""
        self.cache.forget([call.names[todo[at]] for at in self._on_disk(rows)])

    def _read_memory(self, rows: bytes, to: Destinations, deadline: Deadline) -> list[int] | None:
        statuses = read_mapped(self._directory.table, rows, len(rows) // ROW_BYTES, to)
        self.lap("copy")
        if statuses is None or NOT_MAPPED not in statuses:
            return statuses
        self._remote.read(rows, to, statuses, deadline)
        self.lap("wire")
        return statuses if any(statuses) else None

    def _judge(
        self,
        call: _Open,
        todo: Sequence[int],
        rows: bytes,
        statuses: Sequence[int],
        hurried: bool,
    ) -> list[int]:
        """hurried: they had a part of the deadline only, for the sake of those with replicas."""
        again: list[int] = []
        stale: list[int] = []
        table = np.frombuffer(rows, EXTENT)
        for at, (i, status) in enumerate(zip(todo, statuses, strict=True)):
            code = call.result.codes[i] = -status
            if code == errors.OK:
                continue
            if code == _LATE and self._hedge_ms and self._may_hedge(call, i):
                # Nothing is wrong with it but that another may be faster.
                call.hedged[i] = call.hedged.get(i, 0) + 1
                self._directory.failed(int(table[at]["segment_index"]), self._clock.now_ms())
                call.plans[i] = call.plans[i][ROW_BYTES:] + call.plans[i][:ROW_BYTES]
                again.append(i)
                continue
            if code == _LATE and hurried and len(call.plans[i]) == ROW_BYTES:
                again.append(i)  # there is no other, so it has the whole deadline
                continue
            call.plans[i] = call.plans[i][ROW_BYTES:]
            may_ask = i not in call.fresh and call.questions < QUESTIONS_MAX
            if code in (_STALE, _TOO_SMALL) and may_ask:
                stale.append(i)
            elif code == _BUSY:
                again += [i] if call.plans[i] else []
            elif code != _TOO_SMALL:
                self._broken(call, i, table[at], code)
                if call.plans[i]:
                    again.append(i)
                elif i not in call.fresh:
                    stale.append(i)
        if stale:
            self.cache.forget([call.names[i] for i in stale])
            if call.questions < QUESTIONS_MAX and not call.deadline.passed():
                self._question(call, stale)
                again += [i for i in stale if call.plans[i]]
        return sorted(again)

    @staticmethod
    def _may_hedge(call: _Open, i: int) -> bool:
        """Has a replica of this key not been asked yet, or briefly only?"""
        return call.hedged.get(i, 0) < len(call.plans[i]) // ROW_BYTES

    def _broken(self, call: _Open, key: int, row: np.void, code: int) -> None:
        generation, index = int(row["generation"]), int(row["segment_index"])
        if code != errors.TransferTimeout.code:
            self.cache.avoid(generation, index, self._clock.now_ms())
        if code in _UNREACHED:
            self._directory.failed(index, self._clock.now_ms())
        segment = self._directory.segment(index)
        call.result.broken.append(
            BrokenPlacement(key, generation, segment.segment_id, segment.incarnation, code)
        )

    def report(self, names: Sequence[bytes], result: ReadResult, deadline: Deadline) -> None:
        """Tell the master once what could not be read, so that nobody is sent there again."""
        broken = result.broken
        self.cache.forget([names[b.key_index] for b in broken])
        try:
            self._master.report(
                self._tenant,
                [names[b.key_index] for b in broken],
                [b.generation for b in broken],
                [b.segment_id for b in broken],
                [b.code for b in broken],
                incarnations=[b.incarnation for b in broken],
                timeout_ms=max(1, deadline.left_ms()),
            )
        except MooncakeError:
            return  # advice only: the master finds out by itself a little later


def _failed_last(rows: bytes, failed: frozenset[int]) -> bytes:
    """The rows of one key, those of these segments behind the others."""
    table = np.frombuffer(rows, EXTENT)
    order = np.argsort(np.isin(table["segment_index"], list(failed)), kind="stable")
    moved: bytes = table[order].tobytes()
    return moved
