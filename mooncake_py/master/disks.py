"""What the catalog remembers of disks: their lists, work in the making, what is ready to go. The
rules are in `tiering.py`. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mooncake_py.master.allocator import UNIT_BYTES
from mooncake_py.master.eviction import Links
from mooncake_py.master.objects import COLD, ON_DISK, ObjectTable
from mooncake_py.model import DISK_ALIGN_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DISKS_MAX = 4_096
_ROUND = DISK_ALIGN_BYTES // UNIT_BYTES
PENDING_MAX_UNITS = (64 << 20) // UNIT_BYTES  # on their way to one disk
PENDING_MAX = 1_024
_PAUSE_MS = 1_000
_PAUSE_MAX_MS = 30_000
_ADDED_MAX = 65_536  # remembered for late reports and the audit


def disk_units(units: int) -> int:
    """What an extent of so many units takes of a disk."""
    return -(-units // _ROUND) * _ROUND


@dataclass(slots=True, eq=False)
class Offload:
    """One object on its way to a disk. `handed`: its node has it."""

    slot: int
    generation: int
    units: int  # of the disk
    expires_ms: int
    stamp: int
    handed: bool = False


@dataclass(slots=True, eq=False)
class Promotion:
    """One object on its way back: `place` is reserved in memory, under a generation of its own."""

    slot: int
    generation: int
    own: int
    place: int
    units: int
    expires_ms: int
    handed: bool = False


@dataclass(slots=True)
class Audit:
    """What was placed on the disk when the node's list began, rising by generation."""

    generations: NDArray[np.uint64]
    slots: NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Disk:
    """What a segment has that is a disk."""

    head: int  # of its list
    usable_units: int
    offloads: dict[int, Offload] = field(default_factory=dict)  # by generation
    pending_units: int = 0
    promotions: dict[int, Promotion] = field(default_factory=dict)  # by own generation
    promoting: set[int] = field(default_factory=set)  # slots of these
    drops: deque[int] = field(default_factory=deque)  # generations to delete
    added: dict[int, int] = field(default_factory=dict)  # generation -> slot, oldest first
    audit: Audit | None = None
    paused_until_ms: int = 0
    pause_ms: int = 0
    fault: str = ""  # why it is paused
    numbers: Mapping[str, float] = field(default_factory=dict)  # that its node told

    def note_added(self, generation: int, slot: int) -> None:
        self.added[generation] = slot
        while len(self.added) > _ADDED_MAX:
            del self.added[next(iter(self.added))]

    def full_of_work(self) -> bool:
        return self.pending_units >= PENDING_MAX_UNITS or len(self.offloads) >= PENDING_MAX

    def open(self, now_ms: int) -> bool:
        """May it be given more?"""
        return self.paused_until_ms <= now_ms and not self.full_of_work()

    def pause(self, fault: str, now_ms: int) -> None:
        """It failed: leave it alone for a while, longer each time."""
        self.pause_ms = min(max(_PAUSE_MS, 2 * self.pause_ms), _PAUSE_MAX_MS)
        self.paused_until_ms = now_ms + self.pause_ms
        self.fault = fault

    def recovered(self) -> None:
        self.pause_ms = self.paused_until_ms = 0
        self.fault = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """A set-aside object that may go; `cause`: why it is on no disk."""

    slot: int
    generation: int
    stamp: int
    units: int
    cause: str = ""


class DiskLists:
    """The orders of all disks, and what is ready to be evicted."""

    def __init__(self, table: ObjectTable, slots_max: int) -> None:
        self._table = table
        self._slots_max = slots_max
        self._links: Links | None = None
        self.ready: deque[Ready] = deque()
        self.ready_units = 0
        self.cold_count = 0

    def new_disk(self, nbytes: int) -> Disk:
        if self._links is None:
            self._links = Links(self._slots_max, _DISKS_MAX)
        return Disk(self._links.new_list(), nbytes // UNIT_BYTES)

    def join(self, slot: int, disk: Disk) -> None:
        assert self._links is not None
        self._links.append(slot, disk.head)
        self._table.flags[slot] |= ON_DISK

    def leave(self, slot: int) -> None:
        """Its disk replica is not there any more."""
        assert self._links is not None
        self._links.unlink(slot)
        self._table.flags[slot] &= ~ON_DISK

    def chill(self, slot: int) -> None:
        self._table.flags[slot] |= COLD
        self.cold_count += 1

    def warm(self, slot: int) -> None:
        self._table.flags[slot] &= ~COLD
        self.cold_count -= 1

    def used(self, slot: int, disk: Disk) -> None:
        """It goes last."""
        assert self._links is not None
        self._links.unlink(slot)
        self._links.append(slot, disk.head)

    def first(self, disk: Disk) -> int:
        """The slot that goes first, or -1."""
        assert self._links is not None
        slot = self._links.next[disk.head]
        return -1 if slot == disk.head else slot

    def close(self, disk: Disk) -> None:
        assert self._links is not None
        self._links.free_list(disk.head)

    # --- ready ----------------------------------------------------------------------------------

    def add_ready(self, entry: Ready) -> None:
        self.ready.append(entry)
        self.ready_units += entry.units

    def take_ready(self) -> Ready | None:
        if not self.ready:
            return None
        entry = self.ready.popleft()
        self.ready_units -= entry.units
        return entry
