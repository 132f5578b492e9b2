"""Extents through the Python wrappers: a put and a get of a batch, and calls that are wrong."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mooncake_py._native import memory
from mooncake_py.errors import ChecksumMismatch, LeaseExpired, OutOfSpace, UsageError
from mooncake_py.model import extent_bytes
from mooncake_py.wire.rows import EXTENT

NBYTES = 1 << 20
STALE, USAGE, DAMAGED = -LeaseExpired.code, -UsageError.code, -ChecksumMismatch.code


@dataclass
class Segment:
    base: int
    nbytes: int

    def bytes_at(self, offset: int, nbytes: int) -> np.ndarray:
        return np.frombuffer(memory.ffi.buffer(self._pointer(offset), nbytes), np.uint8)

    def _pointer(self, offset: int) -> object:
        return memory.ffi.cast("uint8_t *", self.base + offset)


@pytest.fixture
def segment() -> Iterator[Segment]:
    base, nbytes, fd = memory.memory_open(NBYTES, "extent test")
    yield Segment(base, nbytes)
    memory.memory_close(base, nbytes, fd)


def rows_of(lengths: list[int], generation: int = 1) -> np.ndarray:
    rows = np.zeros(len(lengths), EXTENT)
    offset = 0
    for row, length in zip(rows, lengths, strict=True):
        row["offset"], row["length"] = offset, length
        offset += extent_bytes(length)
    rows["generation"] = np.arange(generation, generation + len(rows))
    digests = memory.digests([b"key %d" % i for i in range(len(rows))], bytes(16))
    rows["digest"] = np.frombuffer(digests, "V16")
    return rows


def put(segment: Segment, rows: np.ndarray, payloads: list[bytes]) -> None:
    statuses = np.zeros(len(rows), np.int32)
    memory.extent_begin(segment.base, segment.nbytes, rows, statuses)
    crcs = np.array([memory.crc32c(payload) for payload in payloads], np.uint32)
    for row, payload in zip(rows, payloads, strict=True):
        segment.bytes_at(int(row["offset"]) + 64, len(payload))[:] = list(payload)
    memory.extent_seal(segment.base, segment.nbytes, rows, crcs, statuses)
    assert not statuses.any()


def get(segment: Segment, rows: np.ndarray, room: int | None = None) -> tuple[list[int], list]:
    targets = [np.zeros(int(r["length"]) if room is None else room, np.uint8) for r in rows]
    addresses = np.array([memory.address_of(t)[0] for t in targets], np.uint64)
    capacities = np.array([len(t) for t in targets], np.uint64)
    statuses = np.zeros(len(rows), np.int32)
    memory.extent_read(segment.base, segment.nbytes, rows, addresses, capacities, statuses)
    return statuses.tolist(), [target.tobytes() for target in targets]


def test_a06_a_batch_comes_back_as_it_was_put(segment: Segment) -> None:
    payloads = [bytes([n % 251]) * n for n in (0, 1, 63, 64, 65, 1000, 300_000)]
    rows = rows_of([len(p) for p in payloads])
    put(segment, rows, payloads)
    assert get(segment, rows) == ([0] * 7, payloads)


def test_a03_every_row_has_its_own_answer(segment: Segment) -> None:
    payloads = [b"one", b"two", b"three", b"four"]
    rows = rows_of([len(p) for p in payloads])
    put(segment, rows, payloads)
    rows["generation"][1] += 7
    rows["offset"][2] = NBYTES
    segment.bytes_at(int(rows["offset"][3]) + 64, 1)[:] ^= 1
    statuses, bytes_got = get(segment, rows)
    assert statuses == [0, STALE, USAGE, DAMAGED]
    assert bytes_got[0] == b"one"


def test_a07_too_small_a_target_is_refused_before_a_byte_is_written(segment: Segment) -> None:
    rows = rows_of([100])
    put(segment, rows, [b"x" * 100])
    assert get(segment, rows, room=99) == ([USAGE], [bytes(99)])
    assert get(segment, rows, room=101) == ([0], [b"x" * 100 + b"\0"])


def test_the_digest_is_compared_unless_it_is_all_zeros(segment: Segment) -> None:
    rows = rows_of([3])
    put(segment, rows, [b"abc"])
    rows["digest"] = np.frombuffer(b"another key.....", "V16")
    assert get(segment, rows)[0] == [STALE]
    rows["digest"] = np.zeros(1, "V16")
    assert get(segment, rows)[0] == [0]


def test_an_ended_extent_is_not_read_and_not_sealed(segment: Segment) -> None:
    rows = rows_of([3])
    put(segment, rows, [b"abc"])
    statuses = np.zeros(1, np.int32)
    memory.extent_unseal(segment.base, segment.nbytes, rows, statuses)
    assert statuses.tolist() == [0]
    assert get(segment, rows)[0] == [STALE]
    memory.extent_seal(segment.base, segment.nbytes, rows, np.zeros(1, np.uint32), statuses)
    assert statuses.tolist() == [STALE]


def test_transported_reads_are_judged_by_both_headers(segment: Segment) -> None:
    rows = rows_of([3, 3, 3])
    put(segment, rows, [b"abc"] * 3)
    images = b"".join(segment.bytes_at(int(o), 64).tobytes() for o in rows["offset"])
    changed = bytearray(images)
    changed[64 + 8] ^= 1  # the second extent is of another generation by now
    crcs = np.full(3, memory.crc32c(b"abc"), np.uint32)
    crcs[2] ^= 1
    statuses = np.zeros(3, np.int32)
    memory.extent_verify(images, changed, rows, crcs, statuses)
    assert statuses.tolist() == [0, STALE, DAMAGED]
    with pytest.raises(UsageError, match="64 bytes a row"):
        memory.extent_verify(images[:-1], changed, rows, crcs, statuses)


EDGES = st.one_of(
    st.integers(0, 8192),
    st.integers(2**64 - 8192, 2**64 - 1),
    st.integers(2**63 - 64, 2**63 + 64),
    st.integers(0, 2**64 - 1),
)


@given(EDGES.map(lambda n: n // 64 * 64) | EDGES, EDGES)
def test_no_row_outside_the_segment_is_accepted(offset: int, length: int) -> None:
    # The segment has no memory behind it: an access would end the process.
    assume(offset % 64 or offset + 64 + length > 4096)
    rows = np.zeros(1, EXTENT)
    rows["offset"], rows["length"], rows["generation"] = offset, length, 1
    statuses = np.zeros(1, np.int32)
    memory.extent_begin(64, 4096, rows, statuses)
    assert statuses.tolist() == [USAGE]


def test_rows_in_the_middle_of_a_message_are_fine(segment: Segment) -> None:
    rows = rows_of([3])
    put(segment, rows, [b"abc"])
    message = b"x" + rows.tobytes()
    assert get(segment, np.frombuffer(message, EXTENT, offset=1)) == ([0], [b"abc"])


def test_malformed_calls_do_nothing_and_say_why(segment: Segment) -> None:
    base, nbytes = segment.base, segment.nbytes
    rows, statuses = rows_of([3]), np.zeros(1, np.int32)
    with pytest.raises(UsageError, match="differ in length"):
        memory.extent_begin(base, nbytes, rows, np.zeros(2, np.int32))
    with pytest.raises(UsageError, match="int32"):
        memory.extent_begin(base, nbytes, rows, np.zeros(1, np.int64))
    with pytest.raises(UsageError, match="EXTENT"):
        memory.extent_begin(base, nbytes, np.zeros(1, "V32"), statuses)
    with pytest.raises(UsageError, match="not a usable buffer"):
        memory.extent_begin(base, nbytes, rows_of([1, 1, 1])[::2], np.zeros(2, np.int32))
    with pytest.raises(UsageError):
        memory.extent_begin(base + 8, nbytes, rows, statuses)
    assert segment.bytes_at(0, 64).tobytes() == bytes(64)


def available_bytes() -> int:
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    return int(lines["MemAvailable"].split()[0]) * 1024


def test_too_little_memory_is_an_error_and_touches_nothing() -> None:
    before = available_bytes()
    for nbytes in (before + (1 << 30), 1 << 44, 1 << 62, 1 << 70):
        with pytest.raises(OutOfSpace, match="too little memory"):
            memory.memory_open(nbytes)
    assert before - available_bytes() < 1 << 30


def test_a_limit_on_address_space_is_an_error_and_no_crash() -> None:
    script = "from mooncake_py._native import memory; memory.memory_open(1 << 30)"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    ended = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"OPENBLAS_NUM_THREADS": "1"},
    )
    assert "OutOfSpace" in ended.stderr
    assert ended.returncode == 1


def test_memory_needs_a_size_and_a_short_name() -> None:
    with pytest.raises(UsageError):
        memory.memory_open(0)
    with pytest.raises(UsageError):
        memory.memory_open(4096, "x" * 201)
