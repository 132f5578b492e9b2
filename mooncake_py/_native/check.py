"""From native statuses to the error tree, and from signals to exceptions.

A signal that interrupts a wait of the core runs its Python handler there (`mc_on_signal`), on the
main thread. What the handler raises, such as KeyboardInterrupt, ends the wait and is raised here.
"""

from __future__ import annotations

from types import TracebackType

from mooncake_py._native import ffi, lib
from mooncake_py.errors import MooncakeError, error_of

_raised: list[BaseException] = []  # by a handler, and not yet here


def _keep(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    _raised.append(error if error is not None else kind())


@ffi.def_extern(error=1, onerror=_keep)  # type: ignore[untyped-decorator]  # cffi has no types
def mc_python_signal() -> int:
    """Handlers run when a Python function begins: this one."""
    return 0


lib.mc_on_signal(lib.mc_python_signal)


def last_error() -> str:
    """This thread's last native failure in words."""
    return bytes(ffi.string(lib.mc_last_error())).decode(errors="replace")


def failure(status: int, what: str, **context: object) -> MooncakeError:
    """The error for a negative status of the call that this thread made last. Raises what the
    handler of a signal has raised in it."""
    if status == lib.MC_E_SIGNAL and _raised:
        raise _raised.pop()
    words = last_error()
    return error_of(status, f"{what}: {words}" if words else what, **context)


def check(status: int, what: str, **context: object) -> int:
    """`status` when it is not negative, else raise what it means. `what` names the call."""
    if status < 0:
        raise failure(status, what, **context)
    return status
