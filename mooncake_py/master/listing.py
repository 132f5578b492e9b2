"""Listings: keys by prefix, in order, in pages, without holding anybody up.

Rules. A listing looks at all slots once, `_LOOK_MAX` a step, and sorts what it finds of each step
by itself; a step that does not come to the end answers `Again`, and whoever serves calls lets
others in before it goes on. Pages then merge these runs. A listing does not see what is put behind
its back, leaves out what was removed meanwhile, and is forgotten when nobody goes on with it. Pure.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from mooncake_py.errors import UsageError
from mooncake_py.master.commands import Again, Applied, List, Listed, Refused
from mooncake_py.master.state import CatalogState
from mooncake_py.master.stripes import whole_length
from mooncake_py.master.tenant import Tenant
from mooncake_py.model import PART_MARK

_LISTINGS_MAX = 4  # in progress a tenant
_LOOK_MAX = 8_192  # slots, or keys of runs, that one step looks at


@dataclass(slots=True)
class Listing:
    """How far it is. `heads`: heap of the first key left of each run, with the run's number."""

    slot: int = 0  # slots before it have been looked at
    runs: list[list[bytes]] = field(default_factory=list)  # each sorted from the last to the first
    heads: list[tuple[bytes, int]] = field(default_factory=list)
    page: list[bytes] = field(default_factory=list)  # of the answer in the making
    used_ms: int = 0

    def pop(self) -> bytes | None:
        """The next key of all runs; None: there are no more."""
        if not self.heads:
            return None
        key, number = self.heads[0]
        run = self.runs[number]
        if run:
            heapq.heapreplace(self.heads, (run.pop(), number))
        else:
            heapq.heappop(self.heads)
        return key


def list_keys(state: CatalogState, command: List, now_ms: int) -> Applied:
    limit = min(command.limit, state.settings.list_max)
    if limit < 1:
        return Applied(Refused(UsageError.code, "limit of a listing must be at least 1"))
    tenant = state.tenants.find(command.tenant)
    if tenant is None:
        return Applied(Listed((), (), (), False))
    name = (command.prefix, command.after)
    listing = tenant.listings.pop(name, None) or Listing()
    listing.used_ms = now_ms
    done = _look(state, tenant, listing, command) and _fill(tenant, listing, limit + 1)
    if not done:
        _keep(tenant, name, listing)
        return Applied(Again())
    page, listing.page = listing.page[:limit], listing.page[limit:]
    if listing.page:  # one more was only to see whether there is one
        _keep(tenant, (command.prefix, page[-1]), listing)
    slots = [tenant.complete[key] for key in page]
    lengths = [whole_length(state.table, tenant, slot) for slot in slots]
    replicas = [len(state.table.places(slot)) for slot in slots]
    return Applied(Listed(page, lengths, replicas, bool(listing.page)))


def _keep(tenant: Tenant, name: tuple[bytes, bytes], listing: Listing) -> None:
    while len(tenant.listings) >= _LISTINGS_MAX:
        del tenant.listings[next(iter(tenant.listings))]
    tenant.listings[name] = listing


def _look(state: CatalogState, tenant: Tenant, listing: Listing, command: List) -> bool:
    """One step over the slots; True: all have been looked at."""
    table, start = state.table, listing.slot
    if start >= len(table.key):
        return True
    listing.slot = start + _LOOK_MAX
    stop = min(listing.slot, len(table.key))
    mine = np.flatnonzero(table.tenant_column.many[start:stop] == tenant.number) + start
    after, prefix = command.after, command.prefix
    run = [
        key
        for key in table.key.many(mine)
        if key is not None and after < key < PART_MARK and key.startswith(prefix)
    ]
    if run:
        run.sort(reverse=True)
        heapq.heappush(listing.heads, (run.pop(), len(listing.runs)))
        listing.runs.append(run)
    return stop == len(table.key)


def _fill(tenant: Tenant, listing: Listing, count: int) -> bool:
    """Fill the page with keys that are still there; False: that takes another step."""
    listing.page = [key for key in listing.page if key in tenant.complete]
    for _ in range(_LOOK_MAX):
        if len(listing.page) >= count:
            return True
        key = listing.pop()
        if key is None:
            return True
        if key in tenant.complete:
            listing.page.append(key)
    return len(listing.page) >= count
