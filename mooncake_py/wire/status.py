"""How a call as a whole ended: `Outcome` of every reply, to and from the error tree."""

from __future__ import annotations

from typing import Any

from mooncake_py.errors import OK, InternalError, MooncakeError, error_of
from mooncake_py.wire.lane import Method
from mooncake_py.wire.v1 import master_pb2 as pb


def refusal(method: Method, error: MooncakeError, term: int) -> bytes:
    """The reply of a call that is refused as a whole."""
    leader = str(error.context.get("leader", ""))
    outcome = pb.Outcome(code=error.code, cause=error.cause, term=term, leader=leader)
    return method.reply(outcome=outcome).SerializeToString()


def unfinished(method: Method, payload: bytes, error: MooncakeError) -> bytes:
    """The reply of a call that was carried out, with an error about what is still to come of it."""
    reply: Any = method.reply.FromString(payload)
    reply.outcome.code, reply.outcome.cause = error.code, error.cause
    raw: bytes = reply.SerializeToString()
    return raw


def check(outcome: pb.Outcome, **context: object) -> None:
    """Raise what the master refused the call with."""
    if outcome.code == OK:
        return
    if outcome.leader:
        context["leader"] = outcome.leader
    raise error_of(outcome.code, outcome.cause, **context)


def broken(method: Method, cause: str) -> InternalError:
    """The other side sent something that is no message of ours."""
    return InternalError(f"{method.name}: {cause}")
