"""The catalog: what is stored where, decided in one place.

`apply(command, now_ms) -> Applied` is the whole interface. It reads no clock, draws no random
number, does no I/O and never blocks; the same calls in the same order always decide the same, in
the leader, in a standby, after recovery and in the simulator. One thread calls it.

    commands.py    what can be asked and what is answered
    puts.py reservations.py commits.py reads.py listing.py removal.py quotas.py pins.py  the verbs
    nodes.py recovery.py drains.py copies.py tiering.py                                  of nodes
    state.py       the state and the only steps that end an attempt
    lifecycle.py   the table those steps obey
    objects.py tenant.py membership.py allocator.py eviction.py lease.py placement.py   the parts
    records.py replay.py   durable form and back
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from mooncake_py.master import (
    commits,
    copies,
    drains,
    events,
    listing,
    nodes,
    pins,
    puts,
    quotas,
    reads,
    recovery,
    removal,
    repair,
    replay,
    reservations,
    snapshots,
    tiering,
)
from mooncake_py.master.commands import (
    Applied,
    Command,
    CopyObjects,
    Done,
    Drain,
    Events,
    Exists,
    Heartbeat,
    Inventory,
    List,
    Locate,
    Mount,
    Pin,
    PutEnd,
    PutRevoke,
    PutStart,
    Remove,
    Report,
    Reserve,
    SegmentInfo,
    SetQuota,
    Status,
    StatusInfo,
    Tasks,
    Tick,
    Unmount,
)
from mooncake_py.master.disk_commands import DiskWork
from mooncake_py.master.evicting import evict
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.membership import GONE, Segment
from mooncake_py.master.replay import RestoreReport
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.shadow import Shadow
from mooncake_py.master.snapshots import Slices
from mooncake_py.master.state import CatalogState
from mooncake_py.master.unrecorded import GRAVES_MAX
from mooncake_py.master.work import Work
from mooncake_py.model import EXTENT_ALIGN_BYTES

_TENANTS_SHOWN = 100  # of a status
_LISTING_MS = 60_000  # a listing that nobody goes on with is forgotten
_HOUSEKEEPING_MS = 10_000


def _tick(state: CatalogState, command: Tick, now_ms: int) -> Applied:
    """Everything that time does, in steps of bounded size."""
    work = Work()
    step = state.settings.step_max
    state.order.retry()
    more = state.expire_grants(work, now_ms, step)
    more |= state.free_rested(now_ms, step)
    more |= _end_ttls(state, work, now_ms, step)
    state.members.excuse(command.excused_ms, now_ms)
    nodes.judge(state, work, now_ms, command.bury)
    nodes.reclaim(state, work, now_ms)
    copies.expire_copies(state, now_ms, step)
    if command.evict_max:
        more |= quotas.trim_tenants(state, work, now_ms, step)
        more |= drains.drain_step(state, work, now_ms)
        repair.repair_step(state, work, now_ms)
    if state.members.disks and command.evict_max:
        more |= tiering.step(state, work, now_ms)
    _evict_to_watermark(state, work, command.evict_max, now_ms)
    if now_ms >= state.housekeeping_ms:
        state.housekeeping_ms = now_ms + _HOUSEKEEPING_MS
        quotas.forget_empty_tenants(state)
        for tenant in state.tenants:
            tenant.listings = {
                page: each
                for page, each in tenant.listings.items()
                if each.used_ms + _LISTING_MS > now_ms
            }
    work.unseal_all(state.lingering.due(now_ms))
    work.records += state.lingering.shorten(state.settings.lease_ms, now_ms)
    if state.unrecorded.grave_count > GRAVES_MAX:
        recovery.give_up(state, work, now_ms)
    elif state.unrecorded.open:
        recovery.refresh(state, work, now_ms)
    if state.doubts:
        state.doubts = {which: until for which, until in state.doubts.items() if until > now_ms}
    return work.done(Done(more), now_ms)


def _end_ttls(state: CatalogState, work: Work, now_ms: int, count_max: int) -> bool:
    """End no more than so many objects whose time is over; are there others?"""
    for _ in range(count_max):
        if not state.ttls.due(now_ms):
            return False
        slot = state.ttls.take()
        if slot >= 0:
            state.end_object(work, slot, Event.TTL_ENDED, now_ms)
    return state.ttls.due(now_ms)


def _evict_to_watermark(state: CatalogState, work: Work, count_max: int, now_ms: int) -> None:
    segments = state.members.placeable
    capacity = sum(each.allocator.units for each in segments)
    used = sum(each.used_units for each in segments)
    if used > capacity * state.settings.evict_high_ratio:
        state.evicting = True
    surplus = used - int(capacity * state.settings.evict_low_ratio)
    if state.evicting and surplus > 0:
        surplus -= evict(state, work, surplus, now_ms, count_max)
    if surplus <= 0:
        state.evicting = False


def _status(state: CatalogState, command: Status, now_ms: int) -> Applied:
    mounted = [each for each in state.members if each.state != GONE]
    present = [each for each in mounted if each.disk is None]
    counters: dict[str, float] = dict(state.counters)
    counters["tenants"] = len(state.tenants)
    counters["grants_running"] = sum(len(each.writing) for each in state.tenants)
    counters["resting_bytes"] = EXTENT_ALIGN_BYTES * sum(each.resting_units for each in present)
    counters["copies_running"] = len(state.tasks.running)
    counters["objects_short_of_replicas"] = len(state.tasks.short) + len(state.tasks.parked)
    counters["hard_pinned_bytes"] = EXTENT_ALIGN_BYTES * state.hard_pinned_units
    for segment in present:
        counters[f"largest_hole_bytes.{segment.segment_id}"] = (
            EXTENT_ALIGN_BYTES * segment.allocator.largest
        )
    if state.members.disks:
        counters |= tiering.numbers(state)
    info = StatusInfo(
        objects=len(state.table) - sum(each.part_count for each in state.tenants),
        used_bytes=EXTENT_ALIGN_BYTES * sum(each.used_units for each in present),
        capacity_bytes=EXTENT_ALIGN_BYTES * sum(each.allocator.units for each in present),
        segments=[_segment_info(each) for each in mounted],
        counters=counters,
        tenants=[
            quotas.tenant_info(each, now_ms) for each in islice(state.tenants, _TENANTS_SHOWN)
        ],
    )
    return Applied(info)


def _segment_info(segment: Segment) -> SegmentInfo:
    return SegmentInfo(
        segment_id=segment.segment_id,
        node=segment.node,
        incarnation=segment.incarnation,
        address=segment.address,
        region=segment.region,
        nbytes=segment.nbytes,
        host_id=segment.host_id,
        used_bytes=segment.used_units * EXTENT_ALIGN_BYTES,
        state=segment.state,
        domain=segment.domain,
        disk_id=segment.disk_id,
    )


def _put_end(state: CatalogState, command: PutEnd, now_ms: int) -> Applied:
    apply = reservations.put_end if command.reserved else commits.put_end
    return apply(state, command, now_ms)


_VERBS: dict[type, Callable[[CatalogState, Any, int], Applied]] = {
    Exists: reads.exists,
    Locate: reads.locate,
    List: listing.list_keys,
    Report: reads.report,
    SetQuota: quotas.set_quota,
    Tasks: copies.tasks,
    CopyObjects: copies.copy_objects,
    Drain: drains.drain,
    Events: lambda state, command, now_ms: events.events(state.events, command),
    PutStart: puts.put_start,
    Reserve: reservations.reserve,
    PutEnd: _put_end,
    PutRevoke: commits.put_revoke,
    Remove: removal.remove,
    Pin: pins.pin,
    Mount: nodes.mount,
    Heartbeat: nodes.heartbeat,
    Unmount: nodes.unmount,
    Inventory: recovery.inventory,
    DiskWork: tiering.disk_work,
    Tick: _tick,
    Status: _status,
}


class Catalog:
    """The master's state. Not thread-safe: one owner thread."""

    def __init__(self, settings: CatalogSettings | None = None) -> None:
        """Raises UsageError when settings contradict each other."""
        self.settings = settings or CatalogSettings()
        self.state = CatalogState(self.settings)

    def apply(self, command: Command, now_ms: int) -> Applied:
        """Decide. `now_ms` must not be smaller than in any call before."""
        return _VERBS[type(command)](self.state, command, now_ms)

    def segment(self, segment_id: int) -> SegmentInfo | None:
        """What replies need to know about a segment they name; None once it is gone."""
        segment = self.state.members.by_id.get(segment_id)
        return None if segment is None else _segment_info(segment)

    @property
    def adopts_segments(self) -> bool:
        """Has it taken over segments of a cluster whose records are lost?"""
        return self.state.counters["segments_adopted"] > 0

    def told(self, segment_id: int, generations: Sequence[int]) -> None:
        """The node has unsealed these: nobody reads them any more."""
        self.state.lingering.told(segment_id, generations)

    def has_followers(self, now_ms: int) -> bool:
        """Do nodes report here, at least half of those that are known?"""
        return self.state.members.reports(now_ms)

    def slices(self, now_ms: int) -> Slices:
        """Begin a snapshot that is made in steps; one at a time."""
        return Slices(self.state, now_ms)

    def snapshot(self, now_ms: int = 0) -> bytes:
        """The whole state (without leases) in the shortest form that `restore` reads."""
        return snapshots.snapshot(self.state, now_ms)

    def restore(
        self, snapshot: bytes | None, records: Iterable[bytes], now_ms: int, corrupt: int = 0
    ) -> RestoreReport:
        """Replace the state by what these records say. What is damaged is counted and left out,
        with the `corrupt` ones that the store has left out already."""
        self.state = CatalogState(self.settings)
        return replay.restore(self.state, snapshot, records, now_ms, corrupt)

    def take_over(self, shadow: Shadow, now_ms: int) -> RestoreReport | None:
        """As `restore`, from a shadow that followed the records as they came and is not used any
        more. None: what it has contradicts itself; restore instead."""
        if not shadow.take_over(now_ms):
            return None
        self.state = shadow.state
        return shadow.report

    def begin_term(
        self,
        term: int,
        now_ms: int = 0,
        foreign_until_ms: int = 0,
        durable_puts: bool = False,
    ) -> list[bytes]:
        """From now on generations and segment ids are this term's own, so that nothing a former
        master handed out is ever handed out again, whatever of its log was lost. `term`: durable,
        and greater than that of every master before (`MetadataStore.load` promises both). Until
        `foreign_until_ms` segments of a cluster whose records are lost are taken over.
        `durable_puts`: a put is acknowledged once it is recorded. Answers records that must be
        durable before any other of this term."""
        return recovery.begin_term(self.state, term, now_ms, foreign_until_ms, durable_puts)

    def raise_term(self, term: int) -> list[bytes]:
        """Go on in a greater term that is durable by now, since a mount wanted it
        (`Applied.term_wanted`): what is granted from now on is younger than all that can come to
        light. Answers records."""
        return [recovery.raise_term(self.state, term)] if term > self.state.term else []
