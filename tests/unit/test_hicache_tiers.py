"""The tiered cache with a store in memory: every page that is handed out has the KV of its tokens.

KV of a token here is a function of the whole prefix, so that a page under a wrong prefix shows.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

torch = pytest.importorskip("torch")

from tier_models import SHAPE, MemoryStore, page_values, prompt  # noqa: E402

from mooncake_py.errors import OutOfSpace, TransferTimeout, UsageError  # noqa: E402 - after the check for torch
from mooncake_py.hicache.kv_pages import LAYOUTS, KvPages, KvShape, copy_layer  # noqa: E402
from mooncake_py.hicache.radix_tree import chain_keys, split_pages  # noqa: E402
from mooncake_py.hicache.tier_options import (  # noqa: E402
    PREFETCH_POLICIES,
    WRITE_POLICIES,
    BreakEven,
    TierOptions,
)
from mooncake_py.hicache.tier_request import Request  # noqa: E402
from mooncake_py.hicache.tier_streams import CpuStreams, Machine  # noqa: E402
from mooncake_py.hicache.tier_work import ThreadWork  # noqa: E402
from mooncake_py.hicache.tiered_cache import TieredCache  # noqa: E402

WAIT_MS = 10_000


def compute(cache: TieredCache, namespace: str, tokens: Sequence[int], pages: list[int]) -> None:
    for page, value in zip(pages, page_values(namespace, tokens), strict=False):
        for layer in range(SHAPE.layer_count):
            cache.device.layer(layer)[page] = value + layer


def check(cache: TieredCache, namespace: str, tokens: Sequence[int], pages: list[int]) -> None:
    for page, value in zip(pages, page_values(namespace, tokens), strict=False):
        for layer in range(SHAPE.layer_count):
            assert (cache.device.layer(layer)[page] == value + layer).all(), (page, layer)


def serve(cache: TieredCache, tokens: Sequence[int], namespace: str = "") -> Request:
    """A whole request: answers it closed, with what it found."""
    request = cache.begin(tokens, namespace)
    with request:
        request.wait()
        with contextlib.suppress(OutOfSpace):
            request.load().wait(timeout_ms=WAIT_MS)
        have = len(request.device_pages)
        check(cache, namespace, tokens, request.device_pages)
        whole = len(tokens) // SHAPE.page_tokens
        new = request.extend(whole - have)
        compute_from = [*request.device_pages[:have], *new]
        compute(cache, namespace, tokens, compute_from)
        request.commit(tokens)
    return request


@contextlib.contextmanager
def caches(
    device: int = 16, host: int = 32, store: MemoryStore | None = None, layout: str = "page_first",
    **options: object,
) -> Iterator[TieredCache]:  # fmt: skip
    given = {"prefetch_tokens_min": 1, "batch_pages": 4} | options
    with TieredCache(
        KvPages(SHAPE, device),
        KvPages(SHAPE, host, layout=layout) if host else None,
        store,
        key_prefix="test/" if store else "",
        options=TierOptions(**given),  # type: ignore[arg-type]
    ) as cache:
        yield cache
        settled(cache)


def settled(cache: TieredCache) -> None:
    """No page is lost: all are in the list of free ones or in the tree."""
    assert cache.flush(timeout_ms=WAIT_MS)
    prefetcher = cache._moves.prefetcher
    if prefetcher is not None:
        with cache._changed:
            assert cache._changed.wait_for(lambda: not prefetcher._jobs, WAIT_MS / 1000)
        assert not prefetcher._pages
    tree = cache._tree
    assert cache.device.free_count + tree.device_pages == cache.device.page_count
    if cache.host is not None:
        assert cache.host.free_count + tree.host_pages == cache.host.page_count
    assert not any(node.device_locks or node.host_locks or node.copying for node in tree.nodes())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prefetch", PREFETCH_POLICIES)
@pytest.mark.parametrize("write", WRITE_POLICIES)
def test_a69_what_is_written_is_read_back_in_every_policy_and_layout(
    write: str, prefetch: str, layout: str
) -> None:
    store = MemoryStore()
    options = {"write_policy": write, "prefetch_policy": prefetch, "layout": layout}
    with caches(device=16, host=32, store=store, **options) as cache:  # type: ignore[arg-type]
        for number in range(4):
            serve(cache, prompt(number, 8))
            serve(cache, prompt(number, 8))
        assert cache.flush(timeout_ms=WAIT_MS)
        tiers = serve(cache, prompt(0, 8)).tier_pages
        assert sum(tiers.values()) == 8, tiers
        assert tiers["L1"] < 8  # it had left the device
        serve(cache, prompt(1, 8))
        assert cache.flush(timeout_ms=WAIT_MS)
    assert len(store.objects) >= 8 * 2
    with caches(16, 32, store, layout, prefetch_policy="wait_complete") as other:
        assert serve(other, prompt(0, 8)).tier_pages == {"L1": 0, "L2": 0, "L3": 8}
        assert serve(other, prompt(0, 8)).tier_pages == {"L1": 8, "L2": 0, "L3": 0}


@pytest.mark.parametrize("seed", range(12))
def test_a66_random_requests_aborts_and_failures_lose_no_page_and_mix_none(seed: int) -> None:
    chance = random.Random(seed)
    store = MemoryStore(seed, failures=chance.choice([0, 0.2]))
    write, prefetch = chance.choice(WRITE_POLICIES), chance.choice(PREFETCH_POLICIES)
    eviction = chance.choice(["lru", "lfu", "cost"])
    with caches(
        chance.choice([12, 24]), chance.choice([4, 16, 40]), store, chance.choice(LAYOUTS),
        write_policy=write, prefetch_policy=prefetch, eviction=eviction, prefetch_base_ms=50,
    ) as cache:  # fmt: skip

        def work(worker: int) -> None:
            mine = random.Random(seed * 100 + worker)
            for _ in range(60):
                tokens = prompt(mine.randrange(6), 5)[: mine.randrange(1, 22)]
                if mine.random() < 0.3:
                    tokens += [mine.randrange(3) for _ in range(4)]
                namespace = mine.choice(["", "adapter"])
                request = cache.begin(tokens, namespace)
                with request, contextlib.suppress(OutOfSpace):
                    if mine.random() < 0.1:
                        continue
                    request.wait()
                    if mine.random() < 0.1:
                        continue
                    load = request.load()
                    if mine.random() < 0.1:
                        continue
                    load.wait(timeout_ms=WAIT_MS)
                    check(cache, namespace, tokens, request.device_pages)
                    request.extend(len(tokens) // SHAPE.page_tokens - len(request.device_pages))
                    compute(cache, namespace, tokens, request.device_pages)
                    if mine.random() < 0.1:
                        continue
                    request.commit(tokens)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        settled(cache)
        cache.clear()
        assert cache.device.free_count == cache.device.page_count


def test_a67_a_host_pool_smaller_than_the_device_s_gets_everything_to_the_store() -> None:
    store = MemoryStore()
    with caches(device=32, host=4, store=store) as cache:
        for number in range(3):
            serve(cache, prompt(number, 7))
            assert cache.flush(timeout_ms=WAIT_MS)
        first = len(store.objects)
        assert first >= 3, "no prompt is too long to be begun with"
        assert cache.report.dropped_pages["no host room for a copy"] > 0
        for _ in range(7):
            for number in range(3):
                assert serve(cache, prompt(number, 7)).tier_pages["L1"] == 7
                assert cache.flush(timeout_ms=WAIT_MS)
        assert len(store.objects) == 21
    with caches(device=32, host=4, store=store, prefetch_policy="wait_complete") as cache:
        assert serve(cache, prompt(0, 7)).tier_pages["L3"] == 2  # half of the pool at once


def test_a69_what_could_never_be_read_back_is_refused() -> None:
    pools = KvPages(SHAPE, 8), KvPages(SHAPE, 1)
    with pytest.raises(UsageError, match="nothing is ever read"):
        TieredCache(*pools, MemoryStore(), key_prefix="test/")
    options = TierOptions(prefetch_host_ratio=1.0, prefetch_tokens_min=1)
    TieredCache(*pools, MemoryStore(), key_prefix="test/", options=options).close()


def test_a60_of_ranks_with_equal_bytes_one_writes_and_all_read() -> None:
    store = MemoryStore()
    with caches(store=store, writes_store=False) as cache:
        serve(cache, prompt(0, 8))
        assert cache.flush(timeout_ms=WAIT_MS)
        assert not store.objects
    with caches(store=store) as cache:
        serve(cache, prompt(0, 8))
    assert len(store.objects) == 8
    reading = {"writes_store": False, "prefetch_policy": "wait_complete"}
    with caches(store=store, **reading) as cache:
        assert serve(cache, prompt(0, 8)).tier_pages["L3"] == 8


def test_a62_an_object_of_another_length_is_no_page() -> None:
    store = MemoryStore()
    with caches(store=store) as cache:
        serve(cache, prompt(0, 8))
    keys = chain_keys("", split_pages(prompt(0, 8), SHAPE.page_tokens))
    short = f"test/{keys[3].hex()}"
    store.objects[short] = store.objects[short][:-1]
    with caches(store=store, prefetch_policy="wait_complete") as cache:
        assert serve(cache, prompt(0, 8)).tier_pages["L3"] == 3


def test_a65_no_policy_waits_longer_than_it_says() -> None:
    assert TierOptions(prefetch_policy="best_effort").wait_ms(10**6) == 0
    timed = TierOptions(prefetch_base_ms=100, prefetch_ms_per_ki_token=50, prefetch_cap_ms=1000)
    assert [timed.wait_ms(tokens) for tokens in (0, 1024, 4096, 10**6)] == [100, 150, 300, 1000]
    store = MemoryStore()
    with caches(store=store) as cache:
        serve(cache, prompt(0, 8))
    store.gate.clear()
    with caches(store=store, prefetch_policy="timeout", prefetch_base_ms=30) as cache:
        request = cache.begin(prompt(0, 8))
        assert store.reading.wait(10)
        assert request.wait() == 0
        request.close()
        store.gate.set()
        assert serve(cache, prompt(0, 8)).tier_pages["L3"] in (0, 8)
    store.gate.clear()
    with caches(store=store, prefetch_policy="wait_complete", prefetch_cap_ms=30) as cache:
        with cache.begin(prompt(0, 8)) as request:
            assert request.wait() == 0, "the cap bounds whatever the policy is"
        store.gate.set()


def test_a64_what_arrived_before_the_end_is_used_and_the_rest_given_back() -> None:
    store = MemoryStore()
    with caches(store=store) as cache:
        serve(cache, prompt(0, 12))
    keys = chain_keys("", split_pages(prompt(0, 12), SHAPE.page_tokens))
    lost = f"test/{keys[6].hex()}"  # between the query and the read
    found, store.leading = store.leading, len  # type: ignore[method-assign]
    del store.objects[lost]
    with caches(store=store, prefetch_policy="wait_complete") as cache:
        assert serve(cache, prompt(0, 12)).tier_pages["L3"] == 6
        assert cache.report.dropped_pages["not readable from the store"] == 2  # of a batch of 4
    assert found(list(store.objects)[:1]) == 1


def test_a66_an_abort_in_the_middle_of_a_read_frees_pages_only_afterwards() -> None:
    store = MemoryStore()
    with caches(store=store) as cache:
        serve(cache, prompt(0, 8))
    store.gate.clear()
    store.reading.clear()
    with caches(host=8, store=store, prefetch_host_ratio=1.0) as cache:
        request = cache.begin(prompt(0, 8))
        assert store.reading.wait(10)
        request.close()
        assert cache.host is not None
        assert cache.host.free_count == 0  # the worker may still write there
        store.gate.set()
        settled(cache)
        assert cache.host.free_count == 8


def test_f66_a_store_that_fails_leaves_the_upper_tiers_as_they_are() -> None:
    store = MemoryStore(failures=1.0)
    with caches(device=16, host=32, store=store) as cache:
        for number in range(3):
            serve(cache, prompt(number, 8))
        assert serve(cache, prompt(2, 8)).tier_pages == {"L1": 8, "L2": 0, "L3": 0}
        assert serve(cache, prompt(0, 8)).tier_pages == {"L1": 0, "L2": 8, "L3": 0}
        assert cache.flush(timeout_ms=WAIT_MS)
        assert cache.report.dropped_pages["not stored"] == 24
    assert not store.objects


class GatedStreams(CpuStreams):
    """Layer 1 and those behind it are copied once the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def copy(self, source, target, layer, from_pages, to_pages, after):  # type: ignore[no-untyped-def]
        assert not layer or target.layout == "page_first" or self.gate.wait(30)
        return super().copy(source, target, layer, from_pages, to_pages, after)


