"""Durable records of the catalog: their layout, and reading them back.

A record is one state change, taken back whole or not at all. It begins with 8 bytes: format
version (1), kind (1), reserved (2), crc32 of these four and of all after it (4). The body is little-endian, its
columns one after the other, so that packing 128 keys costs little more than packing one.

| kind | body | meaning |
|---|---|---|
| MARKS | generation mark, next segment id | generations below the mark and segment ids below the next may have been used |
| SEGMENT | SegmentFields | a node offers a segment |
| GONE | segment id | everything on the segment is forgotten |
| GRANTS | GrantFields | put start: keys, generations, extents, policy |
| COMMITS | time, generations, failed (generation, segment id) | put end |
| DROPS | time, until, generations | objects or grants that ended; their space rests until then |
| LOST | until, (generation, segment id) | single replicas that ended; their space rests until then |
| OBJECTS | like GRANTS | only in snapshots: complete objects |
| RESTING | (until, segment id, offset, bytes) rows | only in snapshots: extents not to be used yet |
| QUOTA | bytes, keys, policy, tenant | a tenant's quota from now on; policy 255: none |
| COPIES | (generation, replica's generation, segment id, offset) rows | objects have got these replicas, or theirs have these generations |
| PINS | (generation, end of the soft pin, hard pin) rows | the pins of these objects from now on |
| RECORDED | horizon, ranges, ranges | every generation below the horizon is in the log, except these, and except reservations (unrecorded.py) |
| BURIED | below, sweep, tenant, keys | keys (or with sweep: prefix and pattern) whose older extents stay dead |
| LEASES | length in ms | no lease that may run is longer (lingering.py) |

A snapshot is a sequence of records, each with its length in front: the log in its shortest form.
A reader skips what it does not know (newer kind) and what is damaged, and counts both.
"""  # noqa: E501  (a table)

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

FORMAT = 1

MARKS = 1
SEGMENT = 2
GONE = 3
GRANTS = 4
COMMITS = 5
DROPS = 6
LOST = 7
OBJECTS = 8
RESTING = 9
QUOTA = 10
COPIES = 11
PINS = 12
RECORDED = 20
BURIED = 21
LEASES = 22

_HEAD = struct.Struct("<BBH")
_CRC = struct.Struct("<I")
_HEAD_NBYTES = _HEAD.size + _CRC.size
_LENGTH = struct.Struct("<I")
_MARKS = struct.Struct("<QQ")
_SEGMENT = struct.Struct("<QQIQHHH")
_GRANTS = struct.Struct("<QQQQBHIII")
_COMMITS = struct.Struct("<QII")
_DROPS = struct.Struct("<QQI")
_QUOTA = struct.Struct("<QQB")
_NO_POLICY = 255
_SEGMENT_TAIL = struct.Struct("<QBQ")  # recorded below, keeps, disk id; absent in older logs
_BURIED = struct.Struct("<QBHI")

_GRANTS_TAIL = struct.Struct("<BI")  # deadlines are absolute, cost; absent when both are usual

HARD_PIN = 1  # of the flags of GRANTS; the upper seven bits: how many replicas were asked for
_WANTED_SHIFT = 1


class DamagedRecord(ValueError):
    """Not a whole record: short, wrong crc, or columns that do not fit."""


@dataclass(frozen=True, slots=True)
class Marks:
    generation: int
    segment_id: int


@dataclass(frozen=True, slots=True)
class SegmentFields:
    segment_id: int
    node: str
    incarnation: int
    address: str
    region: int
    nbytes: int
    host_id: str
    recorded_below: int = 0  # what it holds with a generation below is in the log
    keeps: bool = False  # its memory outlives its process
    disk_id: int = 0  # not 0: a disk with this identity


@dataclass(frozen=True, slots=True)
class Gone:
    segment_id: int


@dataclass(frozen=True, slots=True)
class GrantFields:
    """One put start (complete=False) or a run of complete objects in a snapshot.

    `replicas[i]`: how many replicas key i has. `extents`: segment id, offset in bytes, and so on,
    of all replicas of all keys. `groups` is empty or one
    number a key. `soft_pin_ms` and `ttl_ms` are durations before the commit, unless `absolute`, and
    deadlines (absolute ms) of a complete object.
    """

    now_ms: int
    expires_ms: int
    tenant: str
    soft_pin_ms: int
    ttl_ms: int
    hard_pin: bool
    keys: Sequence[bytes]
    generations: Sequence[int]
    lengths: Sequence[int]
    replicas: Sequence[int]
    extents: Sequence[int]
    groups: Sequence[int] = ()
    complete: bool = False
    wanted: int = 1  # replicas that were asked for
    absolute: bool = False
    cost: int = 1  # times as dear to recompute as usual


