"""The rows have one layout in three languages of this tree: struct, numpy and C."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from mooncake_py import model
from mooncake_py._native import ffi
from mooncake_py.wire import rows


@pytest.mark.parametrize(
    ("packed", "dtype"),
    [
        (model.EXTENT_ROW, rows.EXTENT),
        (model.PLACEMENT_ROW, rows.PLACEMENT),
        (model.FAILED_ROW, rows.FAILED),
    ],
)
def test_dtypes_unpack_what_structs_pack(packed: struct.Struct, dtype: np.dtype[np.void]) -> None:
    assert packed.size == dtype.itemsize
    names = dtype.names or ()
    distinct = [
        bytes(range(1, 16)) + b"\0" if dtype[name].kind == "V" else 1 + 2**i
        for i, name in enumerate(names)
    ]
    row = np.frombuffer(packed.pack(*distinct), dtype)[0]
    for name, expected in zip(names, distinct, strict=True):
        got = row[name].tobytes() if dtype[name].kind == "V" else int(row[name])
        assert got == expected, name
    assert row.tobytes() == packed.pack(*distinct)


def test_the_extent_row_is_the_native_one() -> None:
    kind = ffi.typeof("mc_extent_row")
    assert ffi.sizeof(kind) == rows.EXTENT.itemsize
    native = [(name, field.offset, ffi.sizeof(field.type)) for name, field in kind.fields]
    fields = rows.EXTENT.fields or {}
    assert native == [(name, fields[name][1], fields[name][0].itemsize) for name in fields]


def test_the_header_has_the_size_of_the_model() -> None:
    from mooncake_py._native.memory import HEADER_BYTES  # noqa: PLC0415 - beside its only use

    assert HEADER_BYTES == model.EXTENT_HEADER_BYTES