def test_f66_the_first_layer_is_computed_while_the_next_is_loaded() -> None:
    streams = GatedStreams()

    class Gated(TieredCache):
        def _machine(self) -> Machine:
            return Machine(ThreadWork(), streams)

    with Gated(KvPages(SHAPE, 8), KvPages(SHAPE, 32, layout="page_first")) as cache:
        streams.gate.set()
        serve(cache, prompt(0, 8))
        serve(cache, prompt(1, 8))
        streams.gate.clear()
        with cache.begin(prompt(0, 8)) as request:
            load = request.load()
            load.wait_layer(0, timeout_ms=WAIT_MS)
            with pytest.raises(TransferTimeout):
                load.wait_layer(1, timeout_ms=20)
            streams.gate.set()
            load.wait_layer(2, timeout_ms=WAIT_MS)
            check(cache, "", prompt(0, 8), request.device_pages)


class FailingStreams(CpuStreams):
    """A copy happens when it is waited for. The last layer cannot be copied to the host."""

    def __init__(self) -> None:
        self.given: list[Callable[[], object]] = []

    def copy(self, source, target, layer, from_pages, to_pages, after):  # type: ignore[no-untyped-def]
        if layer == SHAPE.layer_count - 1 and target.layout == "page_first":
            raise RuntimeError("an error of the device")
        self.given.append(lambda: copy_layer(source, target, layer, from_pages, to_pages))
        return len(self.given)

    def finish(self, mark: object) -> None:
        while self.given:
            self.given.pop(0)()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_f66_pages_of_a_copy_that_fails_are_used_again_when_nothing_of_it_goes_on(
    policy: str,
) -> None:
    streams, host = FailingStreams(), KvPages(SHAPE, 8, layout="page_first")

    class Failing(TieredCache):
        def _machine(self) -> Machine:
            return Machine(ThreadWork(), streams)

    on_the_way: list[int] = []
    give_back = host.give_back

    def watched(pages: Sequence[int]) -> None:
        on_the_way.extend([len(streams.given)] * len(pages))
        give_back(pages)

    host.give_back = watched  # type: ignore[method-assign]
    with Failing(KvPages(SHAPE, 4), host, options=TierOptions(write_policy=policy)) as cache:
        serve(cache, prompt(0, 4))
        serve(cache, prompt(1, 4))  # its pages are those of the first, for which write_back copies
        assert cache.flush(timeout_ms=WAIT_MS)
    assert host.free_count == 8
    assert on_the_way
    assert not any(on_the_way)


