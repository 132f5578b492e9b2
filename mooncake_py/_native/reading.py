"""Reads out of mapped segments: many rows, many segments, scattered destinations, one call.

Arrays are C data made here and filled in one go from Python lists; nothing is done per row in
Python. The GIL is released during the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_py._native import ffi, lib
from mooncake_py.errors import InternalError

NOT_MAPPED: int = lib.MC_E_PEER_UNREACHABLE

_ROWS = ffi.typeof("mc_extent_row[]")
_POINTERS = ffi.typeof("char *[]")
_WORDS = ffi.typeof("uint64_t[]")
_WORD_POINTER = ffi.typeof("uint64_t *")
_RANGES = ffi.typeof("mc_range[]")
_STATUSES = ffi.typeof("int32_t[]")
_MAPPED = ffi.typeof("mc_mapped[]")


class MappedTable:
    """The segments that rows refer to by index; never changes. `owners` keep them mapped as long
    as somebody reads through this table."""

    __slots__ = ("count", "native", "owners")

    def __init__(self, entries: Sequence[tuple[int, int]], owners: Sequence[object]) -> None:
        """entries: (base, bytes) a segment; base 0 is one that is not mapped here."""
        self.native = ffi.new(_MAPPED, list(entries))
        self.count = len(entries)
        self.owners = tuple(owners)


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where rows go. `pointers`: char pointers (or None for none), `sizes`: room at each.

    `ends`: end of each row's run of pieces, None when every row has exactly one. `ranges`:
    (start, bytes) wanted of each row, None for whole objects.
    """

    pointers: list[Any]
    sizes: Sequence[int]
    ends: Sequence[int] | None = None
    ranges: Sequence[tuple[int, int]] | None = None


def read_mapped(table: MappedTable, rows: bytes, count: int, to: Destinations) -> list[int] | None:
    """Read `count` EXTENT rows. None: all of them are good; else a status each, native sign:
    NOT_MAPPED for a segment that is not mapped here, else as in native/abi/memory.h."""
    pointers = ffi.new(_POINTERS, to.pointers)
    statuses = ffi.new(_STATUSES, count)
    failed = lib.mc_extent_read_mapped(
        table.native,
        table.count,
        ffi.from_buffer(_ROWS, rows),
        count,
        ffi.NULL if to.ranges is None else ffi.new(_RANGES, to.ranges),
        ffi.NULL if to.ends is None else ffi.new(_WORDS, to.ends),
        ffi.cast(_WORD_POINTER, pointers),
        ffi.new(_WORDS, to.sizes),
        statuses,
    )
    if failed == 0:
        return None
    if failed < 0:
        raise InternalError("malformed call of the native core", rows=count)
    return list(statuses)
