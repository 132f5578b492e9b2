"""Tenants: every key lives in one, and nothing crosses from one to another.

A tenant has two maps. `complete` holds slots of visible objects, `writing` the running grants. They
are apart so that "which of these keys exist" is a plain membership test, and so that an old value
can stay readable while its successor is written. Pure.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake_py.master.eviction import Pool
from mooncake_py.master.keys import CompleteKeys
from mooncake_py.master.objects import ObjectTable
from mooncake_py.model import TENANT_MAX_BYTES


@dataclass(slots=True, eq=False)
class Put:
    """What one put start granted: columns, one entry a grant. A grant is named (put, index).

    Grants of one put have consecutive generations, from `first`. `open_count` grants have not ended
    yet; with the last one the columns are dropped.
    """

    tenant: Tenant
    first: int
    expires_ms: int
    keys: list[bytes]
    lengths: list[int]
    places: list[tuple[int, ...]]
    groups: Sequence[int] = ()  # empty, or one number a grant
    soft_pin_ms: int = 0
    hard_pin: bool = False
    ttl_ms: int = 0
    open_count: int = 0
    wanted: int = 1  # replicas that were asked for
    absolute: bool = False  # soft_pin_ms and ttl_ms are deadlines, and not counted from the commit
    cost: int = 1  # times as dear to recompute as usual

    def close(self, count: int) -> None:
        """So many grants have ended."""
        self.open_count -= count
        if not self.open_count:
            self.keys, self.lengths, self.places, self.groups = [], [], [], ()


Grant = tuple[Put, int]

_STALE_MIN = 1024  # ends of soft pins that were changed, and are never worth a clean-up


REJECT = "reject"
EVICT_OWN = "evict_own"
BORROW = "borrow"
POLICIES = (REJECT, EVICT_OWN, BORROW)


@dataclass(frozen=True, slots=True)
class Quota:
    """How much a tenant may hold (0: no limit), and what happens to a put beyond it.

    `reject`: it is refused. `evict_own`: the tenant's own oldest objects go for it. `borrow`: it
    may use what nobody else needs, and its objects are the first to go when somebody does.
    """

    bytes_max: int = 0
    keys_max: int = 0
    policy: str = REJECT

    def exceeded(self, used_bytes: int, keys: int) -> bool:
        return bool(self.bytes_max and used_bytes > self.bytes_max) or bool(
            self.keys_max and keys > self.keys_max
        )


@dataclass(slots=True, eq=False)
class Tenant:
    name: str
    number: int  # in the column of the object table
    pool: Pool
    complete: CompleteKeys
    quota: Quota | None = None
    writing: dict[bytes, Grant] = field(default_factory=dict)
    used_bytes: int = 0  # extents of complete and writing objects
    part_count: int = (
        0  # of these, further parts of striped ones (stripes.py): no keys of anybody's
    )
    hard_pinned_units: int = 0  # of these
    _soft_pins: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # by generation: end, units
    _soft_ends: list[tuple[int, int]] = field(default_factory=list)  # heap: end, generation
    _soft_units: int = 0  # of all that are pinned

    # by prefix and the last key of the page before (listing.py)
    listings: dict[tuple[bytes, bytes], Any] = field(default_factory=dict)
    counters: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def note_soft_pin(self, generation: int, until_ms: int, units: int) -> None:
        """This object, of so many units, is soft-pinned until then, and not as before."""
        self.end_soft_pin(generation)
        if len(self._soft_ends) > 2 * len(self._soft_pins) + _STALE_MIN:
            self._soft_ends = [(end, each) for each, (end, _) in self._soft_pins.items()]
            heapq.heapify(self._soft_ends)
        self._soft_pins[generation] = (until_ms, units)
        heapq.heappush(self._soft_ends, (until_ms, generation))
        self._soft_units += units

    def end_soft_pin(self, generation: int) -> None:
        """It is not soft-pinned any more, if it was."""
        _, units = self._soft_pins.pop(generation, (0, 0))
        self._soft_units -= units

    def soft_pinned_units(self, now_ms: int) -> int:
        while self._soft_ends and self._soft_ends[0][0] <= now_ms:
            end, generation = heapq.heappop(self._soft_ends)
            if self._soft_pins.get(generation, (0, 0))[0] == end:
                self.end_soft_pin(generation)
        return self._soft_units

    @property
    def over_quota(self) -> bool:
        return self.quota is not None and self.quota.exceeded(self.used_bytes, self.key_count)

    @property
    def key_count(self) -> int:
        return len(self.complete) + len(self.writing) - self.part_count


def name_fault(name: str) -> str:
    """Why this cannot be a tenant's name, or ""."""
    nbytes = len(name.encode(errors="surrogatepass"))
    if nbytes > TENANT_MAX_BYTES:
        return f"tenant name has {nbytes} bytes, at most {TENANT_MAX_BYTES} are allowed"
    if any(0xD800 <= ord(letter) <= 0xDFFF for letter in name):
        return "tenant name is not valid text"
    return ""


class Tenants:
    """All tenants, by name and by number. Numbers are used again once a tenant is forgotten."""

    __slots__ = (
        "_by_name", "_by_number", "_count_max", "_free_numbers", "_new_pool", "_table", "borrowers",
        "trimmed",
    )  # fmt: skip

    def __init__(self, count_max: int, table: ObjectTable, new_pool: Callable[[], Pool]) -> None:
        self._table = table
        self._new_pool = new_pool
        self.borrowers: dict[Tenant, None] = {}  # in an order that is the same everywhere
        self.trimmed: dict[Tenant, None] = {}  # with a quota for which their own objects go
        self._by_name: dict[str, Tenant] = {}
        self._by_number: list[Tenant | None] = []
        self._free_numbers: list[int] = []
        self._count_max = count_max

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def find(self, name: str) -> Tenant | None:
        return self._by_name.get(name)

    def obtain(self, name: str) -> Tenant | str:
        """The tenant, made when it is new; or why it cannot be."""
        tenant = self._by_name.get(name)
        if tenant is not None:
            return tenant
        fault = name_fault(name)
        if not fault and len(self._by_name) >= self._count_max:
            fault = f"there are {self._count_max} tenants already"
        if fault:
            return fault
        if self._free_numbers:
            number = self._free_numbers.pop()
        else:
            number = len(self._by_number)
            self._by_number.append(None)
        tenant = Tenant(name, number, self._new_pool(), self._table.keys_of(number, name))
        self._by_name[name] = tenant
        self._by_number[number] = tenant
        return tenant

    def at(self, number: int) -> Tenant:
        tenant = self._by_number[number]
        assert tenant is not None
        return tenant

    def set_quota(self, tenant: Tenant, quota: Quota | None) -> None:
        tenant.quota = quota
        self.borrowers.pop(tenant, None)
        self.trimmed.pop(tenant, None)
        if quota is not None and quota.policy == BORROW:
            self.borrowers[tenant] = None
        elif quota is not None and quota.policy == EVICT_OWN:
            self.trimmed[tenant] = None

    def forget_empty(self) -> list[Tenant]:
        """Drop tenants that own nothing and have no quota. Cost: all tenants."""
        empty = [
            each for each in self._by_name.values() if not each.key_count and each.quota is None
        ]
        for tenant in empty:
            del self._by_name[tenant.name]
            self._by_number[tenant.number] = None
            self._table.forget_keys_of(tenant.number)
            self._free_numbers.append(tenant.number)
        return empty