def test_f66_a_request_of_a_closed_cache_ends_at_once_and_says_so() -> None:
    cache = TieredCache(KvPages(SHAPE, 8), KvPages(SHAPE, 32, layout="page_first"))
    for number in range(2):
        serve(cache, prompt(number, 8))
        assert cache.flush(timeout_ms=WAIT_MS)
    request = cache.begin(prompt(0, 8))
    assert request._host
    cache.close()
    with pytest.raises(UsageError, match="closed"):
        request.load()
    request.close()
    assert not request._own
    assert not any(node.host_locks or node.device_locks for node in cache._tree.nodes())


def test_namespaces_do_not_share_pages() -> None:
    with caches() as cache:
        serve(cache, prompt(0, 4), "a")
        assert sum(serve(cache, prompt(0, 4), "b").tier_pages.values()) == 0


def test_a63_ranks_agree_on_the_smallest_prefix_with_equal_numbers_of_calls() -> None:
    """Two ranks of which one has lost its pages; `agree` is a barrier with a minimum."""
    barrier = threading.Barrier(2, timeout=10)
    counts: dict[int, int] = {}

    def agreeing(rank: int):  # type: ignore[no-untyped-def]
        def agree(count: int) -> int:
            counts[rank] = count
            barrier.wait()
            least = min(counts.values())
            barrier.wait()
            return least

        return agree

    found: dict[int, list[int]] = {0: [], 1: []}

    def run(rank: int) -> None:
        pools = KvPages(SHAPE, 16), KvPages(SHAPE, 16)
        with TieredCache(*pools, agree=agreeing(rank)) as cache:
            for step, number in enumerate((0, 1, 0, 1)):
                request = serve(cache, prompt(number, 5))
                found[rank].append(request._cached)
                if rank == 1 and step == 0:
                    cache.flush(timeout_ms=WAIT_MS)
                    cache.clear()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0] == found[1]
    assert found[0][2:] == [0, 5]


