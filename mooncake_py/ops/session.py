"""What an engine does with the store, and what it costs: the measured half of a replay.

`Session.serve` is one request: ask how long the cached prefix is, fetch it, store the rest. A page
that was promised and does not come is a miss, whatever the reason, and so is all behind it; only
a master that does not answer ends a session. Times are of the store's calls alone: pages are made
before and judged after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from mooncake_py.clock import stopwatch_ns
from mooncake_py.errors import ClusterError, MooncakeError, ObjectExists, ObjectNotFound
from mooncake_py.ops.pages import Bytes, Pages

BATCH_PAGES_MAX = 128  # what an engine moves in one call
_BATCH_BYTES_MAX = 64 << 20
OPERATIONS = ("exists", "get", "put")
T = TypeVar("T")


class Store(Protocol):
    """The part of StoreClient that an engine uses."""

    def exists(self, keys: Sequence[str], *, prefix: bool = ...) -> Any: ...
    def get_batch(self, keys: Sequence[str], into: Sequence[Any]) -> Sequence[Any]: ...
    def put_batch(self, keys: Sequence[str], values: Sequence[Any]) -> Sequence[Any]: ...


@dataclass(slots=True)
class Tally:
    """Counts of one session. Travels between processes as the dict of its fields."""

    transport: str = ""
    requests: int = 0
    pages: int = 0  # asked for
    hit_pages: int = 0
    got_bytes: int = 0
    put_bytes: int = 0
    wrong_pages: int = 0
    wrong_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # "get PeerUnreachable" -> pages
    latency_ns: dict[str, list[int]] = field(default_factory=lambda: {o: [] for o in OPERATIONS})


class Session:
    """One engine at work. `prefix` keeps its keys apart from others'. Not thread-safe."""

    def __init__(self, store: Store, pages: Pages, tally: Tally, prefix: str = "page") -> None:
        self._store = store
        self._pages = pages
        self._prefix = prefix
        self.tally = tally
        batch_pages = max(1, min(BATCH_PAGES_MAX, _BATCH_BYTES_MAX // pages.page_bytes))
        self._slots: list[Bytes] = list(
            np.zeros((batch_pages, pages.page_bytes), dtype=np.uint8)  # touched before the clock
        )

    def serve(self, page_ids: Sequence[int]) -> None:
        """One request, as an engine serves it."""
        hits = self._get(page_ids[: self._cached_prefix(page_ids)], stop_at_miss=True)
        self._put(page_ids[hits:])
        self.tally.requests += 1
        self.tally.pages += len(page_ids)
        self.tally.hit_pages += hits

    def fetch(self, page_ids: Sequence[int]) -> None:
        """Read whatever is there of these pages, in any order, and store nothing."""
        self.tally.hit_pages += self._get(page_ids, stop_at_miss=False)
        self.tally.requests += 1
        self.tally.pages += len(page_ids)

    def _key(self, page_id: int) -> str:
        return f"{self._prefix}/{page_id}"

    def _cached_prefix(self, page_ids: Sequence[int]) -> int:
        if not page_ids:
            return 0
        keys = [self._key(page_id) for page_id in page_ids]
        try:
            return int(self._timed("exists", lambda: self._store.exists(keys, prefix=True)))
        except ClusterError:
            raise
        except MooncakeError as error:
            self._failed("exists", error, len(page_ids))
            return 0

    def _get(self, page_ids: Sequence[int], *, stop_at_miss: bool) -> int:
        """Fetch and judge; the count of good pages (with stop_at_miss, of the leading ones)."""
        good = 0
        for batch in self._batches(page_ids):
            keys = [self._key(page_id) for page_id in batch]
            targets = self._slots[: len(batch)]
            outcomes = self._call("get", keys, targets, self._store.get_batch)
            right = [
                self._judge(page_id, target, outcome)
                for page_id, target, outcome in zip(batch, targets, outcomes, strict=True)
            ]
            if stop_at_miss and not all(right):
                return good + right.index(False)
            good += sum(right)
        return good

    def _judge(self, page_id: int, target: Bytes, outcome: Any) -> bool:
        if isinstance(outcome, MooncakeError):
            self._failed("get", outcome, 1)
            return False
        self.tally.got_bytes += outcome
        wrong = self._pages.wrong_bytes(page_id, target[:outcome])
        self.tally.wrong_bytes += wrong
        self.tally.wrong_pages += wrong > 0
        return wrong == 0

    def _put(self, page_ids: Sequence[int]) -> None:
        for batch in self._batches(page_ids):
            keys = [self._key(page_id) for page_id in batch]
            sources = self._slots[: len(batch)]
            for page_id, source in zip(batch, sources, strict=True):
                self._pages.fill(page_id, source)
            for outcome in self._call("put", keys, sources, self._store.put_batch):
                if outcome is None:
                    self.tally.put_bytes += self._pages.page_bytes
                elif not isinstance(outcome, ObjectExists):
                    self._failed("put", outcome, 1)

    def _call(
        self,
        operation: str,
        keys: list[str],
        slots: list[Bytes],
        call: Callable[[Sequence[str], Sequence[Any]], Sequence[Any]],
    ) -> Sequence[Any]:
        """One outcome a key, also when the call as a whole failed."""
        try:
            return self._timed(operation, lambda: call(keys, slots))
        except ClusterError:
            raise
        except MooncakeError as error:
            return [error] * len(keys)

    def _timed(self, operation: str, call: Callable[[], T]) -> T:
        start_ns = stopwatch_ns()
        try:
            return call()
        finally:
            self.tally.latency_ns[operation].append(stopwatch_ns() - start_ns)

    def _failed(self, operation: str, error: MooncakeError, pages: int) -> None:
        if not isinstance(error, ObjectNotFound):  # that one is an ordinary miss
            what = f"{operation} {type(error).__name__}"
            self.tally.failures[what] = self.tally.failures.get(what, 0) + pages

    def _batches(self, page_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(page_ids), len(self._slots)):
            yield page_ids[start : start + len(self._slots)]