@dataclass(frozen=True, slots=True)
class Commits:
    now_ms: int
    generations: Sequence[int]
    failed: Sequence[tuple[int, int]] = ()  # generation, segment id


@dataclass(frozen=True, slots=True)
class Drops:
    now_ms: int
    until_ms: int
    generations: Sequence[int]


@dataclass(frozen=True, slots=True)
class Lost:
    until_ms: int
    pairs: Sequence[tuple[int, int]]  # generation, segment id


@dataclass(frozen=True, slots=True)
class Copies:
    rows: Sequence[tuple[int, int, int, int]]  # generation, replica's, segment id, offset in bytes


@dataclass(frozen=True, slots=True)
class Pins:
    rows: Sequence[tuple[int, int, int]]  # generation, end of the soft pin or 0, hard or 0


@dataclass(frozen=True, slots=True)
class Resting:
    rows: Sequence[tuple[int, int, int, int]]  # until ms, segment id, offset, bytes


@dataclass(frozen=True, slots=True)
class Recorded:
    horizon: int
    voids: Sequence[tuple[int, int]]  # from, below
    reserved: Sequence[tuple[int, int]]  # likewise: granted, and told of when they are committed


@dataclass(frozen=True, slots=True)
class Buried:
    tenant: str
    below: int
    sweep: bool
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Leases:
    length_ms: int


@dataclass(frozen=True, slots=True)
class QuotaFields:
    """`policy`: index in tenant.POLICIES; None: the quota has ended."""

    tenant: str
    bytes_max: int
    keys_max: int
    policy: int | None


Record = (
    Marks | SegmentFields | Gone | GrantFields | Commits | Drops | Lost | Resting | QuotaFields
    | Copies | Pins | Recorded | Buried | Leases
)  # fmt: skip


_KINDS_OF_ROWS = {Resting: RESTING, Copies: COPIES, Pins: PINS}


def _frame(kind: int, body: bytes) -> bytes:
    head = _HEAD.pack(FORMAT, kind, 0)
    return head + _CRC.pack(zlib.crc32(body, zlib.crc32(head))) + body


