"""Pull and commit in one native call: the commit leaves only for what the node has sealed."""

from __future__ import annotations

import pytest

from mooncake_py._native.puts import Sent, put_reserved
from mooncake_py.transfer import EngineOptions, Message, TransferEngine
from mooncake_py.wire.node import PullRequest

PULL, COMMIT, T = 7, 8, 10_000
ROWS = 3
SEALED = bytes(4 + ROWS)  # of the reply: the code, and a status a row


@pytest.mark.parametrize(
    ("said", "committed"),
    [
        (SEALED, True),
        (SEALED[:-1], False),
        (SEALED + b"\0", False),
        (bytes(4), False),
        (b"", False),
        (b"\1\0\0\0", False),
        (bytes(4) + b"\0\x1f\0", False),
    ],
    ids=["all", "one row less", "one row more", "no row", "nothing", "refused", "one failed"],
)
def test_f06_what_a_node_has_not_sealed_row_by_row_is_not_committed(
    said: bytes, committed: bool
) -> None:
    asked: list[int] = []

    def answer(message: Message) -> None:
        asked.append(message.kind)
        message.reply(said if message.kind == PULL else b"committed")

    pull = PullRequest(1, bytes(64 * ROWS), b"", 0, bytes(8 * ROWS), b"", T).encode()
    with (
        TransferEngine(EngineOptions(listen="127.0.0.1:0")) as there,
        TransferEngine(EngineOptions()) as here,
    ):
        there.on_message(answer)
        peer = here.open(there.address, timeout_ms=T).id
        status, pulled, reply = put_reserved(
            here.native, Sent(peer, PULL, pull), Sent(peer, COMMIT, b"commit"), T
        )
        assert (status, pulled) == (0, said)
        assert reply == (b"committed" if committed else None)
        assert asked == [PULL, COMMIT] if committed else [PULL]
