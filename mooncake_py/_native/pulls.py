"""The node's native server of pull requests (native/abi/pulls.h) as a Python object."""

from __future__ import annotations

import threading
from typing import Any

from mooncake_py._native import ffi, lib
from mooncake_py._native.check import check
from mooncake_py._native.memory import SECRET_BYTES, digests
from mooncake_py.errors import UsageError

TIME_UNKNOWN = (1 << 63) - 1
ROW_BYTES = 64  # of an mc_extent_row


def grant_mac(segment_id: int, rows: bytes, secret: bytes) -> bytes:
    """The master's word for a set of extent rows of one segment (SipHash-2-4-128, 16 bytes, under
    the first 16 bytes of the segment's grant secret)."""
    return digests((segment_id.to_bytes(8, "little") + rows,), secret[:SECRET_BYTES])


def row_macs(segment_id: int, rows: bytes, secret: bytes) -> bytes:
    """Likewise, but for each row by itself: 16 bytes a row."""
    name = segment_id.to_bytes(8, "little")
    texts = [name + rows[at : at + ROW_BYTES] for at in range(0, len(rows), ROW_BYTES)]
    return digests(texts, secret[:SECRET_BYTES])


class PullServer:
    """Thread-safe. `engine` and `segment` are native handles that outlive this object; `close` only
    when no `serve` runs any more."""

    def __init__(self, engine: Any, segment: Any, base: int, kind: int) -> None:
        out = ffi.new("mc_pulls **")
        check(lib.mc_pulls_open(engine, segment, base, kind, out), "open pulls")
        self._handle: Any = out[0]
        self._lock = threading.Lock()

    def mount(self, segment_id: int, secret: bytes, name_secret: bytes) -> None:
        """Serve grants of this segment from now on; what is being copied is not sealed. Without a
        name secret objects keep no names."""
        names = name_secret[:SECRET_BYTES] if name_secret else ffi.NULL
        lib.mc_pulls_mount(self._live(), segment_id, secret[:SECRET_BYTES], names)

    def unmount(self) -> None:
        lib.mc_pulls_mount(self._live(), 0, ffi.NULL, ffi.NULL)

    def drain(self) -> None:
        """Take nothing new; what runs may end."""
        lib.mc_pulls_drain(self._live())

    def set_time(self, ahead_ms: int) -> None:
        """How far the master's clock is ahead of the boot-time clock, at most. TIME_UNKNOWN: no
        grant is known to run."""
        lib.mc_pulls_set_time(self._live(), ahead_ms)

    def serve(self, timeout_ms: int, out: Any) -> int:
        """Pulls, until another message comes (then 0, and it is in `out`, an mc_message), somebody
        wakes the engine, or the time has passed (then a negative status)."""
        return int(lib.mc_pulls_serve(self._live(), timeout_ms, out))

    def _live(self) -> Any:
        handle = self._handle
        if handle == ffi.NULL:
            raise UsageError("these pulls were closed")
        return handle

    def close(self) -> None:
        with self._lock:
            handle, self._handle = self._handle, ffi.NULL
        lib.mc_pulls_close(handle)
