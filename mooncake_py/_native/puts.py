"""Pull and commit of a put in one native call (native/abi/puts.h)."""

from __future__ import annotations

from typing import Any, NamedTuple

from mooncake_py._native import ffi, lib
from mooncake_py._native.check import failure

_SENT = ffi.typeof("mc_put_message *")
_REPLY = ffi.typeof("mc_message *")


class Sent(NamedTuple):
    """A message for a peer of the engine."""

    peer: int
    kind: int
    payload: bytes


def put_reserved(
    engine: Any, pull: Sent, commit: Sent, timeout_ms: int
) -> tuple[int, bytes | None, bytes | None]:
    """(status, the node's reply, the master's): the commit is sent only if the node has sealed
    everything. A reply that is None did not come; the status, 0 or negative, is about what was sent
    last."""
    one, two = ffi.from_buffer(pull.payload), ffi.from_buffer(commit.payload)
    first = ffi.new(_SENT, (pull.peer, one, len(one), pull.kind))
    second = ffi.new(_SENT, (commit.peer, two, len(two), commit.kind))
    pulled, committed = ffi.new(_REPLY), ffi.new(_REPLY)
    status = lib.mc_put_reserved(engine, first, second, timeout_ms, pulled, committed)
    replies = _taken(pulled), _taken(committed)
    if status == lib.MC_E_SIGNAL:
        raise failure(status, "put")
    return status, *replies


def _taken(reply: Any) -> bytes | None:
    if reply.data == ffi.NULL:
        return None
    payload: bytes = ffi.buffer(reply.data, reply.nbytes)[:]
    lib.mc_message_free(reply)
    return payload
