"""Values that describe themselves: whose, which, how long, and every word of them different.

Word 0 is a magic number, 1 the value's number, 2 a digest of tenant and key, 3 the length in bytes;
word n from then on is a mix of the value's number and n. So any eight bytes of another value, of
another place, or of nothing show up wherever they are. A part can be judged when the number of its
value is known.
"""

from __future__ import annotations

import zlib

import numpy as np

MAGIC = 0x6D6F6F6E63616B65
HEAD_BYTES = 32
WORD_BYTES = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)


class NotWhole(Exception):
    """The bytes are not one value of this key."""


def make(key: str, value: int, nbytes: int) -> bytes:
    """`nbytes` is a multiple of 8, at least 32. `key` with its tenant."""
    return _words(key, value, nbytes).tobytes()


def _words(key: str, value: int, nbytes: int) -> np.ndarray:
    words = (np.arange(nbytes // WORD_BYTES, dtype=np.uint64) + np.uint64(value)) * _MIX
    words ^= np.uint64(value << 20 & (1 << 64) - 1)
    words[:4] = (MAGIC, value, zlib.crc32(key.encode()), nbytes)
    return words


def number_of(key: str, data: bytes | memoryview) -> int:
    """The value's number. Raises NotWhole, with what is wrong."""
    if len(data) < HEAD_BYTES or len(data) % WORD_BYTES:
        raise NotWhole(f"{len(data)} bytes are no value")
    words = np.frombuffer(data, np.uint64)
    magic, value, digest, nbytes = (int(word) for word in words[:4])
    if magic != MAGIC or nbytes != len(data):
        raise NotWhole(f"head {magic:x}, {nbytes} bytes in {len(data)}")
    if digest != zlib.crc32(key.encode()):
        raise NotWhole(f"value {value:x} is another key's")
    wrong = np.flatnonzero(words != _words(key, value, nbytes))
    if len(wrong):
        at = int(wrong[0])
        raise NotWhole(f"value {value:x}: {len(wrong)} of {len(words)} words, first at {at}")
    return value


def check_part(key: str, value: int, nbytes: int, offset: int, part: bytes) -> None:
    """Is this the part at `offset` of that value? Raises NotWhole."""
    if part != make(key, value, nbytes)[offset : offset + len(part)]:
        raise NotWhole(f"the part at {offset} is not of value {value:x}")
