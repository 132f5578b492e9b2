"""Where the master's memory outlives the master: the interface, and what every store promises.

A store holds a cluster's identity, the number of the current term, the newest snapshot of the
catalog, and the records that came after it. Rules that the conformance battery holds every
implementation to:

* `append` is all or nothing and durable when it returns; records come back in the order in which
  they were appended.
* `load` begins a term (`next_term`): its number is greater than that of
  every earlier `load`, and durable before it is returned. While one process has a store loaded, no
  other can.
* `raise_term` goes on in a greater term; it is durable when it returns, and later ones are above.
* After `write_snapshot(snapshot, sequence)` a load gives that snapshot and the records above
  `sequence` only. A store keeps the snapshot before as well and falls back to it when the newest
  one is damaged.
* A damaged record is left out and counted, and the ones after it are still given: the nodes'
  extents say whether an object exists, so one lost record is one object, not the catalog.
* Every failure is `MasterUnavailable` with the store's words in it; nothing is half done then. A
  store that is shared may not know whether an append that failed arrived: the next one must begin
  with the same records (more may follow), and they will be there once. `NotLeader`: another
  process has taken the store over.

A store is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

_MS_TO_2020 = 1_577_836_800_000  # since 1970


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a store held when it was loaded.

    `secret`: 32 bytes, made once in a cluster's life; grants and digests derive theirs from it.
    `sequence`: of the last record. `corrupt`: records and snapshots that were left out. `born_ms`:
    when the store was made.
    """

    cluster_id: str
    secret: bytes
    term: int
    snapshot: bytes | None = None
    records: list[bytes] = field(default_factory=list)
    sequence: int = 0
    corrupt: int = 0
    born_ms: int = 0


def next_term(now_ms: int, before: int = 0) -> int:
    """The number of a term that begins now: milliseconds since 2020, or what is above the term
    `before`, the last one that the store knows. Should the store replace one that was lost, its
    terms are above those of the lost one, and so are generations and whatever nodes and clients
    compare: no process ends and another one begins within a millisecond."""
    return max(1, before + 1, now_ms - _MS_TO_2020)


class MetadataStore(Protocol):
    def load(self) -> Loaded:
        """Begin a term. Called once, before anything else."""

    def append(self, records: Sequence[bytes]) -> int:
        """Make records durable, together. Returns the sequence number of the last one."""

    def raise_term(self, term: int) -> None:
        """Terms that are begun from now on are above this one. A smaller one changes nothing."""

    def write_snapshot(self, snapshot: bytes | bytearray, sequence: int) -> None:
        """Replace what came before by a snapshot that contains all records up to `sequence`, which
        is one that `append` or `load` gave."""

    def describe(self) -> str:
        """Where it is, without blanks, for the line a person reads at start."""

    def close(self) -> None:
        """Give the store free for the next process. Harmless twice."""
