"""Objects go to disks, and come back: `DiskWork`, and what a tick does about disks.

Rules (reasons in design/disk-tier.md).
* A disk replica is a place on a segment that has a `Disk`. Its object is flagged ON_DISK; one
  without any other place is COLD besides, and in no pool.
* Every disk has its objects in one list, the one read or written longest ago first. Beyond what is
  usable the first ones go: a cold object ends, another loses its disk replica only.
* *Ahead of eviction* victims are set aside, in the order of eviction, and offered to the disk of
  their node. What is on the disk is *ready*: evicting it costs nothing. What cannot go there is
  ready, too, and ends as it would without a disk, and the cause is counted. Whoever is used
  meanwhile is not ready any more.
* Work is handed out when the node asks, at most `PENDING_MAX_UNITS` at a time, and forgotten
  `offload_ms` later. What is reported for an object that has ended is deleted again.
* The node lists what it has, page by page, round and round. What is not placed there is deleted;
  what should be there and is not is lost.

Pure.
"""

from __future__ import annotations

from itertools import islice

from mooncake_py.errors import OK, LeaseExpired, ObjectNotFound, OutOfSpace, UsageError
from mooncake_py.master.audits import audit, drop_strays, lives
from mooncake_py.master.commands import Applied, Refused
from mooncake_py.master.disk_commands import DiskTasks, DiskWork
from mooncake_py.master.disks import Disk, Offload, Promotion, Ready, disk_units
from mooncake_py.master.evicting import evict_what_disks_hold, still_ready
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.membership import ALIVE, GONE, Segment
from mooncake_py.master.objects import COLD, HARD_PIN, ON_DISK, PARKED, PLACE_BITS, PLACE_MASK
from mooncake_py.master.snapshots import record_replica
from mooncake_py.master.state import CatalogState, extent_units
from mooncake_py.master.work import Work
from mooncake_py.model import DISK_TASK_ROW, EXTENT_ALIGN_BYTES

OFFLOADS_PER_CALL = 256
PROMOTIONS_PER_CALL = 64
DROPS_PER_CALL = 4_096
WANTED_MAX = 1_024
AUDIT_MAX = 65_536
_SET_ASIDE_MS = 60_000  # a ready object that nobody needed to evict is looked at anew after this
_EVICT_FOR_PROMOTION = 16  # clean objects that may go for one
_LEASED_MAX = 16  # objects in use that are passed over when space is made


# --- ahead of eviction --------------------------------------------------------------------------


def offload_ahead(state: CatalogState, now_ms: int) -> bool:
    """Set victims aside and offer them to disks, until enough is ready. Is there more to do?"""
    disks, members = state.disks, state.members
    capacity = sum(each.allocator.units for each in members.placeable)
    used = sum(each.used_units for each in members.placeable)
    wanted = int(capacity * state.settings.offload_ahead_ratio)
    floor = int(capacity * state.settings.evict_low_ratio) - wanted
    pending = sum(each.pending_units for each in _disks_of(state))
    wanted = min(wanted, used - floor)
    for _ in range(state.settings.step_max):
        if disks.ready_units + pending >= wanted:
            return False
        if not any(each.open(now_ms) for each in _disks_of(state)):
            return False
        slot = state.order.victim(now_ms)
        if slot < 0:
            return False
        pending += _set_aside(state, slot, now_ms)
    return True


def _disks_of(state: CatalogState) -> list[Disk]:
    return [each.disk for each in state.members.disks.values() if each.disk and each.state == ALIVE]


def _set_aside(state: CatalogState, slot: int, now_ms: int) -> int:
    """Offer it to a disk, else it is ready as it is. Units that are now on their way."""
    table = state.table
    units = extent_units(table.length[slot])
    pool = state.tenants.at(table.tenant[slot]).pool
    pool.set_aside(slot, now_ms + _SET_ASIDE_MS)
    segment = state.members.at(table.place[slot] >> PLACE_BITS)
    cause = ""
    if not table.flags[slot] & ON_DISK:
        target = state.members.disk_of(segment.node)
        cause = _offload(state, slot, target, disk_units(units), now_ms)
        if not cause:
            return units
    state.disks.add_ready(Ready(slot, table.generation[slot], table.stamp[slot], units, cause))
    return 0


