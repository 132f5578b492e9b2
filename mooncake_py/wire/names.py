"""What an extent's object is called: the bytes a node keeps beside it, so that its inventory can
tell a master who has lost the records (design/recovery.md).

    version 1, flags 1, tenant's bytes 2, soft pin until 8, TTL until 8, generation 8, tenant, key

Little-endian; deadlines are in milliseconds of the master's clock, 0: none. `generation`: of the
object when this replica was copied and carries another one, else 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from mooncake_py.errors import UsageError
from mooncake_py.master.commands import Name

__all__ = ["Name", "common", "decode", "split"]

_HEAD = struct.Struct("<BBHQQQ")
_VERSION = 1
_HARD_PIN = 1


def common(name: Name) -> bytes:
    """All of a name but the key, which goes behind."""
    tenant = name.tenant.encode()
    flags = _HARD_PIN if name.hard_pin else 0
    head = _HEAD.pack(
        _VERSION, flags, len(tenant), name.soft_pin_until_ms, name.ttl_until_ms, name.generation
    )
    return head + tenant


def decode(data: bytes) -> Name | None:
    """None: no name, or one of a newer release."""
    if len(data) < _HEAD.size:
        return None
    version, flags, nbytes, soft_pin, ttl, generation = _HEAD.unpack_from(data)
    start = _HEAD.size + nbytes
    if version != _VERSION or len(data) <= start:
        return None
    try:
        tenant = data[_HEAD.size : start].decode()
    except UnicodeDecodeError:
        return None
    return Name(tenant, data[start:], soft_pin, ttl, bool(flags & _HARD_PIN), generation)


def split(names: bytes, ends: bytes, count: int) -> Iterator[Name | None]:
    """The names of one page of extents. UsageError: `ends` is not one rising u64 a row."""
    if len(ends) != 8 * count:
        raise UsageError(f"name_ends holds {len(ends)} bytes for {count} rows")
    start = 0
    for (end,) in struct.iter_unpack("<Q", ends):
        if not start <= end <= len(names):
            raise UsageError("name_ends does not rise within names")
        yield decode(names[start:end])
        start = end
