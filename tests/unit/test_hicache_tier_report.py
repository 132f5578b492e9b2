"""What the tiers report: numbers that add up, as an object and for Prometheus; limits say why."""

from __future__ import annotations

import json
import random
import threading
import urllib.request

import pytest

torch = pytest.importorskip("torch")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from test_hicache_tiers import WAIT_MS, caches, serve, settled  # noqa: E402
from tier_models import SHAPE, MemoryStore, prompt  # noqa: E402

from mooncake_py.errors import UsageError  # noqa: E402
from mooncake_py.hicache.kv_pages import KvPages, KvShape  # noqa: E402
from mooncake_py.hicache.tier_metrics import families  # noqa: E402
from mooncake_py.hicache.tier_options import BreakEven, Line, Rate, TierOptions  # noqa: E402
from mooncake_py.hicache.tier_ranks import Capacity, capacity_of  # noqa: E402
from mooncake_py.hicache.tier_streams import CpuStreams, Machine  # noqa: E402
from mooncake_py.hicache.tier_work import ThreadWork  # noqa: E402
from mooncake_py.hicache.tiered_cache import TieredCache  # noqa: E402
from mooncake_py.metrics import Metrics, MetricsServer  # noqa: E402

PAGE_BYTES, TOKENS = SHAPE.page_bytes, SHAPE.page_tokens


class SteppingWork(ThreadWork):
    """Every look at the clock finds a millisecond gone."""

    def __init__(self) -> None:
        self._now_ns = 0
        self._lock = threading.Lock()

    def now_ns(self) -> int:
        with self._lock:
            self._now_ns += 1_000_000
            return self._now_ns


class SteppingCache(TieredCache):
    def _machine(self) -> Machine:
        return Machine(SteppingWork(), CpuStreams())


def served(cache: TieredCache, number: int) -> None:
    with cache.begin(prompt(number, 8)) as request:
        request.wait()
        request.load().wait(timeout_ms=WAIT_MS)
        request.extend(8 - len(request.device_pages))
        request.first_token()
        request.next_token()
        request.next_token()
        request.commit(prompt(number, 8))
    assert cache.flush(timeout_ms=WAIT_MS)


def test_f66_every_token_and_byte_is_reported_once() -> None:
    store = MemoryStore()
    with caches(device=16, host=24, store=store, prefetch_policy="wait_complete") as cache:
        for number in (0, 0, 1, 2, 0, 3, 4, 0):
            served(cache, number)
        now = cache.snapshot()
        assert now.requests == 8
        assert now.tokens == 8 * 33
        assert sum(now.hit_tokens.values()) + now.recomputed_tokens == now.tokens
        assert now.hit_tokens["L1"] == 32
        assert now.hit_tokens["L2"] + now.hit_tokens["L3"] == 64
        assert now.hit_ratio() == pytest.approx(96 / 264)
        assert now.hits["L1"] == 1
        assert now.moved_bytes["L2 to L3"] == len(store.objects) * PAGE_BYTES
        assert now.moved_bytes["L2 to L1"] == 64 // TOKENS * PAGE_BYTES
        assert now.bytes_per_s("L2 to L1") > 0
        assert {tier for tier, _ in now.evicted_pages} == {"L1", "L2"}
        assert sum(now.evicted_pages.values()) == now.evicted_pages["L1", "room for a request"] + (
            now.evicted_pages["L2", "room for a copy"]
            + now.evicted_pages.get(("L2", "room for a prefetch"), 0)
        )
        assert now.itl.count == 16
        assert now.ttft.count == 8
        assert sum(now.ttft.buckets) == 8
        assert now.ttft.total_s == pytest.approx(sum(now.ttft_parts_s.values()))
        assert json.loads(json.dumps(now.to_json()))["occupancy"]["L1"]["pages"] == 16
        assert "room for a request" in str(now)


def test_the_time_to_the_first_token_is_split_into_its_parts() -> None:
    pools = KvPages(SHAPE, 16), KvPages(SHAPE, 16, layout="page_first")
    with SteppingCache(*pools) as cache:
        served(cache, 0)
        served(cache, 1)
        served(cache, 2)
        served(cache, 0)
        parts = cache.snapshot().ttft_parts_s
        assert set(parts) == {"match", "L3", "L2 to L1", "recompute"}
        assert min(parts.values()) > 0


