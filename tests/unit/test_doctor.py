"""The self-check says what is missing and what to do about it."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import resource
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from mooncake_py.ops import doctor


def finding(part: str) -> doctor.Finding:
    return next(found for found in doctor.examine() if found.part == part)


def fail_with(error: Exception) -> object:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_what_is_missing_comes_with_a_remedy_and_what_is_there_does_not() -> None:
    for found in doctor.examine():
        assert bool(found.fix) != found.ok
        assert ("Remedy" in found.line()) != found.ok


def test_a85_a_core_that_does_not_load_is_a_failure_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib, "import_module", fail_with(ImportError("no core")))
    found = finding("native core")
    assert found.required
    assert found.line().startswith("MISSING  native core: does not load (no core). Remedy: build")


def test_a85_optional_parts_that_are_missing_are_reported_with_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = finding("torch")
    assert not found.required
    assert "pip install torch" in found.line()


def test_a_machine_without_memfd_or_ipv6_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", fail_with(OSError(38, "Function not implemented")))
    monkeypatch.setattr(socket.socket, "bind", fail_with(OSError(99, "Cannot assign address")))
    assert finding("shared memory").line().startswith("MISSING")
    assert "Cannot assign address" in finding("IPv6").found
    assert finding("IPv6").line().startswith("absent")


def test_little_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_limits", lambda: [1 << 20, 1 << 40])
    assert finding("free memory").found == "1.0 MiB"
    assert "--segment-bytes" in finding("free memory").fix


def test_what_rdma_and_files_need_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ctypes, "CDLL", fail_with(OSError("no such file")))
    assert "apt install libibverbs1" in finding("RDMA").fix
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(doctor, "_RDMA_DEVICES", tmp_path)
    assert finding("RDMA").found == "libibverbs loads; no device"
    (tmp_path / "mlx5_0").touch()
    assert finding("RDMA").found.endswith("devices: mlx5_0")
    for limit, ok in ((8 << 20, False), (resource.RLIM_INFINITY, True)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert finding("locked memory").ok is ok
    monkeypatch.setattr(doctor, "_SHM", tmp_path / "not" / "there")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for free, ok in ((1 << 20, False), (1 << 40, True)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        assert (finding("/dev/shm").ok, finding("state folder").ok) == (ok, ok)
    assert str(tmp_path) in finding("state folder").found