def _offload(
    state: CatalogState, slot: int, target: Segment | None, units: int, now_ms: int
) -> str:
    """Put it on the list of the disk's work; or why not."""
    if target is None or target.disk is None:
        return "no_disk"
    disk = target.disk
    if disk.paused_until_ms > now_ms:
        return disk.fault
    if units > disk.usable_units:
        return "too_large"
    generation = state.table.generation[slot]
    on_its_way = disk.offloads.get(generation)
    if on_its_way is not None:  # set aside before, used, and next to go once more
        on_its_way.stamp = state.table.stamp[slot]
        return ""
    expires_ms = now_ms + state.settings.offload_ms
    disk.offloads[generation] = Offload(
        slot, generation, units, expires_ms, state.table.stamp[slot]
    )
    disk.pending_units += units
    return ""


def make_room(state: CatalogState, work: Work, now_ms: int) -> bool:
    """Let objects go from disks that hold more than they may. Is there more to do?"""
    left = state.settings.step_max
    for segment in list(state.members.disks.values()):
        disk = segment.disk
        if disk is None or segment.state == GONE:
            continue
        leased = 0
        while segment.used_units + disk.pending_units > disk.usable_units and left:
            slot = state.disks.first(disk)
            if slot < 0 or leased > _LEASED_MAX:
                break
            left -= 1
            flags = state.table.flags[slot]
            # Readers may know no other replica than this one, though it has one by now.
            if (flags & COLD and flags & HARD_PIN) or state.leased_until(slot) > now_ms:
                leased += 1
                state.disks.used(slot, disk)
            elif flags & COLD:
                state.counters["disk_evictions"] += 1
                state.end_object(work, slot, Event.EVICT, now_ms)
            else:
                state.shed_replica(work, slot, segment.index, now_ms)
    return left == 0


def expire(state: CatalogState, now_ms: int) -> None:
    """Forget work that no node has reported in time."""
    for segment in state.members.disks.values():
        disk = segment.disk
        if disk is None:
            continue
        for offload in list(islice(disk.offloads.values(), state.settings.step_max)):
            if offload.expires_ms <= now_ms:
                _end_offload(state, disk, offload, "not_ready")
        for promotion in list(disk.promotions.values()):
            if promotion.expires_ms <= now_ms:
                end_promotion(state, disk, promotion, now_ms)


def forget_work(state: CatalogState, segment: Segment, now_ms: int) -> None:
    """The node of this disk, or the memory into which disks promote, is not there any more."""
    disk = segment.disk
    if disk is None:
        for other in (each.disk for each in state.members.disks.values() if each.disk):
            for promotion in list(other.promotions.values()):
                if promotion.place >> PLACE_BITS == segment.index:
                    end_promotion(state, other, promotion, now_ms)
        return
    for offload in list(disk.offloads.values()):
        _end_offload(state, disk, offload, "no_disk")
    for promotion in list(disk.promotions.values()):
        end_promotion(state, disk, promotion, now_ms)
    disk.audit = None
    disk.drops.clear()


def _end_offload(state: CatalogState, disk: Disk, offload: Offload, cause: str) -> None:
    """Without a replica. The object is ready without one, if it is still set aside."""
    del disk.offloads[offload.generation]
    disk.pending_units -= offload.units
    if lives(state, offload.slot, offload.generation):
        _ready(state, offload, cause)


def _ready(state: CatalogState, offload: Offload, cause: str) -> None:
    table, slot = state.table, offload.slot
    if table.flags[slot] & PARKED and table.stamp[slot] == offload.stamp:
        units = extent_units(table.length[slot])
        state.disks.add_ready(Ready(slot, offload.generation, offload.stamp, units, cause))


# --- the node -----------------------------------------------------------------------------------


def disk_work(state: CatalogState, command: DiskWork, now_ms: int) -> Applied:
    segment = state.members.known(command.node, command.incarnation, command.segment_id)
    if segment is None or not segment.mounted or segment.disk is None:
        cause = f"disk {command.segment_id} of {command.node!r} is not mounted here"
        return Applied(Refused(ObjectNotFound.code, cause))
    if len(command.held) > AUDIT_MAX or len(command.wanted) > WANTED_MAX:
        return Applied(Refused(UsageError.code, "a page of a disk's list is too long"))
    work, disk = Work(), segment.disk
    segment.seen_ms = now_ms
    state.members.set_state(segment, segment.standing)
    disk.usable_units = command.usable_bytes // EXTENT_ALIGN_BYTES
    disk.numbers = command.numbers or disk.numbers
    unknown = [
        task
        for task, code in command.done
        if not _report(state, work, segment, task, code, now_ms) and code == OK
    ]
    drop_strays(state, segment, unknown)
    if command.auditing and segment.recorded:
        audit(state, work, segment, command, now_ms)
    for tenant, key, generation in zip(command.tenants, command.keys, command.wanted, strict=True):
        _want(state, work, segment, (tenant, key, generation), now_ms)
    offload_ahead(state, now_ms)
    return work.done(_hand_out(state, segment, now_ms), now_ms)


