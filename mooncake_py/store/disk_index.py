"""The index of a disk tier: one row an object, in SQLite, and the bytes of small objects.

The index is the truth: a file without a row is nobody's, a row is written after its file is in
place and deleted before the file is. SQLite in WAL mode with `synchronous=FULL`: one flush a
transaction, so callers bring batches. One connection writes, behind a lock; every reading thread
has its own, so no reader waits for a flush.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SMALL_MAX_BYTES = 32 << 10  # up to here an object is a row, beyond it is a file
_WAL_BYTES_MAX = 2 << 20  # the log file is cut back to this after a checkpoint
_WAL_PAGES = 250  # of 4 KiB, after which there is one
_BUSY_S = 5.0
_COLUMNS = "generation, tenant, key, length, crc, digest"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    generation INTEGER PRIMARY KEY, tenant TEXT NOT NULL, key BLOB NOT NULL,
    length INTEGER NOT NULL, crc INTEGER NOT NULL, digest BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS small (generation INTEGER PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS names (generation INTEGER PRIMARY KEY, told BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class DiskObject:
    """One object on the disk. `crc`: crc32c of its bytes, as computed when it was put; `digest`:
    of its key, as in the extent's header; `told`: what a master without records is told of it
    (disk_telling.py), given to `add` only."""

    generation: int
    tenant: str
    key: bytes
    length: int
    crc: int
    digest: bytes = bytes(16)
    told: bytes = b""

    @property
    def small(self) -> bool:
        return self.length <= SMALL_MAX_BYTES


class DiskIndex:
    """Raises sqlite3.Error when the file cannot be used. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._own = threading.local()
        self._readers: list[sqlite3.Connection] = []
        self._writer = self._connect()
        try:
            with self._transaction() as db:
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
        except BaseException:
            self._writer.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute(f"PRAGMA journal_size_limit={_WAL_BYTES_MAX}")
        db.execute(f"PRAGMA wal_autocheckpoint={_WAL_PAGES}")
        return db

    def _reader(self) -> sqlite3.Connection:
        db: sqlite3.Connection | None = getattr(self._own, "db", None)
        if db is None:
            db = self._own.db = self._connect()
            with self._lock:
                self._readers.append(db)
        return db

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            db = self._writer
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise

    # --- writing --------------------------------------------------------------------------------

    def add(self, batch: Sequence[tuple[DiskObject, bytes | None]]) -> None:
        """Objects, each with its bytes if it is small. All of them or none; durable on return."""
        rows = [(o.generation, o.tenant, o.key, o.length, o.crc, o.digest) for o, _ in batch]
        values = [(o.generation, value) for o, value in batch if value is not None]
        told = [(o.generation, o.told) for o, _ in batch if o.told]
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?)", rows)
            db.executemany("INSERT OR REPLACE INTO small VALUES (?, ?)", values)
            db.executemany("INSERT OR REPLACE INTO names VALUES (?, ?)", told)

    def delete(self, generations: Sequence[int]) -> None:
        """Durable on return. Unknown ones do no harm."""
        rows = [(generation,) for generation in generations]
        with self._transaction() as db:
            db.executemany("DELETE FROM objects WHERE generation = ?", rows)
            db.executemany("DELETE FROM small WHERE generation = ?", rows)
            db.executemany("DELETE FROM names WHERE generation = ?", rows)

    def keep(self, name: str, value: int) -> int:
        """A number of this folder: what it had, else `value` from now on."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (name, value))
            (kept,) = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return int(kept)

    def remember(self, cluster_id: str, term: int) -> None:
        """Where this disk is mounted. Durable on return."""
        with self._transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)",
                [("cluster", cluster_id.encode()), ("term", term)],
            )

    def sweep_names(self) -> None:
        """Names of objects that an older release has deleted go."""
        with self._transaction() as db:
            db.execute("DELETE FROM names WHERE generation NOT IN (SELECT generation FROM objects)")

    # --- reading --------------------------------------------------------------------------------

    def former(self) -> tuple[str, int]:
        """Cluster and term in which the disk was mounted last; ("", 0): never."""
        found = dict(self._reader().execute("SELECT name, value FROM meta").fetchall())
        return bytes(found.get("cluster", b"")).decode(), int(found.get("term", 0))

    def find(self, generation: int) -> DiskObject | None:
        row = (
            self._reader()
            .execute(
                f"SELECT {_COLUMNS} FROM objects WHERE generation = ?",
                (generation,),
            )
            .fetchone()
        )
        return None if row is None else DiskObject(*row)

    def value(self, generation: int) -> bytes | None:
        """The bytes of a small object."""
        row = (
            self._reader()
            .execute("SELECT value FROM small WHERE generation = ?", (generation,))
            .fetchone()
        )
        return None if row is None else bytes(row[0])

    def page(self, after: int, limit: int) -> list[DiskObject]:
        """Objects with generations behind `after`, ascending."""
        rows = self._reader().execute(
            f"SELECT {_COLUMNS} FROM objects WHERE generation > ? ORDER BY generation LIMIT ?",
            (after, limit),
        )
        return [DiskObject(*row) for row in rows.fetchall()]

    def told(self, after: int, limit: int) -> list[tuple[int, int, bytes, bytes]]:
        """(generation, length, digest, what is told of it) behind `after`, ascending; the last is
        empty for what an older release has written."""
        return (
            self._reader()
            .execute(
                "SELECT generation, length, digest, coalesce(told, x'') FROM objects"
                " LEFT JOIN names USING (generation)"
                " WHERE generation > ? ORDER BY generation LIMIT ?",
                (after, limit),
            )
            .fetchall()
        )

    def lengths(self) -> Iterator[tuple[int, int]]:
        """(generation, length) of every object, ascending."""
        yield from self._reader().execute(
            "SELECT generation, length FROM objects ORDER BY generation"
        )

    def small_generations(self) -> set[int]:
        return {row[0] for row in self._reader().execute("SELECT generation FROM small")}

    def close(self) -> None:
        with self._lock:
            for db in (*self._readers, self._writer):
                with suppress(sqlite3.Error):
                    db.close()