def test_occupancy_says_what_requests_hold() -> None:
    with caches(device=16, host=24) as cache:
        served(cache, 0)
        held = cache.snapshot().occupancy
        assert (held["L1"].used, held["L1"].locked) == (8, 0)
        assert (held["L2"].pages, held["L2"].used) == (24, 8)
        with cache.begin(prompt(0, 8)) as request:
            request.load()
            request.extend(3)
            held = cache.snapshot().occupancy
            assert (held["L1"].used, held["L1"].locked) == (11, 11)
        assert cache.snapshot().occupancy["L1"].locked == 0


def test_f29_prometheus_sees_the_tiers_under_their_documented_names() -> None:
    metrics = Metrics("mooncake")
    with caches(device=16, host=24, store=MemoryStore()) as cache:
        metrics.collector("tiers", families(cache.snapshot))
        for number in (0, 1, 2, 0, 0):
            served(cache, number)
        server = MetricsServer(("127.0.0.1", 0), metrics, lambda: True)
        try:
            url = f"http://127.0.0.1:{server.port}/metrics"
            with urllib.request.urlopen(url, timeout=10) as answer:
                text = answer.read().decode()
        finally:
            server.close()
        now = cache.snapshot()
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    prefix = "mooncake_hicache_"
    assert found[prefix + "requests_total",] == 5
    assert found[prefix + "hit_tokens_total", "L1"] == now.hit_tokens["L1"]
    assert found[prefix + "moved_bytes_total", "L2 to L3"] == now.moved_bytes["L2 to L3"]
    assert found[prefix + "ttft_seconds_count",] == 5
    assert found[prefix + "ttft_seconds_bucket", "+Inf"] == 5
    assert found[prefix + "itl_seconds_count",] == 10
    assert found[prefix + "evicted_pages_total", "L1", "room for a request"] == 16
    assert found[prefix + "pages", "L1", "free"] == 0
    documented = {
        line.split()[0].partition("{")[0]
        for line in (families.__globals__["__doc__"] or "").splitlines()
        if line.strip().startswith(prefix)
    }
    seen = {name[0].removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
            for name in found}  # fmt: skip
    created = {name for name in seen if name.endswith("_created")}
    assert seen - created <= documented
    assert documented - seen <= {prefix + "dropped_pages_total"}  # none was


