"""The checksum of a slice is that of its bytes, however the slice travelled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_py._native.memory import crc32c
from mooncake_py.transfer import FLAG_CRC, EngineOptions, TransferEngine, make_slices

SLICE_BYTES = 2 << 20  # several parts each, over several connections
SLICE_COUNT = 12


@pytest.fixture
def engines() -> Iterator[tuple[TransferEngine, TransferEngine]]:
    tcp = ("tcp",)
    with (
        TransferEngine(EngineOptions(listen="127.0.0.1:0", transports=tcp, tcp_lanes=4)) as far,
        TransferEngine(EngineOptions(transports=tcp, tcp_lanes=4)) as near,
    ):
        yield far, near


def test_a83_parts_that_arrive_out_of_order_give_the_right_checksum(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    far, near = engines
    source = np.random.default_rng(7).integers(0, 256, (SLICE_COUNT, SLICE_BYTES), np.uint8)
    expected = [crc32c(row) for row in source]
    region = far.register(source)
    peer = near.open(far.address, timeout_ms=5_000)
    for _ in range(12):
        target = np.zeros_like(source)
        slices = make_slices(SLICE_COUNT)
        step = np.arange(SLICE_COUNT, dtype=np.uint64) * np.uint64(SLICE_BYTES)
        slices["region"], slices["length"], slices["flags"] = region.id, SLICE_BYTES, FLAG_CRC
        slices["remote_offset"] = step
        slices["local"] = np.uint64(target.ctypes.data) + step
        near.read(peer, slices, timeout_ms=20_000)
        assert slices["crc"].tolist() == expected
        assert np.array_equal(target, source)
