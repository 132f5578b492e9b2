"""What the log may not know of, and what it must not learn again.

Generations name attempts, and each term of a master has its own (`CatalogState.begin_term`). What a
former master handed out after its last durable record is a *void*: a range of generations that
no record speaks of although nodes may hold sealed extents with them. Everything outside the voids
is recorded, so an extent there that the catalog does not place has ended.

Each segment has `recorded_below`: what it holds with a generation below that was told to a master
and is in the log. A segment with a void above that *owes* an inventory until it has mounted again
and told (recovery.py). While any does, or while segments of a lost cluster may come, `open` is
True and what ends is buried: an older extent of that key which comes to light later stays dead.

The invariant of all that: *whatever a writer may have been told is stored ends by a decision alone
(removal, eviction, a younger value, TTL, loss of all its nodes), never for want of a record.* So

* an expiry ends no grant of a former master as long as a node that may hold it has not told
  (`may_be_stored`): the record of its commit may be among the lost ones. With a store that
  acknowledges after the record there is nothing to wait for;
* parts and members that wait for others to be told of have their place already (adoption.py): no
  put is placed over them;
* an object that was lost with its nodes buries only what is older than itself: a copy of it that no
  record tells of brings it back.

Pure; owner thread only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mooncake_py.errors import UsageError
from mooncake_py.master import records
from mooncake_py.master.pattern import Pattern

GRAVES_MAX = 200_000  # beyond it the segments that owe are not waited for any longer
_VOIDS_MAX = 1_024  # older ones are joined

Range = tuple[int, int]  # from, below
Grave = tuple[tuple[str, bytes], int]  # tenant and key; generations below have ended


class Gaps:
    """Generations between those that a log has told of: reservations whose end it does not see
    (their commits tell of them), copies, and what was in damaged records. Such an extent may hold
    an acknowledged object."""

    __slots__ = ("_ranges", "youngest")

    def __init__(self) -> None:
        self._ranges: list[Range] = []  # ascending
        self.youngest = 0  # of all that were told of

    def learn(self, record: records.Recorded) -> None:
        self.youngest = max(self.youngest, record.horizon - 1)
        self._ranges = sorted({*self._ranges, *record.reserved})

    def granted(self, generations: Sequence[int]) -> None:
        """A record told of these."""
        if not generations:
            return
        first, last = generations[0], generations[-1]
        if first <= self.youngest or last - first + 1 != len(generations):
            for generation in generations:
                self._one(generation)
            return
        self._one(first)
        self.youngest = last

    def _one(self, generation: int) -> None:
        if generation <= self.youngest:
            self.fill(generation)
            return
        if generation > self.youngest + 1:
            self._ranges.append((self.youngest + 1, generation))
        self.youngest = generation

    def fill(self, generation: int) -> None:
        """This one is known, or has ended."""
        at = bisect_right(self._ranges, (generation, 1 << 64)) - 1
        if at < 0 or not self._ranges[at][0] <= generation < self._ranges[at][1]:
            return
        start, below = self._ranges[at]
        parts = [(start, generation), (generation + 1, below)]
        self._ranges[at : at + 1] = [part for part in parts if part[0] < part[1]]

    def ranges(self) -> list[Range]:
        return self._ranges[-_VOIDS_MAX:]


class Unrecorded:
    """`horizon`: generations below it are recorded or in a void. `first_generation`: from this one
    on generations are this master's own."""

    __slots__ = (
        "_graves", "_sweeps", "contested", "durable_puts", "first_generation",
        "foreign_until_ms", "gathered", "horizon", "lost_segments", "open", "voids",
    )  # fmt: skip

    def __init__(self) -> None:
        self.voids: list[Range] = []
        self.horizon = 1
        self.first_generation = 1
        self.durable_puts = False
        self.foreign_until_ms = 0  # segments of a lost cluster are adopted until then
        # Ids from, below, and until when: given out by former masters, after what the log tells.
        self.lost_segments = (1, 1, 0)
        self.open = False
        # Of groups that are not whole yet: by key, what recovery.py found of it.
        self.gathered: dict[tuple[str, int], dict[bytes, list[Any]]] = {}
        # (segment, what was found): puts through reservations whose key the log believes taken.
        self.contested: list[tuple[Any, Any]] = []
        self._graves: dict[tuple[str, bytes], int] = {}  # generations below have ended
        self._sweeps: list[tuple[str, bytes, bytes, int]] = []  # tenant, prefix, pattern, below

    def begin(self, first_generation: int, durable_puts: bool) -> bytes:
        """A master begins; the record that says what its predecessors may have left. With
        `durable_puts` they acknowledged nothing that is not in the log."""
        self.durable_puts = durable_puts
        if self.horizon < first_generation and (not durable_puts or self.horizon == 1):
            self.voids.append((self.horizon, first_generation))  # horizon 1: there is no record yet
        if len(self.voids) > _VOIDS_MAX:
            self.voids[:2] = [(self.voids[0][0], self.voids[1][1])]
        self.horizon = self.first_generation = first_generation
        return records.encode(records.Recorded(first_generation, self.voids, ()))

    def raise_to(self, first_generation: int) -> bytes:
        """This master goes on with younger generations, above all that can come to light; the
        record that says so."""
        self.voids.append((self.horizon, first_generation))
        self.horizon = self.first_generation = first_generation
        self._deepen(first_generation)
        return records.encode(records.Recorded(first_generation, self.voids, ()))

    def may_be_stored(self, generation: int) -> bool:
        """Was this granted by a master that acknowledged puts before their records were durable?"""
        return not self.durable_puts and generation < self.first_generation

    def learn(self, record: records.Recorded) -> None:
        self.horizon = max(self.horizon, record.horizon)
        self.voids = list(record.voids)

    def owed_by(self, recorded_below: int) -> list[Range]:
        """Voids that such a segment may hold extents of."""
        return [
            (max(start, recorded_below), below)
            for start, below in self.voids
            if below > recorded_below
        ]

    def forget_below(self, recorded_below: int) -> None:
        """No segment owes anything below this."""
        self.voids = [each for each in self.voids if each[1] > recorded_below]

    # --- graves ---------------------------------------------------------------------------------

    def bury(self, tenant: str, keys: Sequence[bytes], below: int) -> bytes:
        """These ended now; the record that says so."""
        self._dig(tenant, keys, below)
        return records.encode(records.Buried(tenant, below, False, keys))

    def sweep(self, tenant: str, prefix: bytes, pattern: bytes, below: int) -> bytes:
        """All of the tenant with this prefix, in which the pattern is found, ended now."""
        self._sweeps.append((tenant, prefix, pattern, below))
        return records.encode(records.Buried(tenant, below, True, (prefix, pattern)))

    def rebury(self, record: records.Buried) -> None:
        """From the log."""
        if record.sweep:
            prefix, pattern = record.keys
            self._sweeps.append((record.tenant, prefix, pattern, record.below))
        else:
            self._dig(record.tenant, record.keys, record.below)

    def _dig(self, tenant: str, keys: Sequence[bytes], below: int) -> None:
        graves = self._graves
        for key in keys:
            graves[tenant, key] = max(below, graves.get((tenant, key), 0))

    def _deepen(self, below: int) -> None:
        """Extents may come to light that look younger than this master: whatever was buried was
        older than all its own."""
        self._graves = dict.fromkeys(self._graves, below)
        self._sweeps = [(*each[:3], below) for each in self._sweeps]

    def buried(self, tenant: str, key: bytes, generation: int) -> bool:
        if self._graves.get((tenant, key), 0) > generation:
            return True
        return any(
            tenant == name and generation < below and key.startswith(prefix)
            and (not pattern or _found(pattern, key))
            for name, prefix, pattern, below in self._sweeps
        )  # fmt: skip

    @property
    def grave_count(self) -> int:
        return len(self._graves) + len(self._sweeps)

    def close(self) -> None:
        """Nobody owes anything any more."""
        self.open = False
        self.gathered.clear()
        self.contested.clear()
        self._graves.clear()
        self._sweeps.clear()

    def graves(self) -> list[Grave]:
        """As they are now, for a snapshot that takes its time."""
        return list(self._graves.items())

    def records_of_sweeps(self) -> Iterator[records.Record]:
        """For a snapshot."""
        for tenant, prefix, pattern, below in self._sweeps:
            yield records.Buried(tenant, below, True, (prefix, pattern))


def records_of_graves(graves: Iterable[Grave]) -> Iterator[records.Record]:
    """For a snapshot: no more than a record's worth."""
    by_kind: dict[tuple[str, int], list[bytes]] = {}
    for (tenant, key), below in graves:
        by_kind.setdefault((tenant, below), []).append(key)
    for (tenant, below), keys in by_kind.items():
        yield records.Buried(tenant, below, False, keys)


def _found(pattern: bytes, key: bytes) -> bool:
    try:
        return Pattern(pattern).found_in(key)
    except UsageError:  # it was refused then, too
        return False
