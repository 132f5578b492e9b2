"""The metadata store that needs no server: one SQLite file in WAL mode.

One append is one transaction with `synchronous=FULL`, so one fsync; the writer thread of the
master gathers what came meanwhile into the next one. Every row carries a crc32, because a file
that SQLite opens may still hold what nobody wrote. The file has mode 0600: it holds the cluster's
secret. A second master is kept out by a lock on `PATH.lock` that ends with its process, however
that ends; locking the database itself would be undone by SQLite closing any of its descriptors.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import sqlite3
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mooncake_py.clock import Clock, SystemClock
from mooncake_py.errors import MasterUnavailable
from mooncake_py.master.metadata import Loaded, next_term

LAYOUT = 1
FILE_NAME = "master.db"  # inside a folder that was given as the path
SNAPSHOTS_KEPT = 2
WAL_BYTES_MAX = 64 << 20  # the log file is cut back to this after a checkpoint
MEMORY = "memory"
_ROOM_MIN_BYTES = 64 << 10  # with less than this on its disk nothing can be written
_PIECE_BYTES = 1 << 20  # of a snapshot, written at once

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    sequence INTEGER PRIMARY KEY, payload BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS snapshots (
    sequence INTEGER PRIMARY KEY, payload BLOB NOT NULL, crc INTEGER NOT NULL);
"""


