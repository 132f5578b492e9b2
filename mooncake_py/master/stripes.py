"""Stripes: large objects that lie in several extents, on as many nodes as it takes.

Rules. A put of at least two `stripe_min_bytes` that finds no hole is cut over the largest holes
there are, before anything is evicted for a hole; also one that is larger than any segment. The
first part is the object under its key, the others are objects under *part keys*, which nobody can
name (they begin with the byte FE), and all are one group: visible together, leased together, ended
together. So every other rule of the catalog holds for parts as for any object: they are moved,
repaired, evicted and restored each by itself. Listings, events and removals show the whole under
its key. A striped put is granted one replica a part; those that it wished for besides are made by
`repair.py`, and a strict wish is refused. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake_py.master.membership import Segment
from mooncake_py.master.objects import GROUP, PLACE_BITS, ObjectTable
from mooncake_py.master.tenant import Tenant
from mooncake_py.model import EXTENT_ALIGN_BYTES, EXTENT_HEADER_BYTES, PART_MARK, extent_bytes

PARTS_MAX = 1024


def part_key(key: bytes, number: int) -> bytes:
    """Of the part with this number, 1 and up."""
    return PART_MARK + key + number.to_bytes(2, "big")


def is_part(key: bytes) -> bool:
    return key[:1] == PART_MARK


def whole_key(key: bytes) -> bytes:
    """The key of the object that has this key or whose part has it."""
    return key[1:-2] if is_part(key) else key


@dataclass(slots=True)
class Stripe:
    """Places of the parts of one object, taken, and their payloads' lengths."""

    lengths: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    @property
    def units(self) -> list[int]:
        return [extent_bytes(length) // EXTENT_ALIGN_BYTES for length in self.lengths]


def find_parts(
    segments: Sequence[Segment], length: int, part_min: int, count_max: int
) -> Stripe | None:
    """Places for an object of `length` over the largest holes, in at most `count_max` parts of at
    least `part_min` bytes (but the last); None, and nothing is taken, if they do not suffice."""
    stripe = Stripe()
    left = length
    while left > 0 and segments and len(stripe.places) < min(count_max, PARTS_MAX):
        segment = max(segments, key=lambda each: each.allocator.largest)
        room = segment.allocator.largest * EXTENT_ALIGN_BYTES - EXTENT_HEADER_BYTES
        size = min(left, room)
        if size < min(left, part_min):
            break
        units = extent_bytes(size) // EXTENT_ALIGN_BYTES
        start = segment.allocator.take(units)
        segment.used_units += units
        stripe.lengths.append(size)
        stripe.places.append(segment.index << PLACE_BITS | start)
        left -= size
    if not left:
        return stripe
    by_index = {each.index: each for each in segments}
    for place, units in zip(stripe.places, stripe.units, strict=True):
        segment = by_index[place >> PLACE_BITS]
        segment.used_units -= units
        segment.allocator.give(place & ((1 << PLACE_BITS) - 1), units)
    return None


def part_slots(table: ObjectTable, tenant: Tenant, slot: int) -> list[int]:
    """Slots of an object's parts but the first, in order; none for one that lies in one piece."""
    if not table.flags[slot] & GROUP:
        return []
    found: list[int] = []
    key = table.key[slot]
    assert key is not None
    while (part := tenant.complete.get(part_key(key, len(found) + 1))) is not None:
        if table.groups[part] != table.groups[slot]:
            break  # left over from another one
        found.append(part)
    return found


def whole_length(table: ObjectTable, tenant: Tenant, slot: int) -> int:
    """Bytes of the object with all its parts."""
    return table.length[slot] + sum(table.length[part] for part in part_slots(table, tenant, slot))