def _report(
    state: CatalogState, work: Work, segment: Segment, task: int, code: int, now_ms: int
) -> bool:
    """False: it is not known (any more)."""
    disk = segment.disk
    assert disk is not None
    promotion = disk.promotions.get(task)
    if promotion is not None:
        _promoted(state, work, disk, promotion, code, now_ms)
        return True
    offload = disk.offloads.get(task)
    if offload is None:
        return False
    if code != OK:
        cause = _cause_of(code)
        if cause in ("disk_full", "disk_failed"):
            disk.pause(cause, now_ms)
        _end_offload(state, disk, offload, cause)
        return True
    disk.recovered()
    slot, generation = offload.slot, offload.generation
    if not lives(state, slot, generation) or state.table.flags[slot] & ON_DISK:
        _end_offload(state, disk, offload, "")
        disk.drops.append(generation)
        return True
    del disk.offloads[generation]
    disk.pending_units -= offload.units
    start = segment.allocator.take(extent_units(state.table.length[slot]))
    segment.used_units += offload.units
    place = segment.index << PLACE_BITS | start
    state.add_replica(slot, place, generation)
    record_replica(state, work, slot, place, generation, now_ms)
    disk.note_added(generation, slot)
    state.counters["disk_offloads"] += 1
    _ready(state, offload, "")
    return True


def _cause_of(code: int) -> str:
    """The name of a failure, as it is counted."""
    names = {OutOfSpace.code: "disk_full", UsageError.code: "too_large", LeaseExpired.code: "stale"}
    return names.get(code, "disk_failed")


# --- back into memory ---------------------------------------------------------------------------


def _want(
    state: CatalogState, work: Work, segment: Segment, name: tuple[str, bytes, int], now_ms: int
) -> None:
    """A cold object was read again: let it have a replica in the memory of its node, if that can
    be without squeezing others out that are in use, or on no disk yet."""
    disk = segment.disk
    assert disk is not None
    tenant = state.tenants.find(name[0])
    slot = None if tenant is None else tenant.complete.get(name[1])
    if (
        tenant is None
        or slot is None
        or state.table.generation[slot] != name[2]
        or not state.table.flags[slot] & COLD
        or slot in disk.promoting
        or name[1] in tenant.writing
    ):
        return
    units = extent_units(state.table.length[slot])
    if tenant.quota is not None and (
        tenant.used_bytes + units * EXTENT_ALIGN_BYTES > tenant.quota.bytes_max > 0
    ):
        return
    place = _memory_place(state, work, segment.node, units, now_ms)
    if place < 0:
        state.counters["disk_promotions_refused"] += 1
        return
    state.reserve_generations(work, 1)
    own = state.next_generation
    state.next_generation += 1
    expires_ms = now_ms + state.settings.grant_ttl_ms
    disk.promotions[own] = Promotion(slot, name[2], own, place, units, expires_ms)
    disk.promoting.add(slot)


def _memory_place(state: CatalogState, work: Work, node: str, units: int, now_ms: int) -> int:
    homes = [each for each in state.members.of_node(node) if each.state == ALIVE]
    high = state.settings.evict_high_ratio
    for home in homes:
        for _ in range(_EVICT_FOR_PROMOTION):
            fits = home.used_units + units <= home.allocator.units * high
            start = home.allocator.take(units) if fits else -1
            if start >= 0:
                home.used_units += units
                return home.index << PLACE_BITS | start
            if not evict_what_disks_hold(state, work, now_ms):
                break
    return -1


def _promoted(
    state: CatalogState, work: Work, disk: Disk, promotion: Promotion, code: int, now_ms: int
) -> None:
    slot = promotion.slot
    in_time = promotion.expires_ms > now_ms and lives(state, slot, promotion.generation)
    if code != OK or not in_time or not state.table.flags[slot] & COLD:
        end_promotion(state, disk, promotion, now_ms)
        return
    del disk.promotions[promotion.own]
    disk.promoting.discard(slot)
    state.add_replica(slot, promotion.place, promotion.own)
    record_replica(state, work, slot, promotion.place, promotion.own, now_ms)
    state.counters["disk_promotions"] += 1


def end_promotion(state: CatalogState, disk: Disk, promotion: Promotion, now_ms: int) -> None:
    """Without a replica."""
    del disk.promotions[promotion.own]
    disk.promoting.discard(promotion.slot)
    until = promotion.expires_ms + state.settings.grant_margin_ms if promotion.handed else 0
    gone = state.members.at(promotion.place >> PLACE_BITS).state == GONE
    state.release(promotion.place, promotion.units, 0 if gone else until, now_ms)


