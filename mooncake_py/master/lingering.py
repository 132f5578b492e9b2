"""Extents that ended while readers had a lease of them, and may be read still. Pure.

Rule: an acknowledged removal, forced or not, is never followed by a read of the key's object, by
anyone. A reader who knows a placement asks nobody while its lease runs, so only two things end
such reads for certain: the node has unsealed the extent, or the lease is over. So whatever ends
under a lease, and for whatever reason (removed, replaced by an upsert, TTL, damaged, moved to
another node, node lost), lingers here under its key until one of both is known. A removal of the
key tells the nodes of all of it, and is answered when all of it is told or over (unsealer.py): also
one that finds the key absent, such as a second try of a removal that could not be answered.

What replaced and expired objects leave is unsealed when the lease ends (*late*), unless a removal
of the key comes first: their readers may go on. Evictions leave nothing, since leased objects are
not evicted.

Of leases that a former master gave nothing is known but how long they may last: until then
removed objects of its time count as leased. So that this is not the longest that anybody may ask
for, the log says how long the longest one is that may run (`LEASES`): before one that is longer is
given, and again when such ones have ended. A log that does not say so (an older one, or one with
damage) may have had any; so may a cluster whose log is lost and whose segments are adopted.

Of an object that no record tells of (unrecorded.py: an embedded master acknowledged its put and was
killed) the next master knows nothing, and its reader may have a lease. So while a node has yet to
tell, or was lost before it told, every removal waits for the end of usual leases of that time.

Bounded by the leases: an entry stays for `lease_max_ms` at most. Not in the records: a master that
begins compares what nodes hold with what it knows (recovery.py), but a key that had ended before
its time has no entry here.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from mooncake_py.master import records
from mooncake_py.master.lease import LEASE_MARGIN_MS
from mooncake_py.master.lifecycle import Transition, Unseal
from mooncake_py.master.membership import Membership
from mooncake_py.master.objects import PLACE_BITS, PLACE_MASK, ObjectTable
from mooncake_py.master.stripes import whole_key

if TYPE_CHECKING:
    from mooncake_py.master.state import CatalogState
    from mooncake_py.master.work import Work

Extent = tuple[int, int, int, int]  # segment id, start, length, generation
Name = tuple[str, bytes]  # tenant, key


@dataclass(slots=True, eq=False)
class _Entry:
    name: Name
    until_ms: int
    extents: list[Extent]
    late: bool  # to be unsealed when the lease ends


def extents_of(
    table: ObjectTable, members: Membership, slot: int, places: Iterable[int]
) -> list[Extent]:
    """What the object has at these places."""
    length = table.length[slot]
    return [
        (
            members.at(place >> PLACE_BITS).segment_id,
            place & PLACE_MASK,
            length,
            table.replica_generation(slot, place),
        )
        for place in places
    ]


def end_extents(
    state: CatalogState,
    work: Work,
    slot: int,
    transition: Transition,
    times: tuple[int, int],
    removed: bool,
) -> None:
    """Nodes are told that the object has ended, or will be; who may still read it is not forgotten.
    `times`: end of the lease, now. `removed`: the end is going to be acknowledged."""
    leased, now_ms = times
    table, members = state.table, state.members
    places = table.places(slot)
    always = transition.unseal is not Unseal.NO
    if leased + LEASE_MARGIN_MS <= now_ms:  # nobody reads it: what evictions find
        length = table.length[slot]
        for place in places:
            segment = members.at(place >> PLACE_BITS)
            if (always or segment.disk is not None) and members.can_be_told(segment):
                own = table.replica_generation(slot, place)
                work.unseal(segment.segment_id, place & PLACE_MASK, length, own)
        return
    sealed: list[Extent] = []
    others: list[Extent] = []  # that no node is told about
    for place, extent in zip(places, extents_of(table, members, slot, places), strict=True):
        segment = members.at(place >> PLACE_BITS)
        ends = always or segment.disk is not None
        (sealed if ends and members.can_be_told(segment) else others).append(extent)
    late = transition.unseal is Unseal.WITH_PROMISE and leased > now_ms and not removed
    if not late:
        work.unseal_all(sealed, leased if removed else 0)
    if leased > now_ms:
        name = (state.tenants.at(table.tenant[slot]).name, table.key[slot] or b"")
        state.lingering.add(name, leased, others)
        state.lingering.add(name, leased, sealed, late)
        if removed and others:
            work.hold(leased)


class Lingering:
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, _Entry]] = []
        self._numbers = count()
        self._of_name: defaultdict[Name, list[_Entry]] = defaultdict(list)
        self._of_extent: dict[tuple[int, int], _Entry] = {}  # (segment id, generation)
        self._former = (0, 0)  # generations below this, leases until then
        # Likewise of objects that no record tells of, while a node may have such or was lost with
        # them. Without a log there may have been no former master: none is waited for. Nor where
        # puts are acknowledged by their record (removal.py asks): of those nobody was told.
        self._unrecorded_until_ms = 0
        self._lost_untold = False
        self.longest_ms: int | None = None  # lease that may run, as the log says; None: it does not
        self._shorter_at_ms = 0  # when those that are longer than usual will have ended

    def __len__(self) -> int:
        """How many extents."""
        return len(self._of_extent)

    def begin(
        self, generation: int, now_ms: int, lengths: tuple[int, int], grace_ms: int, new: bool
    ) -> list[bytes]:
        """A former master may have given leases of objects below this generation, of up to
        `lengths` (usual, longest) and for `grace_ms` from now on. `new`: there is no log. Records.
        """
        usual_ms, most_ms = lengths
        longest_ms = most_ms if self.longest_ms is None else max(self.longest_ms, usual_ms)
        self._former = (generation, now_ms + grace_ms + longest_ms)
        self._shorter_at_ms = self._former[1]
        # (Who has a longer lease than usual got it when the object's record was durable: reads.py.)
        self._unrecorded_until_ms = 0 if new else now_ms + grace_ms + usual_ms
        self._lost_untold = False
        return self._record(usual_ms if new else longest_ms)

    def lengthen(self, length_ms: int, now_ms: int) -> list[bytes]:
        """Leases of this length may run from now on; the record, which is to be durable before
        anybody has one, if they are longer than others."""
        if self.longest_ms is None:  # nobody records anything here
            return []
        self._shorter_at_ms = max(self._shorter_at_ms, now_ms + length_ms)
        return self._record(max(length_ms, self.longest_ms))

    def shorten(self, usual_ms: int, now_ms: int) -> list[bytes]:
        """Those that were longer than usual may have ended."""
        if (self.longest_ms or 0) <= usual_ms or now_ms < self._shorter_at_ms:
            return []
        return self._record(usual_ms)

    def _record(self, longest_ms: int) -> list[bytes]:
        if longest_ms == self.longest_ms:
            return []
        self.longest_ms = longest_ms
        return [records.encode(records.Leases(longest_ms))]

    def lose_untold(self) -> None:
        """A node was lost before it has told what it has that no record tells of."""
        self._lost_untold = True

    def unrecorded_until(self, owed: bool) -> int:
        """Until then any key may be read, although no object of it is known. `owed`: a node is to
        tell yet."""
        return self._unrecorded_until_ms if owed or self._lost_untold else 0

    def former_lease(self, generation: int) -> int:
        below, until_ms = self._former
        return until_ms if generation < below else 0

    def add(self, name: Name, until_ms: int, extents: list[Extent], late: bool = False) -> None:
        if not extents:
            return
        entry = _Entry((name[0], whole_key(name[1])), until_ms, extents, late)
        self._of_name[entry.name].append(entry)
        for segment_id, _, _, generation in extents:
            self._of_extent[segment_id, generation] = entry
        heapq.heappush(self._heap, (until_ms + LEASE_MARGIN_MS, next(self._numbers), entry))

    def of(self, tenant: str, key: bytes) -> Iterator[tuple[int, Sequence[Extent]]]:
        """(lease end, extents) of what this key had."""
        for entry in self._of_name.get((tenant, key), ()):
            yield entry.until_ms, tuple(entry.extents)

    def keys(self, tenant: str) -> list[bytes]:
        """That have something here."""
        return [key for owner, key in self._of_name if owner == tenant]

    def latest_ms(self) -> int:
        """When the last of these leases ends."""
        return max((each[0] for each in self._heap), default=0)

    @property
    def name_count(self) -> int:
        return len(self._of_name)

    def told(self, segment_id: int, generations: Iterable[int]) -> None:
        """The node has unsealed these."""
        for generation in generations:
            entry = self._of_extent.pop((segment_id, generation), None)
            if entry is None:
                continue
            entry.extents = [
                each for each in entry.extents if (each[0], each[3]) != (segment_id, generation)
            ]
            if not entry.extents:
                self._forget(entry)

    def due(self, now_ms: int) -> Iterator[Extent]:
        """Take out those whose lease has ended; what is to be unsealed only now."""
        heap = self._heap
        while heap and heap[0][0] <= now_ms:
            entry = heapq.heappop(heap)[2]
            for segment_id, _, _, generation in entry.extents:
                if self._of_extent.get((segment_id, generation)) is entry:
                    del self._of_extent[segment_id, generation]
            if entry.extents:
                self._forget(entry)
            if entry.late:
                yield from entry.extents

    def _forget(self, entry: _Entry) -> None:
        left = [each for each in self._of_name[entry.name] if each is not entry]
        if left:
            self._of_name[entry.name] = left
        else:
            del self._of_name[entry.name]
