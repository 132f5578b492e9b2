"""The tiers' numbers for Prometheus: `metrics.collector("tiers", families(cache.snapshot))`.

mooncake_hicache_requests_total                          requests
mooncake_hicache_tokens_total                            tokens asked for
mooncake_hicache_hits_total{tier}                        requests that found something there
mooncake_hicache_hit_tokens_total{tier}                  L1, L2, L3
mooncake_hicache_recomputed_tokens_total                 found nowhere
mooncake_hicache_ttft_seconds                            histogram: time to the first token
mooncake_hicache_ttft_part_seconds_total{part}           match, L3, L2 to L1, recompute
mooncake_hicache_itl_seconds                             histogram: between tokens
mooncake_hicache_moved_bytes_total{way}                  "L1 to L2": backup; "L3 to L2": restore
mooncake_hicache_moving_seconds_total{way}               bytes by this: what a transfer reaches
mooncake_hicache_evicted_pages_total{tier,cause}
mooncake_hicache_dropped_pages_total{cause}              neither backed up nor restored
mooncake_hicache_refused_fetches_total                   computing was cheaper
mooncake_hicache_pages{tier,state}                       gauge: free, idle, locked
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from mooncake_py.hicache.tier_report import BOUNDS_S, TierSnapshot, Times

PREFIX = "mooncake_hicache"


def families(read: Callable[[], TierSnapshot]) -> Callable[[], Iterable[Metric]]:
    """For `Metrics.collector` or any prometheus_client collector; asks at each scrape."""

    def collect() -> Iterator[Metric]:
        now = read()
        yield _counter("requests", "Requests", (), {(): now.requests})
        yield _counter("tokens", "Tokens asked for", (), {(): now.tokens})
        yield _counter("hits", "Requests that found something", ("tier",), _one(now.hits))
        yield _counter("hit_tokens", "Tokens found", ("tier",), _one(now.hit_tokens))
        yield _counter("recomputed_tokens", "Tokens found nowhere", (), {(): now.recomputed_tokens})
        yield _histogram("ttft_seconds", "Time to the first token", now.ttft)
        yield _counter(
            "ttft_part_seconds", "Parts of it, summed", ("part",), _one(now.ttft_parts_s)
        )
        yield _histogram("itl_seconds", "Time between tokens", now.itl)
        yield _counter("moved_bytes", "Backup and restore", ("way",), _one(now.moved_bytes))
        yield _counter("moving_seconds", "Time of moving them", ("way",), _one(now.busy_s))
        yield _counter("evicted_pages", "Evicted", ("tier", "cause"), now.evicted_pages)
        yield _counter(
            "dropped_pages", "Neither backed up nor restored", ("cause",), _one(now.dropped_pages)
        )
        yield _counter("refused_fetches", "Computing was cheaper", (), {(): now.refused_fetches})
        pages = GaugeMetricFamily(f"{PREFIX}_pages", "Pages of a tier", labels=("tier", "state"))
        for tier, held in now.occupancy.items():
            pages.add_metric((tier, "free"), held.pages - held.used)
            pages.add_metric((tier, "idle"), held.used - held.locked)
            pages.add_metric((tier, "locked"), held.locked)
        yield pages

    return collect


def _one(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(key,): value for key, value in values.items()}


def _counter(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, times: Times) -> Metric:
    family = HistogramMetricFamily(f"{PREFIX}_{name}", text)
    bounds = [f"{bound:g}" for bound in BOUNDS_S] + ["+Inf"]
    family.add_metric((), list(zip(bounds, accumulate(times.buckets), strict=True)), times.total_s)
    return family
