"""Tasks of nodes: what the catalog remembers of them. The rules are in `copies.py`. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum


class Why(Enum):
    """What a copy is made for; also the name of its counters."""

    DRAIN = "drain"
    REPAIR = "repair"
    HOT = "hot"
    ASKED = "asked"


@dataclass(slots=True, eq=False)
class Copy:
    """One replica in the making."""

    generation: int  # of the new extent; it names the task
    slot: int
    of: int  # generation of the object in the slot
    target: int  # place
    units: int
    expires_ms: int
    why: Why
    drops: int = 0  # id of the segment whose replica ends with the commit; 0: none
    handed: bool = False  # to the node: it may be writing


@dataclass(slots=True, eq=False)
class DrainBook:
    """How far the emptying of one segment is. Numbers of objects but for `moved_bytes`."""

    segment_id: int
    cursor: int = 0  # slots before it have been looked at in this pass
    stuck: int = 0  # in this pass: found no place
    pending: int = 0  # in this pass: are being copied
    stuck_before: int = 0  # in the last whole pass
    pending_before: int = 0
    passes: int = 0
    again_ms: int = 0  # when the next pass begins
    moved: int = 0
    moved_bytes: int = 0
    dropped: int = 0  # had enough replicas elsewhere
    ended: int = 0  # were removed or evicted while they were copied
    failed: int = 0  # copies that did not succeed; they are tried again


@dataclass(slots=True)
class TaskBook:
    """All tasks, and who waits for one."""

    running: dict[int, Copy] = field(default_factory=dict)  # by generation
    of_slot: dict[int, Copy] = field(default_factory=dict)  # one an object
    waiting: dict[int, deque[int]] = field(default_factory=dict)  # by index of the target
    units_by_why: dict[Why, int] = field(default_factory=lambda: dict.fromkeys(Why, 0))
    drains: dict[int, DrainBook] = field(default_factory=dict)  # by segment id
    # heap of objects with too few replicas: -heat, -stamp, slot, generation
    short: list[tuple[int, int, int, int]] = field(default_factory=list)
    parked: list[tuple[int, int, int, int]] = field(default_factory=list)  # found no place
    parked_until_ms: int = 0
    budget_bytes: int = 0  # that repair and hot copies may still move now
    budget_ms: int = 0  # when it was filled last
    extra: dict[int, int] = field(default_factory=dict)  # slot -> generation of hot objects
    window_ms: int = 0  # end of the running window of heat

    def waiting_for(self, index: int) -> int:
        """How many copies the node of this segment has not taken yet."""
        return len(self.waiting.get(index, ()))
