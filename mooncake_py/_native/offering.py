"""Many pieces of memory offered to peers as one region, for the time of one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_py._native import ffi, lib
from mooncake_py._native.check import check

_POINTERS = ffi.typeof("char *[]")
_PIECES = ffi.typeof("mc_piece[]")
DEREGISTER_MS = 10_000  # a copy that runs ends by itself, in microseconds
LET_GO_MS = 100  # for peers, at least: one that does not answer by then is cut


def addresses_of(pointers: Sequence[Any]) -> NDArray[np.uint64]:
    """The pointers as numbers, all in one go."""
    return np.frombuffer(ffi.buffer(ffi.new(_POINTERS, pointers)), np.uint64)


class Offer:
    """A readable region of these pieces, one after the other, until `close`. The caller keeps the
    memory alive that long. Raises what registering raises."""

    __slots__ = ("_engine", "id")

    def __init__(
        self, engine: Any, addresses: NDArray[np.uint64], sizes: NDArray[np.uint64]
    ) -> None:
        pieces = np.empty((len(addresses), 2), dtype=np.uint64)
        pieces[:, 0], pieces[:, 1] = addresses, sizes
        out = ffi.new("uint32_t *")
        check(
            lib.mc_region_register(
                engine,
                ffi.from_buffer(_PIECES, pieces),
                len(pieces),
                lib.MC_ACCESS_REMOTE_READ | lib.MC_ACCESS_GATHERED,
                -1,
                out,
            ),
            "offer values",
        )
        self._engine = engine
        self.id = int(out[0])

    def close(self, left_ms: int) -> None:
        """After it nobody reads these pieces any more. left_ms: of the time of the call, in which a
        peer that reads them has to let go; a peer that stands still costs no more than that."""
        status = lib.mc_region_deregister(self._engine, self.id, max(LET_GO_MS, left_ms))
        if status == lib.MC_E_TIMEOUT:  # peers are cut; a copy of our own is waited for
            status = lib.mc_region_deregister(self._engine, self.id, DEREGISTER_MS)
        check(status, "withdraw values")
