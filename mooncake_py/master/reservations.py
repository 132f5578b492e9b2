"""Reservations: extents granted ahead of the keys that will be stored in them.

A writer that stores many objects of one size reserves extents for the next ones while it is busy
with others. Such a put then costs it one call of the master instead of two: the node has the bytes
before the master hears of the key.

Rules.
* A reservation is a grant like any other, of one replica under the default policy, with the same
  expiry. Until it is committed it stands among the tenant's grants under a name that no key can
  have (`model.reserved_key`); a put revoke of that name gives it back.
* Whether the key is taken is decided at the commit: a complete object or a running grant of another
  writer is EXISTS there, and the reservation ends. Nothing else of a put's meaning changes.
* It is a courtesy: nothing is evicted for it, it stays below the high watermark, all of them
  together take at most 1/16 of the cluster, and a tenant with a quota gets none. Whoever gets
  fewer than asked for puts the rest as always.
* Nothing of it is durable before the commit, whose records are those of a put start and a put end.
  A master that takes over knows no reservations: a commit is LEASE_EXPIRED then, and the put is
  made again. Generations are never used twice, so no commit can mean another's extent.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_py.errors import OK, LeaseExpired, ObjectExists, UsageError
from mooncake_py.master import records
from mooncake_py.master.commands import Applied, PutEnd, Refused, Reserve, Reserved, Statuses
from mooncake_py.master.commits import commit, is_complete, still_there
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.objects import PLACE_BITS, PLACE_MASK
from mooncake_py.master.placement import Placer, handicaps
from mooncake_py.master.puts import grant_fields
from mooncake_py.master.state import CatalogState, extent_units
from mooncake_py.master.stripes import is_part
from mooncake_py.master.tenant import Grant, Put, Tenant
from mooncake_py.master.work import Work
from mooncake_py.model import (
    BATCH_MAX_KEYS,
    EXTENT_ALIGN_BYTES,
    EXTENT_ROW,
    RESERVED_ROW,
    ReplicaPolicy,
    is_reserved,
    reserved_key,
)

_SHARE = 16  # one part in so many of the cluster's bytes


def reserve(state: CatalogState, command: Reserve, now_ms: int) -> Applied:
    if not 0 <= command.length <= state.settings.object_max_bytes:
        return Applied(Refused(UsageError.code, "the length is not one of an object"))
    if not 1 <= command.count <= BATCH_MAX_KEYS:
        return Applied(Refused(UsageError.code, f"1 to {BATCH_MAX_KEYS} reservations a call"))
    tenant = state.tenants.obtain(command.tenant)
    if isinstance(tenant, str):
        return Applied(Refused(UsageError.code, tenant))
    units = extent_units(command.length)
    places = _find_places(state, tenant, command, units, now_ms)
    if not places:
        return Applied(Reserved((), (), 0))
    work = Work()
    count = len(places)
    state.reserve_generations(work, count)
    first = state.next_generation
    put = Put(
        tenant=tenant,
        first=first,
        expires_ms=now_ms + state.settings.grant_ttl_ms,
        keys=[reserved_key(generation) for generation in range(first, first + count)],
        lengths=[command.length] * count,
        places=[(place,) for place in places],
        open_count=count,
    )
    state.next_generation += count
    tenant.writing.update((key, (put, index)) for index, key in enumerate(put.keys))
    tenant.used_bytes += EXTENT_ALIGN_BYTES * units * count
    state.watch_grants(put)
    state.reservations.append(put)
    ids, rows = _rows(state, put, command)
    return work.done(Reserved(ids, rows, state.settings.grant_ttl_ms), now_ms)


def _find_places(
    state: CatalogState, tenant: Tenant, command: Reserve, units: int, now_ms: int
) -> list[int]:
    """As many as may be had for nothing; taken."""
    if tenant.quota is not None:
        return []
    segments = state.members.placeable
    capacity = sum(each.allocator.units for each in segments)
    high = int(capacity * state.settings.evict_high_ratio)
    room = high - sum(each.used_units for each in segments)
    state.reservations = [each for each in state.reservations if each.open_count]
    reserved = sum(each.open_count * extent_units(each.lengths[0]) for each in state.reservations)
    slots = state.table.capacity - len(state.table) - state.open_grants
    count = min(command.count, room // units, (capacity // _SHARE - reserved) // units, slots)
    if count <= 0:
        return []
    young = handicaps(segments, state.settings.slow_start_ms, now_ms)
    placer = Placer(
        segments, ReplicaPolicy(), command.host_id, command.random, young,
        state.settings.placement,
    )  # fmt: skip
    return placer.many(units, count)


def _rows(state: CatalogState, put: Put, command: Reserve) -> tuple[list[int], list[bytes]]:
    """The reply's segment table, and the rows of each of its entries."""
    entries: dict[int, list[bytes]] = {}  # by segment index
    for index, (place,) in enumerate(put.places):
        rows = entries.setdefault(place >> PLACE_BITS, [])
        offset = (place & PLACE_MASK) * EXTENT_ALIGN_BYTES
        generation = put.first + index
        row = (
            0,
            0,
            offset,
            put.lengths[index],
            generation,
            put.expires_ms,
            command.digest,
            RESERVED_ROW,
        )
        rows.append(EXTENT_ROW.pack(*row))
    ids = [state.members.at(index).segment_id for index in entries]
    return ids, [b"".join(rows) for rows in entries.values()]


