"""Which object has which key: the packed keys of complete objects, as the verbs ask for them.

A key lies once (`_native/keys.py`), beside its slot's columns (`SlotKeys`), and a tenant's index
leads to it (`CompleteKeys`). The index decides no more than a dictionary would, and its own order
is never seen: iteration follows the slots. Not thread-safe; pure.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from mooncake_py._native.keys import MISSING, NativeKeys

_T = TypeVar("_T")
_FEW = 4  # keys that are looked up one by one


class SlotKeys:
    """Keys by slot, as a list has them; None where no object is. `len`: slots that were used."""

    __slots__ = ("_native", "used")

    def __init__(self, native: NativeKeys) -> None:
        self._native = native
        self.used = 0

    def __len__(self) -> int:
        return self.used

    def __getitem__(self, slot: int) -> bytes | None:
        return self._native.text(slot)

    def many(self, slots: Sequence[int] | NDArray[np.int64]) -> list[bytes | None]:
        """The keys of these slots."""
        return self._native.texts(np.asarray(slots, dtype=np.int64))

    def live(self, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Slots of this range that have a key, in order."""
        stop = self.used if stop is None else min(stop, self.used)
        found = np.flatnonzero(self._native.names[start:stop])
        return found + start


class CompleteKeys(Mapping[bytes, int]):
    """A tenant's keys and their slots."""

    __slots__ = ("_count", "_native", "_slots", "_tenant")

    def __init__(self, native: NativeKeys, slots: SlotKeys, tenant: int) -> None:
        self._native = native
        self._slots = slots
        self._tenant = tenant
        self._count = 0

    def enter(self, slot: int) -> None:
        """The slot is found by its key, instead of any other one."""
        entered = self._native.enter(slot)
        if entered < 0:
            self._native.fail(entered)
        self._count += entered

    def leave(self, slot: int) -> bool:
        """The slot is not found any more; False: it was not."""
        left = self._native.leave(slot)
        self._count -= left
        return left > 0

    def find_many(self, keys: Sequence[bytes]) -> NDArray[np.int32]:
        """A slot a key; -1 where there is none."""
        return self._native.find_many(self._tenant, keys)

    def has_any(self, keys: Sequence[bytes]) -> bool:
        if len(keys) < _FEW:
            return any(key in self for key in keys)
        return bool((self.find_many(keys) != MISSING).any())

    def has_each(self, keys: Sequence[bytes]) -> bytes:
        """0 or 1 a key."""
        if len(keys) < _FEW:
            return bytes([key in self for key in keys])
        present: bytes = (self.find_many(keys) != MISSING).tobytes()
        return present

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._native.find(self._tenant, key) != MISSING

    def __getitem__(self, key: bytes) -> int:
        slot = self._native.find(self._tenant, key)
        if slot == MISSING:
            raise KeyError(key)
        return slot

    @overload
    def get(self, key: bytes) -> int | None: ...
    @overload
    def get(self, key: bytes, default: int | _T) -> int | _T: ...
    def get(self, key: bytes, default: object = None) -> object:
        slot = self._native.find(self._tenant, key)
        return default if slot == MISSING else slot

    def __iter__(self) -> Iterator[bytes]:
        """In the order of slots. Cost: all slots, and for `items` and `values` likewise."""
        return iter([key for key, _ in self._entries()])

    def items(self) -> ItemsView[bytes, int]:
        return dict(self._entries()).items()

    def values(self) -> ValuesView[int]:
        return dict(self._entries()).values()

    def _entries(self) -> Iterator[tuple[bytes, int]]:
        slots = self._slots.live()
        keys = self._slots.many(slots)
        for slot, key in zip(slots.tolist(), keys, strict=True):
            if key is not None and self._native.find(self._tenant, key) == slot:
                yield key, slot
