"""A batch of records, or a snapshot, as values that fit a store with a limit on the size of one.

A *payload* (records, each with its length in front; or a snapshot) is cut into chunks. Chunk 0 is
written last: a payload without it was never completed and counts as nothing. A damaged chunk costs
only the records that touch it, because every chunk says where the first record begins in it.

Chunk, little-endian: magic `MCK1`, crc32 of all that follows, then

| bytes | field |
|---|---|
| 8 | nonce: random, the same in all chunks of a payload; chunks of another one are no part of it |
| 4, 4 | index of this chunk, number of chunks |
| 4 | records in the payload; 0 for a snapshot |
| 4 | index of the first record that begins here |
| 4 | where it begins in this chunk; 0xffffffff: none does |
| 4 | 1: the rest is deflated |
| | the piece of the payload |

Pure.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

CHUNK_BYTES = 512 << 10  # of payload; etcd's default limit is 1.5 MiB a request
COUNT_MAX = 1 << 16

_MAGIC = b"MCK1"
_CRC = struct.Struct("<I")
_FIELDS = struct.Struct("<QIIIIII")
_HEAD_NBYTES = len(_MAGIC) + _CRC.size + _FIELDS.size
_LENGTH = struct.Struct("<I")
_NONE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Chunk:
    nonce: int
    index: int
    count: int
    records: int
    first_record: int
    first_offset: int
    piece: bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """What is left of a payload: `records` in order, `lost` of them are missing."""

    records: list[bytes]
    lost: int


def cut_records(records: Sequence[bytes], nonce: int, nbytes: int = CHUNK_BYTES) -> list[bytes]:
    """Values of the chunks of a batch, chunk 0 first."""
    starts, at = [], 0
    for record in records:
        starts.append(at)
        at += _LENGTH.size + len(record)
    payload = b"".join(piece for record in records for piece in (_LENGTH.pack(len(record)), record))
    count = max(1, -(-len(payload) // nbytes))
    values = []
    number = 0
    for index in range(count):
        begin = index * nbytes
        while number < len(starts) and starts[number] < begin:
            number += 1
        inside = number < len(starts) and starts[number] < begin + nbytes
        offset = starts[number] - begin if inside else _NONE
        fields = (nonce, index, count, len(records), number, offset)
        values.append(_value(fields, payload[begin : begin + nbytes], deflate=False))
    return values


def cut_snapshot(
    snapshot: bytes | bytearray, nonce: int, nbytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """Values of the chunks of a snapshot, chunk 0 first."""
    count = max(1, -(-len(snapshot) // nbytes))
    for index in range(count):
        piece = snapshot[index * nbytes : (index + 1) * nbytes]
        yield _value((nonce, index, count, 0, 0, _NONE), piece, deflate=True)


def snapshot_chunk_count(snapshot: bytes | bytearray, nbytes: int = CHUNK_BYTES) -> int:
    return max(1, -(-len(snapshot) // nbytes))


def _value(fields: tuple[int, ...], piece: bytes | bytearray, *, deflate: bool) -> bytes:
    body = _FIELDS.pack(*fields, int(deflate)) + (zlib.compress(piece, 1) if deflate else piece)
    return _MAGIC + _CRC.pack(zlib.crc32(body)) + body


def read(value: bytes) -> Chunk | None:
    """The chunk in a value; None: it is damaged."""
    if len(value) < _HEAD_NBYTES or not value.startswith(_MAGIC):
        return None
    (crc,) = _CRC.unpack_from(value, len(_MAGIC))
    body = memoryview(value)[len(_MAGIC) + _CRC.size :]
    if zlib.crc32(body) != crc:
        return None
    nonce, index, count, records, first, offset, deflated = _FIELDS.unpack_from(body)
    piece = bytes(body[_FIELDS.size :])
    if deflated:
        try:
            piece = zlib.decompress(piece)
        except zlib.error:
            return None
    return Chunk(nonce, index, count, records, first, offset, piece)


def _of_one_payload(values: Mapping[int, bytes]) -> dict[int, Chunk]:
    """Undamaged chunks of the newest payload by their index. `values` are in the order in which
    they were written; an index is that of the key a value lay under."""
    found: dict[int, Chunk] = {}
    for index, value in values.items():
        chunk = read(value)
        if chunk is not None and chunk.index == index:
            found[index] = chunk
    if not found:
        return {}
    nonce = found[0].nonce if 0 in found else list(found.values())[-1].nonce
    return {index: chunk for index, chunk in found.items() if chunk.nonce == nonce}


def join_records(values: Mapping[int, bytes]) -> Batch | None:
    """The batch in these values (index of the key -> value). None: it was never completed.

    When nothing of a completed batch can be read, at least one record counts as lost.
    """
    if 0 not in values:
        return None
    chunks = _of_one_payload(values)
    if not chunks:
        return Batch([], 1)
    any_chunk = next(iter(chunks.values()))
    records: list[bytes] = []
    for run in _runs(chunks, any_chunk.count):
        records += _records_of(run)
    return Batch(records, any_chunk.records - len(records))


def join_snapshot(values: Mapping[int, bytes]) -> bytes | None:
    """The snapshot in these values; None: it is incomplete or damaged."""
    chunks = _of_one_payload(values) if 0 in values else {}
    if 0 not in chunks or len(chunks) != chunks[0].count:
        return None
    return b"".join(chunks[index].piece for index in range(chunks[0].count))


def _runs(chunks: Mapping[int, Chunk], count: int) -> Iterator[list[Chunk]]:
    """Neighbouring chunks that are there, together."""
    run: list[Chunk] = []
    for index in range(count):
        if index in chunks:
            run.append(chunks[index])
        elif run:
            yield run
            run = []
    if run:
        yield run


def _records_of(run: Sequence[Chunk]) -> Iterator[bytes]:
    """Records that lie in these neighbouring chunks from their first to their last byte."""
    skip = 0  # to the first record that begins here
    for chunk in run:
        if chunk.first_offset != _NONE:
            skip += chunk.first_offset
            break
        skip += len(chunk.piece)
    data = b"".join(chunk.piece for chunk in run)
    at = skip
    while at + _LENGTH.size <= len(data):
        (nbytes,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + nbytes > len(data):
            return
        yield data[at : at + nbytes]
        at += nbytes
