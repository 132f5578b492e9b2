"""Values that several rooms share: fixed rows, limits, the replica policy. No behaviour.

Rows are little-endian and identical on the wire, in memory of the native core, and here. The numpy
views of the same layouts are in `wire/rows.py`; the C one in `native/abi/memory.h`.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

RELEASE = "0.1.0"  # equal to the version in pyproject.toml
PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0

KEY_MAX_BYTES = 4096  # of UTF-8; bounded so that a batch of keys fits one message
TENANT_MAX_BYTES = 128
BATCH_MAX_KEYS = 4096  # a call; clients split larger batches by themselves
OBJECT_MAX_BYTES = 1 << 40
COST_MAX = 1000  # of ReplicaPolicy.recompute_cost

PART_MARK = b"\xfe"  # begins the keys of parts of striped objects; no key of a caller begins so

EXTENT_HEADER_BYTES = 64
EXTENT_ALIGN_BYTES = 64
DISK_ALIGN_BYTES = 4096

# key_index, segment_index, offset, length, generation, expires_ms, digest, tag (the group, or 0)
EXTENT_ROW = struct.Struct("<IIQQQQ16sQ")
# key_index, segment_index, offset, length, generation
PLACEMENT_ROW = struct.Struct("<IIQQQ")
# a PLACEMENT_ROW, then where in the object its payload begins
PART_ROW = struct.Struct("<IIQQQQ")
# an EXTENT_ROW, then of the source: segment_index, reserved, offset, generation
COPY_ROW = struct.Struct("<IIQQQQ16sQIIQQ")
# task, code, reserved
TASK_DONE_ROW = struct.Struct("<QII")
# offset, generation
REPLICA_ROW = struct.Struct("<QQ")
# generation, length, segment_id, offset, memory_generation, expires_ms
DISK_TASK_ROW = struct.Struct("<QQQQQQ")
# key_index, reserved, segment_id
FAILED_ROW = struct.Struct("<IIQ")


def extent_bytes(length: int) -> int:
    """Bytes an object of `length` takes in a segment: header and payload, aligned."""
    size = EXTENT_HEADER_BYTES + length
    return -(-size // EXTENT_ALIGN_BYTES) * EXTENT_ALIGN_BYTES


_RESERVED = b"\xff"  # no UTF-8 text begins with it


MEMBERS_SHIFT = 16  # in `segment_index` of a granted row: above it, how many members its group has
RESERVED_ROW = (1 << 64) - 1  # in `reserved` of an EXTENT_ROW: granted without a key


def reserved_key(generation: int) -> bytes:
    """What a reservation of this generation is called until it is committed under a key."""
    return _RESERVED + generation.to_bytes(8, "little")


def is_reserved(key: bytes) -> bool:
    """Is this no key but the name of a reservation?"""
    return key.startswith(_RESERVED)


def disk_bytes(length: int) -> int:
    """Bytes an object of `length` takes on a disk, as limits count it."""
    return -(-extent_bytes(length) // DISK_ALIGN_BYTES) * DISK_ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class ReplicaPolicy:
    """How many replicas, where, and how long they are protected.

    replica_count: at least 1; no two replicas lie on one node.
    strict: fewer distinct nodes than that is `OutOfSpace`; otherwise the put goes on with what was
    found, the missing ones are made when there is room, and a listing says how many there are.
    preferred_nodes: names of nodes, a tuple; tried first, in order.
    soft_pin_ms: for so long it is evicted only when nothing unpinned is left; then it is an object
    like any other. It makes room in need, and never keeps a `remove` from removing.
    hard_pin: never evicted, and removed with force only (else `ObjectLeased`). For what must stay,
    such as a system prompt. Pins of either kind may take a share of the memory (half of it, unless
    the master is told otherwise); a put beyond it is `QuotaExceeded`.
    ttl_ms: the object ends then. Like `soft_pin_ms` it counts from the commit; 0 means none.
    expires_with: key of an object whose soft pin and TTL, as they are when this put starts, are
    this one's too, to the millisecond, so that all who name the same key expire together. If there
    is no such object, `soft_pin_ms` and `ttl_ms` count.
    recompute_cost: how many times as dear as usual it is to compute the bytes again, 1 to 1000. A
    master that evicts by cost keeps what is dearer for longer.
    """

    replica_count: int = 1
    strict: bool = False
    preferred_nodes: tuple[str, ...] = ()
    soft_pin_ms: int = 0
    hard_pin: bool = False
    ttl_ms: int = 0
    expires_with: str = ""
    recompute_cost: int = 1


DEFAULT_POLICY = ReplicaPolicy()

NAMED_GROUP = 1 << 62  # in the number of a group: other puts may join it
FOLLOWS = 1 << 61  # in that of a member: its own end ends nobody else


@dataclass(frozen=True, slots=True)
class Group:
    """A group of a tenant's objects by its name, which other puts, and other clients, may join.

    Each member is seen as soon as it is there. They end together: when one is evicted, removed or
    lost, all are; a lease of one protects all, and its latest use decides when the group goes. A
    member that follows ends with the others, too, but its own end is nobody else's. Beyond 1,024
    members nobody joins any more: such an object is in no group.
    """

    name: str
    follows: bool = False

    def number(self, tenant: str) -> int:
        """By which the master knows it."""
        digest = hashlib.blake2b(f"{tenant}\0{self.name}".encode(), digest_size=8).digest()
        number = NAMED_GROUP | int.from_bytes(digest, "little") & (FOLLOWS - 1)
        return number | FOLLOWS if self.follows else number
