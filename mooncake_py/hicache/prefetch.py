"""L3 to L2: pages of one request on their way from the store.

A job's host pages belong to its worker until it has ended. The request may take what is there at
any time (`take`), which also tells the worker to stop; the rest goes back to the pool once the
worker has ended, because it may be writing there until then. Pages arrive in order, batch by batch,
and stop at the first that is missing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from mooncake_py.clock import stopwatch_ns
from mooncake_py.hicache.kv_pages import KvPages
from mooncake_py.hicache.tier_options import TierOptions
from mooncake_py.hicache.tier_report import TierReport

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
    """One job. `wait` from any thread; `take` with the cache's lock held."""

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
    """The workers of one cache. take_host and changed: the cache's, which also locks."""

    def __init__(
        self,
        store: Store,
        host: KvPages,
        take_host: Callable[[int], list[int] | None],
        changed: threading.Condition,
        options: TierOptions,
        report: TierReport,
    ) -> None:
        self._store, self.host, self._take_host, self.changed = store, host, take_host, changed
        self._options, self._report = options, report
        self._pages = 0  # on their way
        self._workers = ThreadPoolExecutor(WORKERS, "mooncake-tier-fetch")

    def start(self, keys: list[str]) -> Prefetch:
        job = Prefetch(self, keys)
        self._workers.submit(self._run, job)
        return job

    def close(self) -> None:
        self._workers.shutdown()

    def _run(self, job: Prefetch) -> None:
        try:
            if not job.cancelled and self._begin(job):
                self._fetch(job)
        except Exception:
            log.exception("a prefetch failed; its pages are computed")
        finally:
            with self.changed:
                job.ended = True
                self._pages -= len(job.pages)
                job.settle()
                self.changed.notify_all()

    def _begin(self, job: Prefetch) -> bool:
        found = self._store.leading(job.keys)
        if found * self.host.shape.page_tokens < max(1, self._options.prefetch_tokens_min):
            return False
        with self.changed:
            limit = int(self.host.page_count * self._options.prefetch_host_ratio)
            count = min(found, limit - self._pages)
            pages = self._take_host(count) if count > 0 and not job.cancelled else None
            if pages is None:
                self._report.add("dropped_pages", "no host room for a prefetch", found)
                return False
            job.pages = pages
            self._pages += count
        return True

    def _fetch(self, job: Prefetch) -> None:
        size, count = self.host.shape.page_bytes, len(job.pages)
        pages = list(job.pages)
        for at in range(0, count, self._options.batch_pages):
            if job.cancelled:
                return
            part = slice(at, min(at + self._options.batch_pages, count))
            began = stopwatch_ns()
            targets = [self.host.views(page) for page in pages[part]]
            got = self._store.get(job.keys[part], targets, [size] * len(targets))
            leading = next((i for i, there in enumerate(got) if not there), len(got))
            if leading:
                self._report.break_even.fetched(leading, (stopwatch_ns() - began) / 1e9)
                self._report.add("moved_bytes", "L3 to L2", leading * size)
            with self.changed:
                job.done += leading
                self.changed.notify_all()
            if leading < len(targets):
                lost = len(targets) - leading
                self._report.add("dropped_pages", "not readable from the store", lost)
                return
