"""The files of a segment that outlives its node: whose they are, from the first byte on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_py.errors import OutOfSpace, UsageError
from mooncake_py.store import segment_file
from mooncake_py.store.segment_file import SegmentFile

NBYTES = 1 << 20


def test_a24_a_first_start_that_finds_no_room_does_not_spoil_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "segment")

    def half(fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes // 2)
        raise OutOfSpace("no room for the rest")

    with monkeypatch.context() as patch:
        patch.setattr(segment_file, "FileMemory", half)
        with pytest.raises(OutOfSpace) as met:
            SegmentFile(path, 2 * NBYTES)
    assert f"--segment-file {path}" in str(met.value)
    assert "make room there or choose a smaller --segment-bytes" in str(met.value)
    assert not list(tmp_path.iterdir()), "what is left of it would fill a tmpfs"
    file = SegmentFile(path, NBYTES // 2)
    assert file.former is None
    file.close()


def test_a24_a_former_segment_survives_a_start_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "segment"
    file = SegmentFile(str(path), NBYTES)
    file.remember(replace(file.identity, node="a", segment_id=3))
    file.close()

    def none(fd: int, nbytes: int) -> None:
        raise OutOfSpace("no room")

    monkeypatch.setattr(segment_file, "FileMemory", none)
    with pytest.raises(OutOfSpace, match="no room for"):
        SegmentFile(str(path), 2 * NBYTES)
    assert path.stat().st_size == NBYTES


def test_a24_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "letter"
    foreign.write_bytes(b"to my mother")
    with pytest.raises(UsageError, match="is not the segment of a node"):
        SegmentFile(str(foreign), NBYTES)
    assert foreign.read_bytes() == b"to my mother"
