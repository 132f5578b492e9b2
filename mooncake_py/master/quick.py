"""Quick answers of the hot lane: calls that need no decision, answered natively on the owner's
thread while it waits there (native/abi/door.h).

Rules.
* Two calls are answered: Exists, and the commit of reservations whose keys are free. The door reads
  the catalog's own index of complete objects; what is being written it knows from a mirror:
  `CatalogState.touched` names the keys whose writing began or ended, and they are told before the
  owner waits. What is not plain is left to the catalog: no
  Exists while a node is not readable, while a placement is in doubt, or where objects end by
  themselves; no commit while a segment is leaving or nothing can be recorded.
* A commit that was answered is a promise. The owner applies it, with the time of the answer, before
  anything else that it does: nobody can see the catalog without it. Commits are collected for
  `LINGER_MS` and applied together, which is what makes them cheap. They are records then, as any
  other's: what a master that is killed before has acknowledged is found again on the nodes.
* Never with a store that others may take over: there a put is durable first, and whether this
  master leads is asked for each call.

Owner thread only.
"""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from mooncake_py._native.door import (
    ABSENT,
    MAY_COMMIT,
    MAY_EXISTS,
    WRITING,
    Commit,
    Kinds,
    NativeDoor,
)
from mooncake_py.clock import Clock
from mooncake_py.errors import MooncakeError
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.tenant import Tenant
from mooncake_py.model import BATCH_MAX_KEYS, KEY_MAX_BYTES, TENANT_MAX_BYTES, is_reserved
from mooncake_py.transfer import TransferEngine
from mooncake_py.wire.lane import EXISTS, PUT_END

log = logging.getLogger(__name__)

LINGER_MS = 2  # commits wait so long for company
_CHUNK_KEYS = 65_536  # told at a time at the start

Settle = Callable[[str, Sequence[bytes], Sequence[int], int], None]
"""Apply promised commits: tenant, keys, generations, when (ms) they were answered."""


class QuickAnswers:
    """The mirror of one catalog's grants, and the door that answers from it and from its keys.

    `settle`: applies what was promised. `may_record`: can changes be recorded now?
    """

    def __init__(
        self,
        engine: TransferEngine,
        catalog: Catalog,
        term: Callable[[], int],
        clock: Clock,
        settle: Settle,
        may_record: Callable[[], bool],
    ) -> None:
        limits = (BATCH_MAX_KEYS, KEY_MAX_BYTES, TENANT_MAX_BYTES)
        kinds = Kinds(EXISTS.number, PUT_END.number, *limits)
        self._state = catalog.state
        keys = self._state.table.native_keys
        self._door = NativeDoor(engine.native, keys, kinds, secrets.token_bytes(16))
        self._term = term
        self._clock = clock
        self._settle = settle
        self._may_record = may_record
        self._broken = False
        self._told = (0, 0, 0, 0)
        self._state.touched = []
        for tenant in self._state.tenants:
            self._mirror(tenant, tenant.writing)

    def serve(self, timeout_ms: int, out: Any) -> int:
        """For `Inbox.receive`: wait for a message that is not answered here."""
        self._catch_up()
        may = 0 if self._broken else self._allowed()
        now = (self._term(), self._clock.now_ms())
        return self._door.serve(now, may, LINGER_MS, timeout_ms, out)

    def settle(self) -> tuple[int, int, int, int]:
        """Keep what was promised. Returns what was answered since the last time: Exists calls,
        commits, bytes received and sent."""
        commits, at_ms = self._door.take()
        if commits:
            at_ms = min(at_ms, self._clock.now_ms())
            for tenant, run in _by_tenant(commits).items():
                keys = [each.key for each in run]
                self._settle(tenant, keys, [each.generation for each in run], at_ms)
        counts = self._door.counts()
        total = (
            counts.exists_calls, counts.commit_calls, counts.received_bytes, counts.sent_bytes,
        )  # fmt: skip
        before, self._told = self._told, total
        return (
            total[0] - before[0], total[1] - before[1], total[2] - before[2], total[3] - before[3],
        )  # fmt: skip

    def _allowed(self) -> int:
        state = self._state
        allowed = 0
        doubtful = state.members.impaired or state.doubts
        if not (doubtful or state.table.ttls or state.groups.hiding):
            allowed |= MAY_EXISTS
        if not (doubtful or state.leaving) and self._may_record():
            allowed |= MAY_COMMIT
        return allowed

    def _catch_up(self) -> None:
        touched = self._state.touched
        if not touched:
            return
        self._state.touched = []
        if len(touched) == 1:
            self._mirror(touched[0][0], (touched[0][1],))
            return
        keys: defaultdict[Tenant, dict[bytes, None]] = defaultdict(dict)
        for tenant, key in touched:
            keys[tenant][key] = None
        for tenant, some in keys.items():
            self._mirror(tenant, some)

    def _mirror(self, tenant: Tenant, keys: Iterable[bytes]) -> None:
        """Tell the door which of these keys are being written."""
        name, rest = tenant.name.encode(), iter(keys)
        try:
            while not self._broken and (some := list(islice(rest, _CHUNK_KEYS))):
                self._tell(tenant, name, some)
        except MooncakeError as error:
            log.error("no quick answers any more: %s", error)
            self._broken = True

    def _tell(self, tenant: Tenant, name: bytes, keys: list[bytes]) -> None:
        writing = tenant.writing
        named = keys
        if any(map(is_reserved, keys)):
            named = [key for key in keys if not is_reserved(key)]
            held = [key for key in keys if is_reserved(key)]
            expires = [writing[key][0].expires_ms if key in writing else 0 for key in held]
            generations = [int.from_bytes(key[1:], "little") for key in held]
            self._door.reserve(name, generations, expires)
        if named:
            states = bytes([WRITING if key in writing else ABSENT for key in named])
            self._door.set(name, named, states)


def _by_tenant(commits: Sequence[Commit]) -> dict[str, list[Commit]]:
    found: defaultdict[str, list[Commit]] = defaultdict(list)
    for commit in commits:
        found[commit.tenant.decode()].append(commit)
    return found
