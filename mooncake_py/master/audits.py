"""What a disk has beside what is placed on it: lists that are compared, and reports of what is not
(or not any more) known. What is not placed there is deleted; what should be there and is not is
lost. A master that has just begun knows what its predecessor recorded, and none of the work that
was under way; so a report alone never condemns a file. Pure.
"""

from __future__ import annotations

import numpy as np

from mooncake_py.master.disk_commands import DiskWork
from mooncake_py.master.disks import Audit, Disk
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.membership import Segment
from mooncake_py.master.objects import ON_DISK
from mooncake_py.master.state import CatalogState
from mooncake_py.master.work import Work

_STRAYS_MAX = 16  # late reports of a call that are looked into; the node's list shows the others


def lives(state: CatalogState, slot: int, generation: int) -> bool:
    return state.table.key[slot] is not None and state.table.generation[slot] == generation


def audit(
    state: CatalogState, work: Work, segment: Segment, command: DiskWork, now_ms: int
) -> None:
    """Compare one page of the node's list with what is placed there."""
    disk = segment.disk
    assert disk is not None
    if command.held_after == 0:
        disk.audit = _begin_audit(state, segment)
    placed = disk.audit
    if placed is None:
        return  # began before this master, or before a restart of the node
    held = np.array(command.held, dtype=np.uint64)
    first = int(np.searchsorted(placed.generations, np.uint64(command.held_after), "right"))
    last = len(placed.generations)
    if not command.held_last and len(held):
        last = int(np.searchsorted(placed.generations, held[-1], "right"))
    expected = placed.generations[first:last]
    for generation in held[~np.isin(held, expected)].tolist():
        _unexpected(state, disk, generation)
    absent = ~np.isin(expected, held)
    for generation, slot in zip(
        expected[absent].tolist(), placed.slots[first:last][absent].tolist(), strict=True
    ):
        if lives(state, slot, generation) and state.table.flags[slot] & ON_DISK:
            state.counters["disk_objects_missing"] += 1
            state.lose_replica(work, slot, segment.index, Event.NODE_LOST, now_ms)
    if command.held_last:
        disk.audit = None


def _begin_audit(state: CatalogState, segment: Segment) -> Audit:
    table = state.table
    slots = np.array(table.slots_on(segment.index, 0, len(table.key)), dtype=np.int64)
    generations = table.generation_column.many[slots] if len(slots) else np.zeros(0, np.uint64)
    order = np.argsort(generations)
    return Audit(generations[order].astype(np.uint64), slots[order])


def _unexpected(state: CatalogState, disk: Disk, generation: int) -> None:
    slot = disk.added.get(generation)
    if slot is not None and lives(state, slot, generation) and state.table.flags[slot] & ON_DISK:
        return  # since the list began
    if generation not in disk.offloads:
        state.counters["disk_strays"] += 1
        disk.drops.append(generation)


def drop_strays(state: CatalogState, segment: Segment, generations: list[int]) -> None:
    """Reports that come late, or again: of these what is not placed on the disk is deleted. (A
    master that has just begun knows what its predecessor recorded, and no work of it.)"""
    disk, table = segment.disk, state.table
    assert disk is not None
    for generation in generations[:_STRAYS_MAX]:
        slot = disk.added.get(generation, -1)
        if slot < 0 or not lives(state, slot, generation):
            column = table.generation_column.many[: len(table.key)]
            slot = next(
                (each for each in np.flatnonzero(column == generation).tolist()
                 if lives(state, each, generation)), -1,
            )  # fmt: skip
        if slot < 0 or disk not in state.members.disks_at(table.places(slot)):
            disk.drops.append(generation)
