"""Peers by name. An engine needs none to work: "host:port" is enough. With one, `open("prefill-3")`
looks the name up each time it connects, so that a peer may move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mooncake_py.errors import PeerUnreachable, UsageError


class Directory(Protocol):
    """Where peers are. Called by the thread that opens; may block; any thread."""

    def address_of(self, name: str) -> str | None:
        """ "host:port" of the engine with this name, or None when it is not known (now)."""


class StaticDirectory:
    """Names that are known beforehand: a dictionary of name to "host:port"."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = dict(addresses)

    def address_of(self, name: str) -> str | None:
        return self._addresses.get(name)


def resolve(name: str, directory: Directory | None) -> str:
    """The address to connect to: `name` itself when it has a port. Raises UsageError (no port and
    no directory) and PeerUnreachable (the directory does not know it)."""
    if ":" in name or directory is None:
        if ":" not in name:
            raise UsageError("not host:port, and the engine has no directory of names", peer=name)
        return name
    address = directory.address_of(name)
    if address is None:
        raise PeerUnreachable("the directory knows no peer of this name", peer=name)
    return address