def _u64s(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def _flat(rows: Sequence[tuple[int, ...]]) -> list[int]:
    return [number for row in rows for number in row]


def encode(record: Record) -> bytes:
    """The bytes of a record, head included."""
    match record:
        case GrantFields():
            return _frame(OBJECTS if record.complete else GRANTS, _grants_body(record))
        case Commits(now_ms, generations, failed):
            head = _COMMITS.pack(now_ms, len(generations), len(failed))
            return _frame(COMMITS, head + _u64s(generations) + _u64s(_flat(failed)))
        case Drops(now_ms, until_ms, generations):
            head = _DROPS.pack(now_ms, until_ms, len(generations))
            return _frame(DROPS, head + _u64s(generations))
        case Lost(until_ms, pairs):
            return _frame(LOST, _u64s([until_ms, *_flat(pairs)]))
        case Resting(rows) | Copies(rows) | Pins(rows):
            return _frame(_KINDS_OF_ROWS[type(record)], _u64s(_flat(rows)))
        case QuotaFields(tenant, bytes_max, keys_max, policy):
            head = _QUOTA.pack(bytes_max, keys_max, _NO_POLICY if policy is None else policy)
            return _frame(QUOTA, head + tenant.encode())
        case Recorded(horizon, voids, reserved):
            numbers = [horizon, len(voids), *_flat(voids), *_flat(reserved)]
            return _frame(RECORDED, _u64s(numbers))
        case Buried():
            return _frame(BURIED, _buried_body(record))
        case Marks(generation, segment_id):
            return _frame(MARKS, _MARKS.pack(generation, segment_id))
        case Gone(number) | Leases(number):
            return _frame(GONE if isinstance(record, Gone) else LEASES, _u64s([number]))
        case SegmentFields():
            return _frame(SEGMENT, _segment_body(record))


def _segment_body(record: SegmentFields) -> bytes:
    texts = [text.encode() for text in (record.node, record.address, record.host_id)]
    head = _SEGMENT.pack(
        record.segment_id,
        record.incarnation,
        record.region,
        record.nbytes,
        *(len(text) for text in texts),
    )
    return (
        head
        + b"".join(texts)
        + _SEGMENT_TAIL.pack(record.recorded_below, record.keeps, record.disk_id)
    )


def _buried_body(record: Buried) -> bytes:
    tenant, keys = record.tenant.encode(), record.keys
    head = _BURIED.pack(record.below, record.sweep, len(tenant), len(keys))
    lengths = struct.pack(f"<{len(keys)}H", *map(len, keys))
    return b"".join((head, tenant, lengths, *keys))


def _grants_body(record: GrantFields) -> bytes:
    tenant = record.tenant.encode()
    keys = record.keys
    flags = (HARD_PIN if record.hard_pin else 0) | record.wanted << _WANTED_SHIFT
    head = _GRANTS.pack(
        record.now_ms,
        record.expires_ms,
        record.soft_pin_ms,
        record.ttl_ms,
        flags,
        len(tenant),
        len(keys),
        len(record.extents) // 2,
        len(record.groups),
    )
    count = len(keys)
    usual = not record.absolute and record.cost == 1
    tail = b"" if usual else _GRANTS_TAIL.pack(record.absolute, record.cost)
    return b"".join(
        (
            head,
            tenant,
            struct.pack(f"<{count}H", *map(len, keys)),
            struct.pack(f"<{count}B", *record.replicas),
            _u64s(record.generations),
            _u64s(record.lengths),
            _u64s(record.extents),
            _u64s(record.groups),
            *keys,
            tail,
        )
    )


def decode(data: bytes) -> Record | None:
    """The record in `data`; None for a kind or format of a newer release. Raises DamagedRecord."""
    if len(data) < _HEAD_NBYTES:
        raise DamagedRecord("shorter than its head")
    form, kind, _ = _HEAD.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _HEAD.size)
    body = memoryview(data)[_HEAD_NBYTES:]
    if zlib.crc32(body, zlib.crc32(data[: _HEAD.size])) != crc:
        raise DamagedRecord("crc differs")
    reader = _READERS.get(kind)
    if form != FORMAT or reader is None:
        return None
    try:
        return reader(body)
    except (struct.error, ValueError, IndexError) as error:
        raise DamagedRecord(str(error)) from error


class _Columns:
    """Reads columns one after the other."""

    def __init__(self, body: memoryview, position: int) -> None:
        self._body = body
        self._position = position

    def numbers(self, code: str, count: int) -> tuple[int, ...]:
        column = struct.Struct(f"<{count}{code}")
        values: tuple[int, ...] = column.unpack_from(self._body, self._position)
        self._position += column.size
        return values

    def pairs(self, count: int) -> list[tuple[int, int]]:
        flat = self.numbers("Q", 2 * count)
        return list(zip(flat[::2], flat[1::2], strict=True))

    def take(self, nbytes: int) -> bytes:
        end = self._position + nbytes
        if end > len(self._body):
            raise IndexError("column ends early")
        piece = bytes(self._body[self._position : end])
        self._position = end
        return piece

    def rest(self) -> bytes:
        return bytes(self._body[self._position :])


def _read_grants(body: memoryview, complete: bool = False) -> GrantFields:
    now_ms, expires_ms, soft, ttl, flags, tenant_len, count, places, groups = _GRANTS.unpack_from(
        body
    )
    columns = _Columns(body, _GRANTS.size)
    tenant = columns.take(tenant_len).decode()
    key_lengths = columns.numbers("H", count)
    replica_counts = columns.numbers("B", count)
    generations = columns.numbers("Q", count)
    lengths = columns.numbers("Q", count)
    extents = columns.numbers("Q", 2 * places)
    group_numbers = columns.numbers("Q", groups)
    if sum(replica_counts) != places:
        raise DamagedRecord("extents and replicas differ in number")
    keys = [columns.take(nbytes) for nbytes in key_lengths]
    tail = columns.rest()
    absolute, cost = _GRANTS_TAIL.unpack(tail) if tail else (0, 1)
    return GrantFields(
        now_ms=now_ms,
        expires_ms=expires_ms,
        tenant=tenant,
        soft_pin_ms=soft,
        ttl_ms=ttl,
        hard_pin=bool(flags & HARD_PIN),
        keys=keys,
        generations=generations,
        lengths=lengths,
        replicas=replica_counts,
        extents=extents,
        groups=group_numbers,
        complete=complete,
        wanted=flags >> _WANTED_SHIFT or 1,
        absolute=bool(absolute),
        cost=cost,
    )