def _is_full(error: Exception, folder: Path) -> bool:
    """Is it for want of room? SQLite has several words for it, "disk I/O error" among them."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
        return True
    try:
        left = os.statvfs(folder)
    except OSError:
        return False
    return left.f_bavail * left.f_frsize < _ROOM_MIN_BYTES


class EmbeddedStore:
    """A `MetadataStore` in a SQLite file, or in memory for tests and throw-away clusters.

    `path`: a file, a folder (then `master.db` inside it), or "memory". Nothing is opened before
    `load`.
    """

    def __init__(self, path: str, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._in_memory = path == MEMORY
        file = Path(path)
        self._path = file / FILE_NAME if path.endswith(os.sep) or file.is_dir() else file
        self._lock_fd = -1
        self._db: sqlite3.Connection | None = None
        self._sequence = 0

    def describe(self) -> str:
        return MEMORY if self._in_memory else str(self._path).replace(" ", "%20")

    def load(self) -> Loaded:
        try:
            if not self._in_memory:
                self._claim()
            self._db = self._open()
            return self._read(self._db)
        except (OSError, sqlite3.Error) as error:
            self.close()
            cause = error.strerror if isinstance(error, OSError) else str(error)
            remedy = (
                "make room on the disk that holds it, or give --metadata a path on another one; "
                "nothing in it was changed"
                if _is_full(error, self._path.parent)
                else "give --metadata a path that this user may write and that holds no other "
                "kind of file"
            )
            raise MasterUnavailable(
                f"the metadata store {self.describe()} cannot be opened: {cause}", remedy=remedy
            ) from error
        except MasterUnavailable:
            self.close()
            raise

    def append(self, records: Sequence[bytes]) -> int:
        first = self._sequence + 1
        rows = [(first + i, record, zlib.crc32(record)) for i, record in enumerate(records)]
        with self._transaction() as db:
            db.executemany("INSERT INTO records VALUES (?, ?, ?)", rows)
        self._sequence += len(rows)
        return self._sequence

    def raise_term(self, term: int) -> None:
        with self._transaction() as db:
            (before,) = db.execute("SELECT value FROM meta WHERE name = 'term'").fetchone()
            if term > int(before):
                db.execute("UPDATE meta SET value = ? WHERE name = 'term'", (b"%d" % term,))

    def write_snapshot(self, snapshot: bytes | bytearray, sequence: int) -> None:
        # Piece by piece: a statement that was given all of it would keep a copy until its next use.
        with self._transaction() as db, memoryview(snapshot) as whole:
            row = (sequence, len(whole), zlib.crc32(whole))
            db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, zeroblob(?), ?)", row)
            with db.blobopen("snapshots", "payload", sequence) as blob:
                for start in range(0, len(whole), _PIECE_BYTES):
                    blob.write(whole[start : start + _PIECE_BYTES])
            kept = db.execute(
                "SELECT sequence FROM snapshots ORDER BY sequence DESC LIMIT ?", (SNAPSHOTS_KEPT,)
            ).fetchall()
            oldest = kept[-1][0] if len(kept) == SNAPSHOTS_KEPT else 0
            db.execute("DELETE FROM snapshots WHERE sequence < ?", (oldest,))
            db.execute("DELETE FROM records WHERE sequence <= ?", (oldest,))

    def close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
            self._db = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # --- opening ----------------------------------------------------------------------------

    def _claim(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lock = f"{self._path}.lock"
        self._lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip()
            raise MasterUnavailable(
                f"the metadata store {self._path} is in use by another master (process {holder})",
                remedy="stop that master, or give this one another --metadata path",
            ) from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, str(os.getpid()).encode(), 0)
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def _open(self) -> sqlite3.Connection:
        target = ":memory:" if self._in_memory else str(self._path)
        db = sqlite3.connect(target, isolation_level=None, check_same_thread=False, timeout=1.0)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute(f"PRAGMA journal_size_limit={WAL_BYTES_MAX}")
        db.executescript(_SCHEMA)
        return db

    def _read(self, db: sqlite3.Connection) -> Loaded:
        meta: dict[str, bytes] = dict(db.execute("SELECT name, value FROM meta").fetchall())
        layout = int(meta.get("layout", b"%d" % LAYOUT))
        if layout != LAYOUT:
            raise MasterUnavailable(
                f"the metadata store {self.describe()} has layout {layout}, this release writes "
                f"{LAYOUT}",
                remedy="use the release that wrote it, or another --metadata path",
            )
        cluster_id = meta.get("cluster_id", uuid.uuid4().hex.encode())
        secret = meta.get("secret", secrets.token_bytes(32))
        now_ms = self._clock.now_ms()
        term = next_term(now_ms, int(meta.get("term", b"0")))
        born_ms = int(meta.get("born_ms", b"%d" % now_ms if "term" not in meta else b"0"))
        values = {
            "layout": b"%d" % LAYOUT, "cluster_id": cluster_id, "secret": secret,
            "term": b"%d" % term, "born_ms": b"%d" % born_ms,
        }  # fmt: skip
        with self._transaction():
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())
        snapshot, base, corrupt = self._newest_snapshot(db)
        records = []
        last = base
        rows = db.execute(
            "SELECT sequence, payload, crc FROM records WHERE sequence > ? ORDER BY sequence",
            (base,),
        )
        for sequence, payload, crc in rows:
            last = sequence
            if isinstance(payload, bytes) and zlib.crc32(payload) == crc:
                records.append(payload)
            else:
                corrupt += 1
        # Above everything that is in the file, also above what a damaged snapshot had covered.
        newest = db.execute("SELECT max(sequence) FROM snapshots").fetchone()[0] or 0
        self._sequence = max(last, newest)
        return Loaded(
            cluster_id.decode(), secret, term, snapshot, records, self._sequence, corrupt, born_ms
        )

    @staticmethod
    def _newest_snapshot(db: sqlite3.Connection) -> tuple[bytes | None, int, int]:
        """The newest undamaged snapshot, its sequence, and how many damaged ones were met."""
        corrupt = 0
        query = "SELECT sequence, payload, crc FROM snapshots ORDER BY sequence DESC"
        for sequence, payload, crc in db.execute(query):
            if isinstance(payload, bytes) and zlib.crc32(payload) == crc:
                return payload, sequence, corrupt
            corrupt += 1
        return None, 0, corrupt

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._db
        if db is None:
            raise MasterUnavailable(f"the metadata store {self.describe()} is not open")
        try:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise MasterUnavailable(
                f"the metadata store {self.describe()} refused a write: {error}",
                remedy=("make room on" if _is_full(error, self._path.parent) else "look at")
                + " the disk that "
                "holds it; a running master goes on by itself once it can write again",
            ) from error
