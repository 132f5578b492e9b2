"""A three-tier KV cache for any engine: device pages (L1), host pages (L2), the store (L3).

    request = cache.begin(tokens)     match; the prefix on the device is locked; L3 is being asked
    request.wait()                    what the prefetch policy allows has come to the host
    load = request.load()             host pages -> device pages; load.wait_layer(i) before layer i
    request.extend(count)             device pages for what must be computed
    request.first_token()             for the report: the first token is there (later: next_token)
    request.commit(tokens)            these tokens' whole pages hold KV now; others may use them
    request.close()                   at any point, also in the middle of everything: an abort

Rules.
* One lock guards the tree and the lists of free pages. Nobody waits for the store, or for a copy,
  while holding it (but for write_back, whose copy makes the room that is asked for).
* Every page number has one owner: a list of free pages, the tree, a request (`_own`), or a transfer
  that is going on. A transfer's pages return to the list when it has ended, never before.
* The store is never waited for without a limit, and its failure is a miss. A full host pool means
  that pages are not copied (counted as dropped), never that somebody waits for room.
* Ranks: `agree` gets a count and answers the smallest of all ranks (`tier_ranks.py`). It is called
  three times a request (`begin`, `wait`, `load`), whatever was found, so that ranks cannot get out
  of step; after each of them all ranks have the same `cached_tokens`.
* Copies and the engine's computing keep the order that `tier_streams.py` describes. What runs the
  tasks is behind a seam, `tier_work.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from mooncake_py.errors import OutOfSpace, UsageError
from mooncake_py.hicache.eviction import POLICIES
from mooncake_py.hicache.kv_pages import KvPages
from mooncake_py.hicache.prefetch import Store
from mooncake_py.hicache.radix_tree import RadixTree, chain_keys, split_pages
from mooncake_py.hicache.tier_moves import STOP_S, TierMoves
from mooncake_py.hicache.tier_options import TierOptions
from mooncake_py.hicache.tier_report import TierReport, TierSnapshot
from mooncake_py.hicache.tier_request import Load, Request
from mooncake_py.hicache.tier_streams import Machine, machine_of
from mooncake_py.hicache.tier_work import Seconds

log = logging.getLogger(__name__)


class TieredCache:
    """Thread-safe. host, store: None where there is no such tier. key_prefix: begins the store's
    keys and names everything that makes KV incompatible (`page_keys.PageFormat.prefix`)."""

    def __init__(
        self,
        device: KvPages,
        host: KvPages | None = None,
        store: Store | None = None,
        *,
        key_prefix: str = "",
        options: TierOptions | None = None,
        agree: Callable[[int], int] = lambda count: count,
    ) -> None:
        if store is not None and (host is None or not key_prefix):
            raise UsageError("a store is used through a host pool, with a key_prefix of its own")
        if host is not None and host.shape != device.shape:
            raise UsageError("the pools' shapes differ", device=device.shape, host=host.shape)
        self.device, self.host = device, host
        self.options = options or TierOptions()
        self.report = TierReport()
        self._agree = agree
        machine = self._machine()
        self._work = machine.work
        self._tree = RadixTree(POLICIES[self.options.eviction]())
        self._moves = TierMoves(device, host, self._tree, self.report, self.options, machine)
        if store is not None and host is not None:
            self.options.check_readable(host.page_count, host.shape.page_tokens)
            self._moves.use_store(store, key_prefix)
        self._changed = self._moves.changed
        self._closed = False

    def _machine(self) -> Machine:
        """What runs it; tests put another machine there."""
        return machine_of(self.device)

    # --- a request ---

    def begin(self, tokens: Sequence[int], namespace: str = "") -> Request:
        """namespace: what makes equal tokens different KV (adapter, salt)."""
        pages = split_pages(tokens, self.device.shape.page_tokens)
        request = Request(self, namespace, pages, self._work.now_ns())
        self.report.began(len(tokens))
        with self._changed:
            if self._closed:
                raise UsageError("the cache was closed")
            found = self._tree.match(namespace, request._pages).pages
        # At least one token is computed, or there would be no logits to go on with.
        most = max(0, (len(tokens) - 1) // self.device.shape.page_tokens)
        usable = self._agree(min(found, most))
        with self._changed:
            self._hold(request, usable)
        try:
            self._start_prefetch(request, most)
        except BaseException:
            request.close()  # nobody else has it
            raise
        request._parts_s["match"] = (self._work.now_ns() - request._began_ns) / 1e9
        return request

    def _hold(self, request: Request, count: int) -> None:
        """Lock the first `count` pages for the request instead of what it had. Holds the lock."""
        match = self._tree.match(request._namespace, request._pages[:count])
        self._tree.lock(match.last_device)
        if match.host:
            self._tree.lock_host(match.last)
        self._release_locks(request)
        request._locked = match.last_device
        request._host_node = match.last if match.host else None
        request.device_pages, request._host = list(match.device), list(match.host)
        request._cached = match.pages

    def _release_locks(self, request: Request) -> None:
        if request._locked is not None:
            self._tree.unlock(request._locked)
        if request._host_node is not None:
            self._tree.unlock_host(request._host_node)
        request._locked = request._host_node = None

    # --- L3 to L2 ---

    def _start_prefetch(self, request: Request, most: int) -> None:
        have = request._cached
        request.tier_pages = {"L1": len(request.device_pages), "L2": len(request._host), "L3": 0}
        wanted = most - have
        tokens = wanted * self.device.shape.page_tokens
        prefetcher = self._moves.prefetcher
        if prefetcher is None or wanted < 1 or tokens < self.options.prefetch_tokens_min:
            return
        if not self.report.break_even.worth_fetching(wanted):
            self.report.add("dropped_pages", "cheaper to compute", wanted)
            return
        keys = chain_keys(request._namespace, request._pages[:most])[have:]
        request._prefetch = prefetcher.start([self._moves.key(key) for key in keys])

    def _finish_prefetch(self, request: Request) -> None:
        job = request._prefetch
        with Seconds(self._work) as took:
            got = job.wait(self.options.wait_ms(job.tokens)) if job is not None else 0
        request._parts_s["L3"] = request._parts_s.get("L3", 0.0) + took.s
        have = request._cached
        usable = self._agree(have + got)
        with self._changed:
            if job is not None:
                request._prefetch = None
                self._insert_host(request, have, job.take(min(got, max(0, usable - have))))
            self._hold(request, usable)
        request.tier_pages["L3"] += max(0, request._cached - have)

    def _insert_host(self, request: Request, have: int, taken: list[int]) -> None:
        """Pages that came from the store, behind the `have` of the request. Holds the lock."""
        if taken:
            assert self.host is not None
            pages = request._pages[: have + len(taken)]
            _, spare = self._tree.insert_host(request._namespace, pages, taken, skip=have)
            self.host.give_back(spare)

    # --- L2 to L1 ---

    def _load(self, request: Request) -> Load:
        """A rank that has no room says so to the others, which then load as little as it does."""
        load = Load(self.device.shape.layer_count, self._work, self._moves.streams)
        on_device = len(request.device_pages)
        node = None
        with self._changed:
            pages = self._moves.take_device(len(request._host))
            request._own |= set(pages or ())
        request._load = load
        if pages is None:
            self.report.add("dropped_pages", "no device room for a load", len(request._host))
        try:
            after = self._moves.streams.produced()  # now: it had to wait for the pages perhaps
            usable = self._agree(request._cached if pages is not None else on_device)
        except BaseException:
            load.end()  # nothing was started
            raise
        self._shorten(request, usable)
        count = max(0, usable - on_device)
        with self._changed:
            spare = (pages or [])[count:]
            request._own -= set(spare)
            self.device.give_back(spare)
            if count:
                request.device_pages += (pages or [])[:count]
                node, request._host_node = request._host_node, None  # the copy has the lock now
        self._count_hits(request)
        if count:
            assert node is not None
            host, device = request._host[:count], request.device_pages[-count:]
            self._moves.load(load, node, host, device, after)
        else:
            load.end()
        return load

    @staticmethod
    def _shorten(request: Request, count: int) -> None:
        """Its prefix is of `count` pages at most. Its locks stay."""
        left = request._cached = min(request._cached, count)
        request.device_pages = request.device_pages[:count]
        for tier in ("L1", "L2", "L3"):
            request.tier_pages[tier] = min(request.tier_pages[tier], left)
            left -= request.tier_pages[tier]

    def _count_hits(self, request: Request) -> None:
        for tier, pages in request.tier_pages.items():
            self.report.add("hits", tier, pages > 0)
            self.report.add("hit_tokens", tier, pages * self.device.shape.page_tokens)

    # --- computing ---

    def _extend(self, request: Request, count: int) -> list[int]:
        with self._changed:
            pages = self._moves.take_device(count)
            if pages is None:
                raise OutOfSpace(
                    "the device's pages are all in use by requests",
                    wanted=count, free=self.device.free_count,
                    remedy="end requests, or run fewer at once",
                )  # fmt: skip
            request._own |= set(pages)
            request.device_pages += pages
        return pages

    def _first_token(self, request: Request, prompt_pages: int) -> None:
        parts = request._parts_s
        parts["L2 to L1"] = request._load.stalled_s if request._load is not None else 0.0
        total_s = (self._work.now_ns() - request._began_ns) / 1e9
        parts["recompute"] = max(0.0, total_s - sum(parts.values()))
        self.report.first_token(parts)
        computed = prompt_pages - request._cached
        if computed > 0:
            self.report.break_even.computed(computed, parts["recompute"])

    def _commit(self, request: Request, tokens: Sequence[int]) -> None:
        pages = split_pages(tokens, self.device.shape.page_tokens)
        common = min(len(pages), len(request._pages))
        if pages[:common] != request._pages[:common]:
            raise UsageError("these tokens do not begin with the request's prompt")
        if len(pages) > len(request.device_pages):
            raise UsageError("more whole pages than the request has on the device",
                             pages=len(pages), device_pages=len(request.device_pages))  # fmt: skip
        if request._load is not None:
            request._load.wait()
        after = self._moves.streams.produced()
        request._pages = pages
        numbers = request.device_pages[: len(pages)]
        with self._changed:
            node, spare = self._tree.insert_device(request._namespace, pages, numbers)
            request._own -= set(numbers) - set(spare)
            self._tree.lock(node)
            self._release_locks(request)
            request._locked = node
            copies = [] if self._closed else self._moves.begin_copies(node)
        self._moves.copy_down(copies, after)

    # --- the end ---

    def _close_request(self, request: Request) -> None:
        # Its pages are written until the copy has ended, whoever started what behind it.
        ended = request._load is None or request._load.wait_end(STOP_S)
        with self._changed:
            job, request._prefetch = request._prefetch, None
            if job is not None:
                job.take(0)
            self._release_locks(request)
            if ended:
                self.device.give_back(sorted(request._own))
            request._own = set()
            self._changed.notify_all()
        if not ended:
            log.error("a copy to the device does not end: its pages are not used again")

    def snapshot(self) -> TierSnapshot:
        """All numbers at this moment (`tier_metrics.families` shows them to Prometheus)."""
        with self._changed:
            held = self._moves.occupancy()
        return self.report.snapshot(held)

    def flush(self, *, timeout_ms: int) -> bool:
        """Wait until everything that was committed has been copied below as far as it will be."""
        return self._moves.flush(timeout_ms / 1000)

    def clear(self) -> None:
        """Forget what is on the device and the host and not in use. The store keeps its pages."""
        with self._changed:
            self._moves.clear()

    def close(self) -> None:
        """End the threads; what waits to be stored is stored first. Twice is fine."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._moves.close()

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
