"""The tier state machine under a seeded scheduler: aborts, store failures, waits that run out, a
device that does its work late. A failure prints the seed that repeats it; `MUTANTS` shows that
these runs notice what they are there for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

torch = pytest.importorskip("torch")

from tier_models import SHAPE, MemoryStore, page_values, prompt  # noqa: E402
from tier_schedule import LateStreams, SeededWork, Stuck  # noqa: E402

from mooncake_py.errors import OutOfSpace  # noqa: E402
from mooncake_py.hicache import tier_moves, tier_request, tiered_cache  # noqa: E402
from mooncake_py.hicache.kv_pages import KvPages  # noqa: E402
from mooncake_py.hicache.prefetch import Prefetch  # noqa: E402
from mooncake_py.hicache.radix_tree import RadixTree, chain_keys, split_pages  # noqa: E402
from mooncake_py.hicache.tier_options import (  # noqa: E402
    PREFETCH_POLICIES,
    WRITE_POLICIES,
    TierOptions,
)
from mooncake_py.hicache.tier_request import Load, Request  # noqa: E402
from mooncake_py.hicache.tier_streams import Machine  # noqa: E402
from mooncake_py.hicache.tiered_cache import TieredCache  # noqa: E402

SEEDS = 120


class ScheduledStore(MemoryStore):
    """Others run in the middle of every call, and while a read fills its targets."""

    def __init__(self, work: SeededWork, seed: int, failures: float) -> None:
        super().__init__(seed, failures)
        self._work = work

    def leading(self, keys: Sequence[str]) -> int:
        self._work.switch()
        return super().leading(keys)

    def get(self, keys, targets, sizes) -> list[bool]:  # type: ignore[no-untyped-def]
        for views in targets:  # a read that fails half way leaves rubbish behind, slowly
            for view in views:
                view[:] = b"\xee" * view.nbytes
            self._work.switch()
        return super().get(keys, targets, sizes)

    def put(self, keys, values) -> list[bool]:  # type: ignore[no-untyped-def]
        self._work.switch()
        done = super().put(keys, values)
        self._work.switch()
        return done


def scheduled(work: SeededWork, streams: LateStreams) -> type[TieredCache]:
    class Scheduled(TieredCache):
        def _machine(self) -> Machine:
            return Machine(work, streams)

    return Scheduled


class Run:
    """One seed: engines that serve random requests over one cache."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.work = SeededWork(seed)
        self.streams = LateStreams(self.work)
        chance = self.work.random
        self.store = ScheduledStore(self.work, seed, chance.choice([0, 0, 0.15]))
        self.cache = scheduled(self.work, self.streams)(
            KvPages(SHAPE, chance.choice([7, 14])),
            KvPages(SHAPE, chance.choice([3, 12, 40]), layout="page_first"),
            self.store,
            key_prefix="test/",
            options=TierOptions(
                write_policy=chance.choice(WRITE_POLICIES),
                prefetch_policy=chance.choice(PREFETCH_POLICIES),
                eviction=chance.choice(["lru", "lfu", "cost"]),
                prefetch_tokens_min=1, prefetch_base_ms=20, batch_pages=chance.choice([1, 3]),
                prefetch_jobs_max=chance.choice([1, 8]),
            ),
        )  # fmt: skip
        self.wrong: list[str] = []
        if chance.random() < 0.7:  # another process was here before
            for number in range(4):
                self.fill_store(prompt(number, 5))

    def fill_store(self, tokens: list[int]) -> None:
        keys = chain_keys("", split_pages(tokens, SHAPE.page_tokens))
        for key, value in zip(keys, page_values("", tokens), strict=True):
            layers = [torch.full((SHAPE.piece_bytes // 2,), float(value + i)) for i in range(3)]
            self.store.objects[f"test/{key.hex()}"] = torch.stack(layers).numpy().tobytes()

    def go(self) -> list[str]:
        """The steps. Raises what went wrong."""
        self.work.run(*[lambda n=n: self.engine(n) for n in range(3)])  # type: ignore[misc]  # binds
        self.streams.finish(self.streams.produced())
        assert not self.wrong, self.wrong[0]
        for objects in self.store.objects.items():
            self.check_object(*objects)
        self.nothing_lost()
        return self.work.steps

    def nothing_lost(self) -> None:
        cache, tree = self.cache, self.cache._tree
        assert cache.host is not None
        assert cache.device.free_count + tree.device_pages == cache.device.page_count
        assert cache.host.free_count + tree.host_pages == cache.host.page_count
        locked = [n for n in tree.nodes() if n.device_locks or n.host_locks or n.copying]
        assert not locked
        assert cache._moves.prefetcher is not None
        assert not cache._moves.prefetcher._jobs
        assert not cache._moves.prefetcher._pages
        assert not cache._moves._queued_pages

    def engine(self, number: int) -> None:
        chance = random.Random(self.seed * 10 + number)
        for _ in range(7):
            tokens = prompt(chance.randrange(4), 5)[: chance.randrange(3, 22)]
            if chance.random() < 0.3:
                tokens += [chance.randrange(3) for _ in range(4)]
            with self.cache.begin(tokens) as request:
                self.step()
                try:
                    self.serve(request, tokens, lambda: chance.random() < 0.2)
                except OutOfSpace:
                    self.step()
            self.step()
            if chance.random() < 0.1:
                self.cache.clear()

    def serve(self, request: Request, tokens: list[int], gives_up: Callable[[], bool]) -> None:
        if gives_up():
            return
        request.wait()
        self.step()
        if gives_up():
            return
        load = request.load()
        cached = request.cached_tokens // SHAPE.page_tokens
        if gives_up():
            return
        new = request.extend(len(tokens) // SHAPE.page_tokens - len(request.device_pages))
        values = page_values("", tokens)
        for layer in range(SHAPE.layer_count):
            load.wait_layer(layer)
            self.read(request.device_pages[:cached], values, layer)
            self.write(new, values[cached:], layer)
            self.step()
        if gives_up():
            return
        request.first_token()
        request.commit(tokens)
        self.step()

    def step(self) -> None:
        self.streams.some()
        self.work.switch()

    def read(self, pages: Sequence[int], values: Sequence[torch.Tensor], layer: int) -> None:
        held = list(pages)

        def look() -> None:
            for page, value in zip(held, values, strict=False):
                if not (self.cache.device.layer(layer)[page] == value + layer).all():
                    self.wrong.append(f"seed {self.seed}: page {page}, layer {layer}")

        self.streams.compute(look)

    def write(self, pages: Sequence[int], values: Sequence[torch.Tensor], layer: int) -> None:
        held = list(pages)

        def fill() -> None:
            for page, value in zip(held, values, strict=False):
                self.cache.device.layer(layer)[page] = value + layer

        self.streams.compute(fill)

    def check_object(self, key: str, value: bytes) -> None:
        """One value a page and layer, which its key's first bytes give."""
        first = float(int(key.removeprefix("test/")[2:4] + key.removeprefix("test/")[:2], 16))
        layers = torch.frombuffer(bytearray(value), dtype=torch.float32).view(SHAPE.layer_count, -1)
        for layer in range(SHAPE.layer_count):
            assert (layers[layer] == first + layer).all(), f"seed {self.seed}: object {key}"


def test_a66_any_order_of_aborts_failures_and_delays_keeps_every_page_whole_and_owned() -> None:
    tiers = dict.fromkeys(("L1", "L2", "L3"), 0)
    for seed in range(SEEDS):
        run = Run(seed)
        try:
            run.go()
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        for tier in tiers:
            tiers[tier] += run.cache.report.hits[tier]
    assert min(tiers.values()) > SEEDS // 3, "the runs must meet every tier"


def test_a_seed_is_a_run() -> None:
    assert Run(5).go() == Run(5).go()
    assert Run(5).go() != Run(6).go()


# --- do these runs notice anything? ---


def settle_early(job: Prefetch) -> None:
    """Host pages go back while the worker may still write there."""
    if job.taken is not None and job.pages:
        job._owner.host.give_back(job.pages[job.taken :])
        job.pages = job.pages[: job.taken] if not job.ended else []


def no_lock(tree: RadixTree, node: object) -> None:
    pass


def attach_from_the_head(moves, node, host, copied) -> None:  # type: ignore[no-untyped-def]
    """A node that was split while it was copied gets the pages of its front."""
    whole(moves, node, host[::-1], copied)


def begin_without_order(moves, copies, after) -> None:  # type: ignore[no-untyped-def]
    start(moves, copies, ("engine", 0))


def end_at_once(load: Load, timeout_s: float) -> bool:
    return True


def no_order(streams: LateStreams, mark: object) -> None:
    pass


def lose_spare(cache, request, have, taken) -> None:  # type: ignore[no-untyped-def]
    if taken:
        pages = request._pages[: have + len(taken)]
        cache._tree.insert_host(request._namespace, pages, taken, skip=have)


whole, start = tier_moves.TierMoves._attach, tier_moves.TierMoves.copy_down
MUTANTS = {
    "a prefetch's pages are freed before its worker ended": (Prefetch, "settle", settle_early),
    "host pages are not locked": (RadixTree, "lock_host", no_lock),
    "device pages are not locked": (RadixTree, "lock", no_lock),
    "a split node gets the wrong host pages": (
        tier_moves.TierMoves, "_attach", attach_from_the_head,
    ),
    "a backup does not wait for what computes": (
        tier_moves.TierMoves, "copy_down", begin_without_order,
    ),
    "an abort does not wait for the copy": (tier_request.Load, "wait_end", end_at_once),
    "computing does not wait for the copy": (LateStreams, "order", no_order),
    "pages change hands before the copy ended": (LateStreams, "finish", no_order),
    "spare pages are forgotten": (tiered_cache.TieredCache, "_insert_host", lose_spare),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_runs_notice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, broken = MUTANTS[name]
    monkeypatch.setattr(owner, method, broken)
    if method == "lock":
        monkeypatch.setattr(owner, "unlock", no_lock)
    if method == "lock_host":
        monkeypatch.setattr(owner, "unlock_host", no_lock)
    for seed in range(SEEDS):
        try:
            Run(seed).go()
        except (AssertionError, Stuck, RuntimeError, KeyError, IndexError):
            return
    pytest.fail(f"{SEEDS} runs did not notice: {name}")
