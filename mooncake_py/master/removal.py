"""Remove: idempotent, honest about what stays, and never wider than it was asked.

Rules. An absent key is OK. A leased object stays (OBJECT_LEASED) unless forced; a hard-pinned one
stays likewise, so that pins are ended on purpose. A running grant is cancelled: its commit will be
refused. Removal by prefix reaches only keys of the given tenant that begin with it, and counts what
it removed and what it kept. The answer waits until this and every earlier record is durable, so
that nothing comes back from the dead. Pure.
"""

from __future__ import annotations

from mooncake_py.errors import OK, ObjectLeased, UsageError
from mooncake_py.master.commands import Applied, Refused, Remove, Statuses
from mooncake_py.master.lifecycle import Event
from mooncake_py.master.objects import HARD_PIN
from mooncake_py.master.state import CatalogState, Work
from mooncake_py.master.tenant import Tenant
from mooncake_py.model import BATCH_MAX_KEYS


def remove(state: CatalogState, command: Remove, now_ms: int) -> Applied:
    keys = command.keys
    if command.all and keys:
        return Applied(Refused(UsageError.code, "remove takes keys or all, not both"))
    if command.prefix and not command.all:
        return Applied(Refused(UsageError.code, "prefix is for remove with all"))
    if len(keys) > BATCH_MAX_KEYS:
        return Applied(
            Refused(UsageError.code, f"{len(keys)} keys, at most {BATCH_MAX_KEYS} are allowed")
        )
    tenant = state.tenants.find(command.tenant)
    if tenant is None:
        return Applied(Statuses(bytes(len(keys))), durable_first=True)
    work = Work()
    work.durable = True  # also for absent keys: the record of their end may still be on its way
    if command.all:
        keys = [
            key for key in (*tenant.complete, *tenant.writing) if key.startswith(command.prefix)
        ]
    status = bytearray(len(keys))
    removed = kept = 0
    for i, key in enumerate(keys):
        code, ended = _remove_one(state, work, tenant, key, command.force, now_ms)
        status[i] = code
        removed += ended
        kept += code != OK
    reply = Statuses(b"" if command.all else bytes(status), removed, kept)
    return work.done(reply, now_ms)


def _remove_one(
    state: CatalogState, work: Work, tenant: Tenant, key: bytes, force: bool, now_ms: int
) -> tuple[int, int]:
    """Status, and how many complete objects ended (0 or 1)."""
    slot = state.find_live(work, tenant, key, now_ms)
    if slot is not None and not force:
        leased = state.leased_until(slot) > now_ms
        if leased or state.table.flags[slot] & HARD_PIN:
            return ObjectLeased.code, 0
    grant = tenant.writing.get(key)
    if grant is not None:
        state.end_grant(work, grant, Event.REMOVE, now_ms)
    if slot is None:
        return OK, 0
    state.end_object(work, slot, Event.REMOVE, now_ms)
    return OK, 1