def _read_commits(body: memoryview) -> Commits:
    now_ms, count, failed = _COMMITS.unpack_from(body)
    columns = _Columns(body, _COMMITS.size)
    return Commits(now_ms, columns.numbers("Q", count), columns.pairs(failed))


def _read_drops(body: memoryview) -> Drops:
    now_ms, until_ms, count = _DROPS.unpack_from(body)
    return Drops(now_ms, until_ms, _Columns(body, _DROPS.size).numbers("Q", count))


def _read_lost(body: memoryview) -> Lost:
    columns = _Columns(body, 0)
    (until_ms,) = columns.numbers("Q", 1)
    return Lost(until_ms, columns.pairs(len(body) // 16))


def _read_quota(body: memoryview) -> QuotaFields:
    bytes_max, keys_max, policy = _QUOTA.unpack_from(body)
    tenant = bytes(body[_QUOTA.size :]).decode()
    return QuotaFields(tenant, bytes_max, keys_max, None if policy == _NO_POLICY else policy)


def _read_fours(body: memoryview) -> list[tuple[int, int, int, int]]:
    flat = _Columns(body, 0).numbers("Q", len(body) // 8)
    return list(zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True))


def _read_pins(body: memoryview) -> Pins:
    flat = _Columns(body, 0).numbers("Q", len(body) // 8)
    return Pins(list(zip(flat[::3], flat[1::3], flat[2::3], strict=True)))


def _read_segment(body: memoryview) -> SegmentFields:
    segment_id, incarnation, region, nbytes, *lengths = _SEGMENT.unpack_from(body)
    columns = _Columns(body, _SEGMENT.size)
    node, address, host_id = (columns.take(length).decode() for length in lengths)
    tail = columns.rest()
    # Older logs have none, or one without a disk.
    below, keeps, disk_id = _SEGMENT_TAIL.unpack(tail.ljust(_SEGMENT_TAIL.size, b"\0"))
    return SegmentFields(
        segment_id, node, incarnation, address, region, nbytes, host_id, below, bool(keeps), disk_id
    )


def _read_recorded(body: memoryview) -> Recorded:
    columns = _Columns(body, 0)
    horizon, count = columns.numbers("Q", 2)
    voids = columns.pairs(count)
    return Recorded(horizon, voids, columns.pairs((len(body) - 16) // 16 - count))


def _read_buried(body: memoryview) -> Buried:
    below, sweep, tenant_len, count = _BURIED.unpack_from(body)
    columns = _Columns(body, _BURIED.size)
    tenant = columns.take(tenant_len).decode()
    lengths = columns.numbers("H", count)
    return Buried(tenant, below, bool(sweep), [columns.take(nbytes) for nbytes in lengths])


_READERS: dict[int, Callable[[memoryview], Record]] = {
    MARKS: lambda body: Marks(*_MARKS.unpack_from(body)),
    SEGMENT: _read_segment,
    GONE: lambda body: Gone(*struct.unpack_from("<Q", body)),
    GRANTS: _read_grants,
    COMMITS: _read_commits,
    DROPS: _read_drops,
    LOST: _read_lost,
    OBJECTS: lambda body: _read_grants(body, complete=True),
    RESTING: lambda body: Resting(_read_fours(body)),
    COPIES: lambda body: Copies(_read_fours(body)),
    PINS: _read_pins,
    QUOTA: _read_quota,
    RECORDED: _read_recorded,
    BURIED: _read_buried,
    LEASES: lambda body: Leases(*struct.unpack_from("<Q", body)),
}


def length_of(data: bytes) -> bytes:
    """What stands in front of an encoded record in a snapshot."""
    return _LENGTH.pack(len(data))


def pack(records: Iterable[bytes]) -> bytes:
    """A snapshot of encoded records."""
    return b"".join(piece for data in records for piece in (_LENGTH.pack(len(data)), data))


def unpack(snapshot: bytes) -> Iterator[bytes]:
    """The encoded records of a snapshot; a cut tail ends it with what is left as one record."""
    position = 0
    while position < len(snapshot):
        if position + _LENGTH.size > len(snapshot):
            yield snapshot[position:]
            return
        (nbytes,) = _LENGTH.unpack_from(snapshot, position)
        position += _LENGTH.size
        yield snapshot[position : position + nbytes]
        position += nbytes
