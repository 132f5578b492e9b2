"""Remove: idempotent, honest about what stays, and never wider than it was asked.

Rules. An absent key is OK. A leased object stays (OBJECT_LEASED) unless forced; a hard-pinned one
stays likewise, so that pins are ended on purpose. A running grant is cancelled: its commit will be
refused. Removal by prefix reaches only keys of the given tenant that begin with it, and counts what
it removed and what it kept. The answer waits until this and every earlier record is durable, so
that nothing comes back from the dead, and until nobody reads any more what the keys had, now or
before (lingering.py).

Removal of all goes in steps, so that nobody waits long behind it: one call ends at most `step_max`
objects and grants, looks at no more than `_LOOK_MAX` keys, and answers a cursor to go on with. The
whole of it reaches what was granted before its first call, and nothing younger, or a removal under
a steady stream of puts had no end. A cursor names the next slot to look at and that generation; one
of another term begins at the first slot again, because slots are not the same there.

With a pattern (`pattern.py`) one call takes at most `_STEPS_MAX` steps of the matcher and one key
more, and what is in writing is left alone: complete objects only are removed. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from mooncake_py.errors import OK, ObjectLeased, UsageError
from mooncake_py.master import recovery
from mooncake_py.master.commands import Applied, Refused, Remove, Statuses
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.objects import HARD_PIN
from mooncake_py.master.pattern import Pattern
from mooncake_py.master.state import CatalogState
from mooncake_py.master.stripes import is_part
from mooncake_py.master.tenant import Grant, Tenant
from mooncake_py.master.unrecorded import GRAVES_MAX
from mooncake_py.master.work import Work
from mooncake_py.model import BATCH_MAX_KEYS

_CURSOR = struct.Struct("<QQQ")  # term, slot, generation
_LOOK_MAX = 8_192  # keys of the tenant that one call looks at
_STEPS_MAX = 25_000  # of a matcher, in one call: about five milliseconds
_PATTERNS_MAX = 4  # that are kept ready for the next call
_LINGERING_MAX = 16_384  # keys with extents that are read still
_STRIDE = 65_536  # slots that are compared with the tenant at once


def _fault(command: Remove) -> str:
    if command.all and command.keys:
        return "remove takes keys or all, not both"
    if (command.prefix or command.pattern) and not command.all:
        return "prefix and pattern are for remove with all"
    if command.cursor and not (command.all and len(command.cursor) == _CURSOR.size):
        return "cursor is for remove with all, and comes from the answer before"
    if len(command.keys) > BATCH_MAX_KEYS:
        return f"{len(command.keys)} keys, at most {BATCH_MAX_KEYS} are allowed"
    return ""


def remove(state: CatalogState, command: Remove, now_ms: int) -> Applied:
    fault = _fault(command)
    if fault:
        return Applied(Refused(UsageError.code, fault))
    tenant = state.tenants.find(command.tenant)
    work = Work()
    if not state.unrecorded.durable_puts:
        work.hold(state.lingering.unrecorded_until(state.unrecorded.open))
    if state.unrecorded.open:
        _bury(state, work, command, now_ms)
    if tenant is None:  # or forgotten, with objects that a reader may still have a lease of
        work.durable = True
        for key in command.keys:
            _tell_what_lingers(state, work, command.tenant, key)
        if command.all:
            _end_all_that_lingers(state, work, command, lambda key: True)
        return work.done(Statuses(bytes(len(command.keys))), now_ms)
    work.durable = True  # also for absent keys: the record of their end may still be on its way
    if command.all:
        try:
            step = _RemoveAll(state, work, tenant, command, now_ms)
        except UsageError as error:  # of the pattern
            return Applied(Refused(UsageError.code, error.cause))
        return work.done(step.run(), now_ms)
    status = bytearray(len(command.keys))
    removed = kept = 0
    for i, key in enumerate(command.keys):
        code, ended = _remove_one(state, work, tenant, key, command.force, now_ms)
        status[i] = code
        removed += ended
        kept += code != OK
    return work.done(Statuses(bytes(status), removed, kept), now_ms)


def _bury(state: CatalogState, work: Work, command: Remove, now_ms: int) -> None:
    """A node may still hold what no record tells of: if it comes to light, it stays dead. (Also of
    what a lease or pin keeps: older extents of its key are not wanted back either.)"""
    unrecorded, below = state.unrecorded, state.next_generation
    if not command.all:
        record = unrecorded.bury(command.tenant, command.keys, below)
    elif not command.cursor:
        record = unrecorded.sweep(command.tenant, command.prefix, command.pattern, below)
    else:
        return
    work.records.append(record)
    if unrecorded.grave_count > GRAVES_MAX:
        recovery.give_up(state, work, now_ms)


def _remove_one(
    state: CatalogState, work: Work, tenant: Tenant, key: bytes, force: bool, now_ms: int
) -> tuple[int, int]:
    """Status, and how many complete objects ended (0 or 1)."""
    slot = state.find_live(work, tenant, key, now_ms)
    if slot is not None and not force:
        leased = state.leased_until(slot) > now_ms
        if leased or state.table.flags[slot] & HARD_PIN:
            return ObjectLeased.code, 0
    _tell_what_lingers(state, work, tenant.name, key)
    grant = tenant.writing.get(key)
    if grant is not None:
        state.end_grant(work, grant, Event.REMOVE, now_ms)
    if slot is None:
        return OK, 0
    state.end_object(work, slot, Event.REMOVE, now_ms)
    return OK, 1


def _end_all_that_lingers(
    state: CatalogState, work: Work, command: Remove, ended: Callable[[bytes], bool]
) -> None:
    """Keys that have no object any more may have had one that somebody still reads. Of very many
    nobody is told: their leases are waited for."""
    if state.lingering.name_count > _LINGERING_MAX:
        work.hold(state.lingering.latest_ms())
        return
    for key in state.lingering.keys(command.tenant):
        if key.startswith(command.prefix) and ended(key):
            _tell_what_lingers(state, work, command.tenant, key)


def _tell_what_lingers(state: CatalogState, work: Work, tenant: str, key: bytes) -> None:
    """With the key goes what it had before and somebody may still read."""
    for until_ms, extents in state.lingering.of(tenant, key):
        for extent in extents:
            segment = state.members.by_id.get(extent[0])
            if segment is not None and state.members.can_be_told(segment):
                work.unseal_all([extent], until_ms)
            else:
                work.hold(until_ms)


def _ready(state: CatalogState, text: bytes) -> Pattern:
    pattern = state.patterns.get(text)
    if pattern is None:
        pattern = Pattern(text)
        if len(state.patterns) >= _PATTERNS_MAX:
            state.patterns.clear()
        state.patterns[text] = pattern
    return pattern


@dataclass(slots=True)
class _RemoveAll:
    """One step of a removal of all. Grants go first: what is left below the limit of generations
    is then complete, and the walk over the slots misses none of it."""

    state: CatalogState
    work: Work
    tenant: Tenant
    command: Remove
    now_ms: int
    _pattern: Pattern | None = None
    _steps_max: int = 0

    def __post_init__(self) -> None:
        if self.command.pattern:
            self._pattern = _ready(self.state, self.command.pattern)
            self._steps_max = self._pattern.spent + _STEPS_MAX

    def run(self) -> Statuses:
        state, command = self.state, self.command
        term, slot, limit = 0, 0, state.next_generation
        if command.cursor:
            term, slot, limit = _CURSOR.unpack(command.cursor)
        if term != state.term:
            slot = 0
        step = state.settings.step_max
        grants = [] if self._pattern else list(islice(self._grants(limit), step))
        for put, index in grants:
            if index < len(put.keys) and self.tenant.writing.get(put.keys[index]) == (put, index):
                state.end_grant(self.work, (put, index), Event.REMOVE, self.now_ms)
        if len(grants) == step:
            return Statuses(cursor=_CURSOR.pack(state.term, slot, limit))
        return self._objects(slot, limit, step - len(grants))

    def _grants(self, limit: int) -> Iterator[Grant]:
        prefix = self.command.prefix
        for key, (put, index) in self.tenant.writing.items():
            if put.first + index < limit and key.startswith(prefix) and not is_part(key):
                yield put, index

    def _objects(self, first: int, limit: int, count_max: int) -> Statuses:
        state, command = self.state, self.command
        table = state.table
        removed = kept = tried = 0
        for slot, key in self._keys(first):
            if key is None or tried == count_max or self._tired():
                cursor = _CURSOR.pack(self.state.term, slot, limit)
                return Statuses(b"", removed, kept, cursor)
            if table.generation[slot] >= limit or not key.startswith(command.prefix):
                continue
            if is_part(key):
                continue  # ends with its first part
            if self.tenant.complete.get(key) != slot:
                continue  # ended just now, with its group
            if self._pattern and not self._pattern.found_in(key):
                continue
            tried += 1
            code, ended = _remove_one(
                self.state, self.work, self.tenant, key, command.force, self.now_ms
            )
            removed += ended
            kept += code != OK
        wanted = partial(self._ended, limit)
        _end_all_that_lingers(state, self.work, command, wanted)
        return Statuses(b"", removed, kept)

    def _ended(self, limit: int, key: bytes) -> bool:
        """Is it one of those that are removed, and was not kept?"""
        slot = self.tenant.complete.get(key)
        if slot is not None and self.state.table.generation[slot] < limit:
            return False
        return self._pattern is None or self._pattern.found_in(key)

    def _tired(self) -> bool:
        return self._pattern is not None and self._pattern.spent > self._steps_max

    def _keys(self, first: int) -> Iterator[tuple[int, bytes | None]]:
        """Slots of the tenant from this one on, with their keys; after `_LOOK_MAX` of them the
        next one without its key."""
        table, looked = self.state.table, 0
        for start in range(first, len(table.key), _STRIDE):
            tenants = table.tenant_column.many[start : min(start + _STRIDE, len(table.key))]
            for slot in (np.flatnonzero(tenants == self.tenant.number) + start).tolist():
                key = table.key[slot]
                if key is None:
                    continue
                if looked == _LOOK_MAX:
                    yield slot, None
                    return
                looked += 1
                yield slot, key
