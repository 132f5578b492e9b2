"""Put start: which keys are granted, and where. What becomes of grants is in `commits.py`.

Rules. A put start answers per key: granted, EXISTS (a complete object, or another writer's running
grant, or the same key earlier in the batch), OUT_OF_SPACE, QUOTA (hard pins) or USAGE.

With `upsert` a complete object does not stand in the way: it is found until the put end, which
replaces it in the same step. If the put fails, it simply stays.

Space is made in two ways: beyond the high watermark the oldest objects go before grants are made,
and when no hole is large enough they go until one is.

A batch is handled in columns: what is decided per key is kept to a few list operations. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import repeat

from mooncake_py.errors import OK, LeaseExpired, ObjectExists, OutOfSpace, QuotaExceeded, UsageError
from mooncake_py.master import records
from mooncake_py.master.commands import (
    Applied,
    Granted,
    PutStart,
    Refused,
)
from mooncake_py.master.commits import still_there
from mooncake_py.master.evicting import evict
from mooncake_py.master.groups import is_named, names_of
from mooncake_py.master.objects import COLD, PLACE_BITS, PLACE_MASK
from mooncake_py.master.pins import RoomForPins, ends_of, left_of
from mooncake_py.master.placement import Placer, handicaps
from mooncake_py.master.quotas import Allowance
from mooncake_py.master.state import CatalogState
from mooncake_py.master.stripes import Stripe, find_parts, is_part, part_key
from mooncake_py.master.tenant import Put, Tenant
from mooncake_py.master.work import Work
from mooncake_py.model import (
    BATCH_MAX_KEYS,
    COST_MAX,
    EXTENT_ALIGN_BYTES,
    EXTENT_HEADER_BYTES,
    EXTENT_ROW,
    KEY_MAX_BYTES,
    MEMBERS_SHIFT,
    PART_MARK,
)

_EXISTS, _SPACE, _QUOTA = ObjectExists.code, OutOfSpace.code, QuotaExceeded.code
_USAGE, _EXPIRED = UsageError.code, LeaseExpired.code
_ROUND = EXTENT_HEADER_BYTES + EXTENT_ALIGN_BYTES - 1
_EVICT_MAX = 4_096  # objects that one put start may evict; what does not fit then comes again
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
    if not 1 <= policy.recompute_cost <= COST_MAX:
        return f"recompute_cost is {policy.recompute_cost}, 1 to {COST_MAX} are allowed"
    return ""


def put_start(state: CatalogState, command: PutStart, now_ms: int) -> Applied:
    tenant = _fault(state, command) or state.tenants.obtain(command.tenant)
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
        self.status = bytearray(len(command.keys))
        self.allowance = Allowance(state, tenant)
        self.twins: list[tuple[int, int]] = []  # (index, later index) of the same key
        segments = state.members.placeable
        self.policy = command.policy
        young = handicaps(segments, state.settings.slow_start_ms, now_ms)
        self.placer = Placer(
            segments, command.policy, command.host_id, command.random, young,
            state.settings.placement,
        )  # fmt: skip
        self.capacity = sum(each.allocator.units for each in segments)
        self.largest = max((each.allocator.units for each in segments), default=0)
        high = int(self.capacity * state.settings.evict_high_ratio)
        self.room = high - sum(each.used_units for each in segments)
        self.evictions_left = _EVICT_MAX
        self.ends = ends_of(state, tenant, command.policy, now_ms)
        self.room_for_pins = RoomForPins(state, tenant, command.policy.hard_pin, now_ms)
        self.stripes: dict[int, Stripe] = {}  # by key index
        self.part_rows: list[tuple[int, int, bytes]] = []  # entry, row, key of each of these
        self.owners: list[int] = []  # key index of each grant that is a further part

    def run(self) -> Applied:
        state, command = self.state, self.command
        state.reserve_generations(self.work, len(command.keys))
        indices = self._fresh_keys()
        indices, places = self._find_places(indices)
        if command.groups:
            indices, places = self._drop_broken_groups(indices, places)
        for first, i in self.twins:
            self.status[i] = self.status[first] or _EXISTS
        generations = [0] * len(command.keys)
        ids: Sequence[int] = ()
        rows: list[bytes] = []
        if indices:
            put = self._grant(indices, places)
            for generation, i in enumerate(indices, put.first):
                generations[i] = generation
            ids, rows = self._rows(put, indices)
        for counters in (state.counters, self.tenant.counters):
            counters["put_keys"] += len(command.keys)
        left_ms = left_of(self.ends, self.now_ms)
        granted = Granted(bytes(self.status), generations, ids, rows, self.part_rows, left_ms)
        return self.work.done(granted, self.now_ms)

    # --- which keys -----------------------------------------------------------------------------

    def _fresh_keys(self) -> list[int]:
        """Indices of keys that may be granted; the others have their status."""
        keys, lengths = self.command.keys, self.command.lengths
        if not keys:
            return []
        sizes = set(map(len, keys))
        length_max = self.state.settings.object_max_bytes
        if (
            min(sizes) > 0
            and max(keys) < PART_MARK
            and max(sizes) <= KEY_MAX_BYTES
            and min(lengths) >= 0
            and max(lengths) <= length_max
            and not self.tenant.complete.has_any(keys)
            and self.tenant.writing.keys().isdisjoint(keys)
            and len(set(keys)) == len(keys)
        ):
            return list(range(len(keys)))
        fresh: dict[bytes, int] = {}
        for i, key in enumerate(keys):
            named = 0 < len(key) <= KEY_MAX_BYTES and not is_part(key)
            if not named or not 0 <= lengths[i] <= length_max:
                self.status[i] = _USAGE
            elif key in fresh:
                self.twins.append((fresh[key], i))
            elif self._taken(key):
                self.status[i] = _EXISTS
            else:
                fresh[key] = i
        return list(fresh.values())

    def _taken(self, key: bytes) -> bool:
        """Is there an object or a running grant? Ends what only seems to be there."""
        state = self.state
        if key in self.tenant.complete:
            slot = state.find_live(self.work, self.tenant, key, self.now_ms)
            if slot is not None and not self.command.upsert:
                if not state.table.flags[slot] & COLD:
                    self.tenant.pool.renew(slot, self.now_ms)
                return True
        grant = self.tenant.writing.get(key)
        if grant is None:
            return False
        return still_there(state, self.work, grant, self.now_ms)

    # --- where ----------------------------------------------------------------------------------

    def _find_places(self, indices: list[int]) -> tuple[list[int], list[tuple[int, ...]]]:
        """Keys that have found places, and these; taken and accounted for."""
        indices = self._limit_count(indices)
        lengths = self.command.lengths
        units = [(lengths[i] + _ROUND) // EXTENT_ALIGN_BYTES for i in indices]
        places: list[tuple[int, ...]] = []
        if len(units) > 1 and not self._special() and min(units) == max(units) <= self.largest:
            size, total = units[0], units[0] * len(units)
            if total <= self.room:
                self.room -= total
                places = list(zip(self.placer.many(size, len(units))))
                self.room += size * (len(units) - len(places))
        if len(places) == len(indices):
            return indices, places
        found = indices[: len(places)]
        for i, size in zip(indices[len(places) :], units[len(places) :], strict=True):
            pins_left = self.room_for_pins.left
            place = self._place(i, size)
            if isinstance(place, int):
                self.status[i] = place
                self.room_for_pins.left = pins_left
            else:
                found.append(i)
                places.append(place)
        return found, places

    def _limit_count(self, indices: list[int]) -> list[int]:
        """As many of them as the table of objects has room for, by eviction if need be."""
        state = self.state
        surplus = len(state.table) + state.open_grants + len(indices) - state.table.capacity
        for _ in range(surplus):
            if not self._evict(1):
                break
            surplus -= 1
        if surplus <= 0:
            return indices
        for i in indices[-surplus:]:
            self.status[i] = _SPACE
        return indices[:-surplus]

    def _evict(self, units: int, count_max: int = _EVICT_MAX) -> int:
        """Evict until so many units are free; the units that became free."""
        before = self.work.drop_count
        most = min(count_max, self.evictions_left)
        freed = evict(self.state, self.work, units, self.now_ms, most) if most > 0 else 0
        self.evictions_left -= self.work.drop_count - before
        return freed

    def _special(self) -> bool:
        policy = self.policy
        pinned = policy.hard_pin or self.ends.soft_pin_ms > 0
        return policy.replica_count > 1 or pinned or self.tenant.quota is not None

    def _place(self, i: int, units: int) -> tuple[int, ...] | int:
        """Places of all replicas of one object; or the status that says why not."""
        state, policy = self.state, self.policy
        replicas = policy.replica_count
        stripable = self.command.lengths[i] >= 2 * state.settings.stripe_min_bytes and not (
            policy.strict and replicas > 1
        )
        if units > (self.capacity if stripable else self.largest):
            return _SPACE
        pinned = policy.hard_pin or self.ends.soft_pin_ms
        if pinned and not self.room_for_pins.take(units * replicas):
            return _QUOTA
        if not self.allowance.take(self.work, units * replicas, self.now_ms):
            self.tenant.counters["quota_refusals"] += 1
            return _QUOTA
        self.room -= units * replicas
        if self.room < 0:
            self.room += self._evict(-self.room)
        if stripable and not any(
            each.allocator.largest >= units for each in state.members.placeable
        ):
            return self._stripe(i, units, replicas)
        places: list[int] = []
        for index in range(replicas):
            place = self._one_replica(units, places, policy.strict or index == 0)
            if place >= 0:
                places.append(place)
            elif policy.strict or not places:
                for each in places:
                    state.release(each, units, 0, self.now_ms)
                self.room += units * replicas
                self.allowance.give_back(units * replicas)
                return _SPACE
            else:
                self.room += units * (replicas - index)
                self.allowance.give_back_units(units * (replicas - index))
                break
        if policy.hard_pin:
            state.pin(self.tenant, units * len(places))
        return tuple(places)

    def _stripe(self, i: int, units: int, replicas: int) -> tuple[int, ...] | int:
        """Cut the object over several holes, making space if need be."""
        state, length = self.state, self.command.lengths[i]
        count_max = state.table.capacity - len(state.table) - state.open_grants
        part_min = state.settings.stripe_min_bytes
        while True:
            stripe = find_parts(state.members.placeable, length, part_min, count_max)
            if stripe is not None:
                break
            freed = self._evict(max(1, units // 8))
            self.room += freed
            if not freed:
                self.room += units * replicas
                self.allowance.give_back(units * replicas)
                return _SPACE
        self.stripes[i] = stripe
        state.counters["striped_puts"] += 1
        if self.policy.hard_pin:
            state.pin(self.tenant, sum(stripe.units))
        return (stripe.places[0],)

    def _one_replica(self, units: int, places: Sequence[int], needed: bool) -> int:
        """A place, making space if need be; or -1."""
        state = self.state
        chosen = [state.members.at(place >> PLACE_BITS) for place in places]
        place = self.placer.another(units, chosen) if chosen else self.placer.one(units)
        if place >= 0:
            return place
        chosen_nodes = {each.node for each in chosen}
        if not any(
            each.node not in chosen_nodes and each.allocator.units >= units
            for each in state.members.placeable
        ):
            return -1
        left = 1 << 62 if needed else _EVICT_FOR_EXTRA
        while left > 0:
            before = self.work.drop_count
            self.room += self._evict(1, left)
            evicted = self.work.drop_count - before
            if not evicted:
                return -1
            left -= evicted
            place = self.placer.another(units, chosen) if chosen else self.placer.one(units)
            if place >= 0:
                return place
        return -1

    def _drop_broken_groups(
        self, indices: list[int], places: list[tuple[int, ...]]
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """Groups of which a member found no place get none at all."""
        numbers, lengths = self.command.groups, self.command.lengths
        broken = {
            numbers[i]: code for i, code in enumerate(self.status) if code not in (OK, _EXISTS)
        }
        broken.pop(0, None)
        if not broken:
            return indices, places
        kept: list[tuple[int, tuple[int, ...]]] = []
        for i, replicas in zip(indices, places, strict=True):
            if numbers[i] not in broken:
                kept.append((i, replicas))
                continue
            self.status[i] = broken[numbers[i]]
            units = (lengths[i] + _ROUND) // EXTENT_ALIGN_BYTES
            taken = [(place, units) for place in replicas]
            stripe = self.stripes.pop(i, None)
            if stripe is not None:
                taken = list(zip(stripe.places, stripe.units, strict=True))
            for place, each in taken:
                self.state.release(place, each, 0, self.now_ms)
            self.allowance.give_back(units * len(replicas))
            if self.policy.hard_pin:
                self.state.pin(self.tenant, -sum(each for _, each in taken))
        return [i for i, _ in kept], [replicas for _, replicas in kept]

    def _group_names(self, indices: list[int]) -> Sequence[int]:
        numbers = self.command.groups
        if not any(numbers):
            return ()
        return names_of([numbers[i] for i in indices], self.state.next_generation)

    # --- grants ---------------------------------------------------------------------------------

    def _grant(self, indices: list[int], places: list[tuple[int, ...]]) -> Put:
        state, command, settings = self.state, self.command, self.state.settings
        all_keys = len(indices) == len(command.keys)
        put = Put(
            tenant=self.tenant,
            first=state.next_generation,
            expires_ms=self.now_ms + settings.grant_ttl_ms,
            keys=list(command.keys) if all_keys else [command.keys[i] for i in indices],
            lengths=[command.lengths[i] for i in indices],
            places=places,
            groups=self._group_names(indices),
            soft_pin_ms=self.ends.soft_pin_ms,
            hard_pin=self.policy.hard_pin,
            ttl_ms=self.ends.ttl_ms,
            wanted=self.policy.replica_count,
            absolute=self.ends.absolute,
            cost=self.policy.recompute_cost,
        )
        if self.stripes:
            self._add_parts(put, indices)
        count = put.open_count = len(put.keys)
        state.reserve_generations(self.work, count)
        state.next_generation += count
        grants = zip(repeat(put, count), range(count), strict=True)
        self.tenant.writing.update(zip(put.keys, grants, strict=True))
        self.tenant.used_bytes += EXTENT_ALIGN_BYTES * sum(
            (length + _ROUND) // EXTENT_ALIGN_BYTES * len(replicas)
            for length, replicas in zip(put.lengths, put.places, strict=True)
        )
        state.watch_grants(put)
        state.counters["put_starts"] += count
        self.work.records.append(records.encode(grant_fields(state, put, self.now_ms)))
        return put

    def _add_parts(self, put: Put, indices: list[int]) -> None:
        """Parts of striped objects become grants of their own, in one group with their first."""
        groups = list(put.groups) or [0] * len(indices)
        for position, i in enumerate(indices):
            stripe = self.stripes.get(i)
            if stripe is None:
                continue
            if not groups[position] or is_named(groups[position]):
                groups[position] = put.first + position
            name = groups[position]
            put.lengths[position] = stripe.lengths[0]
            for number in range(1, len(stripe.places)):
                self.owners.append(i)
                put.keys.append(part_key(put.keys[position], number))
                put.lengths.append(stripe.lengths[number])
                put.places.append((stripe.places[number],))
                groups.append(name)
        put.groups = groups
        self.tenant.part_count += len(put.keys) - len(indices)

    def _rows(self, put: Put, indices: list[int]) -> tuple[list[int], list[bytes]]:
        """The reply's segment table, and the rows of each of its entries. Digests of parts are for
        whoever knows the secret."""
        digests, pack, expires_ms = self.command.digests, EXTENT_ROW.pack, put.expires_ms
        entries: dict[int, int] = {}  # segment index -> entry
        rows: list[list[bytes]] = []
        generation = put.first - 1
        owners = [*indices, *self.owners] if self.owners else indices
        members = Counter(put.groups)
        for i, length, replicas in zip(owners, put.lengths, put.places, strict=True):
            generation += 1
            digest = digests[16 * i : 16 * i + 16]
            group = put.groups[generation - put.first] if put.groups else 0
            size = members[group] << MEMBERS_SHIFT if group and not is_named(group) else 0
            for place in replicas:
                index = place >> PLACE_BITS
                entry = entries.get(index)
                if entry is None:
                    entry = entries[index] = len(rows)
                    rows.append([])
                offset = (place & PLACE_MASK) * EXTENT_ALIGN_BYTES
                row = pack(i, entry | size, offset, length, generation, expires_ms, digest, group)
                if generation - put.first >= len(indices):
                    key = put.keys[generation - put.first]
                    self.part_rows.append((entry, len(rows[entry]), key))
                rows[entry].append(row)
        ids = [self.state.members.at(index).segment_id for index in entries]
        return ids, [b"".join(each) for each in rows]


def grant_fields(
    state: CatalogState, put: Put, now_ms: int, generations: Sequence[int] = ()
) -> records.GrantFields:
    """The record of a put. `generations`: unless they are consecutive."""
    ids = {each.index: each.segment_id for each in state.members}
    return records.GrantFields(
        now_ms=now_ms,
        expires_ms=put.expires_ms,
        tenant=put.tenant.name,
        soft_pin_ms=put.soft_pin_ms,
        ttl_ms=put.ttl_ms,
        hard_pin=put.hard_pin,
        keys=put.keys,
        generations=generations or range(put.first, put.first + len(put.keys)),
        lengths=put.lengths,
        replicas=list(map(len, put.places)),
        extents=[
            number
            for replicas in put.places
            for place in replicas
            for number in (ids[place >> PLACE_BITS], (place & PLACE_MASK) * EXTENT_ALIGN_BYTES)
        ],
        groups=put.groups,
        wanted=put.wanted,
        absolute=put.absolute,
        cost=put.cost,
    )
