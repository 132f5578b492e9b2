"""Removals that take several messages, of which some could not be told to a node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_py.clock import Deadline, ManualClock
from mooncake_py.errors import PeerUnreachable
from mooncake_py.master.client import MasterClient
from mooncake_py.wire.v1 import master_pb2 as pb

KEYS = [b"a", b"b", b"c", b"d", b"e"]


class Client(MasterClient):
    """Messages of two keys. The master takes `silent` tries until it can answer for key a."""

    def __init__(self, silent: int) -> None:
        self._clock = clock = ManualClock()
        self._info = SimpleNamespace(batch_max_keys=2)  # type: ignore[assignment]
        self._pause = SimpleNamespace(wait=lambda s: clock.advance(int(s * 1_000)))  # type: ignore[assignment]
        self.silent = silent
        self.sent: list[bytes] = []

    def _call(self, method: Any, request: Any, deadline: Deadline, *, check: bool = True) -> Any:
        assert not check, "an error would be raised, and what was done not be known"
        self.sent += request.keys
        reply = pb.RemoveReply(status=bytes(len(request.keys)), removed=len(request.keys))
        if b"a" in request.keys and self.silent:
            self.silent -= 1
            reply.outcome.code = PeerUnreachable.code
        return reply


def test_a08_a_silent_node_holds_up_its_own_keys_only() -> None:
    client = Client(silent=3)
    assert client.remove("default", KEYS, timeout_ms=10_000).status.tolist() == [0] * 5
    assert client.sent == [*KEYS, *[b"a", b"b"] * 3]


def test_a08_what_cannot_be_told_is_an_error_after_everything_is_removed() -> None:
    client = Client(silent=10_000)
    with pytest.raises(PeerUnreachable):
        client.remove("default", KEYS, timeout_ms=1_000)
    assert set(client.sent) == set(KEYS)
    assert client.sent[:5] == KEYS
