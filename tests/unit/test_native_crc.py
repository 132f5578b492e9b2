"""crc32c, copies and digests of the native core, against references written here."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_py._native import memory
from mooncake_py.errors import UsageError

STREAM_MIN = 256 * 1024
BOUNDARIES = (0, 1, 7, 8, 63, 64, 65, 255, 256, 257, 4096, STREAM_MIN - 1, STREAM_MIN)


def _table() -> np.ndarray:
    crcs = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crcs = np.where(crcs & 1, (crcs >> 1) ^ np.uint32(0x82F63B78), crcs >> 1)
    return crcs.astype(np.uint32)


TABLE = _table()


def reference_crc(data: bytes, seed: int = 0) -> int:
    crc = seed ^ 0xFFFFFFFF
    table = TABLE.tolist()
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


NOISE = np.random.default_rng(7).integers(0, 256, 2 * STREAM_MIN, dtype=np.uint8)


def test_crc32c_has_the_published_check_value() -> None:
    assert memory.crc32c(b"123456789") == 0xE3069283
    assert memory.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert memory.crc32c(b"\xff" * 32) == 0x62A8AB43


@given(st.binary(max_size=2000), st.integers(0, 2000), st.integers(0, 2**32 - 1))
def test_crc32c_equals_the_reference_and_goes_on_from_a_seed(
    data: bytes, split: int, seed: int
) -> None:
    whole = memory.crc32c(data, seed)
    assert whole == reference_crc(data, seed)
    assert memory.crc32c(data[split:], memory.crc32c(data[:split], seed)) == whole


@settings(max_examples=200)
@given(
    st.sampled_from(BOUNDARIES),
    st.integers(-1, 1),
    st.integers(0, 70),
    st.integers(0, 70),
)
def test_copies_are_exact_at_boundaries_and_alignments(
    edge: int, off_by: int, source_shift: int, target_shift: int
) -> None:
    nbytes = max(0, edge + off_by)
    source = NOISE[source_shift : source_shift + nbytes]
    target = np.full(nbytes + 256, 0xA5, np.uint8)
    middle = target[64 + target_shift : 64 + target_shift + nbytes]
    crc = memory.copy_crc32c(middle.ctypes.data, source.ctypes.data, nbytes)
    assert np.array_equal(middle, source)
    assert crc == memory.crc32c(source.tobytes())
    assert (target[: 64 + target_shift] == 0xA5).all()
    assert (target[64 + target_shift + nbytes :] == 0xA5).all()


def test_a_streamed_copy_has_the_reference_crc() -> None:
    target = np.zeros(STREAM_MIN + 77, np.uint8)
    source = NOISE[3 : 3 + len(target)]
    crc = memory.copy_crc32c(target.ctypes.data, source.ctypes.data, len(target))
    assert crc == reference_crc(source.tobytes())


def _rotated(x: int, by: int) -> int:
    return ((x << by) | (x >> (64 - by))) & (2**64 - 1)


def _sip_rounds(v: list[int], n: int) -> None:
    mask = 2**64 - 1
    for _ in range(n):
        v[0] = (v[0] + v[1]) & mask
        v[2] = (v[2] + v[3]) & mask
        v[1] = _rotated(v[1], 13) ^ v[0]
        v[3] = _rotated(v[3], 16) ^ v[2]
        v[0] = _rotated(v[0], 32)
        v[2] = (v[2] + v[1]) & mask
        v[0] = (v[0] + v[3]) & mask
        v[1] = _rotated(v[1], 17) ^ v[2]
        v[3] = _rotated(v[3], 21) ^ v[0]
        v[2] = _rotated(v[2], 32)


def reference_digest(key: bytes, secret: bytes) -> bytes:
    k0, k1 = (int.from_bytes(secret[i : i + 8], "little") for i in (0, 8))
    start = b"somepseudorandomlygeneratedbytes"
    words = [int.from_bytes(start[i : i + 8], "big") for i in range(0, 32, 8)]
    v = [words[0] ^ k0, words[1] ^ k1 ^ 0xEE, words[2] ^ k0, words[3] ^ k1]
    padded = key + bytes(-(len(key) + 1) % 8) + bytes([len(key) % 256])
    for i in range(0, len(padded), 8):
        word = int.from_bytes(padded[i : i + 8], "little")
        v[3] ^= word
        _sip_rounds(v, 2)
        v[0] ^= word
    out = b""
    for index, constant in ((2, 0xEE), (1, 0xDD)):
        v[index] ^= constant
        _sip_rounds(v, 4)
        out += (v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little")
    return out


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [  # the reference implementation's vectors
        (0, "a3817f04ba25a8e66df67214c7550293"),
        (1, "da87c1d86b99af44347659119b22fc45"),
        (3, "9c70b60c5267a94e5f33b6b02985ed51"),
        (15, "5493e99933b0a8117e08ec0f97cfc3d9"),
        (16, "6ee2a4ca67b054bbfd3315bf85230577"),
    ],
)
def test_digests_have_the_published_values(nbytes: int, expected: str) -> None:
    assert memory.digests([bytes(range(nbytes))], bytes(range(16))).hex() == expected


@given(st.lists(st.binary(max_size=70), max_size=20), st.binary(min_size=16, max_size=16))
def test_digests_of_a_batch_are_those_of_its_keys(keys: list[bytes], secret: bytes) -> None:
    assert memory.digests(keys, secret) == b"".join(reference_digest(k, secret) for k in keys)


def test_a_secret_of_another_size_is_refused() -> None:
    with pytest.raises(UsageError, match="16 bytes"):
        memory.digests([b"key"], b"short")


def test_addresses_of_unsuitable_buffers_are_refused() -> None:
    with pytest.raises(UsageError):
        memory.address_of(b"read-only", writable=True)
    with pytest.raises(UsageError):
        memory.address_of(np.zeros((4, 4), np.uint8)[:, ::2])
    with pytest.raises(UsageError):
        memory.address_of("text")  # type: ignore[arg-type] - that is the point
    array = np.zeros(10, np.float64)
    assert memory.address_of(array, writable=True) == (array.ctypes.data, 80)
