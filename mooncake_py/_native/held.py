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
# As native/abi/keys.h has them, with the keys' handle as a number first. Slots are int64, but those
# that are found int32.
keys_set: Callable[[int, int, int, bytes], int]
keys_enter: Callable[[int, int], int]
keys_leave: Callable[[int, int], int]
keys_clear: Callable[[int, int], int]
keys_find: Callable[[int, int, bytes], int]
keys_find_many: Callable[[int, int, Any, Any], None]
keys_text: Callable[[int, int], bytes | None]
keys_texts: Callable[[int, Any], list[bytes | None]]
links_move: Callable[[Any, Any, Any, int], None]


def _load() -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, _mooncake.__file__)
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def number_of(pointer: Any) -> int:
    """A handle for such a call; whoever calls holds the handle itself."""
    return int(ffi.cast("uintptr_t", pointer))


_module = _load()
transfer_now = _module.transfer_now
keys_set, keys_enter, keys_leave = _module.keys_set, _module.keys_enter, _module.keys_leave
keys_clear, keys_text, keys_texts = _module.keys_clear, _module.keys_text, _module.keys_texts
keys_find, keys_find_many = _module.keys_find, _module.keys_find_many
links_move = _module.links_move
