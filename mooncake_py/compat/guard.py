"""A wrong call gets its answer, whatever was wrong about it: types, lengths, addresses.

    @guarded({"put": one, "batch_put_from": per_key, "get": nothing(b"")})
    class Store: ...

The named methods answer in the shape of their results instead of raising for arguments that cannot
be right. What is left to Python is a call that does not fit the signature at all.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mooncake_py.compat import codes
from mooncake_py.errors import UsageError

log = logging.getLogger(__name__)

C = TypeVar("C")
Shape = Callable[..., Any]  # from the call's arguments to its answer

WRONG = (
    TypeError, ValueError, OverflowError, AttributeError, LookupError, BufferError, UsageError,
    RecursionError,
)  # fmt: skip


def one(*_: Any, **__: Any) -> int:
    return codes.INVALID_PARAMS


def per_key(keys: Any = (), *_: Any, **__: Any) -> list[int]:
    return [codes.INVALID_PARAMS] * count_of(keys)


def nothing(answer: Any) -> Shape:
    """The same every time; of a list, one a key."""

    def shape(keys: Any = (), *_: Any, **__: Any) -> Any:
        return answer * count_of(keys) if isinstance(answer, list) else answer

    return shape


def count_of(keys: Any) -> int:
    try:
        return len(keys)
    except TypeError:
        return 0


def guarded(shapes: Mapping[str, Shape]) -> Callable[[type[C]], type[C]]:
    def wrap(kind: type[C]) -> type[C]:
        for name, shape in shapes.items():
            setattr(kind, name, _guard(getattr(kind, name), shape))
        return kind

    return wrap


def _guard(call: Callable[..., Any], shape: Shape) -> Callable[..., Any]:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def answered(self: Any, *args: Any, **named: Any) -> Any:
        try:
            return call(self, *args, **named)
        except WRONG as error:
            bound = signature.bind(self, *args, **named)  # TypeError: no call of this method at all
            log.warning("%s: wrong arguments: %s: %s", call.__name__, type(error).__name__, error)
            return shape(*list(bound.arguments.values())[1:])

    return answered
