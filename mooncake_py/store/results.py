"""Memory of large results, used again once nobody can see the result any more.

A new bytes object of 64 MiB costs more in page faults than the copy into it. So the client keeps
the large ones that it has handed out, up to KEPT_BYTES of them, the latest used; a get of the same
length writes into one of those, if it is free.

Rules.
* Free means: the reference of this module is the only one. A bytes object is immutable and has its
  bytes inside, so whoever can see them (a name, a slice by memoryview, an array over it, a call in
  another thread) holds a reference. The count is read under the interpreter's lock; no interpreter
  without one uses this module.
* Nobody can come by a reference to a free one: it is in no list but this module's.
* The hash that the object remembers is of its former content, and is forgotten.
* How this interpreter lays out and counts is found out by trying, at import. Where it is otherwise,
  every result is new.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import Any

from mooncake_py._native import ffi, lib

LARGE_BYTES = 4 << 20  # from here on page faults cost more than the copy
KEPT_BYTES = 256 << 20

_BYTES = ffi.typeof("char[]")
_ADDRESS = ffi.typeof("uintptr_t")
_HASH = ffi.typeof("intptr_t *")
_NO_HASH = -1


def _hash_of(pointer: Any) -> Any:
    """Where an object keeps its hash: right before its bytes."""
    return ffi.cast(_HASH, pointer) - 1


def _references(kept: deque[bytes], at: int) -> int:
    return sys.getrefcount(kept[at])


def _alone() -> int:
    """What `_references` counts for an object that only the deque holds; 0: it cannot be told."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return 0
    kept = deque([bytes(range(64))])
    count = _references(kept, 0)
    seen = memoryview(kept[0])
    told = _references(kept, 0) > count
    seen.release()
    pointer = ffi.from_buffer(_BYTES, kept[0])
    before, remembered = _hash_of(pointer)[0], hash(kept[0])
    known = before == _NO_HASH and _hash_of(pointer)[0] == remembered
    return count if told and known else 0


_ALONE = _alone()


class ResultPool:
    """Of one client. Thread-safe."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._kept: deque[bytes] = deque()  # the latest used last
        self._nbytes = 0

    def new(self, nbytes: int) -> bytes:
        """An object of this length with any content, for the caller to write before anybody else
        sees it. From LARGE_BYTES on."""
        if not _ALONE or nbytes > self._kept_bytes:
            return _fresh(nbytes)
        with self._lock:
            found = self._take(nbytes)
            if found is None:
                found = _fresh(nbytes)
                self._nbytes += nbytes
            self._kept.append(found)
            while self._nbytes > self._kept_bytes:
                self._nbytes -= len(self._kept.popleft())
        return found

    def _take(self, nbytes: int) -> bytes | None:
        for at in range(len(self._kept)):
            if len(self._kept[at]) == nbytes and _references(self._kept, at) == _ALONE:
                found = self._kept[at]
                del self._kept[at]
                _hash_of(ffi.from_buffer(_BYTES, found))[0] = _NO_HASH
                return found
        return None

    def clear(self) -> None:
        """Give up what is free, and lose sight of what is not."""
        with self._lock:
            self._kept.clear()
            self._nbytes = 0


def _fresh(nbytes: int) -> bytes:
    new = bytes(nbytes)
    address = int(ffi.cast(_ADDRESS, ffi.from_buffer(_BYTES, new)))
    lib.mc_memory_expect(address, nbytes)
    return new
