"""Put end and put revoke: what becomes of grants.

Rules. A grant is known by its generation; only a put end that names it, in time, makes the object
visible. A second put end of the same generation is OK, anything else is LEASE_EXPIRED and changes
nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_py.errors import LeaseExpired, ObjectExists, UsageError
from mooncake_py.master import records
from mooncake_py.master.commands import Applied, PutEnd, PutRevoke, Refused, Statuses
from mooncake_py.master.events import STORED
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.objects import HARD_PIN, REPLICAS, SOFT_PIN
from mooncake_py.master.state import CatalogState, extent_units
from mooncake_py.master.stripes import part_key
from mooncake_py.master.tenant import Grant, Put, Tenant
from mooncake_py.master.work import Work
from mooncake_py.model import BATCH_MAX_KEYS

_MANY = 4  # keys that are better looked up at once
_EXISTS, _USAGE, _EXPIRED = ObjectExists.code, UsageError.code, LeaseExpired.code


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
    tenant = state.tenants.find(command.tenant)
    if tenant is None:
        return Applied(Statuses(bytes([_EXPIRED]) * count))
    status = bytearray(count)
    step = _PutEnd(state, tenant, keys, now_ms)
    for i in range(count - 1, -1, -1):  # the last is the first to go: see `eviction.py`
        if not step.end(keys[i], generations[i], failed.get(i, set())):
            status[i] = _EXPIRED
    return step.done(bytes(status))


class _PutEnd:
    """One put end in the making."""

    def __init__(
        self, state: CatalogState, tenant: Tenant, keys: Sequence[bytes], now_ms: int
    ) -> None:
        self.state = state
        self.tenant = tenant
        self.now_ms = now_ms
        self.work = Work()
        self.committed: list[int] = []
        self.lost: list[tuple[int, int]] = []
        # None has a former object, and none gets one by what is committed here.
        self._fresh = len(keys) >= _MANY and not tenant.complete.has_any(keys)

    def end(self, key: bytes, generation: int, failed: set[int]) -> bool:
        """Commit one key; `failed`: ids of segments that did not seal. False: it has expired."""
        state, now_ms = self.state, self.now_ms
        grant = self.tenant.writing.get(key)
        if grant is None or grant[0].first + grant[1] != generation:
            return is_complete(state, self.tenant, key, generation)
        put, index = grant
        if not still_there(state, self.work, grant, now_ms):
            return False
        parts = _parts_of(grant) if put.groups and put.groups[index] else []
        if failed and not parts:
            self.lost.extend((generation, each) for each in failed)
            state.fail_replicas(put, index, failed, now_ms)
        if failed and (parts or not put.places[index]):
            state.end_grant(self.work, grant, Event.ALL_REPLICAS_FAILED, now_ms)
            return False
        for each, at in (*reversed(parts), grant):  # the head last: with it all are visible
            if parts or not self._fresh:
                replace_former(state, self.work, self.tenant, each.keys[at], now_ms)
            commit(state, each, at, now_ms)
            self.committed.append(each.first + at)
        return True

    def done(self, status: bytes) -> Applied:
        if self.committed or self.lost:
            record = records.Commits(self.now_ms, self.committed, self.lost)
            self.work.records.append(records.encode(record))
        self.state.counters["put_ends"] += len(self.committed)
        return self.work.done(Statuses(status), self.now_ms)


def _parts_of(grant: Grant) -> list[Grant]:
    """Grants of the further parts of a striped object."""
    put, index = grant
    key, writing = put.keys[index], put.tenant.writing
    found: list[Grant] = []
    while (part := writing.get(part_key(key, len(found) + 1))) is not None:
        if part[0].groups[part[1]] != put.groups[index]:
            break
        found.append(part)
    return found


def still_there(state: CatalogState, work: Work, grant: Grant, now_ms: int) -> bool:
    """Is it in time? A segment that is gone takes its part with it; is anything left?"""
    put, index = grant
    if put.expires_ms <= now_ms and not state.may_be_stored(put, waits=False):
        state.end_grant(work, grant, Event.GRANT_EXPIRED, now_ms)
        return False
    for leaving in state.leaving:
        if put.tenant.writing.get(put.keys[index]) == grant:
            state.lose_grant(work, grant, leaving.segment.index, now_ms)
        if not put.keys or put.tenant.writing.get(put.keys[index]) != grant:
            return False
    return True


def replace_former(
    state: CatalogState, work: Work, tenant: Tenant, key: bytes, now_ms: int
) -> None:
    """An upsert is about to be committed: what was there ends."""
    former = tenant.complete.get(key)
    if former is not None:
        state.end_object(work, former, Event.REPLACED, now_ms)


def commit(state: CatalogState, put: Put, index: int, now_ms: int) -> None:
    """The grant becomes a visible object; pins and TTL count from now."""
    key, places, tenant = put.keys[index], put.places[index], put.tenant
    del tenant.writing[key]
    slot = state.table.add(key, put.first + index, put.lengths[index], places[0], tenant.number)
    if _is_special(put):
        since = 0 if put.absolute else now_ms
        soft_pin = since + put.soft_pin_ms if put.soft_pin_ms else 0
        ttl = since + put.ttl_ms if put.ttl_ms else 0
        dress(state, slot, places, put.hard_pin, soft_pin, ttl)
        state.table.set_cost(slot, put.cost)
        if put.wanted > 1:
            state.table.set_wanted(slot, put.wanted)
            state.note_short(slot)
        if put.groups and put.groups[index]:
            state.join_group(put.groups[index], tenant, key, slot)
    state.enter(tenant, key, slot, now_ms)
    state.events.add(STORED, tenant.name, key, put.first + index)
    state.close_grants(put, 1)


def _is_special(put: Put) -> bool:
    several = put.wanted > 1 or bool(put.groups) or put.cost > 1
    return several or put.hard_pin or bool(put.soft_pin_ms or put.ttl_ms)


def dress(
    state: CatalogState, slot: int, places: tuple[int, ...], hard_pin: bool, soft_pin: int, ttl: int
) -> None:
    """What few objects have: further replicas, a pin, deadlines (0: none)."""
    table = state.table
    if len(places) > 1:
        table.more[slot] = places[1:]
        table.flags[slot] |= REPLICAS
    if hard_pin:
        table.flags[slot] |= HARD_PIN
    elif soft_pin and state.members.in_memory(places):  # what is on disk alone has none any more
        table.flags[slot] |= SOFT_PIN
        table.soft_pins[slot] = soft_pin
        units = extent_units(table.length[slot]) * len(places)
        tenant = state.tenants.at(table.tenant[slot])
        tenant.note_soft_pin(table.generation[slot], soft_pin, units)
    if ttl:
        state.ttls.set(slot, ttl)


def put_revoke(state: CatalogState, command: PutRevoke, now_ms: int) -> Applied:
    keys, generations = command.keys, command.generations
    if len(keys) > BATCH_MAX_KEYS or len(generations) != len(keys):
        return Applied(Refused(_USAGE, "too many keys, or keys and generations differ in number"))
    status = bytearray(len(keys))
    work = Work()
    tenant = state.tenants.find(command.tenant)
    if tenant is None:
        return Applied(Statuses(bytes(status)))
    for i, key in enumerate(keys):
        grant = tenant.writing.get(key)
        if grant is not None and grant[0].first + grant[1] == generations[i]:
            state.end_grant(work, grant, Event.PUT_REVOKE, now_ms)
        elif is_complete(state, tenant, key, generations[i]):
            status[i] = _EXISTS
    return work.done(Statuses(bytes(status)), now_ms)


def is_complete(state: CatalogState, tenant: Tenant, key: bytes, generation: int) -> bool:
    slot = tenant.complete.get(key)
    return slot is not None and state.table.generation[slot] == generation
