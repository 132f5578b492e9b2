"""Is the host known by which others are to reach this process? Looked up once, at start."""

from __future__ import annotations

import logging
import socket
import threading

log = logging.getLogger(__name__)


def warn_of_unknown_host(host: str) -> None:
    """A line if this machine cannot resolve it. Others may, so it is no error. In the background: a
    name server that is silent holds nothing up."""
    if host:
        threading.Thread(target=resolve_or_warn, args=(host,), daemon=True).start()


def resolve_or_warn(host: str) -> None:
    try:
        socket.getaddrinfo(host.strip("[]"), None)
    except (OSError, UnicodeError) as error:
        log.warning(
            "--advertise %s: this machine knows no such host (%s), and whoever does not cannot "
            "reach this daemon. Remedy: give a name or an address that the others can resolve",
            host, error,
        )  # fmt: skip
