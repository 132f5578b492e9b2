"""Slices: rows that say what is moved from where to where. The numpy view of `mc_slice`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_py._native import ffi, lib
from mooncake_py.errors import UsageError

SLICE = np.dtype(
    [
        ("op", "<u4"),  # set by read() and write(); for submit() OP_READ or OP_WRITE
        ("region", "<u4"),  # the peer's region id
        ("remote_offset", "<u8"),  # in that region
        ("local", "<u8"),  # address in this process
        ("length", "<u8"),
        ("flags", "<u4"),  # FLAG_*
        ("crc", "<u4"),  # out, with FLAG_CRC: crc32c of the bytes moved
        ("status", "<i4"),  # out: 0 or a negated code of errors.py
        ("reserved", "<u4"),
    ]
)

OP_READ: int = lib.MC_OP_READ
OP_WRITE: int = lib.MC_OP_WRITE
FLAG_CRC: int = lib.MC_SLICE_CRC
FLAG_FENCE: int = lib.MC_SLICE_FENCE  # begin only after every earlier slice has completed

Slices = NDArray[np.void]


def make_slices(n: int) -> Slices:
    """n rows of zeros, to be filled column by column."""
    return np.zeros(n, dtype=SLICE)


def check_slices(slices: Slices) -> None:
    """UsageError: the array is not one that the native core can work in."""
    if slices.dtype != SLICE or slices.ndim != 1 or not slices.flags.c_contiguous:
        raise UsageError(
            "slices must be a contiguous one-dimensional array of SLICE",
            dtype=str(slices.dtype),
            shape=slices.shape,
        )
    if not slices.flags.writeable or not slices.flags.aligned:
        raise UsageError("slices must be writable and aligned: results are written into them")


def slice_array(slices: Slices) -> Any:
    """The native view of the rows, valid while the caller holds them. Raises UsageError."""
    check_slices(slices)
    if slices.size == 0:
        return ffi.NULL
    return ffi.from_buffer("mc_slice[]", slices, require_writable=True)
