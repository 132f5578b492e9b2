"""Eviction: space is made by letting objects go, or only their replicas in memory.

Rules. Which object is next the order of eviction says (`eviction.py`), within one tenant or over
all, borrowers that are over their quota first. Those that `tiering.py` has set aside come before
the others. An object that is on a disk loses its replicas in memory and lives on; any other ends.
Something evictable is never passed over: when nothing else is left, what is on its way to a disk
goes, too. A group by name is as old as its latest use, and pinned while one that leads is. Pure.
"""

from __future__ import annotations

from mooncake_py.master.disks import Ready
from mooncake_py.master.groups import is_named
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.membership import ALIVE
from mooncake_py.master.objects import (
    GROUP,
    HARD_PIN,
    ON_DISK,
    PARKED,
    PLACE_BITS,
    READ,
    SOFT_PIN,
)
from mooncake_py.master.state import CatalogState, extent_units
from mooncake_py.master.tenant import Tenant
from mooncake_py.master.work import Work
from mooncake_py.model import FOLLOWS

_SET_ASIDE_MS = 1_000  # an object whose end would free nothing useful is looked at again later
_NOT_READY = "not_ready"


def evict(
    state: CatalogState,
    work: Work,
    units: int,
    now_ms: int,
    count_max: int = 1 << 62,
    tenant: Tenant | None = None,
) -> int:
    """Evict until `units` are free again or nothing may go; the units that became free. Only
    objects of `tenant`, if it is given; else those of borrowers over their quota first."""
    freed = 0
    if state.aside and state.aside_version != state.members.version:
        _bring_back(state)
    searched = not state.members.disks
    while freed < units and count_max > 0:
        slot, cause = _next(state, now_ms, tenant)
        if slot < 0 and not searched:
            searched = True
            _recall(state, tenant, now_ms)
            continue
        if slot < 0:
            break
        owner = state.tenants.at(state.table.tenant[slot])
        if not _helps(state, slot):
            owner.pool.set_aside(slot, now_ms + _SET_ASIDE_MS)
            state.aside[slot] = state.table.generation[slot]
            state.aside_version = state.members.version
            continue
        if state.table.flags[slot] & GROUP and _spared_by_group(state, slot, now_ms):
            continue
        owner.counters["evictions"] += 1
        freed += _let_go(state, work, slot, cause, now_ms)
        count_max -= 1
    return freed


def evict_what_disks_hold(state: CatalogState, work: Work, now_ms: int) -> int:
    """The next one leaves memory if a disk has it, too: for those that can do without the room. The
    units that became free."""
    slot, _ = _next(state, now_ms, None)
    if slot < 0 or not state.table.flags[slot] & ON_DISK or not _helps(state, slot):
        return 0
    if state.table.flags[slot] & GROUP and state.leased_until(slot) > now_ms:
        return 0
    state.tenants.at(state.table.tenant[slot]).counters["evictions"] += 1
    return _let_go(state, work, slot, "", now_ms)


def _spared_by_group(state: CatalogState, slot: int, now_ms: int) -> bool:
    """Is another member read, pinned, or of a later use than this one? It is not asked again then
    before that ends, or it has been as long unused as that one."""
    table = state.table
    pool, name = state.tenants.at(table.tenant[slot]).pool, table.groups[slot]
    if (until := state.leased_until(slot)) > now_ms:
        pool.set_aside(slot, until)
        return True
    if not is_named(name) or name & FOLLOWS:
        return False
    pins = HARD_PIN | SOFT_PIN
    own, used_ms, mates = table.flags[slot], table.stamp[slot], state.groups.leaders(name)
    if any(table.flags[each] & pins & ~own for each in mates):
        pool.set_aside(slot, now_ms + _SET_ASIDE_MS)
        return True
    latest_ms = max((table.stamp[each] for each in mates if table.flags[each] & READ), default=0)
    if latest_ms > used_ms:
        pool.touch([slot], latest_ms)
    return latest_ms > used_ms


def _let_go(state: CatalogState, work: Work, slot: int, cause: str, now_ms: int) -> int:
    members = state.members
    if not state.table.flags[slot] & ON_DISK:
        if members.disks:
            state.counters[f"disk_drops.{cause or _NOT_READY}"] += 1
        return state.end_object(work, slot, Event.EVICT, now_ms)
    indices = {place >> PLACE_BITS for place in state.table.places(slot)} - members.disks.keys()
    units = extent_units(state.table.length[slot])
    freed = units * sum(members.at(index).state == ALIVE for index in indices)
    for index in indices:
        state.shed_replica(work, slot, index, now_ms)
    state.counters["evictions_to_disk"] += 1
    work.drop_count += 1
    return freed


def _next(state: CatalogState, now_ms: int, tenant: Tenant | None) -> tuple[int, str]:
    """Slot, in its pool, and why it is on no disk as far as that is known; -1: nothing may go."""
    if tenant is not None:
        return tenant.pool.victim(now_ms), ""
    for borrower in state.tenants.borrowers:
        if borrower.over_quota:
            slot = borrower.pool.victim(now_ms)
            if slot >= 0:
                return slot, ""
    slot, cause = ready_victim(state, now_ms)
    return (slot, cause) if slot >= 0 else (state.order.victim(now_ms), "")


def _recall(state: CatalogState, tenant: Tenant | None, now_ms: int) -> None:
    """What is set aside for a disk, and that nobody uses, may go as well."""
    table = state.table
    slots = [(each.slot, each.generation) for each in state.disks.ready]
    for segment in state.members.disks.values():
        if segment.disk is not None:
            slots += [(each.slot, each.generation) for each in segment.disk.offloads.values()]
    for slot, generation in slots:
        if table.key[slot] is None or table.generation[slot] != generation:
            continue
        owner = state.tenants.at(table.tenant[slot])
        if owner is tenant or (tenant is None and state.leased_until(slot) <= now_ms):
            owner.pool.bring_back(slot)


def ready_victim(state: CatalogState, now_ms: int) -> tuple[int, str]:
    """The next object that is set aside and may go, and why it is on no disk; or -1."""
    while (entry := state.disks.take_ready()) is not None:
        if still_ready(state, entry) and state.leased_until(entry.slot) <= now_ms:
            owner = state.tenants.at(state.table.tenant[entry.slot])
            owner.pool.bring_back(entry.slot)
            return entry.slot, entry.cause
    return -1, ""


def still_ready(state: CatalogState, entry: Ready) -> bool:
    """Is it set aside, and nobody has used it since? One that was used is in its pool again."""
    table, slot = state.table, entry.slot
    if table.key[slot] is None or table.generation[slot] != entry.generation:
        return False
    if table.flags[slot] & PARKED and table.stamp[slot] == entry.stamp:
        return True
    state.tenants.at(table.tenant[slot]).pool.bring_back(slot)
    return False


def _bring_back(state: CatalogState) -> None:
    """Nodes have come or gone: what did not help may help now."""
    table = state.table
    for slot, generation in state.aside.items():
        if table.generation[slot] == generation and table.key[slot] is not None:
            state.tenants.at(table.tenant[slot]).pool.bring_back(slot)
    state.aside.clear()


def _helps(state: CatalogState, slot: int) -> bool:
    """Would its end free space that may be given out? (Not on a suspect or leaving node.)"""
    members = state.members
    if not members.impaired and len(members.placeable) == members.memory_count:
        return True
    segments = [members.at(place >> PLACE_BITS) for place in state.table.places(slot)]
    return any(each.state == ALIVE and each.disk is None for each in segments)
