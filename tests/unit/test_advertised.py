"""A host that nobody knows is told at start, not found out by those who cannot reach it."""

from __future__ import annotations

import socket

import pytest

from mooncake_py.transfer.advertised import resolve_or_warn


def test_c07_an_advertised_host_that_is_not_known_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(host: str, *_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for known in ("127.0.0.1", "[::1]"):
        resolve_or_warn(known)
    assert not caplog.records
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    resolve_or_warn("nosuch.invalid")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "--advertise nosuch.invalid" in line
    assert "Remedy: " in line