def test_fetching_is_refused_when_computing_is_cheaper() -> None:
    even = BreakEven()
    assert even.worth_fetching(10)
    even.computed(10, 0.01)
    even.fetched(10, 1.0)
    answers = [even.worth_fetching(10) for _ in range(64)]
    assert answers.count(True) == 2  # it looks again from time to time
    for _ in range(80):
        even.fetched(10, 0.001)
    assert even.worth_fetching(10)
    store = MemoryStore()
    with caches(store=store) as cache:
        serve(cache, prompt(0, 8))
    with caches(store=store, prefetch_policy="wait_complete") as cache:
        cache.report.break_even.computed(1, 1e-9)
        cache.report.break_even.fetched(1, 1.0)
        calls = store.calls
        assert serve(cache, prompt(0, 8)).tier_pages["L3"] == 0
        assert store.calls == calls
        assert cache.report.dropped_pages["cheaper to compute"] == 8


def test_pages_in_use_by_requests_are_not_taken_from_them() -> None:
    with caches(device=8) as cache:
        first = cache.begin(prompt(0, 8)[:-1])
        first.wait()
        first.load()
        first.extend(6)
        second = cache.begin(prompt(1, 8))
        with pytest.raises(OutOfSpace, match="in use by requests"):
            second.extend(3)
        first.close()
        second.extend(3)
        second.close()
        with pytest.raises(UsageError, match="after the request was closed"):
            second.extend(1)


