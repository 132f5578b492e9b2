"""A segment that outlives its node: `--segment-file PATH`, on tmpfs or on a disk.

    PATH           the memory: extents as always (design/extent.md), mapped by its one owner
    PATH.journal   what was begun where, in order, with names (native/abi/segment.h)
    PATH.json      whose it is: layout, size, name of the node, cluster, term, segment id

A node that is started on these files adopts what they hold: journal entries in their order, a later
one ending those that it overlaps; of what is left, extents whose header is sealed and that of the
entry, and whose payload fits its checksum. A process that was killed in the middle of a put left no
sealed header, so nothing torn is adopted. (A machine that lost power left anything: what was torn
then fails its checksum.)

PATH is locked while a node has it. The journal is written anew, beside and renamed, at every start
and whenever it has grown much larger than what it tells of.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import mmap
import os
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mooncake_py._native.segment import Adopted, OwnedSegment
from mooncake_py.errors import OutOfSpace, UsageError
from mooncake_py.transfer import FileMemory

log = logging.getLogger(__name__)

LAYOUT = 1
JOURNAL_SLACK_BYTES = 16 << 20  # beyond four times what is told, the journal is written anew
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ENTRY_BYTES = 256  # about what one extent takes in it


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose the memory is. `segment_id` 0: it was never mounted."""

    nbytes: int
    node: str = ""
    cluster_id: str = ""
    term: int = 0
    segment_id: int = 0
    layout: int = LAYOUT


class SegmentFile:
    """Open files of one segment, locked until `close`.

    Raises UsageError: another node has it, it is no segment, or is larger than `nbytes`;
    OutOfSpace. One owner; not thread-safe.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        self._path = Path(path)
        self._journal_fd = -1
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with ExitStack() as starting:
            self._fd = self._claim()
            starting.callback(os.close, self._fd)
            self.former = self._read_identity(nbytes)
            if self.former is None:
                starting.callback(self._discard)
                self._begin(nbytes)
            self.memory = self._map(nbytes)
            starting.pop_all()
        self.identity = Identity(nbytes, *self._belonging())

    def _map(self, nbytes: int) -> FileMemory:
        try:
            return FileMemory(self._fd, nbytes)
        except OutOfSpace:
            raise self._no_room(nbytes) from None

    def _no_room(self, nbytes: int) -> OutOfSpace:
        return OutOfSpace(
            f"--segment-file {self._path}: its file system has no room for {nbytes} bytes",
            remedy="make room there or choose a smaller --segment-bytes",
        )

    def _discard(self) -> None:
        """A first start has failed. Nothing of use is in the files, and they may fill a tmpfs."""
        for path in (self._path, self._beside(".json"), self._beside(".json.new")):
            with suppress(OSError):
                path.unlink()

    def _begin(self, nbytes: int) -> None:
        """Say whose it is before it has a byte: a start that fails half-way can be made again."""
        try:
            self.remember(Identity(nbytes))
        except OSError as error:
            if error.errno in _FULL:
                raise self._no_room(nbytes) from None
            raise UsageError(
                f"beside --segment-file {self._path} nothing can be written: {error.strerror}",
                remedy="give a path in a folder that this user may write, with free space",
            ) from None

    def _belonging(self) -> tuple[str, str, int, int]:
        former = self.former
        if former is None:
            return "", "", 0, 0
        return former.node, former.cluster_id, former.term, former.segment_id

    def _claim(self) -> int:
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"--segment-file {self._path} cannot be opened: {error.strerror}",
                remedy="give a path in a folder that this user may write",
            ) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise UsageError(
                f"--segment-file {self._path} belongs to a node that runs",
                remedy="stop that node first, or give another file",
            ) from None
        return fd

    def _read_identity(self, nbytes: int) -> Identity | None:
        """Of a former life; None in a new file, and in one that was never mounted."""
        size = os.fstat(self._fd).st_size
        if size == 0:
            return None
        try:
            former = Identity(**json.loads(self._beside(".json").read_text()))
        except (OSError, ValueError, TypeError):
            former = None
        if former is not None and former.layout == LAYOUT and former.segment_id == 0:
            return None
        if former is None or former.layout != LAYOUT or former.nbytes > size:
            raise UsageError(
                f"--segment-file {self._path} is not the segment of a node of this release",
                remedy="delete it, if nothing else needs it, or give another path",
            )
        if former.nbytes > nbytes:
            raise UsageError(
                f"--segment-file {self._path} has {former.nbytes} bytes, more than --segment-bytes",
                remedy=f"give --segment-bytes {former.nbytes}, or delete the file and its cache",
            )
        return former

    def _beside(self, suffix: str) -> Path:
        return self._path.with_name(self._path.name + suffix)

    # --- adopting -------------------------------------------------------------------------------

    def adopt(self, segment: OwnedSegment) -> Adopted:
        """Bring what a former life left into the table of this segment, and begin a journal."""
        adopted = Adopted()
        if self.former is not None:
            try:
                with self._beside(".journal").open("rb") as file:
                    if os.fstat(file.fileno()).st_size:
                        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as journal:
                            adopted = segment.adopt(journal)
            except OSError as error:
                log.warning("the journal of %s cannot be read: %s", self._path, error)
        try:
            self.remember(self.identity)
            self.renew_journal(segment)
        except (OSError, OutOfSpace) as error:
            if self.former is None:
                self._discard()
            if isinstance(error, OutOfSpace) or error.errno in _FULL:
                raise self._no_room(self.identity.nbytes) from None
            raise
        return adopted

    # --- keeping --------------------------------------------------------------------------------

    def remember(self, identity: Identity) -> None:
        """Whose it is from now on; all of it or the former."""
        self.identity = identity
        temporary = self._beside(".json.new")
        with temporary.open("w") as file:
            file.write(json.dumps(asdict(identity)))
            file.flush()
            os.fdatasync(file.fileno())
        temporary.replace(self._beside(".json"))

    def renew_journal(self, segment: OwnedSegment) -> None:
        temporary = self._beside(".journal.new")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            segment.journal(fd)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                temporary.unlink()
            raise
        former, self._journal_fd = self._journal_fd, fd
        temporary.replace(self._beside(".journal"))
        if former >= 0:
            os.close(former)

    def tend(self, segment: OwnedSegment) -> None:
        """Now and then: write the journal anew when it has become much longer than needed."""
        stats = segment.stats()
        needed = 4 * _ENTRY_BYTES * (stats.extent_count + stats.writing_count)
        if stats.journal_nbytes > needed + JOURNAL_SLACK_BYTES:
            self.renew_journal(segment)

    def close(self) -> None:
        """After the segment and its region. Ends the lock."""
        self.memory.close()
        if self._fd >= 0:  # by word: the engine may still have a duplicate, which would keep it
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        for fd in (self._journal_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._journal_fd = self._fd = -1
