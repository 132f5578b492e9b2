"""The storage backend of SGLang's hierarchical cache: pages of its host pools, kept in the store.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
      '{"backend_name": "mooncake_py", "module_path": "mooncake_py.hicache",
        "class_name": "HiCacheBackend", "interface_v1": 1, "master": "10.0.0.1:50051"}'

Rules.
* One page of one pool is one object (with split heads one a target rank), so a page is there whole
  or not at all. All objects of a page are one group, whichever call wrote them: pools that every
  page needs end with each other, and what only the last pages need (windows, state) ends with them
  but may go before.
* Bytes are read from and written into the registered host pool; the generic calls and pools that
  cannot say where their pages lie cost one copy more.
* No call raises because of the store, and none takes longer than its setting says: what cannot be
  had is a miss, what cannot be stored is not stored (`page_store.py`). Construction and
  registration do raise: a server that was asked for a store it cannot reach or use is not to start.
* After a call has returned nobody touches the memory it was given.

Thread-safe: SGLang queries, reads and writes at once. What differs between releases of SGLang is
looked up in `sglang_release.py`.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache import hicache_storage as kinds

from mooncake_py.clock import stopwatch_ns
from mooncake_py.errors import UsageError
from mooncake_py.hicache.host_pool import (
    HostPool,
    buffers_of,
    descriptor_of,
    flat_bytes,
    is_rank_sharded,
)
from mooncake_py.hicache.page_keys import PageFormat, page_keys, shard_name
from mooncake_py.hicache.page_store import PageStore
from mooncake_py.hicache.settings import settings_of
from mooncake_py.hicache.sglang_release import (
    deployment_of,
    pool_result,
    server_facts,
    stats_maker,
)
from mooncake_py.hicache.side_pools import PoolAsk, boundary, possible
from mooncake_py.model import Group
from mooncake_py.store.raw_memory import RawMemory

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
KV = "kv"
STATS_KEPT = 4_096  # batches between two looks of the metrics collector


def _softly(otherwise: Callable[..., Any]) -> Callable[[F], F]:
    """A bug of ours costs the pages of one call, never one of SGLang's threads."""

    def wrap(call: F) -> F:
        @functools.wraps(call)
        def guarded(self: Any, *args: Any, **named: Any) -> Any:
            try:
                return call(self, *args, **named)
            except Exception:
                logger.exception("%s failed, its pages count as misses", call.__name__)
                return otherwise(*args, **named)

        return guarded  # type: ignore[return-value]  # same signature as the call

    return wrap


