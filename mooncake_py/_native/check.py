"""From native statuses to the error tree."""

from __future__ import annotations

from mooncake_py._native import ffi, lib
from mooncake_py.errors import MooncakeError, error_of


def last_error() -> str:
    """This thread's last native failure in words."""
    return bytes(ffi.string(lib.mc_last_error())).decode(errors="replace")


def failure(status: int, what: str, **context: object) -> MooncakeError:
    """The error for a negative status of the call that this thread made last."""
    words = last_error()
    return error_of(status, f"{what}: {words}" if words else what, **context)


def check(status: int, what: str, **context: object) -> int:
    """`status` when it is not negative, else raise what it means. `what` names the call."""
    if status < 0:
        raise failure(status, what, **context)
    return status
