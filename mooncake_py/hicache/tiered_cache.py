"""A three-tier KV cache for any engine: device pages (L1), host pages (L2), the store (L3).

    request = cache.begin(tokens)     match; the prefix on the device is locked; L3 is being asked
    request.wait()                    what the prefetch policy allows has come to the host
    load = request.load()             host pages -> device pages; load.wait_layer(i) before layer i
    request.extend(count)             device pages for what must be computed
    request.commit(tokens)            these tokens' whole pages hold KV now; others may use them
    request.close()                   at any point, also in the middle of everything: an abort

Rules.
* One lock guards the tree and the lists of free pages. Nobody waits for the store, or for a copy,
  while holding it (but for write_back, whose copy makes the room that is asked for).
* Every page number has one owner: a list of free pages, the tree, a request (`_own`), or a transfer
  that is going on. A transfer's pages return to the list when it has ended, never before.
* The store is never waited for without a limit, and its failure is a miss. A full host pool means
  that pages are not copied (counted as dropped), never that somebody waits for room.
* Ranks: `agree` gets a count and answers the smallest of all ranks. It is called twice a request
  (`begin`, `wait`), whatever was found, so that ranks cannot get out of step.
* CUDA: copies run on a stream of their own and layers are awaited by events; on the CPU a thread
  copies layer after layer.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from mooncake_py.clock import stopwatch_ns
from mooncake_py.errors import OutOfSpace, UsageError
from mooncake_py.hicache.eviction import POLICIES
from mooncake_py.hicache.kv_pages import KvPages, copy_layer
from mooncake_py.hicache.prefetch import Prefetcher, Store
from mooncake_py.hicache.radix_tree import Freed, Node, RadixTree, chain_keys, split_pages
from mooncake_py.hicache.tier_options import TierOptions
from mooncake_py.hicache.tier_report import TierReport
from mooncake_py.hicache.tier_request import Load, Request

log = logging.getLogger(__name__)

EVICT_SHARE = 64  # an eviction takes at least this fraction of the pool: it looks at every node
STOP_S = 30.0


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
        self._store, self._prefix, self._agree = store, key_prefix, agree
        self._tree = RadixTree(POLICIES[self.options.eviction]())
        self._changed = threading.Condition()
        self._copier = ThreadPoolExecutor(1, "mooncake-tier-copy")
        self._to_store: queue.SimpleQueue[tuple[Node, list[str], list[int]] | None]
        self._to_store = queue.SimpleQueue()
        self._queued_pages = 0
        self._copying = 0  # nodes on their way to the host
        self._prefetcher: Prefetcher | None = None
        if store is not None and host is not None:
            self._prefetcher = Prefetcher(
                store, host, self._take_host, self._changed, self.options, self.report
            )
        self._stream = torch.cuda.Stream() if device.tensor.is_cuda else None
        self._closed = False
        self._writer = threading.Thread(target=self._write, name="mooncake-tier-write", daemon=True)
        self._writer.start()

    # --- a request ---

    def begin(self, tokens: Sequence[int], namespace: str = "") -> Request:
        """namespace: what makes equal tokens different KV (adapter, salt)."""
        began = stopwatch_ns()
        request = Request(self, namespace, split_pages(tokens, self.device.shape.page_tokens))
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
        self._start_prefetch(request, most)
        self.report.add("seconds", "match", (stopwatch_ns() - began) / 1e9)
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
        have = len(request.device_pages) + len(request._host)
        request.tier_pages = {"L1": len(request.device_pages), "L2": len(request._host), "L3": 0}
        wanted = most - have
        tokens = wanted * self.device.shape.page_tokens
        if self._prefetcher is None or wanted < 1 or tokens < self.options.prefetch_tokens_min:
            return
        if not self.report.break_even.worth_fetching():
            self.report.add("dropped_pages", "cheaper to compute", wanted)
            return
        keys = chain_keys(request._namespace, request._pages[:most])[have:]
        request._prefetch = self._prefetcher.start([self._prefix + key.hex() for key in keys])

    def _finish_prefetch(self, request: Request) -> None:
        job, request._prefetch = request._prefetch, None
        began = stopwatch_ns()
        got = job.wait(self.options.wait_ms(job.tokens)) if job is not None else 0
        self.report.add("seconds", "wait for L3", (stopwatch_ns() - began) / 1e9)
        have = len(request.device_pages) + len(request._host)
        usable = self._agree(have + got)
        with self._changed:
            if job is not None:
                taken = job.take(min(got, max(0, usable - have)))
                self._insert_host(request, have, taken)
            self._hold(request, min(usable, self._still(request, usable)))
            held = len(request.device_pages) + len(request._host)
        if held < usable:
            log.info("pages went while they were waited for: %d of %d", usable - held, usable)
        request.tier_pages["L3"] = max(0, held - have)

    def _insert_host(self, request: Request, have: int, taken: list[int]) -> None:
        """Pages that came from the store, behind the `have` of the request. Holds the lock."""
        if taken:
            assert self.host is not None
            pages = request._pages[: have + len(taken)]
            _, spare = self._tree.insert_host(request._namespace, pages, taken, skip=have)
            self.host.give_back(spare)

    def _still(self, request: Request, count: int) -> int:
        return self._tree.match(request._namespace, request._pages[:count]).pages

    # --- L2 to L1 ---

    def _load(self, request: Request) -> Load:
        assert self.host is not None or not request._host
        load = request._load = Load(self.device.shape.layer_count)
        if not request._host:
            self._count_hits(request)
            for done in load._done:
                done.set()
            return load
        with self._changed:
            pages = self._take_device(len(request._host))
            if pages is None:
                wanted, request._host, request._load = len(request._host), [], None
                request._cached = len(request.device_pages)
                request.tier_pages |= {"L2": 0, "L3": 0}
                raise OutOfSpace("the device's pages are all in use", wanted=wanted)
            request._own |= set(pages)
            request.device_pages += pages
            node, request._host_node = request._host_node, None  # the copy holds the lock now
            assert node is not None
        self._count_hits(request)
        self._copier.submit(self._copy_up, load, node, list(request._host), pages)
        return load

    def _count_hits(self, request: Request) -> None:
        for tier, pages in request.tier_pages.items():
            self.report.add("hit_tokens", tier, pages * self.device.shape.page_tokens)

    def _copy_up(self, load: Load, node: Node, host: list[int], device: list[int]) -> None:
        assert self.host is not None
        began = stopwatch_ns()
        try:
            for layer in range(self.device.shape.layer_count):
                self._copy(self.host, self.device, layer, host, device, load)
                load._done[layer].set()
            if self._stream is not None:
                self._stream.synchronize()
            self.report.add("moved_bytes", "L2 to L1", len(host) * self.device.shape.page_bytes)
        except BaseException as error:
            load._error = error
            raise
        finally:
            for done in load._done:
                done.set()
            self.report.add("seconds", "load", (stopwatch_ns() - began) / 1e9)
            with self._changed:
                self._tree.unlock_host(node)
                self._changed.notify_all()

    def _copy(
        self, source: KvPages, target: KvPages, layer: int, from_pages: list[int],
        to_pages: list[int], load: Load | None = None,
    ) -> None:  # fmt: skip
        if self._stream is None:
            copy_layer(source, target, layer, from_pages, to_pages)
            return
        with torch.cuda.stream(self._stream):
            copy_layer(source, target, layer, from_pages, to_pages)
            if load is not None:
                event = torch.cuda.Event()
                event.record(self._stream)
                load._events.append(event)

    # --- computing ---

    def _extend(self, request: Request, count: int) -> list[int]:
        with self._changed:
            pages = self._take_device(count)
            if pages is None:
                raise OutOfSpace(
                    "the device's pages are all in use by requests",
                    wanted=count, free=self.device.free_count,
                    remedy="end requests, or run fewer at once",
                )  # fmt: skip
            request._own |= set(pages)
            request.device_pages += pages
        return pages

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
        request._pages = pages
        numbers = request.device_pages[: len(pages)]
        with self._changed:
            node, spare = self._tree.insert_device(request._namespace, pages, numbers)
            request._own -= set(numbers) - set(spare)
            self._tree.lock(node)
            self._release_locks(request)
            request._locked = node
            todo = [each for each in node.path() if self._wants_copy(each) and not self._closed]
            jobs = [(each, list(each.device or ()), self._begin_copy_down(each)) for each in todo]
        for each, device, host in jobs:
            if host is not None:
                self._copier.submit(self._copy_down, each, device, host)

    # --- L1 to L2 to L3 ---

    def _wants_copy(self, node: Node) -> bool:
        if self.host is None or node.host is not None or node.device is None or node.copying:
            return False
        policy = self.options.write_policy
        hits = self.options.selective_hits
        return policy == "write_through" or (policy != "write_back" and node.hits + 1 >= hits)

    def _begin_copy_down(self, node: Node) -> list[int] | None:
        """Host pages for a copy of the node, which stays where it is meanwhile. Holds the lock."""
        host = self._take_host(len(node.pages))
        if host is None:
            self.report.add("dropped_pages", "no host room for a copy", len(node.pages))
            return None
        node.copying = True
        self._copying += 1
        self._tree.lock(node)
        return host

    def _copy_down(self, node: Node, device: list[int], host: list[int]) -> None:
        """`node` may have been split meanwhile: it is the tail of what is copied."""
        assert self.host is not None
        copied = False
        try:
            for layer in range(self.device.shape.layer_count):
                self._copy(self.device, self.host, layer, device, host)
            if self._stream is not None:
                self._stream.synchronize()
            copied = True
            self.report.add("moved_bytes", "L1 to L2", len(host) * self.device.shape.page_bytes)
        except Exception:
            log.exception("pages were not copied to the host")
        finally:
            with self._changed:
                self._attach(node, host, copied)
                self._tree.unlock(node)
                self._copying -= 1
                self._changed.notify_all()

    def _attach(self, node: Node, host: list[int], copied: bool) -> None:
        """From the tail on, node by node. Holds the lock."""
        assert self.host is not None
        each: Node | None = node
        rest = host
        while rest and each is not None and not each.is_root:
            part, rest = rest[-len(each.pages) :], rest[: -len(each.pages)]
            each.copying = False
            if copied and each.host is None and each.device is not None:
                self._tree.add_host(each, part)
                self._queue_for_store(each)
            else:
                self.host.give_back(part)
            each = each.parent
        self.host.give_back(rest)

    def _queue_for_store(self, node: Node) -> None:
        if self._store is None or node.host is None:
            return
        if self._queued_pages + len(node.host) > self.options.queue_pages_max:
            self.report.add("dropped_pages", "the store is too slow", len(node.host))
            return
        self._queued_pages += len(node.host)
        self._tree.lock_host(node)
        keys = [self._prefix + key.hex() for key in node.keys]
        self._to_store.put((node, keys, list(node.host)))

    def _write(self) -> None:
        while (job := self._to_store.get()) is not None:
            node, keys, pages = job
            try:
                self._store_pages(keys, pages)
            except Exception:
                log.exception("pages were not stored")
            finally:
                with self._changed:
                    self._queued_pages -= len(pages)
                    self._tree.unlock_host(node)
                    self._changed.notify_all()

    def _store_pages(self, keys: list[str], pages: list[int]) -> None:
        assert self._store is not None
        assert self.host is not None
        for at in range(0, len(keys), self.options.batch_pages):
            part = slice(at, at + self.options.batch_pages)
            values = [self.host.views(page) for page in pages[part]]
            stored = self._store.put(keys[part], values)
            self.report.add("moved_bytes", "L2 to L3", sum(stored) * self.device.shape.page_bytes)
            if not all(stored):
                self.report.add("dropped_pages", "not stored", len(stored) - sum(stored))

    # --- room ---

    def _take_device(self, count: int) -> list[int] | None:
        """Evicts when needed, and waits for copies to the host that keep pages from it (they end by
        themselves). Holds the lock."""
        deadline_ns = stopwatch_ns() + int(STOP_S * 1e9)
        while True:
            lack = count - self.device.free_count
            if lack > 0:
                least = max(lack, self.device.page_count // EVICT_SHARE)
                self._freed(self._tree.evict_device(least, self._demote))
            pages = self.device.take(count)
            left_s = (deadline_ns - stopwatch_ns()) / 1e9
            if pages is not None or not self._copying or left_s <= 0:
                return pages
            self._changed.wait(left_s)

    def _demote(self, node: Node) -> bool:
        """write_back: the copy is made now, because the device's pages are needed now."""
        if self.host is None or self.options.write_policy != "write_back" or node.device is None:
            return False
        host = self._take_host(len(node.pages))
        if host is None:
            self.report.add("dropped_pages", "no host room for a copy", len(node.pages))
            return False
        for layer in range(self.device.shape.layer_count):
            copy_layer(self.device, self.host, layer, node.device, host)
        self._tree.add_host(node, host)
        self._queue_for_store(node)
        self.report.add("moved_bytes", "L1 to L2", len(host) * self.device.shape.page_bytes)
        return True

    def _take_host(self, count: int) -> list[int] | None:
        """Holds the lock."""
        assert self.host is not None
        lack = count - self.host.free_count
        if lack > 0:
            self._freed(self._tree.evict_host(max(lack, self.host.page_count // EVICT_SHARE)))
        return self.host.take(count)

    def _freed(self, freed: Freed) -> None:
        self.device.give_back(freed.device)
        if self.host is not None:
            self.host.give_back(freed.host)
        self.report.add("evicted_pages", "L1", len(freed.device))
        self.report.add("evicted_pages", "L2", len(freed.host))

    # --- the end ---

    def _close_request(self, request: Request) -> None:
        if request._load is not None:
            for done in request._load._done:  # its pages are written until then
                done.wait(STOP_S)
        with self._changed:
            job, request._prefetch = request._prefetch, None
            if job is not None:
                job.take(0)
            self._release_locks(request)
            self.device.give_back(sorted(request._own))
            request._own = set()
            self._changed.notify_all()

    def flush(self, *, timeout_ms: int) -> bool:
        """Wait until everything that was committed has been copied below as far as it will be."""
        self._copier.submit(lambda: None).result(timeout_ms / 1000)
        with self._changed:
            return self._changed.wait_for(lambda: self._queued_pages == 0, timeout_ms / 1000)

    def clear(self) -> None:
        """Forget what is on the device and the host and not in use. The store keeps its pages."""
        with self._changed:
            self._freed(self._tree.clear())

    def close(self) -> None:
        """End the threads; what waits to be stored is stored first. Twice is fine."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._copier.shutdown()
        self._to_store.put(None)
        self._writer.join(STOP_S)

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
