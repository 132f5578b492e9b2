"""Sessions: many objects read or written part by part, for engines that work layer by layer.

    with store.session(keys) as reading:             # one master call
        for layer in range(80):
            reading.read(offset, nbytes, into=buffers)   # none

    with store.session(keys, sizes=sizes) as writing:
        for layer in range(80):
            writing.write(offset, parts)
        outcomes = writing.commit()                  # two; without it nothing has happened

Rules.
* A reading session is about the objects that were there when it began. A key whose object is
  removed or evicted meanwhile fails for the rest of the session; parts of an older and a newer
  object under one key are never mixed. Leases are renewed as the session goes on. An object that
  moves (to another node, to or from a disk) or gets another replica stays the same object: the
  master names it by a generation of its own, and one that cannot be read where it was is looked
  for once in that call, and at every renewal.
* A writing session collects in memory that nodes on this host map (`alloc`), and asks for space at
  commit. So it may last as long as it likes, the objects become visible together, and a session
  that is abandoned, or whose process is killed, leaves nothing anywhere: no node ever has an extent
  that waits for its writer. `write` copies into that memory, and at commit a node copies out of it;
  what is computed or received straight into `views` is copied by the node alone, once.
* What is committed was written whole. An object of which a part was never written is refused by
  itself; one that was filled through `views` is its writer's word.
* A session belongs to one thread at a time. It ends with its `with`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any, Self

import numpy as np

from mooncake_py._native import ffi
from mooncake_py.clock import Deadline
from mooncake_py.errors import MooncakeError, ObjectNotFound, UsageError
from mooncake_py.model import DEFAULT_POLICY, OBJECT_MAX_BYTES, ReplicaPolicy
from mooncake_py.store.buffers import source_span
from mooncake_py.store.outcomes import GetOutcome
from mooncake_py.store.regions import RegisteredMemory
from mooncake_py.store.stripes import object_length
from mooncake_py.wire.answers import Segment
from mooncake_py.wire.rows import EXTENT

PIECE_ALIGN_BYTES = 64
LOOK_MS = 1_000  # as if by a lease of that length, when nothing can be read just now

Locate = Callable[[Deadline], tuple[list[bytes], list[int]]]
Read = Callable[
    [list[bytes], Sequence[Any] | None, Sequence[tuple[int, int]], Deadline], list[GetOutcome]
]


class ReadSession:
    """Made by `StoreClient.session`. `present[i]`: key i has an object; `lengths[i]`: its bytes."""

    def __init__(
        self,
        keys: Sequence[str],
        locate: Locate,
        read: Read,
        deadline: Callable[[], Deadline],
        now_ms: Callable[[], int],
        segment: Callable[[int], Segment],
    ) -> None:
        self._keys = keys
        self._locate = locate
        self._read = read
        self._deadline = deadline
        self._now_ms = now_ms
        self._segment = segment
        self._rows, self._objects = locate(deadline())
        self._renew_at_ms = self._renewal()
        self.present = [bool(rows) for rows in self._rows]
        self.lengths = [object_length(rows) for rows in self._rows]

    def __repr__(self) -> str:
        return f"<ReadSession of {len(self._keys)} keys, {sum(map(bool, self._rows))} readable>"

    def homes(self) -> list[list[Segment]]:
        """Where each object lies, as the master said last: its segments, in memory before disks."""
        found = []
        for rows in self._rows:
            indices = dict.fromkeys(np.frombuffer(rows, EXTENT)["segment_index"].tolist())
            found.append(sorted(map(self._segment, indices), key=lambda each: each.disk_id > 0))
        return found

    def _renewal(self) -> int:
        """When a third of the shortest lease will be left."""
        now_ms = self._now_ms()
        leases = [_lease_end(rows) for rows in self._rows if rows]
        return now_ms + max(1, min(leases, default=now_ms + LOOK_MS) - now_ms) * 2 // 3

    def _renew(self, deadline: Deadline) -> None:
        """New leases; and what is another object by now is not ours any more. (One that is nowhere
        to be read may be again.)"""
        found, objects = self._locate(deadline)
        for i, (ours, theirs) in enumerate(zip(self._objects, objects, strict=True)):
            self._rows[i] = found[i] if ours and ours == theirs else b""
            if theirs and ours != theirs:
                self._objects[i] = 0
        self._renew_at_ms = self._renewal()

    def read(self, offset: int, nbytes: int, into: Sequence[Any] | None = None) -> list[GetOutcome]:
        """The same part of every object, into one target a key or as bytes. One outcome a key,
        in order, as of `get_batch`."""
        deadline = self._deadline()
        fresh = any(self._objects) and self._now_ms() >= self._renew_at_ms
        if fresh:
            self._renew(deadline)
        ranges = [(offset, nbytes)] * len(self._keys)
        outcomes = self._read(self._rows, into, ranges, deadline)
        missed = [i for i, rows in enumerate(self._rows) if rows and _is_miss(outcomes[i])]
        if missed and not fresh:  # it may have moved
            self._renew(deadline)
            rows = [b""] * len(self._keys)
            for i in missed:
                rows[i] = self._rows[i]
            again = self._read(rows, into, ranges, deadline)
            for i in missed:
                outcomes[i] = again[i]
        for i in missed:
            if _is_miss(outcomes[i]):
                self._rows[i] = b""
        return outcomes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows = [b""] * len(self._keys)
        self._objects = [0] * len(self._keys)


def _is_miss(outcome: GetOutcome) -> bool:
    return isinstance(outcome, ObjectNotFound)


def _lease_end(rows: bytes) -> int:
    return int(np.frombuffer(rows, EXTENT)["expires_ms"][0])


class _Written:
    """Which bytes of one object were written: ascending spans, mostly one."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> None:
        spans = self._spans
        if spans and spans[-1][0] <= start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
            return
        spans.append((start, end))
        spans.sort()
        joined = spans[:1]
        for begin, stop in spans[1:]:
            if begin <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
            else:
                joined.append((begin, stop))
        self._spans = joined

    def first_gap(self, nbytes: int) -> tuple[int, int] | None:
        """The first bytes of `nbytes` that were not written."""
        spans = [*self._spans, (nbytes, nbytes)]
        if spans[0][0] > 0:
            return 0, spans[0][0]
        return None if spans[0][1] >= nbytes else (spans[0][1], spans[1][0])


