"""Nodes and their segments: who is here, who may be used, who is forgotten.

A segment is *readable* when Locate may name it, *placeable* when new extents may go there:

| state | readable | placeable | leaves by |
|---|---|---|---|
| alive | yes | yes | silence of `suspect_ms`, or a report after a missed heartbeat -> suspect |
| draining | yes | no | the node says so in its heartbeats, or an operator asked for it |
| returning | yes | no | mounted and told (recovery.py) -> alive; half `dead_ms` -> suspect |
| suspect | no | no | heartbeat -> alive; silence of `dead_ms` -> gone |
| away | no | no | its memory outlives it, long silent: mount -> alive; `away_ms` -> gone |
| away (a disk) | no | no | its node is gone: mount -> alive; `disk_away_ms` -> gone |
| gone | no | no | its objects are forgotten in small steps, then the entry |

A node comes back under its name with a new incarnation when it was restarted: its former segments
are gone at once. While the former incarnation still heartbeats, the name is taken and the mount is
refused; unless it comes from the same address, which two live processes cannot share.

After a restart of the master a node must mount again before anything is placed on it, because
grants that the former master gave out but did not record may still be running there; the node ends
them before it mounts. Its heartbeat is answered "unknown" until then. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mooncake_py.master import records
from mooncake_py.master.allocator import UNIT_BYTES, Allocator
from mooncake_py.master.commands import Mount
from mooncake_py.master.disks import Disk, DiskLists, disk_units
from mooncake_py.master.objects import PLACE_BITS
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.tenant import Put

ALIVE = "alive"
DRAINING = "draining"
RETURNING = "returning"
SUSPECT = "suspect"
AWAY = "away"
GONE = "gone"

_DISK_SPACE_UNITS = 1 << 43  # addresses of a disk: so many that there is always a hole
_READABLE = (ALIVE, DRAINING, RETURNING)


class Segment:
    """What the master knows of a segment."""

    __slots__ = (
        "address",
        "allocator",
        "asked_below",
        "compared",
        "disk",
        "disk_id",
        "domain",
        "drain_asked",
        "drain_told",
        "host_id",
        "incarnation",
        "index",
        "keeps",
        "lost_units",
        "mounted",
        "nbytes",
        "new_ms",
        "node",
        "owed",
        "recorded",
        "recorded_below",
        "region",
        "replicas_lost",
        "resting_units",
        "seen_ms",
        "segment_id",
        "state",
        "used_units",
        "waits",
    )

    def __init__(self, segment_id: int, index: int, mount: Mount, now_ms: int) -> None:
        self.segment_id = segment_id
        self.index = index  # in places of the object table
        self.node = mount.node
        self.incarnation = mount.incarnation
        self.address = mount.address
        self.region = mount.region
        self.nbytes = mount.nbytes
        self.host_id = mount.host_id
        self.drain_asked = False  # by an operator
        self.drain_told = False  # by the node itself, in its last heartbeat
        self.domain = mount.domain  # known while it is mounted with this master
        self.disk_id = mount.disk_id
        self.disk: Disk | None = None
        units = _DISK_SPACE_UNITS if mount.disk_id else mount.nbytes // UNIT_BYTES
        self.allocator = Allocator(units)
        self.state = ALIVE
        self.waits = False  # for the record of a mount, silent until it is written
        self.mounted = True  # with this master, not only with a former one
        self.keeps = mount.keeps
        # Of recovery.py:
        self.recorded_below = 0  # what it holds with a generation below is in the log
        self.recorded = True  # this master knows what it holds
        self.compared = True  # and the node knows what this master believes
        self.owed: Sequence[tuple[int, int]] = ()  # generations it may hold unrecorded
        self.asked_below = 0  # the first generation that the mount answered, for which it tells
        self.seen_ms = now_ms
        self.new_ms = now_ms  # since when it is there; 0: it was before this master
        self.used_units = 0
        self.resting_units = 0
        self.lost_units = 0  # used when it was lost
        self.replicas_lost = 0  # forgotten since then

    def charge(self, units: int) -> int:
        """What an extent of so many units counts for here."""
        return units if self.disk is None else disk_units(units)

    @property
    def readable(self) -> bool:
        return self.state in _READABLE

    @property
    def standing(self) -> str:
        """Its state when its node is heard."""
        return ALIVE if self.recorded else RETURNING


@dataclass(slots=True)
class Leaving:
    """A segment that is gone, and how far it is forgotten."""

    segment: Segment
    puts: list[Put] = field(default_factory=list)  # whose grants are still to be looked at
    entry: int = 0  # of the last of these
    slot: int = 0  # objects before this one have been looked at


def segment_fields(segment: Segment) -> records.SegmentFields:
    """The record of a segment."""
    return records.SegmentFields(
        segment.segment_id,
        segment.node,
        segment.incarnation,
        segment.address,
        segment.region,
        segment.nbytes,
        segment.host_id,
        segment.recorded_below,
        segment.keeps,
        segment.disk_id,
    )


class Membership:
    """All segments. `impaired` holds the indices of those that are not readable; `placeable`
    those that new extents may go to, `draining` those that are to be emptied, `disks` are by index.
    `version` changes whenever one of them does."""

    def __init__(self, settings: CatalogSettings, lists: DiskLists) -> None:
        self._settings = settings
        self._lists = lists
        self.disks: dict[int, Segment] = {}
        self.memory_count = 0
        self.by_id: dict[int, Segment] = {}
        self.by_index: list[Segment | None] = []
        self.version = 0
        self.impaired: set[int] = set()
        self.placeable: list[Segment] = []
        self.draining: list[Segment] = []
        self.next_segment_id = 1

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.by_id.values())

    def of_node(self, node: str) -> list[Segment]:
        """Its memory."""
        return [
            each
            for each in self.by_id.values()
            if each.node == node and each.state != GONE and each.disk is None
        ]

    def disk_of(self, node: str) -> Segment | None:
        """The disk behind the memory of this node, if it takes anything."""
        for segment in self.disks.values():
            if segment.node == node and segment.state == ALIVE:
                return segment
        return None

    @staticmethod
    def can_be_told(segment: Segment) -> bool:
        """Is there a node that might unseal what is on it?"""
        return segment.state != GONE and not (segment.disk is not None and segment.state == AWAY)

    def owe(self, put: Put, away: bool) -> bool:
        """Has a node yet to tell (recovery.py) whether it holds what was granted there, be it away
        or not?"""
        over = (GONE,) if away else (GONE, AWAY)
        return any(
            not (segment := self.at(place >> PLACE_BITS)).recorded and segment.state not in over
            for index, key in enumerate(put.keys)
            if put.tenant.writing.get(key) == (put, index)
            for place in put.places[index]
        )

    def in_memory(self, places: Sequence[int]) -> int:
        """How many of these places are not on a disk."""
        if not self.disks:
            return len(places)
        return sum(place >> PLACE_BITS not in self.disks for place in places)

    def disks_at(self, places: Sequence[int]) -> list[Disk]:
        found = [
            self.disks[each >> PLACE_BITS] for each in places if each >> PLACE_BITS in self.disks
        ]
        return [each.disk for each in found if each.disk is not None]

    def at(self, index: int) -> Segment:
        segment = self.by_index[index]
        assert segment is not None
        return segment

    def known(self, node: str, incarnation: int, segment_id: int) -> Segment | None:
        segment = self.by_id.get(segment_id)
        if segment is None or segment.node != node or segment.incarnation != incarnation:
            return None
        return None if segment.state == GONE else segment

    def conflict(self, mount: Mount, now_ms: int) -> str:
        """Why this node cannot mount, or ""."""
        others = self.of_node(mount.node)
        if mount.disk_id:
            others = [each for each in self.disks.values() if each.disk_id == mount.disk_id]
        for other in others:
            silent_ms = now_ms - other.seen_ms
            if (
                other.incarnation != mount.incarnation
                and not (mount.warm and other.segment_id == mount.segment_id)
                and other.address != mount.address
                and other.readable
                and silent_ms < self._settings.suspect_ms
            ):
                if mount.disk_id:
                    return f"this disk is in use by the node {other.node!r} at {other.address}"
                return (
                    f"a node named {mount.node!r} lives at {other.address} (last heartbeat "
                    f"{silent_ms} ms ago); choose another name, or stop it first"
                )
        return ""

    def find_mounted(self, mount: Mount) -> Segment | None:
        """The segment this very incarnation mounted before: by its id, else by its region."""
        own = [
            each
            for each in self.of_node(mount.node)
            if each.incarnation == mount.incarnation and each.nbytes == mount.nbytes
        ]
        for segment in own:
            if segment.segment_id == mount.segment_id:
                return segment
        if mount.segment_id == 0:
            for segment in own:
                if segment.region == mount.region and segment.address == mount.address:
                    return segment
        return None

    def find_disk(self, mount: Mount) -> Segment | None:
        """The segment that this disk was before, whichever node it was behind."""
        for segment in self.disks.values():
            if segment.disk_id == mount.disk_id and segment.state != GONE:
                return segment
        return None

    def add(self, mount: Mount, segment_id: int, now_ms: int) -> Segment:
        if None in self.by_index:
            index = self.by_index.index(None)
        else:
            index = len(self.by_index)
            self.by_index.append(None)
        segment = Segment(segment_id, index, mount, now_ms)
        if mount.disk_id:
            segment.disk = self._lists.new_disk(mount.nbytes)
        self.by_id[segment_id] = segment
        self.by_index[index] = segment
        self.next_segment_id = max(self.next_segment_id, segment_id + 1)
        self.refresh()
        return segment

    def set_state(self, segment: Segment, state: str) -> None:
        if segment.state != state:
            segment.state = state
            self.refresh()

    def reports(self, now_ms: int) -> bool:
        """Do nodes report to this master, at least half of those it knows?"""
        present = [each for each in self.by_id.values() if each.state != GONE]
        heard = sum(now_ms - each.seen_ms < self._patience_ms(each) for each in present)
        return heard > 0 and 2 * heard >= len(present)

    def forget(self, segment: Segment) -> None:
        """Drop the entry; nothing may refer to its index any more."""
        del self.by_id[segment.segment_id]
        self.by_index[segment.index] = None
        if segment.disk is not None:
            self._lists.close(segment.disk)
        self.refresh()

    def refresh(self) -> None:
        self.version += 1
        self.impaired = {each.index for each in self.by_id.values() if not each.readable}
        memory = [each for each in self.by_id.values() if each.disk is None]
        self.memory_count = len(memory)
        self.disks = {each.index: each for each in self.by_id.values() if each.disk is not None}
        self.placeable = [each for each in memory if each.state == ALIVE]
        self.draining = [each for each in memory if each.state == DRAINING]

    def _patience_ms(self, segment: Segment) -> int:
        """A node whose master was stopped, or is behind a wall, waits for that one for a while
        before it looks for this one."""
        if segment.state == RETURNING or segment.waits:
            return max(self._settings.suspect_ms, self._settings.dead_ms // 2)
        return self._settings.suspect_ms

    def excuse(self, silence_ms: int, now_ms: int) -> None:
        """So much of everybody's silence so far proves nothing."""
        if silence_ms:
            for segment in self.by_id.values():
                segment.seen_ms = min(now_ms, segment.seen_ms + silence_ms)

    def silent(self, now_ms: int) -> tuple[list[Segment], list[Segment]]:
        """Segments that are to become (suspect, gone) for their silence. A disk is given longer."""
        suspects, dead = [], []
        for segment in self.by_id.values():
            silent_ms = now_ms - segment.seen_ms
            if segment.state == GONE:
                continue
            if segment.disk is not None and segment.state == AWAY:
                if silent_ms >= self._settings.disk_away_ms:
                    dead.append(segment)
            elif segment.state == AWAY or (segment.keeps and silent_ms >= self._settings.dead_ms):
                if silent_ms >= self._settings.dead_ms + self._settings.away_ms:
                    dead.append(segment)
                else:
                    self.set_state(segment, AWAY)
            elif silent_ms >= self._settings.dead_ms:
                dead.append(segment)
            elif silent_ms >= self._patience_ms(segment) and segment.state != SUSPECT:
                suspects.append(segment)
        return suspects, dead
