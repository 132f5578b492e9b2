"""The owner's table: who may write where, and what a reader accepts afterwards."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from mooncake_py import errors
from mooncake_py._native import ffi, memory
from mooncake_py._native.segment import OwnedSegment
from mooncake_py.errors import UsageError
from mooncake_py.wire.rows import EXTENT

NBYTES = 1 << 20
NOW = 1_000


@dataclass
class Bench:
    base: int
    segment: OwnedSegment

    def view(self) -> memoryview:
        return memoryview(ffi.buffer(ffi.cast("char *", self.base), NBYTES))

    def put(self, rows: npt.NDArray[np.void], values: list[bytes], now_ms: int = NOW) -> list[int]:
        statuses = np.zeros(len(rows), np.int32)
        crcs = np.zeros(len(rows), np.uint32)
        sources = np.cumsum([0, *map(len, values[:-1])]).astype(np.uint64)
        self.segment.begin(rows, now_ms, statuses)
        begun = np.flatnonzero(statuses == 0)
        mine = statuses[begun]
        self.segment.fill(rows[begun], b"".join(values), sources[begun], crcs, mine)
        self.segment.seal(rows[begun], crcs, now_ms, mine)
        statuses[begun] = mine
        return [-code for code in statuses.tolist()]

    def get(self, rows: npt.NDArray[np.void]) -> list[bytes | int]:
        """Bytes, or the code why not."""
        statuses = np.zeros(len(rows), np.int32)
        targets = [np.zeros(int(n) or 1, np.uint8) for n in rows["length"]]
        addresses = np.array([t.ctypes.data for t in targets], np.uint64)
        sizes = np.array([t.nbytes for t in targets], np.uint64)
        memory.extent_read(self.base, NBYTES, rows, addresses, sizes, statuses)
        return [
            -int(code) if code else target[: int(n)].tobytes()
            for code, target, n in zip(statuses, targets, rows["length"], strict=True)
        ]


@pytest.fixture
def bench() -> Iterator[Bench]:
    base, nbytes, fd = memory.memory_open(NBYTES, "test-segment")
    segment = OwnedSegment(base, nbytes)
    yield Bench(base, segment)
    segment.close()
    memory.memory_close(base, nbytes, fd)


def test_a76_memory_is_touched_in_advance_and_other_threads_run_meanwhile() -> None:
    turns, done = 0, threading.Event()
    opened: list[tuple[int, int, int]] = []

    def open_it() -> None:
        opened.append(memory.memory_open(64 << 20, "test-large"))
        done.set()

    thread = threading.Thread(target=open_it)
    thread.start()
    while not done.wait(0.0001):
        turns += 1
    thread.join()
    ((base, nbytes, fd),) = opened
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    view = np.frombuffer(ffi.buffer(ffi.cast("char *", base), nbytes), np.uint8)
    view[::4096] = 1
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    del view
    memory.memory_close(base, nbytes, fd)
    assert turns >= 3, "64 MiB take some ten milliseconds"
    assert faults < nbytes // 4096 // 50, "of 16,384 pages"


def row(offset: int, length: int, generation: int, expires_ms: int = NOW + 100) -> npt.NDArray:
    rows = np.zeros(1, EXTENT)
    rows["offset"], rows["length"], rows["generation"] = offset, length, generation
    rows["expires_ms"] = expires_ms
    return rows


def test_f01_what_was_sealed_is_read_back(bench: Bench) -> None:
    rows = np.concatenate([row(0, 5, 1), row(128, 0, 2), row(192, 100_000, 3)])
    values = [b"hello", b"", bytes(range(250)) * 400]
    assert bench.put(rows, values) == [0, 0, 0]
    assert bench.get(rows) == values
    assert bench.segment.stats()[:3] == (3, 100_005, 0)


def test_f63_an_expired_grant_is_refused_and_changes_nothing(bench: Bench) -> None:
    old = row(0, 3, 1)
    assert bench.put(old, [b"old"]) == [0]
    late = row(0, 3, 2, expires_ms=NOW - 1)
    assert bench.put(late, [b"new"]) == [errors.LeaseExpired.code]
    assert bench.get(old) == [b"old"]


def test_f63_a_grant_that_ends_while_copying_is_not_sealed(bench: Bench) -> None:
    rows = row(0, 3, 1, expires_ms=NOW)
    statuses, crcs = np.zeros(1, np.int32), np.zeros(1, np.uint32)
    bench.segment.begin(rows, NOW, statuses)
    bench.segment.seal(rows, crcs, NOW + 1, statuses)
    assert statuses.tolist() == [-errors.LeaseExpired.code]
    assert bench.get(rows) == [errors.LeaseExpired.code]
    assert bench.segment.stats().writing_count == 0


def test_a11_a_reader_of_replaced_memory_gets_no_bytes(bench: Bench) -> None:
    olds = np.concatenate([row(64 * 4 * i, 100, i + 1) for i in range(4)])
    assert bench.put(olds, [bytes([i]) * 100 for i in range(4)]) == [0] * 4
    young = row(64 * 5, 300, 10)  # begins inside the second, covers the third
    assert bench.put(young, [b"y" * 300]) == [0]
    got = bench.get(olds)
    assert got[0] == bytes([0]) * 100
    assert got[1:3] == [errors.LeaseExpired.code] * 2
    assert bench.get(young) == [b"y" * 300]


@pytest.mark.parametrize("generation", [4, 5])
def test_a01_an_older_or_equal_generation_never_overwrites(bench: Bench, generation: int) -> None:
    assert bench.put(row(0, 3, 5), [b"abc"]) == [0]
    assert bench.put(row(0, 3, generation), [b"xyz"]) == [errors.LeaseExpired.code]
    assert bench.get(row(0, 3, 5)) == [b"abc"]


def test_a01_two_writers_never_share_memory(bench: Bench) -> None:
    first, statuses = row(0, 1000, 1), np.zeros(1, np.int32)
    bench.segment.begin(first, NOW, statuses)
    assert bench.put(row(512, 1000, 2), [b"z" * 1000]) == [errors.Backpressure.code]
    statuses[:] = -errors.TransferTimeout.code  # the first one's copy failed
    bench.segment.seal(first, np.zeros(1, np.uint32), NOW, statuses)
    assert statuses.tolist() == [-errors.TransferTimeout.code]
    assert bench.put(row(512, 1000, 2), [b"z" * 1000]) == [0]


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (1, 10), (NBYTES, 0), (NBYTES - 64, 1), (0, NBYTES), (0, 1 << 63),
        ((1 << 64) - 64, 64), (64, (1 << 64) - 64), (0, (1 << 64) - 1),
    ],
)  # fmt: skip
def test_a34_rows_outside_the_segment_are_refused(bench: Bench, offset: int, length: int) -> None:
    rows, statuses = row(offset, length, 1), np.zeros(1, np.int32)
    bench.segment.begin(rows, NOW, statuses)
    assert statuses.tolist() == [-errors.UsageError.code]
    assert bench.segment.stats().refused_count == 1


@pytest.mark.parametrize("source", [1, 4, (1 << 64) - 1])
def test_a34_a_source_outside_the_inline_values_is_refused(bench: Bench, source: int) -> None:
    rows, statuses = row(0, 4, 1), np.zeros(1, np.int32)
    bench.segment.begin(rows, NOW, statuses)
    crcs = np.zeros(1, np.uint32)
    bench.segment.fill(rows, b"abcd", np.array([source], np.uint64), crcs, statuses)
    bench.segment.seal(rows, crcs, NOW, statuses)
    assert statuses.tolist() == [-errors.UsageError.code]
    assert bench.get(rows) == [errors.LeaseExpired.code]


def test_f43_a_flipped_byte_is_an_integrity_error(bench: Bench) -> None:
    rows = row(0, 4096, 1)
    assert bench.put(rows, [b"k" * 4096]) == [0]
    bench.view()[64 + 1000] ^= 1
    assert bench.get(rows) == [errors.ChecksumMismatch.code]


def test_a34_a_payload_that_looks_like_a_header_blocks_nobody(bench: Bench) -> None:
    first = row(0, 64, (1 << 63))
    assert bench.put(first, [b"h" * 64]) == [0]
    header = bytes(bench.view()[:64])
    bench.segment.unseal(first)
    assert bench.put(row(0, 1000, 1), [header * 15 + b"." * 40]) == [0]
    inner = row(64, 10, 2)  # its header lies where the payload shows one of a huge generation
    assert bench.put(inner, [b"0123456789"]) == [0]
    assert bench.get(inner) == [b"0123456789"]


def test_a06_removed_extents_are_gone_and_others_stay(bench: Bench) -> None:
    rows = np.concatenate([row(0, 10, 1), row(128, 10, 2)])
    assert bench.put(rows, [b"a" * 10, b"b" * 10]) == [0, 0]
    stale = row(128, 10, 1)  # another generation than what is there: left alone
    bench.segment.unseal(np.concatenate([rows[:1], stale]))
    assert bench.get(rows) == [errors.LeaseExpired.code, b"b" * 10]
    assert bench.segment.inventory()["generation"].tolist() == [2]


def test_a01_a_second_request_for_a_grant_does_not_end_the_first(bench: Bench) -> None:
    rows, statuses = row(0, 4, 1), np.zeros(1, np.int32)
    bench.segment.begin(rows, NOW, statuses)
    assert bench.put(rows, [b"twin"]) == [errors.LeaseExpired.code]
    assert bench.segment.stats().writing_count == 1
    crcs = np.zeros(1, np.uint32)
    bench.segment.fill(rows, b"mine", np.zeros(1, np.uint64), crcs, statuses)
    bench.segment.seal(rows, crcs, NOW, statuses)
    assert bench.get(rows) == [b"mine"]


def test_a_closed_segment_says_so(bench: Bench) -> None:
    bench.segment.close()
    bench.segment.close()
    with pytest.raises(UsageError, match="closed"):
        bench.segment.stats()


def test_f65_a_held_extent_is_not_overwritten_until_released(bench: Bench) -> None:
    (old,) = (row(0, 1000, 1),)
    assert bench.put(old, [b"o" * 1000]) == [0]
    statuses = np.zeros(1, np.int32)
    bench.segment.hold(old, statuses)
    bench.segment.hold(old, statuses)
    assert statuses.tolist() == [0]
    assert bench.segment.stats().held_count == 1
    newer = row(0, 1000, 2)
    inside = row(512, 64, 3)
    for _ in range(2):
        assert bench.put(newer, [b"n" * 1000]) == [errors.Backpressure.code]
        assert bench.put(inside, [b"i" * 64]) == [errors.Backpressure.code]
        bench.segment.unseal(old)  # ends it for readers to come, and touches no byte of it
        assert bytes(bench.view()[64:1064]) == b"o" * 1000
        bench.segment.release(old)
    assert bench.segment.stats().held_count == 0
    assert bench.put(newer, [b"n" * 1000]) == [0]


def test_f65_only_what_is_sealed_there_can_be_held(bench: Bench) -> None:
    sealed = row(0, 100, 5)
    assert bench.put(sealed, [b"s" * 100]) == [0]
    for other in (row(0, 100, 4), row(0, 100, 6), row(0, 99, 5), row(64, 100, 5)):
        statuses = np.zeros(1, np.int32)
        bench.segment.hold(other, statuses)
        assert statuses.tolist() == [-errors.LeaseExpired.code]
        bench.segment.release(other)
    begun = row(4096, 100, 7)
    statuses = np.zeros(1, np.int32)
    bench.segment.begin(begun, NOW, statuses)
    bench.segment.hold(begun, statuses)
    assert statuses.tolist() == [-errors.LeaseExpired.code]
    assert bench.segment.stats().held_count == 0