def _none_of(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _none_of_transfers(transfers: Sequence[Any], *_: Any, **__: Any) -> dict[Any, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class _Pool:
    """A registered pool with the prefixes of its keys."""

    def __init__(self, host: HostPool, formats: PageFormat, shards: Sequence[str]) -> None:
        self.host = host
        self.format = formats
        self.prefixes = [formats.prefix(shard) for shard in shards]


class HiCacheBackend(kinds.HiCacheStorage):  # type: ignore[misc]  # SGLang has no types
    def __init__(self, storage_config: Any = None, kwargs: Any = None) -> None:
        """Raises UsageError for settings that cannot be right, MasterUnavailable when no master
        answers in `start_ms`."""
        self._deployment = deployment_of(storage_config)
        self._settings, origins = settings_of(self._deployment.extra)
        self._facts = server_facts()
        self._model = self._settings.model or self._deployment.model
        if not self._model:
            raise UsageError(
                "the model's name is not known, and pages of different models must never mix",
                remedy='start SGLang with --served-model-name, or put "model" in the extra config',
            )
        logger.info("settings: %s", ", ".join(map(str, origins)))
        if not self._deployment.extra.get("interface_v1"):
            logger.warning('without "interface_v1": 1 SGLang copies every page once more')
        self.registered_pools: dict[Any, Any] = {}
        self._pools: dict[str, _Pool] = {}
        self._arenas = RawMemory()
        self._lock = threading.Lock()
        self._stats_kind = stats_maker() if self._deployment.with_stats else None
        self._reads: deque[tuple[int, float]] = deque(maxlen=STATS_KEPT)
        self._writes: deque[tuple[int, float]] = deque(maxlen=STATS_KEPT)
        self._store = PageStore(self._settings)

    # --- pools ---

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the main pool. Raises UsageError for one whose pages cannot be moved."""
        self.mem_pool_host = mem_pool_host
        if buffers_of(mem_pool_host):
            self._take(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a side pool (or the main one again)."""
        self.registered_pools[host_pool_name] = host_pool
        name = str(getattr(host_pool_name, "value", host_pool_name))
        if buffers_of(host_pool) and (name != KV or KV not in self._pools):
            self._take(name, host_pool)

    def on_host_pools_registered(self) -> None:
        for name, pool in sorted(self._pools.items()):
            logger.info("pool %s is stored under %s: %s", name, pool.prefixes, pool.format.text())

    def _take(self, name: str, pool: Any) -> None:
        split = self._deployment.split if name == KV else 1
        host = HostPool(name, pool, functools.partial(torch.arange, dtype=torch.int64), split)
        ranks, sizes = dict(self._deployment.ranks), dict(self._deployment.sizes)
        sharded = is_rank_sharded(name, pool, self._deployment.mla)
        if not sharded:
            ranks.pop("tp", None)
            sizes.pop("tp", None)
        self._refuse_unreadable(name, sharded)
        shards = [shard_name(ranks)]
        if split > 1:
            first = ranks.get("tp", 0) * split
            sizes["tp"] = sizes.get("tp", 1) * split
            shards = [shard_name({**ranks, "tp": first + i}) for i in range(split)]
        formats = PageFormat(
            model=self._model,
            revision=self._settings.revision or self._facts.get("revision", ""),
            pool=name,
            dtype=self._dtype(name, host.dtype),
            layout=host.layout,
            page_tokens=host.stride,
            page_bytes=host.page_bytes,
            sizes=sizes,
            variant=self._variant(name),
            tag=self._settings.tag,
        )
        with self._lock:
            for address, nbytes in buffers_of(pool):
                view = self._arenas.add(address, nbytes)
                if view is not None:
                    self._store.register(view, descriptor_of(pool, address))
            self._pools[name] = _Pool(host, formats, shards)

    def _refuse_unreadable(self, name: str, sharded: bool) -> None:
        """A pool that only one rank writes although every rank needs its own is never complete."""
        if self._deployment.mla and sharded and name != "mamba" and "tp" in self._deployment.ranks:
            raise UsageError(
                f"pool {name!r} is split over ranks, and SGLang writes it from rank 0 only",
                remedy="use SGLang's own mooncake backend over mooncake_py.compat for this model",
            )

    def _dtype(self, name: str, dtype: str) -> str:
        """8-bit pools hold more than one format, and only the server's arguments say which."""
        if name != KV or dtype not in ("uint8", "int8"):
            return dtype
        given = self._settings.kv_cache_dtype or self._facts.get("kv_cache_dtype", "")
        if not given:
            raise UsageError(
                f"the KV pool holds {dtype}, which does not tell the format of its numbers",
                remedy='put "kv_cache_dtype" in the extra config, as given to --kv-cache-dtype',
            )
        return f"{dtype}:{given}"

    def _variant(self, name: str) -> dict[str, str]:
        """What else changes the bytes."""
        found = {}
        quantization = self._settings.quantization or self._facts.get("quantization", "")
        if quantization:
            found["quantization"] = quantization
        overrides = self._facts.get("json_model_override_args")
        if overrides:
            found["overrides"] = overrides
        if name.startswith("draft"):
            draft = self._settings.draft_model or self._facts.get(
                "speculative_draft_model_path", ""
            )
            if not draft:
                raise UsageError(
                    f"pool {name!r} holds KV of a draft model whose name is not known",
                    remedy='put "draft_model" in the extra config',
                )
            found["draft_model"] = draft
            revision = self._facts.get("speculative_draft_model_revision")
            if revision:
                found["draft_revision"] = revision
        return found

    # --- pages in place: one call a batch ---

    @_softly(lambda *_, **__: 0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many leading pages can be read. One master call, which also serves the read."""
        pool = self._pools.get(KV)
        if pool is None:
            return len(keys) if self._is_logical() else 0
        found = self._store.leading(page_keys(pool.prefixes, keys))
        return found // len(pool.prefixes)

    @_softly(_none_of)
    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        pool = self._pools.get(KV)
        if pool is None:
            return [self._is_logical()] * len(keys)
        return self._read(pool, keys, host_indices)

    @_softly(_none_of)
    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        pool = self._pools.get(KV)
        if pool is None:
            return [self._is_logical()] * len(keys)
        return self._write([(pool, keys, host_indices, False)])[0]

    def _is_logical(self) -> bool:
        """The main pool only hands out indices; its pages are those of the side pools."""
        pool = getattr(self, "mem_pool_host", None)
        return pool is not None and not buffers_of(pool)

    def _read(self, pool: _Pool, keys: Sequence[str], indices: Any) -> list[bool]:
        host, count = pool.host, len(keys)
        names = page_keys(pool.prefixes, keys)
        start = stopwatch_ns()
        targets = (
            host.staged_targets(count) if host.staged else host.values(self._arenas, indices, count)
        )
        done = _by_page(self._store.get(names, targets, [host.page_bytes] * len(names)), host.split)
        if host.staged:
            host.unstage(indices, targets, done)
        self._note(self._reads, boundary(done), host, start)
        return done

    def _write(self, asks: Sequence[tuple[_Pool, Sequence[str], Any, bool]]) -> list[list[bool]]:
        """Store pages of one or several pools at once: (pool, keys, indices, do its objects follow
        the others of their page?)."""
        names: list[str] = []
        values: list[Any] = []
        groups: list[int | Group] = []
        start = stopwatch_ns()
        for pool, keys, indices, follows in asks:
            host, count = pool.host, len(keys)
            names += page_keys(pool.prefixes, keys)
            groups += self._groups(pool, keys, follows)
            values += (
                host.staged_values(indices, count)
                if host.staged
                else host.values(self._arenas, indices, count)
            )
        stored = self._store.put(names, values, groups)
        results, at = [], 0
        for pool, keys, _, _ in asks:
            end = at + len(keys) * len(pool.prefixes)
            results.append(_by_page(stored[at:end], len(pool.prefixes)))
            at = end
            self._note(self._writes, sum(results[-1]), pool.host, start)
        return results

    def _groups(self, pool: _Pool, keys: Sequence[str], follows: bool) -> list[int | Group]:
        """One a page, for its objects in all pools, named as its first object in the main pool. A
        page of one object needs none."""
        each = len(pool.prefixes)
        if len(self._pools) == 1:
            return [i + 1 for i in range(len(keys)) for _ in range(each)] if each > 1 else []
        first = self._pools.get(KV) or self._pools[min(self._pools)]
        return [Group(first.prefixes[0] + key, follows) for key in keys for _ in range(each)]

    # --- several pools ---

    @_softly(lambda *_, **__: pool_result(kinds, 0, {}, []))
    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """How far the prefix can be used, given what the side pools have. One master call."""
        asks = [(self._pool_of(transfer), transfer) for transfer in pool_transfers or ()]
        main = self._pools.get(KV)
        counted = [pool for pool in (main, *(pool for pool, _ in asks)) if pool is not None]
        names = [name for pool in counted for name in page_keys(pool.prefixes, keys)]
        present = iter(self._store.present(names))
        if main is None:
            pages = len(keys) if self._is_logical() else 0
        else:
            pages = boundary(_take_pages(present, len(keys), main))
        by_pool: dict[Any, int] = {getattr(kinds, "PoolName", str)(KV): pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for pool, transfer in asks:
            found = [False] * len(keys) if pool is None else _take_pages(present, len(keys), pool)
            own, allowed = possible(_ask_of(transfer), found, pages)
            if own:
                by_pool[transfer.name] = own
            kept = set(allowed)
            restorable = [length for length in restorable if length in kept]
        return pool_result(kinds, restorable[-1] if restorable else 0, by_pool, restorable)

    @_softly(_none_of_transfers)
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, Any]:
        results = _none_of_transfers(transfers)
        for transfer in transfers:
            pool = self._pool_of(transfer)
            if pool is not None and transfer.keys:
                results[transfer.name] = self._read(pool, transfer.keys, transfer.host_indices)
        return results

    @_softly(_none_of_transfers)
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, Any]:
        results = _none_of_transfers(transfers)
        known = [
            (pool, transfer)
            for transfer in transfers
            if (pool := self._pool_of(transfer)) is not None and transfer.keys
        ]
        asks = [
            (pool, transfer.keys, transfer.host_indices, _policy_of(transfer) == "trailing_pages")
            for pool, transfer in known
        ]
        for (_, transfer), stored in zip(known, self._write(asks) if asks else [], strict=True):
            results[transfer.name] = stored
        return results

    def _pool_of(self, transfer: Any) -> _Pool | None:
        """None for a pool that was never registered: all its pages are misses."""
        return self._pools.get(str(getattr(transfer.name, "value", transfer.name)))

    # --- pages as tensors: the slow way, and the only one of early releases ---

    @_softly(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """The targets that were filled, None for a miss. Targets are flat tensors of a page, or
        (with sizes in bytes) addresses in a registered pool."""
        targets = list(target_locations or [self._new_page() for _ in keys])
        names, values, sizes, ends = self._flat(keys, targets, target_sizes)
        done = iter(self._store.get(names, values, sizes))
        return [
            target if all([next(done) for _ in range(count)]) else None
            for target, count in zip(targets, ends, strict=True)
        ]

    @_softly(lambda *_, **__: False)
    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        given = list(values if values is not None else target_locations)
        names, parts, _, _ = self._flat(keys, given, target_sizes)
        groups = self._groups(self._pools[KV], keys, False)
        return all(self._store.put(names, parts, groups if len(groups) == len(names) else ()))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        (found,) = self.batch_get(
            [key],
            None if target_location is None else [target_location],
            None if target_sizes is None else [target_sizes],
        )
        return found

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return bool(
            self.batch_set(
                [key],
                None if value is None else [value],
                None if target_location is None else [target_location],
                None if target_sizes is None else [target_sizes],
            )
        )

    def exists(self, key: str) -> bool:
        return bool(self.batch_exists([key]) == 1)

    def _new_page(self) -> Any:
        return self.mem_pool_host.get_dummy_flat_data_page()

    def _flat(
        self, keys: Sequence[str], pages: Sequence[Any], sizes: Any
    ) -> tuple[list[str], list[Any], list[int], list[int]]:
        """(names, memory, bytes) of the objects of these pages, and objects a page."""
        pool = self._pools[KV]
        host = pool.host
        names: list[str] = []
        parts: list[Any] = []
        lengths: list[int] = []
        ends: list[int] = []
        for i, (key, page) in enumerate(zip(keys, pages, strict=True)):
            view = self._view_of(page, None if sizes is None else sizes[i])
            if len(view) == host.page_bytes * host.split:
                prefixes, mine = pool.prefixes, host.parts_of_flat(view)
            else:  # not a page of this pool: a format of its own
                other = replace(pool.format, page_bytes=len(view), pool="flat")
                prefixes, mine = [other.prefix(shard_name(self._deployment.ranks))], [view]
            names += page_keys(prefixes, [key])
            parts += mine
            lengths += [len(view) // len(mine)] * len(mine)
            ends.append(len(mine))
        return names, parts, lengths, ends

    def _view_of(self, page: Any, nbytes: Any) -> memoryview:
        if isinstance(page, int):
            return self._arenas.slices([(page, int(nbytes))])[0]
        return memoryview(flat_bytes(page).view(torch.uint8).reshape(-1).numpy())

    # --- the rest ---

    def clear(self) -> None:
        """Remove this deployment's pages (of this rank, and those that all ranks share)."""
        for name, pool in self._pools.items():
            removed = sum(self._store.clear(prefix) for prefix in pool.prefixes)
            logger.info("cleared %d objects of pool %s", removed, name)

    def get_stats(self) -> Any:
        """Batches since the last call, as the metrics of this release want them; None without."""
        if self._stats_kind is None:
            return None
        stats = self._stats_kind()
        for kept, pages, bandwidth in (
            (self._reads, stats.prefetch_pgs, stats.prefetch_bandwidth),
            (self._writes, stats.backup_pgs, stats.backup_bandwidth),
        ):
            while kept:
                count, speed = kept.popleft()
                pages.append(count)
                bandwidth.append(speed)
        return stats

    def _note(self, kept: deque[tuple[int, float]], pages: int, host: HostPool, start: int) -> None:
        if self._stats_kind is not None and pages:
            seconds = max(1e-9, (stopwatch_ns() - start) / 1e9)
            kept.append((pages, pages * host.split * host.page_bytes / (1 << 30) / seconds))

    def close(self) -> None:
        """Let running calls end, give the pools' memory back, leave the cluster. Twice is fine."""
        self._store.close()


def _by_page(objects: Sequence[bool], each: int) -> list[bool]:
    """A page is there when all its objects are."""
    if each == 1:
        return list(objects)
    return [all(objects[i : i + each]) for i in range(0, len(objects), each)]


def _take_pages(objects: Iterator[bool], count: int, pool: _Pool) -> list[bool]:
    each = len(pool.prefixes)
    return _by_page([next(objects) for _ in range(count * each)], each)


def _ask_of(transfer: Any) -> PoolAsk:
    return PoolAsk(
        policy=_policy_of(transfer),
        trailing=len(transfer.keys or ()),
        block_pages=int(getattr(transfer, "block_pages", 0) or 0),
        group_pages=int(getattr(transfer, "group_pages", 0) or 0),
    )


def _policy_of(transfer: Any) -> str:
    policy = getattr(transfer, "hit_policy", "all_pages")
    return str(getattr(policy, "value", policy))
