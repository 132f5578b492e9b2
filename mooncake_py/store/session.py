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
  object under one key are never mixed. Leases are renewed as the session goes on.
* A writing session collects in memory that nodes on this host map (`alloc`). The parts move to the
  nodes at commit, so the objects become visible together, and an abandoned session leaves nothing.
  What was never written is zeros.
* A session belongs to one thread at a time. It ends with its `with`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from numbers import Integral
from types import TracebackType
from typing import Any, Self

import numpy as np

from mooncake_py.errors import MooncakeError, ObjectNotFound, UsageError
from mooncake_py.model import OBJECT_MAX_BYTES
from mooncake_py.store.regions import RegisteredMemory
from mooncake_py.store.stripes import object_length
from mooncake_py.wire.rows import EXTENT

PIECE_ALIGN_BYTES = 64

Locate = Callable[[], list[bytes]]
Read = Callable[[list[bytes], Sequence[Any] | None, Sequence[tuple[int, int]]], list[Any]]


class ReadSession:
    """Made by `StoreClient.session`. `present[i]`: key i has an object; `lengths[i]`: its bytes."""

    def __init__(
        self, keys: Sequence[str], locate: Locate, read: Read, now_ms: Callable[[], int]
    ) -> None:
        self._keys = keys
        self._locate = locate
        self._read = read
        self._now_ms = now_ms
        self._renew_at_ms = 0
        self._rows: list[bytes] = []
        self._renew()
        self.present = [bool(rows) for rows in self._rows]
        self.lengths = [object_length(rows) for rows in self._rows]

    def __repr__(self) -> str:
        return f"<ReadSession of {len(self._keys)} keys, {sum(map(bool, self._rows))} readable>"

    def _renew(self) -> None:
        """New leases; and what is another object by now is not ours any more."""
        found = self._locate()
        now_ms = self._now_ms()
        leases = [_column(rows, "expires_ms") for rows in found if rows]
        self._renew_at_ms = now_ms + max(1, min(leases, default=now_ms) - now_ms) * 2 // 3
        if not self._rows:
            self._rows = found
            return
        for i, (old, new) in enumerate(zip(self._rows, found, strict=True)):
            same = old and new and _column(old, "generation") == _column(new, "generation")
            self._rows[i] = new if same else b""

    def read(
        self, offset: int, nbytes: int, into: Sequence[Any] | None = None
    ) -> list[bytes | int | MooncakeError]:
        """The same part of every object, into one target a key or as bytes. One outcome a key,
        in order, as of `get_batch`."""
        if self._now_ms() >= self._renew_at_ms:
            self._renew()
        ranges = [(offset, nbytes)] * len(self._keys)
        outcomes = self._read(self._rows, into, ranges)
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, ObjectNotFound):
                self._rows[i] = b""
        return outcomes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._rows = [b""] * len(self._keys)


def _column(rows: bytes, name: str) -> int:
    return int(np.frombuffer(rows, EXTENT)[name][0]) if rows else 0


class WriteSession:
    """Made by `StoreClient.session` with sizes. `views[i]`: the memory of object i, which may also
    be written directly before `commit`."""

    def __init__(
        self,
        keys: Sequence[str],
        sizes: Sequence[int],
        alloc: Callable[[int], RegisteredMemory],
        put: Callable[[Sequence[str], Sequence[Any]], list[MooncakeError | None]],
    ) -> None:
        if not all(isinstance(size, Integral) and 0 <= size <= OBJECT_MAX_BYTES for size in sizes):
            raise UsageError("a size is a whole number of bytes", sizes=list(sizes)[:8])
        self._keys = keys
        self._put = put
        rounded = [-(-size // PIECE_ALIGN_BYTES) * PIECE_ALIGN_BYTES for size in sizes]
        starts = [0, *accumulate(rounded)]
        self._memory: RegisteredMemory | None = alloc(max(1, starts[-1]))
        whole = self._memory.view()
        self.views = [
            whole[start : start + size] for start, size in zip(starts, sizes, strict=False)
        ]

    def __repr__(self) -> str:
        state = "has ended" if self._memory is None else "not committed"
        nbytes = sum(map(len, self.views))
        return f"<WriteSession of {len(self._keys)} keys, {nbytes} bytes, {state}>"

    def write(self, offset: int, parts: Sequence[Any]) -> None:
        """Part i goes to `offset` of object i; None leaves that object as it is. Raises UsageError
        when a part does not fit, and then nothing was written."""
        if self._memory is None:
            raise UsageError("the session has ended")
        if len(parts) != len(self._keys):
            raise UsageError("one part a key", keys=len(self._keys), parts=len(parts))
        given = [None if part is None else memoryview(part).cast("B") for part in parts]
        for key, view, part in zip(self._keys, self.views, given, strict=True):
            if part is not None and not 0 <= offset <= len(view) - len(part):
                raise UsageError(
                    "the part does not fit the object",
                    key=key, nbytes=len(view), offset=offset, part=len(part),
                )  # fmt: skip
        for view, part in zip(self.views, given, strict=True):
            if part is not None:
                view[offset : offset + len(part)] = part

    def commit(self) -> list[MooncakeError | None]:
        """Store all objects. One outcome a key, as of `put_batch`; the session has ended."""
        if self._memory is None:
            raise UsageError("the session has ended")
        try:
            return self._put(self._keys, self.views)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End without storing anything that was not committed. Twice is fine."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()
