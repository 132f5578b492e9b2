"""Copies between memory and disk: done once, and never into the memory of another mount."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from mooncake_py import errors
from mooncake_py._native.segment import OwnedSegment
from mooncake_py.clock import ManualClock
from mooncake_py.model import disk_bytes
from mooncake_py.store.disk_copies import CopyTask, DiskCopier
from mooncake_py.store.disk_files import DiskFiles
from mooncake_py.store.disk_index import SMALL_MAX_BYTES
from mooncake_py.store.master_time import MasterTime
from mooncake_py.transfer import Memory

NBYTES = 1 << 20
LENGTH = SMALL_MAX_BYTES + 1_000
VALUE = bytes(range(250)) * (LENGTH // 250) + b"!" * (LENGTH % 250)
SEGMENT = 5


class Desk:
    """A copier over a memory with one sealed extent, generation 1 at offset 0."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.memory = Memory(NBYTES)
        stack.callback(self.memory.close)
        self.segment = OwnedSegment(self.memory.base, NBYTES)
        stack.callback(self.segment.close)
        self.files = DiskFiles(str(folder / "disk"), 64 << 20)
        stack.callback(self.files.close)
        self.mounted = SEGMENT
        time = MasterTime(ManualClock())
        time.learnt(0, 0)
        self.done: list[tuple[int, int]] = []
        self._changed = threading.Condition()
        owned = (self.memory, self.segment)
        self.copier = DiskCopier(self.files, owned, lambda: self.mounted, time, self._note)
        stack.callback(self.copier.stop)
        self._put()

    def _put(self) -> None:
        row = self.task(1).extent()
        statuses, crcs = np.zeros(1, np.int32), np.zeros(1, np.uint32)
        self.segment.begin(row, 0, statuses)
        self.segment.fill(row, VALUE, np.zeros(1, np.uint64), crcs, statuses)
        self.segment.seal(row, crcs, 0, statuses)
        assert not statuses[0]

    def _note(self, task: int, code: int) -> None:
        with self._changed:
            self.done.append((task, code))
            self._changed.notify()

    def wait_done(self, count: int) -> list[tuple[int, int]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.done) >= count, 10)
            return list(self.done)

    @staticmethod
    def task(memory_generation: int, offset: int = 0) -> CopyTask:
        return CopyTask(7, LENGTH, SEGMENT, offset, memory_generation, 1 << 60, "t", b"key")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(tmp_path, stack)


def test_a81_an_offload_that_is_ordered_again_is_done_once(desk: Desk) -> None:
    desk.copier.offload([desk.task(1), desk.task(1)])
    desk.wait_done(1)
    desk.copier.offload([desk.task(1)])
    assert set(desk.wait_done(2)) == {(7, errors.OK)}
    assert desk.copier.counters.offloads == 1
    assert (desk.files.used_bytes, desk.files.count) == (disk_bytes(LENGTH), 1)
    assert desk.files.delete([7]) == 1
    assert desk.files.used_bytes == 0


def test_a80_a_disk_that_pauses_and_resumes_says_so_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(desk.files, "_write_file", full)
        for count in (1, 2, 3):
            desk.copier.offload([desk.task(1)])
            desk.wait_done(count)
    desk.copier.offload([desk.task(1)])
    assert [code for _, code in desk.wait_done(4)] == [errors.OutOfSpace.code] * 3 + [errors.OK]
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [("pauses: it is full" in line, "resumes: " in line) for line in lines] == [
        (True, False),
        (False, True),
    ]


def test_f42_a_promotion_into_memory_that_was_mounted_anew_leaves_nothing(desk: Desk) -> None:
    desk.copier.offload([desk.task(1)])
    desk.wait_done(1)
    seal = desk.segment.seal

    def mount_anew_and_seal(*arguments: object) -> None:
        desk.mounted = SEGMENT + 1
        seal(*arguments)  # type: ignore[arg-type]

    desk.segment.seal = mount_anew_and_seal  # type: ignore[method-assign]
    at = NBYTES // 2
    desk.copier.promote([desk.task(2, at)])
    assert desk.wait_done(2)[1] == (2, errors.LeaseExpired.code)
    assert len(desk.segment.inventory(at)) == 0
    assert desk.segment.stats().writing_count == 0