def test_wrong_calls_are_refused() -> None:
    with caches() as cache:
        request = cache.begin(prompt(0, 2))
        request.load()
        with pytest.raises(UsageError, match="loads once"):
            request.load()
        with pytest.raises(UsageError, match="more whole pages"):
            request.commit(prompt(0, 2))
        request.extend(2)
        with pytest.raises(UsageError, match="do not begin"):
            request.commit([1] * 8)
        request.close()
    with pytest.raises(UsageError, match="closed"):
        cache.begin([1])
    with pytest.raises(UsageError, match="key_prefix"):
        TieredCache(KvPages(SHAPE, 2), KvPages(SHAPE, 2), MemoryStore())
    other = KvShape(layer_count=1, page_tokens=4, head_count=2, head_dim=4)
    with pytest.raises(UsageError, match="shapes differ"):
        TieredCache(KvPages(SHAPE, 2), KvPages(other, 2))
    for wrong in ({"write_policy": "x"}, {"batch_pages": 0}, {"prefetch_host_ratio": 0}):
        with pytest.raises(UsageError):
            TierOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="layout"):
        KvPages(SHAPE, 1, layout="sideways")
    with pytest.raises(UsageError, match="large enough"):
        KvPages(SHAPE, 2, memory=memoryview(bytearray(SHAPE.page_bytes)))


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("planes", [1, 2])
def test_a69_objects_are_the_same_from_both_layouts(source: str, target: str, planes: int) -> None:
    shape = KvShape(2, 4, 3, 5, planes, torch.bfloat16)
    memory = memoryview(bytearray(3 * shape.page_bytes + 7))
    one, other = KvPages(shape, 3, layout=source), KvPages(shape, 3, layout=target, memory=memory)
    for layer in range(2):
        one.layer(layer)[:] = torch.randn(3, planes, 4, 3, 5)
        copy_layer(one, other, layer, [0, 2], [2, 1])
    assert b"".join(one.views(2)) == b"".join(other.views(1))
    assert len(b"".join(one.views(0))) == shape.page_bytes
    assert one.take(4) is None
    assert one.take(2) == [0, 1]
