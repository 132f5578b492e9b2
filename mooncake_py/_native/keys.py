"""The packed keys of complete objects (native/abi/keys.h) as a Python object.

A pure data structure: it asks for no time and waits for nothing, so the catalog's deciding modules
may hold it. The calls keep the interpreter's lock (held.py), so that they cost little more than a
dictionary's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mooncake_py._native import ffi, held, lib
from mooncake_py._native.check import check

MISSING = -1


class NativeKeys:
    """Slots with their keys, and back. One thread's.

    The hot calls are the native ones themselves. `set` and `enter` answer a status below 0 when
    they failed, and nothing has changed then; `fail` raises what it means (OutOfSpace, UsageError).
    """

    __slots__ = ("_number", "clear", "enter", "find", "handle", "leave", "names", "set", "text")

    def __init__(self, capacity: int) -> None:
        out = ffi.new("mc_keys **")
        check(lib.mc_keys_open(capacity, out), "open keys")
        self.handle: Any = ffi.gc(out[0], lib.mc_keys_close)
        number = self._number = held.number_of(out[0])
        names = ffi.buffer(lib.mc_keys_names(self.handle), 4 * capacity)
        # 0 where a slot has no key. As long as this object.
        self.names: NDArray[np.uint32] = np.frombuffer(names, dtype="u4")
        # (slot, tenant, key): give a slot without a key this one, of at most 8192 bytes.
        self.set: Callable[[int, int, bytes], int] = partial(held.keys_set, number)
        self.clear: Callable[[int], int] = partial(held.keys_clear, number)
        # The slot is found by its key: 1; 0: instead of another one.
        self.enter: Callable[[int], int] = partial(held.keys_enter, number)
        # The slot is not found any more: 1; 0: it was not.
        self.leave: Callable[[int], int] = partial(held.keys_leave, number)
        # (tenant, key): the slot, or MISSING.
        self.find: Callable[[int, bytes], int] = partial(held.keys_find, number)
        # The slot's key.
        self.text: Callable[[int], bytes | None] = partial(held.keys_text, number)

    def fail(self, status: int) -> NoReturn:
        check(status, "keep a key")
        raise AssertionError(status)

    def name_tenant(self, tenant: int, name: bytes) -> None:
        """The tenant with this number has this name, and no other one has it."""
        check(lib.mc_keys_name_tenant(self.handle, tenant, name, len(name)), "name tenant")

    def forget_tenant(self, tenant: int) -> None:
        lib.mc_keys_forget_tenant(self.handle, tenant)

    def find_many(self, tenant: int, keys: Sequence[bytes]) -> NDArray[np.int32]:
        """A slot, or MISSING, a key. Several wait for memory together, so this is faster."""
        slots = np.empty(len(keys), dtype=np.int32)
        some = keys if isinstance(keys, (list, tuple)) else list(keys)
        held.keys_find_many(self._number, tenant, some, slots)
        return slots

    def texts(self, slots: NDArray[np.int64]) -> list[bytes | None]:
        """The keys of these slots."""
        return held.keys_texts(self._number, np.ascontiguousarray(slots))


def move_to_end(
    following: NDArray[Any], previous: NDArray[Any], slots: NDArray[np.int64], head: int
) -> None:
    """Of doubly linked lists in two columns of uint32: these nodes become the last ones of the list
    with this head, one after the other."""
    held.links_move(following, previous, slots, head)
