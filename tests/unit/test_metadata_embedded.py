"""The SQLite store: the battery, and what is peculiar to a file."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from mooncake_py.errors import MasterUnavailable
from mooncake_py.master.embedded import EmbeddedStore
from tests.conformance.metadata_battery import MetadataBattery


class TestEmbedded(MetadataBattery):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "deep" / "er" / "cluster.db"

    def open_store(self) -> EmbeddedStore:
        return EmbeddedStore(str(self.path))


def _filled(path: Path, records: list[bytes]) -> None:
    store = EmbeddedStore(str(path))
    store.load()
    store.append(records)
    store.close()


def test_a_damaged_record_is_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "master.db"
    _filled(path, [b"one", b"two", b"three"])
    with sqlite3.connect(path) as db:
        db.execute("UPDATE records SET payload = ? WHERE payload = ?", (b"twO", b"two"))
    store = EmbeddedStore(str(tmp_path))
    loaded = store.load()
    store.close()
    assert (loaded.records, loaded.corrupt) == ([b"one", b"three"], 1)


def test_a_damaged_snapshot_falls_back_to_the_one_before(tmp_path: Path) -> None:
    store = EmbeddedStore(str(tmp_path))
    store.load()
    store.write_snapshot(b"old", store.append([b"1"]))
    store.write_snapshot(b"new", store.append([b"2"]))
    store.append([b"3"])
    store.close()
    with sqlite3.connect(tmp_path / "master.db") as db:
        db.execute("UPDATE snapshots SET payload = ? WHERE payload = ?", (b"neW", b"new"))
    again = EmbeddedStore(str(tmp_path))
    loaded = again.load()
    again.close()
    assert (loaded.snapshot, loaded.records, loaded.corrupt) == (b"old", [b"2", b"3"], 1)


def test_snapshots_bound_the_file(tmp_path: Path) -> None:
    store = EmbeddedStore(str(tmp_path))
    store.load()
    for _ in range(20):
        store.write_snapshot(b"s" * 1000, store.append([b"r" * 1000] * 10))
    store.close()
    with sqlite3.connect(tmp_path / "master.db") as db:
        assert db.execute("SELECT count(*) FROM snapshots").fetchone() == (2,)
        assert db.execute("SELECT count(*) FROM records").fetchone() == (10,)


def test_the_file_is_private_because_it_holds_the_secret(tmp_path: Path) -> None:
    _filled(tmp_path / "master.db", [b"x"])
    assert stat.S_IMODE(os.stat(tmp_path / "master.db").st_mode) == 0o600


def test_memory_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = EmbeddedStore("memory")
    store.load()
    assert store.append([b"a", b"b"]) == 2
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_kind_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are somebody's notes, longer than a header of SQLite would be\n" * 20)
    before = path.read_text()
    with pytest.raises(MasterUnavailable, match=r"notes\.txt cannot be opened"):
        EmbeddedStore(str(path)).load()
    assert path.read_text() == before


def test_a_later_layout_is_refused(tmp_path: Path) -> None:
    _filled(tmp_path / "master.db", [b"x"])
    with sqlite3.connect(tmp_path / "master.db") as db:
        db.execute("UPDATE meta SET value = ? WHERE name = 'layout'", (b"2",))
    with pytest.raises(MasterUnavailable, match="layout 2"):
        EmbeddedStore(str(tmp_path)).load()


def test_a_failed_append_is_not_half_done(tmp_path: Path) -> None:
    store = EmbeddedStore(str(tmp_path))
    store.load()
    store.append([b"before"])
    with sqlite3.connect(tmp_path / "master.db") as other:
        other.execute("BEGIN IMMEDIATE")  # somebody with a shell holds the file
        with pytest.raises(MasterUnavailable, match="locked"):
            store.append([b"lost", b"lost too"])
        other.execute("ROLLBACK")
    store.append([b"after"])
    store.close()
    again = EmbeddedStore(str(tmp_path))
    assert again.load().records == [b"before", b"after"]
    again.close()


def test_f64_a_start_on_a_full_disk_says_to_make_room_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        _filled(folder / "master.db", [b"before"])
        ballast = folder / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(4096)) == 4096:
                pass
        for path in (folder / "master.db", folder / "another.db"):  # an old one and a new one
            with pytest.raises(MasterUnavailable) as refused:
                EmbeddedStore(str(path)).load()
            assert "make room on the disk" in str(refused.value)
        ballast.unlink()
        store = EmbeddedStore(str(folder / "master.db"))
        assert store.load().records == [b"before"]
        store.close()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
