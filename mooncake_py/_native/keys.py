"""The packed keys of complete objects (native/abi/keys.h) as a Python object.

A pure data structure: it asks for no time and waits for nothing, so the catalog's deciding modules
may hold it. The calls keep the interpreter's lock (held.py), so that they cost little more than a
dictionary's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_py._native import ffi, held, lib
from mooncake_py._native.check import check

MISSING = -1


class NativeKeys:
    """Slots with their keys, and back. One thread's. `set` and `enter` raise OutOfSpace."""

    __slots__ = ("_number", "handle", "names")

    def __init__(self, capacity: int) -> None:
        out = ffi.new("mc_keys **")
        check(lib.mc_keys_open(capacity, out), "open keys")
        self.handle: Any = ffi.gc(out[0], lib.mc_keys_close)
        self._number = held.number_of(out[0])
        names = ffi.buffer(lib.mc_keys_names(self.handle), 4 * capacity)
        # 0 where a slot has no key. As long as this object.
        self.names: NDArray[np.uint32] = np.frombuffer(names, dtype="u4")

    def name_tenant(self, tenant: int, name: bytes) -> None:
        """The tenant with this number has this name, and no other one has it."""
        check(lib.mc_keys_name_tenant(self.handle, tenant, name, len(name)), "name tenant")

    def forget_tenant(self, tenant: int) -> None:
        lib.mc_keys_forget_tenant(self.handle, tenant)

    def set(self, slot: int, tenant: int, key: bytes) -> None:
        """Give a slot without a key this one, of at most 8192 bytes."""
        status = held.keys_set(self._number, slot, tenant, key)
        if status:
            check(status, "keep key")

    def clear(self, slot: int) -> None:
        held.keys_clear(self._number, slot)

    def enter(self, slot: int) -> bool:
        """The slot is found by its key; False: instead of another one."""
        status = held.keys_enter(self._number, slot)
        if status < 0:
            check(status, "enter key")
        return status > 0

    def leave(self, slot: int) -> bool:
        """The slot is not found any more; False: it was not."""
        return held.keys_leave(self._number, slot) > 0

    def find(self, tenant: int, key: bytes) -> int:
        """The slot; or MISSING."""
        return held.keys_find(self._number, tenant, key)

    def find_many(self, tenant: int, keys: Sequence[bytes]) -> NDArray[np.int32]:
        """A slot, or MISSING, a key. Several wait for memory together, so this is faster."""
        slots = np.empty(len(keys), dtype=np.int32)
        some = keys if isinstance(keys, (list, tuple)) else list(keys)
        held.keys_find_many(self._number, tenant, some, slots)
        return slots

    def text(self, slot: int) -> bytes | None:
        """The slot's key."""
        return held.keys_text(self._number, slot)

    def texts(self, slots: NDArray[np.int64]) -> list[bytes | None]:
        """The keys of these slots."""
        return held.keys_texts(self._number, np.ascontiguousarray(slots))


def move_to_end(
    following: NDArray[Any], previous: NDArray[Any], slots: NDArray[np.int64], head: int
) -> None:
    """Of doubly linked lists in two columns of uint32: these nodes, none of them twice, become the
    last ones of the list with this head, in order."""
    held.links_move(following, previous, slots, head)
