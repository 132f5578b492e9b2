"""Where objects are, remembered: what the master last said, for as long as its lease runs.

Rules.
* An entry is what a Locate answered, and it ends with the lease of that answer (counted from when
  the question left here, so never too late). While it runs the object can neither be evicted nor
  removed without force, so reading it again needs no question. When it has ended the master is
  asked again, which also tells it that the object is in use: a hot object stays young there.
* An entry is never believed as such: every read compares the generation in the extent's own header.
  A mismatch ends the entry, and the reader asks the master within the same call.
* What this client puts or removes is forgotten, also in answers that are still on their way: a
  *flight* is opened before the question, and names forgotten during it are not learnt from it.
* A placement that could not be read is *avoided* for a while: answers that name it again are learnt
  without it, so that one dead node does not cost every call a timeout.
* Bounded: at most `entries_max` keys, in two halves. When the younger is full it becomes the older,
  and the older is dropped. An entry has about 350 bytes with its key.

An entry is the extent rows of the key's replicas, 64 bytes each, ready for the native reader:
`segment_index` is the client's own (segments.py), `expires_ms` the end of the lease on the client's
clock. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from mooncake_py.wire.rows import EXTENT

ENTRIES_MAX = 65_536
AVOIDED_MAX = 4_096
AVOID_MS = 5_000
ROW_BYTES = EXTENT.itemsize

Rows = npt.NDArray[np.void]


class Flight:
    """A question to the master that is on its way."""

    __slots__ = ("forgotten",)

    def __init__(self) -> None:
        self.forgotten: set[bytes] = set()


class PlacementCache:
    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._half = max(1, entries_max // 2)
        self._lock = threading.Lock()
        self._young: dict[bytes, bytes] = {}
        self._old: dict[bytes, bytes] = {}
        self._flights: set[Flight] = set()
        self._avoided: dict[tuple[int, int], int] = {}  # (generation, segment index) -> until

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def find(self, names: Sequence[bytes]) -> list[bytes | None]:
        """The rows of each key, or None. Their leases may have ended: the reader looks, once."""
        found: list[bytes | None] = list(map(self._young.get, names))
        old = self._old
        if old and None in found:
            found = [
                old.get(name) if rows is None else rows
                for name, rows in zip(names, found, strict=True)
            ]
        return found

    def depart(self) -> Flight:
        """Before a question leaves. Every flight must arrive."""
        flight = Flight()
        with self._lock:
            self._flights.add(flight)
        return flight

    def arrive(self, flight: Flight, names: Sequence[bytes], entries: Sequence[bytes]) -> None:
        """The answer: rows a key; empty for a key without an object, which is not remembered."""
        with self._lock:
            self._flights.discard(flight)
            young = self._young
            if flight.forgotten:
                pairs: Iterable[tuple[bytes, bytes]] = (
                    (name, rows)
                    for name, rows in zip(names, entries, strict=True)
                    if rows and name not in flight.forgotten
                )
            elif b"" in entries:
                pairs = (pair for pair in zip(names, entries, strict=True) if pair[1])
            else:
                pairs = zip(names, entries, strict=True)
            young.update(pairs)
            if len(young) > self._half:
                self._turn()

    def _turn(self) -> None:
        young = self._young
        if len(young) > 2 * self._half:  # one answer larger than all of it: keep its tail
            young = dict(list(young.items())[-self._half :])
        self._old, self._young = young, {}

    def forget(self, names: Iterable[bytes]) -> None:
        """These keys were changed, or their rows proved stale."""
        if not self._flights and not self._young and not self._old:
            return
        names = list(names)
        with self._lock:
            for flight in self._flights:
                flight.forgotten.update(names)
            for half in (self._young, self._old):
                if half:
                    for name in names:
                        half.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            for flight in self._flights:
                flight.forgotten.update(self._young, self._old)
            self._young, self._old = {}, {}

    # --- placements that could not be read ---

    def avoid(self, generation: int, segment_index: int, now_ms: int) -> None:
        with self._lock:
            if len(self._avoided) >= AVOIDED_MAX:
                del self._avoided[next(iter(self._avoided))]
            self._avoided[generation, segment_index] = now_ms + AVOID_MS

    def usable(self, rows: Rows, now_ms: int) -> npt.NDArray[np.bool_] | None:
        """Which rows are not avoided; None: all of them."""
        if not self._avoided:
            return None
        with self._lock:
            ended = [pair for pair, until in self._avoided.items() if until <= now_ms]
            for pair in ended:
                del self._avoided[pair]
            avoided = set(self._avoided)
        if not avoided:
            return None
        pairs = zip(rows["generation"].tolist(), rows["segment_index"].tolist(), strict=True)
        return np.fromiter((pair not in avoided for pair in pairs), bool, len(rows))
