"""L3 to L2: pages of one request on their way from the store.

A job's host pages belong to its worker until it has ended. The request may take what is there at
any time (`take`), which also tells the worker to stop; the rest goes back to the pool once the
worker has ended, because it may be writing there until then. Pages arrive in order, batch by batch,
and stop at the first that is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mooncake_py.hicache.tier_options import Rate
from mooncake_py.hicache.tier_work import Seconds

if TYPE_CHECKING:
    from mooncake_py.hicache.tier_moves import TierMoves

log = logging.getLogger(__name__)

WORKERS = 2


class Store(Protocol):
    """L3: `page_store.PageStore` is one. Calls are bounded, raise nothing and answer each key."""

    def leading(self, keys: Sequence[str]) -> int: ...

    def get(
        self, keys: Sequence[str], targets: Sequence[list[memoryview]], sizes: Sequence[int]
    ) -> list[bool]: ...

    def put(self, keys: Sequence[str], values: Sequence[list[memoryview]]) -> list[bool]: ...


class Prefetch:
    """One job. `wait` from any thread; `take` with the cache's lock held, once."""

    def __init__(self, owner: Prefetcher, keys: list[str]) -> None:
        self._owner = owner
        self.keys = keys
        self.pages: list[int] = []
        self.done = 0  # leading pages that are there
        self.taken: int | None = None  # of them, by the request
        self.cancelled = False
        self.ended = False

    @property
    def tokens(self) -> int:
        return len(self.keys) * self._owner.host.shape.page_tokens

    def wait(self, timeout_ms: int) -> int:
        """Until it has ended, or for this time; then it stops. Answers how many pages are there."""
        changed = self._owner.changed
        with changed:
            changed.wait_for(lambda: self.ended, timeout_ms / 1000)
            self.cancelled = True
            return self.done

    def take(self, count: int) -> list[int]:
        """The first `count` pages, for good. The others are given back."""
        self.cancelled, self.taken = True, count
        taken = self.pages[:count]
        self.settle()
        return taken

    def settle(self) -> None:
        """Give back what nobody took, once the worker has ended. Holds the lock."""
        if self.ended and self.taken is not None:
            self._owner.host.give_back(self.pages[self.taken :])
            self.pages = []


class Prefetcher:
    """The workers of one cache, whose lock, host pool and room are the moves'."""

    def __init__(self, store: Store, moves: TierMoves) -> None:
        assert moves.host is not None
        self._store, self.host, self.changed = store, moves.host, moves.changed
        self._take_host = moves.prefetch_room
        self._work, self._report, self._options = moves.work, moves.report, moves.options
        self._rate = Rate(self._options.prefetch_bytes_per_s)
        self._jobs = 0  # waiting or running
        self._pages = 0  # on their way
        self._workers = self._work.lane("fetch", WORKERS)

    @property
    def jobs(self) -> int:
        """Tracked: waiting or running."""
        with self.changed:
            return self._jobs

    def start(self, keys: list[str]) -> Prefetch | None:
        """None: too many wait already."""
        with self.changed:
            if self._jobs >= self._options.prefetch_jobs_max:
                self._report.add("dropped_pages", "too many prefetches wait", len(keys))
                return None
            self._jobs += 1
        job = Prefetch(self, keys)
        self._workers.submit(lambda: self._run(job))
        return job

    def close(self) -> None:
        self._workers.close()

    def _run(self, job: Prefetch) -> None:
        try:
            took = Seconds(self._work)
            if not job.cancelled and self._begin(job):
                self._fetch(job)
                if job.done and not job.cancelled:
                    self._report.break_even.fetched(job.done, took.s)
        except Exception:
            log.exception("a prefetch failed; its pages are computed")
        finally:
            with self.changed:
                job.ended = True
                self._jobs -= 1
                self._pages -= len(job.pages)
                job.settle()
                self.changed.notify_all()

    def _begin(self, job: Prefetch) -> bool:
        found = self._store.leading(job.keys)
        if found * self.host.shape.page_tokens < max(1, self._options.prefetch_tokens_min):
            return False
        with self.changed:
            if job.cancelled:
                return False
            limit = int(self.host.page_count * self._options.prefetch_host_ratio)
            count = min(found, limit - self._pages)
            nbytes = max(0, count) * self.host.shape.page_bytes
            if not self._rate.take(nbytes, self._work.now_ns()):
                self._report.add("dropped_pages", "prefetch rate", found)
                return False
            pages = self._take_host(count) if count > 0 else None
            if pages is None:
                self._report.add("dropped_pages", "no host room for a prefetch", found)
                return False
            if count < found:
                self._report.add("dropped_pages", "no host room for a prefetch", found - count)
            job.pages = pages
            self._pages += count
        return True

    def _fetch(self, job: Prefetch) -> None:
        size, count = self.host.shape.page_bytes, len(job.pages)
        pages = list(job.pages)
        for at in range(0, count, self._options.batch_pages):
            if job.cancelled:
                self._report.add("dropped_pages", "not awaited any more", count - at)
                return
            part = slice(at, min(at + self._options.batch_pages, count))
            targets = [self.host.views(page) for page in pages[part]]
            with Seconds(self._work) as took:
                got = self._store.get(job.keys[part], targets, [size] * len(targets))
            leading = next((i for i, there in enumerate(got) if not there), len(got))
            self._report.moved("L3 to L2", leading * size, took.s)
            with self.changed:
                job.done += leading
                self.changed.notify_all()
            if leading < len(targets):
                lost = len(targets) - leading
                self._report.add("dropped_pages", "not readable from the store", lost)
                return
