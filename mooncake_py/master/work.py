"""What one command wants done: records and effects, collected while it is decided. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from mooncake_py.master import records
from mooncake_py.master.commands import Applied, Effect, Reply, Unseal
from mooncake_py.master.lingering import Extent
from mooncake_py.model import EXTENT_ALIGN_BYTES, EXTENT_ROW

_NO_DIGEST = bytes(16)


class Work:
    """Of one command, in the making."""

    __slots__ = (
        "_copied", "_dropped", "_lost", "_read_until", "_unseals", "drop_count", "durable",
        "hold_until_ms", "records",
    )  # fmt: skip

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.durable = False
        self.drop_count = 0
        self.hold_until_ms = 0
        self._dropped: dict[int, list[int]] = {}  # extents rest until -> generations
        self._lost: dict[int, list[tuple[int, int]]] = {}  # until -> (generation, segment id)
        self._unseals: dict[int, list[bytes]] = {}
        self._read_until: dict[int, int] = {}  # segment id -> when leases of these end
        self._copied: list[tuple[int, int, int, int]] = []

    def copy(self, generation: int, own: int, segment_id: int, start: int) -> None:
        """The object has got a replica with a generation of its own."""
        self._copied.append((generation, own, segment_id, start * EXTENT_ALIGN_BYTES))

    def drop(self, generation: int, until_ms: int) -> None:
        self.drop_count += 1
        self._dropped.setdefault(until_ms, []).append(generation)

    def lose(self, generation: int, segment_id: int, until_ms: int) -> None:
        self._lost.setdefault(until_ms, []).append((generation, segment_id))

    def unseal(self, segment_id: int, start: int, length: int, generation: int) -> None:
        rows = self._unseals.setdefault(segment_id, [])
        offset = start * EXTENT_ALIGN_BYTES
        rows.append(EXTENT_ROW.pack(len(rows), 0, offset, length, generation, 0, _NO_DIGEST, 0))

    def unseal_all(self, extents: Iterable[Extent], read_until_ms: int = 0) -> None:
        """`read_until_ms`: the leases of readers end then, and what was asked for is not done
        before that or the unsealing (lingering.py)."""
        for segment_id, start, length, generation in extents:
            self.unseal(segment_id, start, length, generation)
            known_ms = self._read_until.get(segment_id, 0)
            self._read_until[segment_id] = max(known_ms, read_until_ms)

    def hold(self, until_ms: int) -> None:
        """Readers may have leases until then of what no node can be told about."""
        self.hold_until_ms = max(self.hold_until_ms, until_ms)

    def done(self, reply: Reply, now_ms: int) -> Applied:
        """The outcome. Drops go before grants: what they freed may already be granted again. Copies
        go before both, so that a replica that was moved is never the last one."""
        found = [records.encode(records.Copies(self._copied))] if self._copied else []
        found += [
            records.encode(records.Drops(now_ms, until, generations))
            for until, generations in self._dropped.items()
        ]
        found += [records.encode(records.Lost(until, pairs)) for until, pairs in self._lost.items()]
        found += self.records
        effects: list[Effect] = [
            Unseal(segment_id, b"".join(rows), self._read_until.get(segment_id, 0))
            for segment_id, rows in self._unseals.items()
        ]
        return Applied(reply, found, effects, self.durable, hold_until_ms=self.hold_until_ms)
