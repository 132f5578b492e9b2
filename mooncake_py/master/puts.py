"""Put start, put end, put revoke.

Rules. A put start answers per key: granted, EXISTS (a complete object, or another writer's running
grant, or the same key earlier in the batch), OUT_OF_SPACE, QUOTA (hard pins) or USAGE. A grant is
known by its generation; only a put end that names it, in time, makes the object visible. A second
put end of the same generation is OK, anything else is LEASE_EXPIRED and changes nothing.

Space is made in two ways: beyond the high watermark the oldest objects go before a grant is made,
and when no hole is large enough they go until one is. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_py.errors import (
    LeaseExpired,
    ObjectExists,
    OutOfSpace,
    QuotaExceeded,
    UsageError,
)
from mooncake_py.master import records
from mooncake_py.master.commands import (
    Applied,
    Granted,
    PutEnd,
    PutRevoke,
    PutStart,
    Refused,
    Statuses,
)
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.objects import HARD_PIN, PLACE_BITS, PLACE_MASK, REPLICAS, SOFT_PIN
from mooncake_py.master.placement import Placer
from mooncake_py.master.state import CatalogState, Work
from mooncake_py.master.tenant import Grant, PutOptions, Tenant
from mooncake_py.model import (
    BATCH_MAX_KEYS,
    EXTENT_ALIGN_BYTES,
    EXTENT_HEADER_BYTES,
    EXTENT_ROW,
    KEY_MAX_BYTES,
)

_EXISTS, _SPACE, _QUOTA = ObjectExists.code, OutOfSpace.code, QuotaExceeded.code
_USAGE, _EXPIRED = UsageError.code, LeaseExpired.code
_ROUND = EXTENT_HEADER_BYTES + EXTENT_ALIGN_BYTES - 1
_EVICT_FOR_EXTRA = 64  # objects that may go for a replica that is only wished for


def _fault(state: CatalogState, command: PutStart) -> str:
    count = len(command.keys)
    policy = command.policy
    if count > BATCH_MAX_KEYS:
        return f"{count} keys in one call, at most {BATCH_MAX_KEYS} are allowed"
    if len(command.lengths) != count or len(command.digests) != 16 * count:
        return "keys, lengths and digests differ in number"
    if command.groups and len(command.groups) != count:
        return "keys and groups differ in number"
    if not 1 <= policy.replica_count <= state.settings.replica_max:
        return (
            f"replica_count is {policy.replica_count}, "
            f"1 to {state.settings.replica_max} are allowed"
        )
    if policy.soft_pin_ms < 0 or policy.ttl_ms < 0:
        return "soft_pin_ms and ttl_ms must not be negative"
    return ""


def put_start(state: CatalogState, command: PutStart, now_ms: int) -> Applied:
    fault = _fault(state, command)
    if fault:
        return Applied(Refused(_USAGE, fault))
    tenant = state.tenants.obtain(command.tenant)
    if isinstance(tenant, str):
        return Applied(Refused(_USAGE, tenant))
    return _PutStart(state, command, tenant, now_ms).run()


class _PutStart:
    """One put start in the making."""

    def __init__(self, state: CatalogState, command: PutStart, tenant: Tenant, now_ms: int) -> None:
        self.state = state
        self.command = command
        self.tenant = tenant
        self.now_ms = now_ms
        self.work = Work()
        segments = state.members.placeable
        policy = command.policy
        self.policy = policy
        self.placer = Placer(segments, policy, command.host_id, command.random)
        self.largest = max((each.allocator.units for each in segments), default=0)
        high = state.settings.evict_high_ratio
        self.capacity = sum(each.allocator.units for each in segments)
        self.room = int(self.capacity * high) - sum(each.used_units for each in segments)
        soft_pin = min(policy.soft_pin_ms, state.settings.soft_pin_max_ms)
        self.options = PutOptions(soft_pin, policy.hard_pin, policy.ttl_ms)
        self.grants: list[Grant] = []
        self.table: dict[int, int] = {}  # segment index -> entry of the reply's table
        self.rows: list[list[bytes]] = []
        self.used_bytes = 0

    def run(self) -> Applied:
        state, keys, lengths = self.state, self.command.keys, self.command.lengths
        count = len(keys)
        status = bytearray(count)
        generations = [0] * count
        state.reserve_generations(self.work, count)
        expires_ms = self.now_ms + state.settings.grant_ttl_ms
        groups, options, tenant = self.command.groups, self.options, self.tenant
        writing = tenant.writing
        length_max = state.settings.object_max_bytes
        for i, key in enumerate(keys):
            length = lengths[i]
            if not 0 < len(key) <= KEY_MAX_BYTES or not 0 <= length <= length_max:
                status[i] = _USAGE
                continue
            if self._taken(key):
                status[i] = _EXISTS
                continue
            units = (length + _ROUND) // EXTENT_ALIGN_BYTES
            places = self._place(units)
            if isinstance(places, int):
                status[i] = places
                continue
            generation = state.next_generation
            state.next_generation = generation + 1
            grant = Grant(key, generation, length, places)
            grant.expires_ms = expires_ms
            grant.tenant = tenant
            grant.put = options
            if groups:
                grant.group = groups[i]
            writing[key] = grant
            generations[i] = generation
            self.grants.append(grant)
            self.used_bytes += units * EXTENT_ALIGN_BYTES * len(places)
            self._add_rows(i, grant)
        self._finish(expires_ms)
        ids = [state.members.at(index).segment_id for index in self.table]
        state.counters["put_keys"] += count
        granted = Granted(bytes(status), generations, ids, [b"".join(rows) for rows in self.rows])
        return self.work.done(granted, self.now_ms)

    def _taken(self, key: bytes) -> bool:
        """Is there an object or a running grant? Ends what only seems to be there."""
        state = self.state
        if key in self.tenant.complete:
            slot = state.find_live(self.work, self.tenant, key, self.now_ms)
            if slot is not None:
                state.order.renew(slot, self.now_ms)
                return True
        grant = self.tenant.writing.get(key)
        if grant is None:
            return False
        if grant.expires_ms > self.now_ms:
            return True
        state.end_grant(self.work, grant, Event.GRANT_EXPIRED, self.now_ms)
        return False

    def _place(self, units: int) -> tuple[int, ...] | int:
        """Places of all replicas, taken and accounted for; or the status that says why not."""
        state, policy = self.state, self.policy
        replicas = policy.replica_count
        if units > self.largest:
            return _SPACE
        if policy.hard_pin:
            wanted = state.hard_pinned_units + units * replicas
            if wanted > self.capacity * state.settings.hard_pin_max_ratio:
                return _QUOTA
        self.room -= units * replicas
        if self.room < 0:
            self.room += state.evict(self.work, -self.room, self.now_ms)
        if replicas == 1 and (place := self.placer.one(units)) >= 0:
            if policy.hard_pin:
                state.hard_pinned_units += units
            return (place,)
        places: list[int] = []
        for index in range(replicas):
            place = self._one_replica(units, places, policy.strict or index == 0)
            if place >= 0:
                places.append(place)
            elif policy.strict or not places:
                for each in places:
                    state.release(each, units, 0, self.now_ms)
                self.room += units * replicas
                return _SPACE
            else:
                self.room += units * (replicas - index)
                break
        if policy.hard_pin:
            state.hard_pinned_units += units * len(places)
        return tuple(places)

    def _one_replica(self, units: int, places: Sequence[int], needed: bool) -> int:
        state = self.state
        chosen = [state.members.at(place >> PLACE_BITS) for place in places]
        chosen_nodes = {each.node for each in chosen}
        if not any(
            each.node not in chosen_nodes and each.allocator.units >= units
            for each in state.members.placeable
        ):
            return -1
        left = 1 << 62 if needed else _EVICT_FOR_EXTRA
        while True:
            place = self.placer.another(units, chosen) if chosen else self.placer.one(units)
            if place >= 0 or left <= 0:
                return place
            before = self.work.drop_count
            self.room += state.evict(self.work, 1, self.now_ms, min(left, 64))
            evicted = self.work.drop_count - before
            if not evicted:
                return -1
            left -= evicted

    def _add_rows(self, i: int, grant: Grant) -> None:
        digest = self.command.digests[16 * i : 16 * i + 16]
        for place in grant.places:
            index = place >> PLACE_BITS
            entry = self.table.get(index)
            if entry is None:
                entry = self.table[index] = len(self.rows)
                self.rows.append([])
            self.rows[entry].append(
                EXTENT_ROW.pack(
                    i,
                    entry,
                    (place & PLACE_MASK) * EXTENT_ALIGN_BYTES,
                    grant.length,
                    grant.generation,
                    grant.expires_ms,
                    digest,
                    0,
                )
            )

    def _finish(self, expires_ms: int) -> None:
        grants, state = self.grants, self.state
        if not grants:
            return
        self.tenant.used_bytes += self.used_bytes
        keys = [grant.key for grant in grants]
        state.watch_grants(self.tenant, expires_ms, keys, grants[0].generation)
        state.counters["put_starts"] += len(grants)
        self.work.records.append(
            records.encode(grant_fields(state, self.tenant, grants, self.now_ms))
        )


def grant_fields(
    state: CatalogState, tenant: Tenant, grants: Sequence[Grant], now_ms: int
) -> records.GrantFields:
    """The record of grants that share their options and expiry."""
    options = grants[0].put
    ids = {segment.index: segment.segment_id for segment in state.members.by_id.values()}
    return records.GrantFields(
        now_ms=now_ms,
        expires_ms=grants[0].expires_ms,
        tenant=tenant.name,
        soft_pin_ms=options.soft_pin_ms,
        ttl_ms=options.ttl_ms,
        hard_pin=options.hard_pin,
        keys=[grant.key for grant in grants],
        generations=[grant.generation for grant in grants],
        lengths=[grant.length for grant in grants],
        extents=[
            [
                (ids[place >> PLACE_BITS], (place & PLACE_MASK) * EXTENT_ALIGN_BYTES)
                for place in grant.places
            ]
            for grant in grants
        ],
        groups=[grant.group for grant in grants] if any(g.group for g in grants) else (),
    )


def put_end(state: CatalogState, command: PutEnd, now_ms: int) -> Applied:
    keys, generations = command.keys, command.generations
    count = len(keys)
    if count > BATCH_MAX_KEYS or len(generations) != count:
        return Applied(Refused(_USAGE, "too many keys, or keys and generations differ in number"))
    failed: dict[int, set[int]] = {}
    for index, segment_id in command.failed:
        if not 0 <= index < count:
            return Applied(Refused(_USAGE, f"failed names key {index} of {count}"))
        failed.setdefault(index, set()).add(segment_id)
    status = bytearray(count)
    tenant = state.tenants.find(command.tenant)
    if tenant is None:
        return Applied(Statuses(bytes([_EXPIRED]) * count))
    work = Work()
    committed: list[int] = []
    lost: list[tuple[int, int]] = []
    writing, complete = tenant.writing, tenant.complete
    for i, key in enumerate(keys):
        grant = writing.get(key)
        generation = generations[i]
        if grant is None or grant.generation != generation:
            slot = complete.get(key)
            if slot is None or state.table.generation[slot] != generation:
                status[i] = _EXPIRED
            continue
        if grant.expires_ms <= now_ms:
            state.end_grant(work, grant, Event.GRANT_EXPIRED, now_ms)
            status[i] = _EXPIRED
            continue
        if failed and i in failed:
            lost.extend((generation, each) for each in failed[i])
            drop_replicas(state, grant, failed[i], now_ms)
        if not grant.places:
            state.end_grant(work, grant, Event.ALL_REPLICAS_FAILED, now_ms)
            status[i] = _EXPIRED
            continue
        commit(state, grant, now_ms)
        committed.append(generation)
    if committed or lost:
        work.records.append(records.encode(records.Commits(now_ms, committed, lost)))
    state.counters["put_ends"] += len(committed)
    return work.done(Statuses(bytes(status)), now_ms)


def drop_replicas(state: CatalogState, grant: Grant, segment_ids: set[int], now_ms: int) -> None:
    """The node of these replicas did not seal them; it may still be writing."""
    kept = []
    units = (grant.length + _ROUND) // EXTENT_ALIGN_BYTES
    until = grant.expires_ms + state.settings.grant_margin_ms
    for place in grant.places:
        if state.members.at(place >> PLACE_BITS).segment_id in segment_ids:
            state.release(place, units, until, now_ms)
            grant.tenant.used_bytes -= units * EXTENT_ALIGN_BYTES
            if grant.put.hard_pin:
                state.hard_pinned_units -= units
        else:
            kept.append(place)
    grant.places = tuple(kept)


def commit(state: CatalogState, grant: Grant, now_ms: int) -> None:
    """The grant becomes a visible object; pins and TTL count from now."""
    options = grant.put
    soft_pin = now_ms + options.soft_pin_ms if options.soft_pin_ms else 0
    install(state, grant, soft_pin, now_ms + options.ttl_ms if options.ttl_ms else 0, now_ms)


def install(
    state: CatalogState, grant: Grant, soft_pin_until_ms: int, ttl_until_ms: int, now_ms: int
) -> None:
    """As `commit`, with deadlines instead of durations (0: none)."""
    table, tenant = state.table, grant.tenant
    del tenant.writing[grant.key]
    places = grant.places
    slot = table.add(grant.key, grant.generation, grant.length, places[0], tenant.number)
    if len(places) > 1:
        table.more[slot] = places[1:]
        table.flags[slot] |= REPLICAS
    if grant.put.hard_pin:
        table.flags[slot] |= HARD_PIN
    elif soft_pin_until_ms:
        table.flags[slot] |= SOFT_PIN
        table.soft_pins[slot] = soft_pin_until_ms
    if ttl_until_ms:
        state.set_ttl(slot, ttl_until_ms)
    tenant.complete[grant.key] = slot
    state.order.add(slot, now_ms)


def put_revoke(state: CatalogState, command: PutRevoke, now_ms: int) -> Applied:
    keys, generations = command.keys, command.generations
    if len(keys) > BATCH_MAX_KEYS or len(generations) != len(keys):
        return Applied(Refused(_USAGE, "too many keys, or keys and generations differ in number"))
    status = bytearray(len(keys))
    work = Work()
    tenant = state.tenants.find(command.tenant)
    for i, key in enumerate(keys):
        grant = tenant.writing.get(key) if tenant is not None else None
        if grant is not None and grant.generation == generations[i]:
            state.end_grant(work, grant, Event.PUT_REVOKE, now_ms)
        elif tenant is not None and _is_complete(state, tenant, key, generations[i]):
            status[i] = _EXISTS
    return work.done(Statuses(bytes(status)), now_ms)


def _is_complete(state: CatalogState, tenant: Tenant, key: bytes, generation: int) -> bool:
    slot = tenant.complete.get(key)
    return slot is not None and state.table.generation[slot] == generation
