"""The tiered cache's room and moves: pages between L1, L2 and L3, and who has to make place.

Its lock, tree and pools are the cache's (`tiered_cache.py` has the rules). Methods that say so are
called with the lock held. Tasks run in lanes: copies to the device, copies to the host, writes to
the store, and reads from it (`prefetch.py`), so that a request's load waits for no backup.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mooncake_py.errors import UsageError
from mooncake_py.hicache.kv_pages import KvPages
from mooncake_py.hicache.prefetch import Prefetcher, Store
from mooncake_py.hicache.radix_tree import Freed, Node, RadixTree
from mooncake_py.hicache.tier_options import TierOptions
from mooncake_py.hicache.tier_report import Occupancy, TierReport
from mooncake_py.hicache.tier_request import Load
from mooncake_py.hicache.tier_streams import Machine, Mark
from mooncake_py.hicache.tier_work import Condition, Seconds

log = logging.getLogger(__name__)

EVICT_SHARE = 64  # an eviction takes at least this fraction of the pool: it looks at every node
STOP_S = 30.0
PARTS = 4  # a node that is copied to the host is at most this fraction of its pool


@dataclass(frozen=True, slots=True)
class CopyDown:
    """One node on its way to the host."""

    node: Node
    device: list[int]
    host: list[int]


class TierMoves:
    def __init__(
        self, device: KvPages, host: KvPages | None, tree: RadixTree, report: TierReport,
        options: TierOptions, machine: Machine,
    ) -> None:  # fmt: skip
        self.device, self.host, self.tree, self.report = device, host, tree, report
        self.options = options
        self.work, self.streams = machine.work, machine.streams
        self.changed: Condition = self.work.condition()
        self.prefetcher: Prefetcher | None = None
        self._store: Store | None = None
        self._prefix = ""
        self._up, self._down, self._write = (self.work.lane(n, 1) for n in ("up", "down", "write"))
        self._queued_pages = 0  # waiting to be stored
        self._copying = 0  # nodes on their way to the host
        self._storing = True

    def use_store(self, store: Store, prefix: str) -> None:
        """Once, before anything else."""
        assert self.host is not None
        self._store, self._prefix = store, prefix
        self.prefetcher = Prefetcher(store, self)

    def key(self, chain: bytes) -> str:
        return self._prefix + chain.hex()

    # --- L2 to L1 ---

    def load(self, load: Load, node: Node, host: list[int], device: list[int], after: Mark) -> None:
        """`node`'s host pages are locked; the task unlocks them. UsageError: after `close`."""
        try:
            self._up.submit(lambda: self._copy_up(load, node, host, device, after))
        except UsageError as error:
            load.fail(error)
            self._end_load(load, node)
            raise

    def _end_load(self, load: Load, node: Node) -> None:
        load.end()
        with self.changed:
            self.tree.unlock_host(node)
            self.changed.notify_all()

    def _copy_up(
        self, load: Load, node: Node, host: list[int], device: list[int], after: Mark
    ) -> None:
        assert self.host is not None
        took = Seconds(self.work)
        mark = after
        try:
            for layer in range(self.device.shape.layer_count):
                mark = self.streams.copy(self.host, self.device, layer, host, device, after)
                load.started(layer, mark)
            self.streams.finish(mark)
            self.report.moved("L2 to L1", len(host) * self.device.shape.page_bytes, took.s)
        except BaseException as error:
            load.fail(error)
            self.streams.finish(mark)  # nothing of it goes on when the pages change hands
            raise
        finally:
            self._end_load(load, node)

    # --- L1 to L2 ---

    def _wants_copy(self, node: Node) -> bool:
        if self.host is None or node.host is not None or node.device is None or node.copying:
            return False
        policy = self.options.write_policy
        hits = self.options.selective_hits
        return policy == "write_through" or (policy != "write_back" and node.hits + 1 >= hits)

    def begin_copies(self, last: Node) -> list[CopyDown]:
        """What of this path the write policy wants on the host; what was never stored first, so
        that a small host pool gets a long prompt to the store in the end. Holds the lock."""
        if self.host is None:
            return []
        for node in list(last.path()):
            if self._wants_copy(node):  # in parts that the pool can have several of
                self.tree.cut(node, max(1, self.host.page_count // PARTS))
        wanted = [node for node in last.path() if self._wants_copy(node)]
        wanted.sort(key=lambda node: node.stored)
        return [copy for node in wanted if (copy := self._begin_copy(node)) is not None]

    def copy_down(self, copies: list[CopyDown], after: Mark) -> None:
        """Start them, without the lock."""
        for each in copies:
            self._down.submit(lambda each=each: self._copy_down(each, after))  # type: ignore[misc]  # the default binds

    def _begin_copy(self, node: Node) -> CopyDown | None:
        """Takes host pages for it; the node stays where it is meanwhile."""
        host = self._take_host(len(node.pages), "room for a copy")
        if host is None:
            self.report.add("dropped_pages", "no host room for a copy", len(node.pages))
            return None
        node.copying = True
        self._copying += 1
        self.tree.lock(node)
        return CopyDown(node, list(node.device or ()), host)

    def _copy_down(self, copy: CopyDown, after: Mark) -> None:
        """The node may have been split meanwhile: it is the tail of what is copied."""
        copied = False
        try:
            self._copy_to_host(copy.device, copy.host, after)
            copied = True
        except Exception:
            log.exception("pages were not copied to the host")
            self.report.add("dropped_pages", "copy to the host failed", len(copy.host))
        finally:
            with self.changed:
                self._attach(copy.node, copy.host, copied)
                self.tree.unlock(copy.node)
                self._copying -= 1
                self.changed.notify_all()

    def _copy_to_host(self, device: list[int], host: list[int], after: Mark) -> None:
        assert self.host is not None
        mark = after
        with Seconds(self.work) as took:
            try:
                for layer in range(self.device.shape.layer_count):
                    mark = self.streams.copy(self.device, self.host, layer, device, host, after)
            finally:
                self.streams.finish(mark)  # nothing of it goes on when the pages change hands
        self.report.moved("L1 to L2", len(host) * self.device.shape.page_bytes, took.s)

    def _attach(self, node: Node, host: list[int], copied: bool) -> None:
        """From the tail on, node by node. Holds the lock."""
        assert self.host is not None
        each: Node | None = node
        rest = host
        while rest and each is not None and not each.is_root:
            part, rest = rest[-len(each.pages) :], rest[: -len(each.pages)]
            each.copying = False
            if copied and each.host is None and each.device is not None:
                self.tree.add_host(each, part)
                self._queue_for_store(each)
            else:
                self.host.give_back(part)
            each = each.parent
        self.host.give_back(rest)

    # --- L2 to L3 ---

    def _queue_for_store(self, node: Node) -> None:
        if self._store is None or node.host is None or not self.options.writes_store:
            return
        if not self._storing:
            self.report.add("dropped_pages", "the cache was closed", len(node.host))
            return
        if self._queued_pages + len(node.host) > self.options.queue_pages_max:
            self.report.add("dropped_pages", "the store is too slow", len(node.host))
            return
        self._queued_pages += len(node.host)
        self.tree.lock_host(node)
        keys = [self.key(key) for key in node.keys]
        pages = list(node.host)
        self._write.submit(lambda: self._store_node(node, keys, pages))

    def _store_node(self, node: Node, keys: list[str], pages: list[int]) -> None:
        stored = False
        try:
            stored = self._store_pages(keys, pages)
        except Exception:
            log.exception("pages were not stored")
            self.report.add("dropped_pages", "not stored", len(pages))
        finally:
            with self.changed:
                node.stored = stored
                self._queued_pages -= len(pages)
                self.tree.unlock_host(node)
                self.changed.notify_all()

    def _store_pages(self, keys: list[str], pages: list[int]) -> bool:
        """Whether all are stored."""
        assert self._store is not None
        assert self.host is not None
        whole = True
        for at in range(0, len(keys), self.options.batch_pages):
            part = slice(at, at + self.options.batch_pages)
            values = [self.host.views(page) for page in pages[part]]
            with Seconds(self.work) as took:
                stored = self._store.put(keys[part], values)
            self.report.moved("L2 to L3", sum(stored) * self.device.shape.page_bytes, took.s)
            self.report.add("dropped_pages", "not stored", len(stored) - sum(stored))
            whole = whole and all(stored)
        return whole

    # --- room ---

    def take_device(self, count: int) -> list[int] | None:
        """Evicts when needed, and waits for copies to the host that keep pages from it (they end by
        themselves). Holds the lock, but not while it waits."""
        deadline_ns = self.work.now_ns() + int(STOP_S * 1e9)
        while True:
            lack = count - self.device.free_count
            if lack > 0:
                least = max(lack, self.device.page_count // EVICT_SHARE)
                freed = self.tree.evict_device(least, self._demote)
                self._freed(freed, "room for a request")
            pages = self.device.take(count)
            left_s = (deadline_ns - self.work.now_ns()) / 1e9
            if pages is not None or not self._copying or left_s <= 0:
                return pages
            copying = self._copying
            self.changed.wait_for(lambda copying=copying: self._copying != copying, left_s)  # type: ignore[misc]  # the default binds

    def _demote(self, node: Node) -> bool:
        """write_back: the copy is made now, because the device's pages are needed now."""
        if self.host is None or self.options.write_policy != "write_back" or node.device is None:
            return False
        host = self._take_host(len(node.pages), "room for a copy")
        if host is None:
            self.report.add("dropped_pages", "no host room for a copy", len(node.pages))
            return False
        try:
            self._copy_to_host(node.device, host, self.streams.produced())
        except Exception:
            log.exception("pages were not copied to the host")
            self.report.add("dropped_pages", "copy to the host failed", len(host))
            self.host.give_back(host)
            return False
        self.tree.add_host(node, host)
        self._queue_for_store(node)
        return True

    def prefetch_room(self, count: int) -> list[int] | None:
        """Holds the lock."""
        return self._take_host(count, "room for a prefetch")

    def _take_host(self, count: int, cause: str) -> list[int] | None:
        """Holds the lock."""
        assert self.host is not None
        lack = count - self.host.free_count
        if lack > 0:
            least = max(lack, self.host.page_count // EVICT_SHARE)
            self._freed(self.tree.evict_host(least), cause)
        return self.host.take(count)

    def _freed(self, freed: Freed, cause: str) -> None:
        self.device.give_back(freed.device)
        if self.host is not None:
            self.host.give_back(freed.host)
        self.report.add("evicted_pages", ("L1", cause), len(freed.device))
        self.report.add("evicted_pages", ("L2", cause), len(freed.host))
        self.report.add("dropped_pages", "left L1 and L2", freed.dropped)

    def clear(self) -> None:
        """Holds the lock."""
        self._freed(self.tree.clear(), "cleared")

    def occupancy(self) -> dict[str, Occupancy]:
        """Looks at every node. Holds the lock."""
        idle = {"L1": 0, "L2": 0}
        for node in self.tree.nodes():
            if node.device is not None and not node.device_locks:
                idle["L1"] += len(node.pages)
            if node.host is not None and not node.host_locks:
                idle["L2"] += len(node.pages)
        found = {}
        for tier, pool in (("L1", self.device), ("L2", self.host)):
            if pool is not None:
                used = pool.page_count - pool.free_count
                found[tier] = Occupancy(pool.page_count, used, used - idle[tier])
        return found

    # --- the end ---

    def flush(self, timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(
                lambda: not self._copying and not self._queued_pages, timeout_s
            )

    def close(self) -> None:
        """Copies end first, because they queue for the store."""
        if self.prefetcher is not None:
            self.prefetcher.close()
        self._up.close()
        self._down.close()
        with self.changed:  # a request that goes on may still copy to the host for room
            self._storing = False
        self._write.close()