def test_a66_ten_thousand_prefetches_with_random_aborts_leave_nothing_behind() -> None:
    chance = random.Random(7)
    store = MemoryStore(7, failures=0.1)
    with caches(host=64, store=store, prefetch_policy="wait_complete", batch_pages=2) as cache:
        serve(cache, prompt(0, 8))
        assert cache.flush(timeout_ms=WAIT_MS)
        cache.clear()
        for number in range(10_000):
            request = cache.begin(prompt(number % 3 // 2, 8))
            if chance.random() < 0.5:
                request.wait()
            request.close()
            if number % 2_000 == 0:
                cache.clear()
        settled(cache)
        prefetcher = cache._moves.prefetcher
        assert prefetcher is not None
        assert prefetcher.jobs == 0
        cache.clear()
        assert cache.host is not None
        assert cache.host.free_count == cache.host.page_count
        assert cache.report.moved_bytes["L3 to L2"] > 0


def test_a64_a_prefetch_that_the_limits_refuse_promises_nothing() -> None:
    store = MemoryStore()
    with caches(store=store) as cache:
        serve(cache, prompt(0, 8))
        serve(cache, prompt(1, 8))
    slow = {"prefetch_policy": "wait_complete", "prefetch_bytes_per_s": 8 * PAGE_BYTES}
    with caches(store=store, **slow) as cache:
        assert serve(cache, prompt(0, 8)).tier_pages["L3"] == 8
        assert serve(cache, prompt(1, 8)).tier_pages["L3"] == 0  # within the same second
        assert cache.report.dropped_pages["prefetch rate"] == 8
    store.gate.clear()
    with caches(store=store, prefetch_jobs_max=1) as cache:
        first = cache.begin(prompt(0, 8))
        assert store.reading.wait(10)
        with cache.begin(prompt(1, 8)) as second:
            assert second.wait() == 0
        assert cache.report.dropped_pages["too many prefetches wait"] == 8
        first.close()
        store.gate.set()


def test_a_rate_gives_a_second_at_once_and_then_what_it_says() -> None:
    rate = Rate(100)
    assert rate.take(100, 0)
    assert not rate.take(1, 0)
    assert rate.take(50, 500_000_000)
    assert not rate.take(10, 500_000_000)
    assert rate.take(1_000, 1_500_000_000)  # larger than the bucket: it passes alone
    assert not rate.take(1, 2_500_000_000)
    assert rate.take(1, 12_500_000_000)
    assert Rate(0).take(1 << 60, 0)


def test_break_even_depends_on_the_length_of_the_prefix() -> None:
    even = BreakEven()
    for pages in (1, 10, 40):
        even.fetched(pages, 0.010 + pages * 0.001)
        even.computed(pages, pages * 0.003)
    assert not even.worth_fetching(2)
    assert even.worth_fetching(20)
    fetch_s, compute_s = even.predict_s(100)
    assert fetch_s == pytest.approx(0.110, rel=1e-6)
    assert compute_s == pytest.approx(0.300, rel=1e-6)
    assert even.refused == 1


class MeasuringWork(ThreadWork):
    """Time that a test moves."""

    def __init__(self) -> None:
        self.time_ns = 0

    def now_ns(self) -> int:
        return self.time_ns


class MeasuredStore(MemoryStore):
    """Reads take a latency and bytes by a bandwidth."""

    def __init__(self, work: MeasuringWork) -> None:
        super().__init__()
        self.work, self.latency_s, self.bytes_per_s = work, 0.001, 1e9

    def get(self, keys, targets, sizes) -> list[bool]:  # type: ignore[no-untyped-def]
        self.work.time_ns += int((self.latency_s + sum(sizes) / self.bytes_per_s) * 1e9)
        return super().get(keys, targets, sizes)


def test_f66_a_slow_store_is_not_fetched_from_until_it_is_fast_again() -> None:
    """By the measured bandwidth: a page is computed in 1 ms."""
    work = MeasuringWork()
    store = MeasuredStore(work)

    class Measured(TieredCache):
        def _machine(self) -> Machine:
            return Machine(work, CpuStreams())

    def ask(cache: TieredCache, pages: int) -> int:
        """Pages from L3; nothing stays above."""
        with cache.begin(prompt(0, pages)) as request:
            request.wait()
            request.load()
            work.time_ns += (pages - request._cached) * 1_000_000
            request.first_token()
            found = request.tier_pages["L3"]
        cache.clear()
        return found

    options = TierOptions(prefetch_policy="wait_complete", prefetch_tokens_min=1)
    pools = KvPages(SHAPE, 32), KvPages(SHAPE, 64)
    with Measured(*pools, store, key_prefix="test/", options=options) as cache:
        serve(cache, prompt(0, 16))
        assert cache.flush(timeout_ms=WAIT_MS)
        cache.clear()
        cache.report.break_even = BreakEven()  # what `serve` measured was no computing
        store.objects, kept = {}, store.objects
        for pages in (2, 16):
            assert ask(cache, pages) == 0  # computed: now that is known
        store.objects = kept
        assert [ask(cache, pages) for pages in (2, 16)] == [2, 16]

        store.bytes_per_s = SHAPE.page_bytes / 0.01  # ten times slower than computing
        found = [ask(cache, 16) for _ in range(20)]
        assert found[0] == 16
        assert found[-10:] == [0] * 10
        assert cache.report.break_even.refused >= 10

        store.bytes_per_s = 1e9
        found = [ask(cache, 16) for _ in range(BreakEven.RETRY * 12)]
        assert found[-5:] == [16] * 5, "it looks from time to time, and finds it fast again"


def test_a_line_of_odd_measurements_stays_sensible() -> None:
    assert Line().seconds(5) is None
    chance = random.Random(5)
    for _ in range(50):
        line = Line()
        for _ in range(chance.randrange(1, 6)):
            line.add(chance.randrange(1, 5), chance.random())
        times = [line.seconds(pages) for pages in (1, 2, 10, 1000)]
        assert times == sorted(times)  # type: ignore[type-var]  # no None: something was measured
        assert times[0] >= -1e-9  # type: ignore[operator]


def test_f66_capacity_is_that_of_the_smallest_rank_and_says_so() -> None:
    def rank(number: int, pages: int):  # type: ignore[no-untyped-def]
        return capacity_of(number, KvPages(SHAPE, pages), KvPages(SHAPE, 3 * pages))

    capacity = Capacity(tuple(rank(number, 10 - number) for number in range(4)))
    assert capacity.device_tokens == 7 * TOKENS
    assert capacity.host_tokens == 21 * TOKENS
    assert "not added up" in str(capacity)
    assert f"rank 3: device {7 * TOKENS} tokens in {7 * PAGE_BYTES:,} bytes" in str(capacity)


def test_tokens_are_reported_in_order() -> None:
    with caches() as cache, cache.begin(prompt(0, 2)) as request:
        with pytest.raises(UsageError, match="before first_token"):
            request.next_token()
        request.load()
        with pytest.raises(UsageError, match="wait comes before load"):
            request.wait()
    with pytest.raises(UsageError):
        KvShape(0, 1, 1, 1)
