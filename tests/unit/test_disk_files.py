"""The folder of a disk tier: complete or not at all, bounded, found again, never wrong bytes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mooncake_py._native import memory
from mooncake_py.errors import ChecksumMismatch, LeaseExpired, OutOfSpace, UsageError
from mooncake_py.model import disk_bytes
from mooncake_py.store import disk_files
from mooncake_py.store.disk_files import DiskFailed, DiskFiles
from mooncake_py.store.disk_index import SMALL_MAX_BYTES, DiskObject

MIB = 1 << 20
LARGE = SMALL_MAX_BYTES + 1_000


@pytest.fixture
def files(tmp_path: Path) -> Iterator[DiskFiles]:
    with closing(DiskFiles(str(tmp_path / "disk"), 64 * MIB)) as opened:
        yield opened


def value(generation: int, length: int) -> bytes:
    return bytes((generation + i) % 251 for i in range(length))


def store(files: DiskFiles, generation: int, length: int) -> DiskObject:
    payload = value(generation, length)
    found = DiskObject(
        generation, "t", b"key %d" % generation, length, memory.crc32c(payload), bytes(range(16))
    )
    files.commit([(found, files.write(found, memoryview(payload)))])
    return found


def read(files: DiskFiles, generation: int) -> bytes:
    found = files.find(generation)
    assert found is not None
    into = bytearray(found.length)
    files.read(found, memoryview(into))
    return bytes(into)


def on_disk(folder: Path) -> list[Path]:
    return [each for each in (folder / "objects").rglob("*") if each.is_file()]


@pytest.mark.parametrize("length", [0, 1, 1_000, SMALL_MAX_BYTES, LARGE, 3 * MIB])
def test_f41_what_is_stored_is_read_back(files: DiskFiles, length: int) -> None:
    found = store(files, 7, length)
    assert files.find(7) == found
    assert read(files, 7) == value(7, length)
    assert files.used_bytes == disk_bytes(length)
    assert len(on_disk(files.path)) == (length > SMALL_MAX_BYTES)


def test_a78_a_folder_is_as_it_was_when_it_is_opened_again(tmp_path: Path) -> None:
    path = str(tmp_path / "disk")
    with closing(DiskFiles(path, 64 * MIB)) as files:
        for generation, length in enumerate((10, LARGE, 0, MIB), 1):
            store(files, generation, length)
        files.delete([3])
        disk_id, used = files.disk_id, files.used_bytes
    for _ in range(3):
        with closing(DiskFiles(path, 64 * MIB)) as files:
            assert files.disk_id == disk_id
            assert (files.used_bytes, files.count) == (used, 3)
            assert files.page(0, 10).tolist() == [1, 2, 4]
            assert files.page(1, 1).tolist() == [2]
            assert read(files, 4) == value(4, MIB)
            assert files.find(3) is None
            assert (files.swept_count, files.lost_count) == (0, 0)


def test_a77_a_kill_before_the_rename_or_before_the_row_leaves_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "disk")
    with closing(DiskFiles(path, 64 * MIB)) as files:
        store(files, 1, LARGE)
        written = DiskObject(2, "t", b"no row", LARGE, 0)
        files.write(written, memoryview(value(2, LARGE)))  # renamed, and no row
        part = files.path / "objects" / "03" / f"{3:016x}.part"
        part.write_bytes(b"half")
    with closing(DiskFiles(path, 64 * MIB)) as files:
        assert files.swept_count == 2
        assert files.count == 1
        assert len(on_disk(files.path)) == 1
        assert files.used_bytes == disk_bytes(LARGE)
        assert read(files, 1) == value(1, LARGE)


def test_a77_a_row_whose_file_is_gone_or_cut_is_dropped(tmp_path: Path) -> None:
    path = str(tmp_path / "disk")
    with closing(DiskFiles(path, 64 * MIB)) as files:
        for generation in (1, 2, 3):
            store(files, generation, LARGE)
    gone, cut, _ = sorted(on_disk(tmp_path / "disk"))
    gone.unlink()
    os.truncate(cut, 10)
    with closing(DiskFiles(path, 64 * MIB)) as files:
        assert files.lost_count == 2
        assert files.page(0, 10).tolist() == [3]
        assert files.used_bytes == disk_bytes(LARGE)
        assert len(on_disk(files.path)) == 1


@pytest.mark.parametrize("at", [0, LARGE // 2, LARGE - 1])
def test_a83_a_flipped_byte_in_a_file_is_never_read(files: DiskFiles, at: int) -> None:
    store(files, 1, LARGE)
    (file,) = on_disk(files.path)
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChecksumMismatch):
        read(files, 1)


def test_a83_a_flipped_byte_of_a_small_object_is_never_read(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with closing(DiskFiles(str(path), 64 * MIB)) as files:
        store(files, 1, 3_000)
    data = (path / "index.db").read_bytes()
    at = data.index(value(1, 3_000)[100:200])
    (path / "index.db").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with closing(DiskFiles(str(path), 64 * MIB)) as files, pytest.raises(ChecksumMismatch):
        read(files, 1)


def test_a83_a_file_that_was_cut_while_it_is_known_is_damage(files: DiskFiles) -> None:
    store(files, 1, LARGE)
    (file,) = on_disk(files.path)
    os.truncate(file, LARGE - 1)
    with pytest.raises(ChecksumMismatch):
        read(files, 1)
    file.unlink()
    with pytest.raises(LeaseExpired):
        read(files, 1)


def _fill(files: DiskFiles, length: int) -> int:
    """Store until one is refused; its generation."""
    for generation in range(1, 10_000):
        try:
            store(files, generation, length)
        except OutOfSpace:
            return generation
    raise AssertionError("there is no limit")


@pytest.mark.parametrize("length", [100, LARGE])
def test_a79_the_limit_is_the_configured_one(tmp_path: Path, length: int) -> None:
    with closing(DiskFiles(str(tmp_path / "disk"), 2 * MIB)) as files:
        generation = _fill(files, length)
        used = files.used_bytes
        assert MIB < used <= 2 * MIB
        assert files.usable_bytes() <= 2 * MIB
        assert files.count == generation - 1
        assert len(on_disk(files.path)) in (0, generation - 1), "a refused one left a file"
        assert files.delete([1, 2, 10**9]) == 2
        assert files.used_bytes == used - 2 * disk_bytes(length)
        store(files, 1_000, length)
        taken = sum(each.stat().st_blocks * 512 for each in (tmp_path / "disk").rglob("*"))
        assert taken <= 2 * MIB + 2 * 257 * 4096, "with folders"


def test_a79_what_the_file_system_has_left_counts(
    files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(files, 1, MIB)
    real = os.statvfs(files.path)
    little = os.statvfs_result((*real[:4], 100, *real[5:]))  # blocks that are available
    monkeypatch.setattr(disk_files.os, "statvfs", lambda _: little)
    assert files.usable_bytes() < files.used_bytes + 100 * real.f_frsize


def test_a80_a_full_disk_refuses_and_goes_on(
    files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(files, 1, LARGE)
    used = files.used_bytes

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk_files.os, "fdatasync", full)
        with pytest.raises(OutOfSpace):
            store(files, 2, LARGE)
    assert files.used_bytes == used
    assert len(on_disk(files.path)) == 1
    store(files, 3, LARGE)
    assert read(files, 3) == value(3, LARGE)


def test_a80_a_disk_with_errors_is_told_from_a_full_one(
    files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk_files.os, "fdatasync", broken)
    with pytest.raises(DiskFailed):
        store(files, 2, LARGE)
    assert files.used_bytes == 0
    assert on_disk(files.path) == []


def test_a81_a_batch_whose_rows_cannot_be_written_leaves_no_files(
    files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(batch: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(files._index, "add", broken)
    with pytest.raises(DiskFailed):
        store(files, 2, LARGE)
    assert files.used_bytes == 0
    assert on_disk(files.path) == []


def test_a77_a_name_is_flushed_before_its_row_is_written(
    files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power failure could leave the row of an acknowledged copy without its file."""
    done: list[str] = []
    fsync, rename, add = os.fsync, os.rename, files._index.add

    def flush(fd: int) -> None:
        done.append("flush " + Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    monkeypatch.setattr(disk_files.os, "fsync", flush)
    monkeypatch.setattr(disk_files.os, "rename", lambda a, b: [done.append("name"), rename(a, b)])
    monkeypatch.setattr(files._index, "add", lambda batch: [done.append("row"), add(batch)])
    store(files, 0x1AB, LARGE)
    assert done == ["name", "flush ab", "row"]
    done.clear()
    store(files, 0x1AC, 100)
    assert done == ["row"]


def test_a81_a_folder_that_cannot_be_flushed_leaves_no_files(
    files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk_files.os, "fsync", broken)
    with pytest.raises(DiskFailed):
        store(files, 2, LARGE)
    assert files.used_bytes == 0
    assert on_disk(files.path) == []
    assert files.find(2) is None


def test_f41_two_nodes_do_not_share_a_folder(files: DiskFiles) -> None:
    with pytest.raises(UsageError, match=f"in use by another node \\(process {os.getpid()}"):
        DiskFiles(str(files.path), MIB)


def test_f41_a_folder_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="cannot be used"):
        DiskFiles(str(tmp_path / "file" / "disk"), MIB)