def _bytes_of(part: Any) -> memoryview:
    """To be used while the part is alive."""
    span = source_span(part)
    return memoryview(ffi.buffer(ffi.cast("char *", span.address), span.nbytes)).cast("B")


class WriteSession:
    """Made by `StoreClient.session` with sizes."""

    def __init__(
        self,
        keys: Sequence[str],
        sizes: Sequence[int],
        alloc: Callable[[int], RegisteredMemory],
        put: Callable[..., list[MooncakeError | None]],
    ) -> None:
        if not all(isinstance(size, Integral) and 0 <= size <= OBJECT_MAX_BYTES for size in sizes):
            raise UsageError("a size is a whole number of bytes", sizes=list(sizes)[:8])
        self._keys = keys
        self._put = put
        rounded = [-(-size // PIECE_ALIGN_BYTES) * PIECE_ALIGN_BYTES for size in sizes]
        starts = [0, *accumulate(rounded)]
        self._memory: RegisteredMemory | None = alloc(max(1, starts[-1]))
        whole = self._memory.view()
        self._views = [
            whole[start : start + size] for start, size in zip(starts, sizes, strict=False)
        ]
        self._written = [_Written() for _ in sizes]
        self._by_hand = False

    @property
    def views(self) -> list[memoryview]:
        """The memory of each object, to be written directly before `commit`, which then takes the
        caller's word for what was written."""
        self._by_hand = True
        return self._views

    def __repr__(self) -> str:
        state = "has ended" if self._memory is None else "not committed"
        nbytes = sum(map(len, self._views))
        return f"<WriteSession of {len(self._keys)} keys, {nbytes} bytes, {state}>"

    def write(self, offset: int, parts: Sequence[Any]) -> None:
        """Part i (bytes, a buffer or a CPU tensor) goes to `offset` of object i; None leaves that
        object as it is. Raises UsageError when a part does not fit or has no bytes to read, and
        then nothing was written."""
        if self._memory is None:
            raise UsageError("the session has ended")
        if len(parts) != len(self._keys):
            raise UsageError("one part a key", keys=len(self._keys), parts=len(parts))
        given = [None if part is None else _bytes_of(part) for part in parts]
        for key, view, part in zip(self._keys, self._views, given, strict=True):
            if part is not None and not 0 <= offset <= len(view) - len(part):
                raise UsageError(
                    "the part does not fit the object",
                    key=key, nbytes=len(view), offset=offset, part=len(part),
                )  # fmt: skip
        for written, view, part in zip(self._written, self._views, given, strict=True):
            if part is not None:
                view[offset : offset + len(part)] = part
                written.add(offset, offset + len(part))

    def commit(
        self, *, policy: ReplicaPolicy = DEFAULT_POLICY, upsert: bool = False
    ) -> list[MooncakeError | None]:
        """Store all objects, as `put_batch` does with this policy. One outcome a key, as its, or
        UsageError for an object of which a part was never written; the session has ended."""
        if self._memory is None:
            raise UsageError("the session has ended")
        try:
            outcomes = [self._refusal(i) for i in range(len(self._keys))]
            whole = [i for i, outcome in enumerate(outcomes) if outcome is None]
            keys, values = [self._keys[i] for i in whole], [self._views[i] for i in whole]
            stored = self._put(keys, values, policy=policy, upsert=upsert)
            for i, outcome in zip(whole, stored, strict=True):
                outcomes[i] = outcome
            return outcomes
        finally:
            self.abandon()

    def _refusal(self, i: int) -> MooncakeError | None:
        gap = None if self._by_hand else self._written[i].first_gap(len(self._views[i]))
        if gap is None:
            return None
        return UsageError(
            "the object was not written whole",
            remedy="write every part of it before commit, or abandon the session",
            key=self._keys[i], nbytes=len(self._views[i]), missing=f"{gap[0]} to {gap[1]}",
        )  # fmt: skip

    def abandon(self) -> None:
        """End without storing anything that was not committed. Twice is fine."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()