def put_end(state: CatalogState, command: PutEnd, now_ms: int) -> Applied:
    """A put end whose grants are reservations: the keys are named here."""
    keys, generations = command.keys, command.generations
    if len(keys) > BATCH_MAX_KEYS or len(generations) != len(keys) or command.failed:
        cause = "too many keys, keys and generations differ in number, or some have failed"
        return Applied(Refused(UsageError.code, cause))
    tenant = state.tenants.find(command.tenant)
    if tenant is None:
        return Applied(Statuses(bytes([LeaseExpired.code]) * len(keys)))
    work = Work()
    status = bytearray(len(keys))
    named: list[Grant] = []
    for i, (key, generation) in enumerate(zip(keys, generations, strict=True)):
        outcome = _name(state, work, tenant, key, generation, now_ms)
        if isinstance(outcome, int):
            status[i] = outcome
        else:
            named.append(outcome)
    if named:
        work.records.append(records.encode(_named_fields(state, named, now_ms)))
        for put, index in reversed(named):  # the last is the first to go: see `eviction.py`
            commit(state, put, index, now_ms)
        committed = [put.first + index for put, index in named]
        work.records.append(records.encode(records.Commits(now_ms, committed)))
    state.counters["put_starts"] += len(named)
    state.counters["put_ends"] += len(named)
    for counters in (state.counters, tenant.counters):
        counters["put_keys"] += len(keys)
    return work.done(Statuses(bytes(status)), now_ms)


def _name(
    state: CatalogState, work: Work, tenant: Tenant, key: bytes, generation: int, now_ms: int
) -> Grant | int:
    """Make the reservation a grant of this key, to be committed; or the key's status."""
    if is_part(key) or is_reserved(key):
        return UsageError.code  # those names are the catalog's own
    held = reserved_key(generation)
    grant = tenant.writing.get(held)
    if grant is None:
        # OK without a grant of its own: this commit was answered before.
        return OK if is_complete(state, tenant, key, generation) else LeaseExpired.code
    put, index = grant
    if not still_there(state, work, grant, now_ms):
        return LeaseExpired.code
    other = tenant.writing.get(key)
    if other is not None and not still_there(state, work, other, now_ms):
        other = None
    slot = state.find_live(work, tenant, key, now_ms)
    if slot is not None or other is not None:
        if slot is not None:
            tenant.pool.renew(slot, now_ms)
        state.end_grant(work, grant, Event.PUT_REVOKE, now_ms)
        return ObjectExists.code
    del tenant.writing[held]
    if state.touched is not None:
        state.touched.append((tenant, held))
    put.keys[index] = key
    tenant.writing[key] = grant
    return grant


def _named_fields(state: CatalogState, named: Sequence[Grant], now_ms: int) -> records.GrantFields:
    """The record of a put start that these grants would have had."""
    first = named[0][0]
    together = Put(
        tenant=first.tenant,
        first=first.first,
        expires_ms=min(put.expires_ms for put, _ in named),
        keys=[put.keys[index] for put, index in named],
        lengths=[put.lengths[index] for put, index in named],
        places=[put.places[index] for put, index in named],
    )
    generations = [put.first + index for put, index in named]
    return grant_fields(state, together, now_ms, generations)