def test_a77_a_damaged_index_is_set_aside_and_the_folder_starts_empty(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with closing(DiskFiles(str(path), 64 * MIB)) as files:
        store(files, 1, LARGE)
    (path / "index.db").write_bytes(b"not a database at all" * 1_000)
    with closing(DiskFiles(str(path), 64 * MIB)) as files:
        assert files.reset
        assert files.count == 0
        assert on_disk(path) == []
        assert (path / "index.db.damaged").exists()
        store(files, 2, LARGE)
        assert read(files, 2) == value(2, LARGE)


def test_f41_a_deletion_is_durable_and_takes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with closing(DiskFiles(str(path), 64 * MIB)) as files:
        store(files, 1, LARGE)
        store(files, 2, 50)
        assert files.delete([1, 2]) == 2
        assert on_disk(path) == []
        with closing(sqlite3.connect(path / "index.db")) as other:  # as after a kill right now
            assert other.execute("SELECT count(*) FROM objects").fetchone() == (0,)
            assert other.execute("SELECT count(*) FROM small").fetchone() == (0,)


def test_f41_a_file_system_smaller_than_the_limit_is_named_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DiskFiles(str(tmp_path / "small"), 1 << 20).close()
    assert not caplog.records
    DiskFiles(str(tmp_path / "large"), 1 << 60).close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"--disk-size is {1 << 60}" in line
    assert "room for" in line
