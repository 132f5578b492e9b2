"""The master's native quick answers (native/abi/door.h) as a Python object."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from mooncake_py._native import ffi, lib
from mooncake_py._native.check import check
from mooncake_py._native.keys import NativeKeys

ABSENT: int = lib.MC_DOOR_ABSENT
WRITING: int = lib.MC_DOOR_WRITING
MAY_EXISTS: int = lib.MC_DOOR_EXISTS
MAY_COMMIT: int = lib.MC_DOOR_COMMIT
_NUMBERS = ffi.typeof("uint64_t[]")


class Kinds(NamedTuple):
    """The messages that are answered, and their limits."""

    exists: int
    commit: int
    keys_max: int
    key_max_bytes: int
    tenant_max_bytes: int


class Commit(NamedTuple):
    """A commit that was answered."""

    tenant: bytes
    key: bytes
    generation: int


class NativeDoor:
    """One thread's, which is that of `keys`. `engine` is a native handle that outlives this object.
    Raises OutOfSpace from `set` and `reserve`: then the mirror is not right any more and this must
    be closed."""

    def __init__(self, engine: Any, keys: NativeKeys, kinds: Kinds, secret: bytes) -> None:
        out = ffi.new("mc_door **")
        native = ffi.new("mc_door_kinds *", kinds._asdict())
        check(lib.mc_door_open(engine, keys.handle, native, secret, out), "open door")
        self._handle = ffi.gc(out[0], lib.mc_door_close)
        self._engine = engine
        self._keys = keys
        self._counts = ffi.new("mc_door_counts *")
        self._log = (
            ffi.new("mc_door_commit **"), ffi.new("uint64_t *"), ffi.new("uint8_t **"),
            ffi.new("uint64_t *"), ffi.new("uint64_t *"),
        )  # fmt: skip

    def set(self, tenant: bytes, keys: Sequence[bytes], states: bytes) -> None:
        """What these keys of a tenant are from now on: ABSENT (complete, perhaps) or WRITING
        each."""
        ends = ffi.from_buffer(_NUMBERS, array("Q", accumulate(map(len, keys))))
        text = b"".join(keys)
        status = lib.mc_door_set(self._handle, tenant, len(tenant), text, ends, len(keys), states)
        check(status, "mirror keys")

    def reserve(self, tenant: bytes, generations: Sequence[int], expires: Sequence[int]) -> None:
        """These reservations of a tenant end then (ms), or have ended (0)."""
        names = ffi.from_buffer(_NUMBERS, array("Q", generations))
        ends = ffi.from_buffer(_NUMBERS, array("Q", expires))
        count = len(generations)
        status = lib.mc_door_reserve(self._handle, tenant, len(tenant), names, ends, count)
        check(status, "mirror reservations")

    def serve(
        self, now: tuple[int, int], may: int, linger_ms: int, timeout_ms: int, out: Any
    ) -> int:
        """As the engine's receive, but that quick answers are given on the way. `now`: term and
        time in ms."""
        return int(lib.mc_door_serve(self._handle, *now, may, linger_ms, timeout_ms, out))

    def take(self) -> tuple[list[Commit], int]:
        """Commits that were answered since the last time, and when (ms) the first one was."""
        commits, count, text, nbytes, at_ms = self._log
        lib.mc_door_log(self._handle, commits, count, text, nbytes, at_ms)
        if not count[0]:
            return [], 0
        words = ffi.buffer(text[0], nbytes[0])[:]
        found = []
        for row in ffi.unpack(commits[0], count[0]):
            key = row.text + row.tenant_nbytes
            tenant = words[row.text : key]
            found.append(Commit(tenant, words[key : key + row.key_nbytes], row.generation))
        lib.mc_door_clear(self._handle)
        return found, at_ms[0]

    def counts(self) -> Any:
        """An mc_door_counts, until the next call."""
        lib.mc_door_count(self._handle, self._counts)
        return self._counts
