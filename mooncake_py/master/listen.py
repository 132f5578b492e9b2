"""Addresses to listen on: resolved once, and known to be free before anything else begins."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from mooncake_py.config import join_address, listen_remedy, split_address
from mooncake_py.errors import MasterUnavailable, UsageError


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen, resolved: a literal host, so that nothing listens on a second one."""

    family: socket.AddressFamily
    host: str
    port: int

    def __str__(self) -> str:
        return join_address(self.host, self.port)


def listen_address(text: str, option: str) -> Address:
    """Resolve `HOST:PORT` and make sure that it can be listened on.

    UsageError: no such name or form. MasterUnavailable: somebody else has it, or it is not ours.
    """
    host, port = split_address(text)
    if not host:
        raise UsageError(f"{option} {text!r} names no host", remedy="write 0.0.0.0 for all")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"{option} {text!r}: {error.strerror}") from None
    family, _, _, _, where = found[0]
    address = Address(family, str(where[0]), port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
        except OSError as error:
            raise cannot_listen(option, address, error) from None
    return address


def cannot_listen(option: str, address: Address, error: OSError) -> MasterUnavailable:
    return MasterUnavailable(
        f"{option} {address}: {error.strerror}",
        remedy=listen_remedy(option, error.errno or 0),
    )
