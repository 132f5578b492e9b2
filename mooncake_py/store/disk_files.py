"""What lies in the folder of a disk tier, and the few safe steps on it.

    LOCK                 one node a folder (flock; the kernel ends it with the process)
    index.db             the index and small objects (disk_index.py)
    objects/XX/HEX       one larger object, named by its generation; XX are its last two digits
    objects/XX/HEX.part  being written

Rules.
* A file appears complete or not at all: temporary name, flush, rename. Then its folder is flushed,
  which makes the name last a power failure, and its row is written; a batch has each of its folders
  flushed once and its rows in one transaction. A kill at any point leaves temporary files and files
  without a row, which `open` removes, and rows without a file are impossible but after damage; they
  go, too.
* What is read is compared with the crc32c of the put. Bytes that differ are never handed out.
* Space is counted in what each object takes of the disk, rounded up to 4 KiB, when it is staged.
  The limit is the configured one; what the file system has left is a second one.

Thread-safe. Nothing here knows the network.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mooncake_py._native import memory
from mooncake_py.errors import (
    ChecksumMismatch,
    InternalError,
    LeaseExpired,
    OutOfSpace,
    UsageError,
)
from mooncake_py.model import disk_bytes
from mooncake_py.store.disk_index import DiskIndex, DiskObject

log = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_RESERVE_MAX_BYTES = 16 << 20  # of the limit, for the index's own log
_RESERVE_SHARE = 8  # but never more than this part of it
_SPARE_SHARE = 16  # of the file system, left free for others
_PART = ".part"
_FOLDERS = 256


class DiskFailed(OSError):
    """The disk does not do what it is asked; what was asked has not happened."""


class DiskFull(OutOfSpace):
    """It is the file system that has no room, not the configured limit that is reached."""


class DiskFiles:
    """The objects in one folder.

    path: made if it is missing. nbytes_max: what all objects together may take.
    Raises UsageError: the folder cannot be used, or another node uses it.
    """

    def __init__(self, path: str, nbytes_max: int) -> None:
        self.path = Path(path)
        self.nbytes_max = nbytes_max
        self.swept_count = 0  # leftovers that `open` removed
        self.lost_count = 0  # rows whose bytes were not there
        self.reset = False  # the index was damaged, so everything was dropped
        self._lock = threading.Lock()
        self._lock_fd = -1
        self._used = 0
        self._sizes: dict[int, int] = {}
        try:
            self._claim()
            self._index = self._open_index()
            self.disk_id = self._index.keep("disk_id", secrets.randbits(62) | 1)
            self._reconcile()
            self._compare_room()
        except (OSError, sqlite3.Error) as error:
            self.close()
            cause = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(
                f"--disk {path} cannot be used: {cause}",
                remedy="give a folder that this user may write, on a disk with free space",
            ) from error
        except BaseException:
            self.close()
            raise

    # --- opening --------------------------------------------------------------------------------

    def _claim(self) -> None:
        for number in range(_FOLDERS):
            (self.path / "objects" / f"{number:02x}").mkdir(parents=True, exist_ok=True)
        _flush_folder(f"{self.path}/objects")
        _flush_folder(str(self.path))
        self._lock_fd = os.open(self.path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip()
            raise UsageError(
                f"--disk {self.path} is in use by another node (process {holder})",
                remedy="give each node a folder of its own, or stop that one",
            ) from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, str(os.getpid()).encode(), 0)

    def _open_index(self) -> DiskIndex:
        """A damaged index is set aside: without it nobody knows what the files are, so they go."""
        path = self.path / "index.db"
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            index = DiskIndex(path)
            for _ in index.lengths():
                pass
            return index
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise  # locked, full, not writable: nothing is known to be damaged
            log.error("the index of the disk tier is damaged (%s): it starts empty", error)
        self.reset = True
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{path}{suffix}.damaged")
        return DiskIndex(path)

    def _reconcile(self) -> None:
        """Files and rows that do not belong to each other go."""
        wanted: dict[int, int] = dict(self._index.lengths())
        small = self._index.small_generations()
        lost = [
            generation
            for generation, length in wanted.items()
            if _is_small(length) and generation not in small
        ]
        files: dict[int, int] = {g: n for g, n in wanted.items() if not _is_small(n)}
        for number in range(_FOLDERS):
            with os.scandir(self.path / "objects" / f"{number:02x}") as entries:
                for entry in entries:
                    generation = _generation_of(entry.name)
                    if files.get(generation) == entry.stat().st_size:
                        del files[generation]
                        continue
                    os.unlink(entry.path)
                    self.swept_count += 1
        lost += files
        self._index.sweep_names()
        if lost:
            log.warning("%d objects of the disk tier had lost their bytes", len(lost))
            self._index.delete(lost)
            self.lost_count = len(lost)
        gone = set(lost)
        self._sizes = {g: disk_bytes(n) for g, n in wanted.items() if g not in gone}
        self._used = sum(self._sizes.values())

    def _compare_room(self) -> None:
        """Said at start: later it looks like a disk that is full too early."""
        found = os.statvfs(self.path)
        room = self._used + found.f_bavail * found.f_frsize
        if room < self.nbytes_max:
            log.warning(
                "--disk %s: its file system has room for %d bytes, --disk-size is %d; what does "
                "not fit is dropped. Remedy: make room there, or lower --disk-size",
                self.path, room, self.nbytes_max,
            )  # fmt: skip

    # --- numbers --------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def count(self) -> int:
        return len(self._sizes)

    def usable_bytes(self) -> int:
        """What all objects together may take right now: the limit, or less where the file system
        has less left. A file system that does not answer counts as full."""
        limit = self.nbytes_max - self._reserve()
        try:
            found = os.statvfs(self.path)
        except OSError:
            return min(limit, self._used)
        spare = min(_RESERVE_MAX_BYTES, found.f_blocks * found.f_frsize // _SPARE_SHARE)
        free = found.f_bavail * found.f_frsize - spare
        if found.f_files and not found.f_favail:
            free = 0
        return max(0, min(limit, self._used + free))

    def _reserve(self) -> int:
        return min(_RESERVE_MAX_BYTES, self.nbytes_max // _RESERVE_SHARE)

    # --- writing --------------------------------------------------------------------------------

    def holds(self, generation: int) -> bool:
        return generation in self._sizes

    def write(self, found: DiskObject, payload: memoryview) -> bytes | None:
        """First step of storing an object: its bytes are on the disk, and nobody knows of it. One
        that is here, or in another `write`, is not to be written again. Returns what `commit`
        needs. Raises OutOfSpace, DiskFailed; then nothing is left behind."""
        size = disk_bytes(found.length)
        with self._lock:
            if self._used + size > self.nbytes_max - self._reserve():
                raise OutOfSpace("the disk tier has reached its limit", used=self._used)
            self._used += size
        try:
            if found.small:
                return bytes(payload)
            self._write_file(found.generation, payload)
        except BaseException as error:
            with self._lock:
                self._used -= size
            if isinstance(error, OSError):
                raise _translated(error) from error
            raise
        return None

    def _write_file(self, generation: int, payload: memoryview) -> None:
        path = self._path_of(generation)
        part = f"{path}{_PART}"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            try:
                at = 0
                while at < len(payload):
                    at += os.write(fd, payload[at:])
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
            os.rename(part, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise

    def commit(self, batch: Sequence[tuple[DiskObject, bytes | None]]) -> None:
        """Second step: from now on the objects are here. Raises OutOfSpace, DiskFailed; then none
        of them is, and their bytes are gone."""
        try:
            for folder in {self._folder_of(o.generation) for o, _ in batch if not o.small}:
                _flush_folder(folder)
            self._index.add(batch)
        except (OSError, sqlite3.Error) as error:
            self.abandon([found for found, _ in batch])
            if isinstance(error, OSError):
                raise _translated(error) from error
            raise _translated_sqlite(error) from error
        with self._lock:
            for found, _ in batch:
                self._sizes[found.generation] = disk_bytes(found.length)

    def abandon(self, objects: Iterable[DiskObject]) -> None:
        """Written, and not to be committed."""
        for found in objects:
            with self._lock:
                self._used -= disk_bytes(found.length)
            if not found.small:
                with suppress(OSError):
                    os.unlink(self._path_of(found.generation))

    def delete(self, generations: Iterable[int]) -> int:
        """They are gone, durably; how many of them were here. Raises DiskFailed."""
        here = [generation for generation in generations if generation in self._sizes]
        if not here:
            return 0
        try:
            self._index.delete(here)
        except sqlite3.Error as error:
            failure = _translated_sqlite(error)
            if not isinstance(failure, OutOfSpace):
                raise failure from error
            self._unlink(here)  # a full disk has no room for the deletion either; now it has
            self._delete_again(here)
        self._unlink(here)
        for generation in here:
            with self._lock:
                self._used -= self._sizes.pop(generation, 0)
        return len(here)

    def _delete_again(self, generations: Sequence[int]) -> None:
        try:
            self._index.delete(generations)
        except sqlite3.Error as error:
            raise _translated_sqlite(error) from error

    def _unlink(self, generations: Iterable[int]) -> None:
        for generation in generations:
            with suppress(OSError):
                os.unlink(self._path_of(generation))

    # --- reading --------------------------------------------------------------------------------

    def find(self, generation: int) -> DiskObject | None:
        """Raises DiskFailed."""
        if generation not in self._sizes:
            return None
        try:
            return self._index.find(generation)
        except sqlite3.Error as error:
            raise _translated_sqlite(error) from error

    def page(self, after: int, limit: int) -> NDArray[np.uint64]:
        """Generations behind `after`, ascending. Raises DiskFailed."""
        try:
            found = self._index.page(after, limit)
        except sqlite3.Error as error:
            raise _translated_sqlite(error) from error
        return np.array([each.generation for each in found], dtype="<u8")

    def former(self) -> tuple[str, int]:
        """Cluster and term in which the disk was mounted last. Raises InternalError."""
        try:
            return self._index.former()
        except sqlite3.Error as error:
            raise _unreadable(error) from error

    def remember(self, cluster_id: str, term: int) -> None:
        """It is mounted there now. Raises OutOfSpace, DiskFailed."""
        try:
            if self._index.former() != (cluster_id, term):
                self._index.remember(cluster_id, term)
        except sqlite3.Error as error:
            raise _translated_sqlite(error) from error

    def told(self, after: int, limit: int) -> list[tuple[int, int, bytes, bytes]]:
        """See `DiskIndex.told`. Raises InternalError."""
        try:
            return self._index.told(after, limit)
        except sqlite3.Error as error:
            raise _unreadable(error) from error

    def read(self, found: DiskObject, into: memoryview) -> None:
        """All bytes of the object, compared with its checksum.

        Raises LeaseExpired: it is not here any more. ChecksumMismatch: its bytes are damaged, cut
        short, or cannot be read. Then `into` may hold anything.
        """
        if found.small:
            self._read_small(found, into)
        else:
            self._read_file(found, into)
        if memory.crc32c(into) != found.crc:
            raise ChecksumMismatch("bytes on the disk are damaged", generation=found.generation)

    def _read_small(self, found: DiskObject, into: memoryview) -> None:
        try:
            value = self._index.value(found.generation)
        except sqlite3.Error as error:
            raise ChecksumMismatch(f"the index of the disk tier is damaged: {error}") from error
        if value is None:
            raise LeaseExpired("the object is not on this disk any more")
        if len(value) != found.length:
            raise ChecksumMismatch("bytes on the disk are cut short", generation=found.generation)
        into[:] = value

    def _read_file(self, found: DiskObject, into: memoryview) -> None:
        try:
            fd = os.open(self._path_of(found.generation), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise LeaseExpired("the object is not on this disk any more") from None
        except OSError as error:
            raise ChecksumMismatch(f"a file cannot be opened: {error.strerror}") from error
        try:
            at = 0
            while at < found.length:
                step = os.preadv(fd, [into[at:]], at)
                if not step:
                    raise ChecksumMismatch("a file is cut short", generation=found.generation)
                at += step
        except OSError as error:
            raise ChecksumMismatch(f"a file cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)

    def _folder_of(self, generation: int) -> str:
        return f"{self.path}/objects/{generation & 255:02x}"

    def _path_of(self, generation: int) -> str:
        return f"{self._folder_of(generation)}/{generation:016x}"

    def close(self) -> None:
        """Twice is fine. No other call may run."""
        index = getattr(self, "_index", None)
        if index is not None:
            index.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _is_small(length: int) -> bool:
    return DiskObject(0, "", b"", length, 0).small


def _flush_folder(path: str) -> None:
    """What was renamed there keeps its name through a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _generation_of(name: str) -> int:
    try:
        return int(name, 16) if len(name) == 16 else -1
    except ValueError:
        return -1


def _unreadable(error: sqlite3.Error) -> InternalError:
    return InternalError(
        f"the index of the disk tier cannot be read: {error}",
        remedy="look at the disk that holds --disk; the node tries again",
    )


def _translated(error: OSError) -> Exception:
    if error.errno in _FULL:
        return DiskFull("the disk is full", free="0")
    return DiskFailed(error.errno, error.strerror)


def _translated_sqlite(error: sqlite3.Error) -> Exception:
    if getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":
        return DiskFull("the disk is full", free="0")
    return DiskFailed(errno.EIO, str(error))
