"""Messages: small bytes between engines, with or without a reply."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """A received message. `correlation` is 0 when nobody waits for a reply."""

    peer_id: int
    kind: int
    correlation: int
    payload: bytes
