"""Calls that keep the interpreter's lock: `native/python/held.c` says which and why.

The module lies in the same library as the binding, under a second name.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable
from typing import Any

from mooncake_py._native import _mooncake, ffi

_NAME = "mooncake_py._native._held"

# (engine, peer id, rows) -> status; NOT_NOW: nothing was done, the call would wait
transfer_now: Callable[[int, int, Any], int]
NOT_NOW = 1


def _load() -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, _mooncake.__file__)
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def number_of(pointer: Any) -> int:
    """The engine's handle for `transfer_now`; whoever calls holds the handle itself."""
    return int(ffi.cast("uintptr_t", pointer))


transfer_now = _load().transfer_now