# --- the answer ---------------------------------------------------------------------------------


def _hand_out(state: CatalogState, segment: Segment, now_ms: int) -> DiskTasks:
    disk, table = segment.disk, state.table
    assert disk is not None
    rows: list[bytes] = []
    tenants: list[str] = []
    keys: list[bytes] = []
    more = False
    for offload in list(disk.offloads.values()):
        if offload.handed:
            continue
        if len(rows) == OFFLOADS_PER_CALL:
            more = True
            break
        source = _source(state, segment.node, offload)
        if source < 0:
            _end_offload(state, disk, offload, "not_ready")
            continue
        offload.handed = True
        offload.expires_ms = now_ms + state.settings.offload_ms
        rows.append(_row(state, offload.slot, source, offload.expires_ms))
        tenants.append(state.tenants.at(table.tenant[offload.slot]).name)
        keys.append(table.key[offload.slot] or b"")
    drops = [disk.drops.popleft() for _ in range(min(len(disk.drops), DROPS_PER_CALL))]
    promotions = _hand_out_promotions(state, disk, now_ms)
    return DiskTasks(b"".join(rows), tenants, keys, promotions, drops, more or bool(disk.drops))


def _source(state: CatalogState, node: str, offload: Offload) -> int:
    """A place of it in the memory of that node, if nobody has used it since; or -1."""
    table, slot = state.table, offload.slot
    if not lives(state, slot, offload.generation) or table.stamp[slot] != offload.stamp:
        return -1
    for place in table.places(slot):
        segment = state.members.at(place >> PLACE_BITS)
        if segment.node == node and segment.disk is None and segment.state != GONE:
            return place
    return -1


def _row(state: CatalogState, slot: int, place: int, expires_ms: int) -> bytes:
    table = state.table
    return DISK_TASK_ROW.pack(
        table.generation[slot],
        table.length[slot],
        state.members.at(place >> PLACE_BITS).segment_id,
        (place & PLACE_MASK) * EXTENT_ALIGN_BYTES,
        table.replica_generation(slot, place),
        expires_ms,
    )


def _hand_out_promotions(state: CatalogState, disk: Disk, now_ms: int) -> bytes:
    rows: list[bytes] = []
    for promotion in list(disk.promotions.values()):
        if promotion.handed or len(rows) == PROMOTIONS_PER_CALL:
            continue
        if not lives(state, promotion.slot, promotion.generation):
            end_promotion(state, disk, promotion, now_ms)
            continue
        promotion.handed = True
        home = state.members.at(promotion.place >> PLACE_BITS)
        rows.append(
            DISK_TASK_ROW.pack(
                promotion.generation,
                state.table.length[promotion.slot],
                home.segment_id,
                (promotion.place & PLACE_MASK) * EXTENT_ALIGN_BYTES,
                promotion.own,
                promotion.expires_ms,
            )
        )
    return b"".join(rows)


def numbers(state: CatalogState) -> dict[str, float]:
    """Of a status."""
    present = [each for each in state.members.disks.values() if each.state != GONE]
    found: dict[str, float] = {
        "disk_used_bytes": EXTENT_ALIGN_BYTES * sum(each.used_units for each in present),
        "disk_capacity_bytes": sum(each.nbytes for each in present),
        "disk_cold_objects": state.disks.cold_count,
        "disk_ready_bytes": EXTENT_ALIGN_BYTES * state.disks.ready_units,
        "disk_pending_bytes": EXTENT_ALIGN_BYTES
        * sum(each.disk.pending_units for each in present if each.disk),
    }
    for disk in (each.disk for each in present if each.disk):
        for name, value in disk.numbers.items():
            found[f"disk_node_{name}"] = found.get(f"disk_node_{name}", 0) + value
    paused = sum(bool(each.disk.fault) for each in present if each.disk)
    found["disks_paused"] = paused
    return found


def _prune_ready(state: CatalogState) -> None:
    """Look at some that are ready, round and round: those that were used since do not count."""
    for _ in range(min(len(state.disks.ready), state.settings.step_max)):
        entry = state.disks.take_ready()
        if entry is not None and still_ready(state, entry):
            state.disks.add_ready(entry)


def step(state: CatalogState, work: Work, now_ms: int) -> bool:
    """What a tick does about disks. Is there more to do?"""
    expire(state, now_ms)
    _prune_ready(state)
    more = make_room(state, work, now_ms)
    return offload_ahead(state, now_ms) or more
