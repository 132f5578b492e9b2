"""What was promised to the users of `StoreClient`, and whether it was kept.

Every value says which write it is of. So whoever reads it can be told whether that write may be
read now; and when the master commits a generation, the node's memory says whose write that is.

Rules that are judged:
* a reader gets a whole value, of a write of that key which nobody was told had failed for good;
* what was acknowledged or read before a removal began is not read by a call that begins after the
  removal was acknowledged;
* what is committed is on a node: sealed, with its own bytes;
* what was acknowledged and did not end by the catalog's word is there in the end, unless all nodes
  that had it were lost;
* a call ends within its deadline, and in calm times one that asks for what is there gets it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from catalog_model import check_invariants

from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import Applied, Command
from mooncake_py.master.events import STORED
from mooncake_py.master.replay import RestoreReport
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.shadow import Shadow

STORED_OK, REFUSED, UNKNOWN = "stored", "refused", "unknown"


@dataclass
class Write:
    number: int
    key: str
    nbytes: int
    begun_ms: int
    ended_ms: int = -1
    outcome: str = UNKNOWN
    dead_ms: int = -1  # a removal of it was acknowledged then
    generation: int = 0
    seen_ms: int = -1  # somebody had read it then
    grouped: bool = False  # it ends with others
    # Somebody asked for its end, or for a successor: a master that does not know it yet, since its
    # record was lost and its node has not told, has no event for that.
    unwanted: bool = False

    def value(self) -> bytes:
        head = b"%s|%06d|" % (self.key.encode(), self.number)
        return (head * (1 + self.nbytes // len(head)))[: self.nbytes]


@dataclass
class Ledger:
    writes: list[Write] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    ending: Counter[str] = field(default_factory=Counter)  # calls under way that end a key's object
    ended: dict[int, str] = field(default_factory=dict)  # generation -> the catalog's word
    homes: dict[int, set[object]] = field(default_factory=dict)  # generation -> lives of nodes

    def begin(self, key: str, nbytes: int, now_ms: int, upsert: bool = False) -> Write:
        """`upsert`: it has said itself that it ends what is there."""
        write = Write(len(self.writes), key, nbytes, now_ms, unwanted=self.ending[key] > upsert)
        self.writes.append(write)
        return write

    def unwant(self, key: str) -> None:
        """A removal of the key, or an upsert, begins; until `unwanted` is called, it may end what
        is put meanwhile, too."""
        self.ending[key] += 1
        for write in self.writes:
            write.unwanted |= write.key == key

    def unwanted(self, key: str) -> None:
        """It has ended."""
        self.ending[key] -= 1

    def end(self, write: Write, outcome: str, now_ms: int) -> None:
        write.ended_ms, write.outcome = now_ms, outcome
        self.counts[f"put: {outcome}"] += 1

    def removed(self, key: str, begun_ms: int, now_ms: int) -> None:
        self.counts["removed"] += 1
        for write in self.writes:
            # A put that nobody knows the outcome of may come to be after the removal.
            was_there = write.outcome == STORED_OK or 0 <= write.seen_ms <= begun_ms
            ended = 0 <= write.ended_ms <= begun_ms
            if write.key == key and was_there and ended and write.dead_ms < 0:
                write.dead_ms = now_ms

    def of(self, key: str, data: bytes) -> Write:
        """Whose value this is; judged to be a whole one of this key."""
        name, number, _ = data.split(b"|", 2)
        assert name.decode() == key, f"bytes of {name!r} under {key}"
        write = self.writes[int(number)]
        assert data == write.value(), f"{key}: a torn value"
        return write

    def judge_read(self, key: str, data: bytes, called_ms: int, now_ms: int) -> None:
        write = self.of(key, data)
        self.counts["read"] += 1
        if write.seen_ms < 0:
            write.seen_ms = now_ms
        assert write.outcome != REFUSED, f"{key}: write {write.number} was refused, and is read"
        assert not 0 <= write.dead_ms < called_ms, (
            f"{key}: write {write.number} was removed at {write.dead_ms}, and is read by a call of "
            f"{called_ms}"
        )


class Watched(Catalog):
    """The real one; what it does is checked, and noted."""

    def __init__(self, settings: CatalogSettings, cluster: Any) -> None:
        super().__init__(settings)
        self.cluster = cluster  # whole_run.Cluster

    def take_over(self, shadow: Shadow, now_ms: int) -> RestoreReport | None:
        report = super().take_over(shadow, now_ms)
        if report is not None:
            assert report.damaged_records == report.extents_overlapping == 0, report
        return report

    def begin_term(self, term: int, *times: Any, **options: Any) -> list[bytes]:
        self.cluster.masters.begins(self, term)
        return super().begin_term(term, *times, **options)

    def apply(self, command: Command, now_ms: int) -> Applied:
        before = self.state.events.next - 1
        applied = super().apply(command, now_ms)
        if not applied.records:
            return applied
        check_invariants(self)
        if not self.cluster.masters.is_newest(self):
            return applied
        page = self.state.events.page(before, 1 << 10)
        for event in page.events:
            if event.what == STORED:
                self.cluster.committed(self, event.key, event.generation)
            else:
                self.cluster.ledger.ended[event.generation] = event.what
                self.cluster.ledger.counts[f"ended: {event.what}"] += 1
        self.cluster.note_homes(self)
        return applied
