"""A real decoder over the tiers: its logits are those of a run without cache, to the last bit, in
all policies, layouts and kinds of attention, and whichever tier served the prefix."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "serving"))

from decoder import PAGE, SHAPES, Decoder, pages_of  # noqa: E402
from tier_models import MemoryStore  # noqa: E402

from mooncake_py.hicache.kv_pages import LAYOUTS, KvPages  # noqa: E402
from mooncake_py.hicache.tier_options import (  # noqa: E402
    PREFETCH_POLICIES,
    WRITE_POLICIES,
    TierOptions,
)
from mooncake_py.hicache.tiered_cache import TieredCache  # noqa: E402

WAIT_MS, CACHED = 20_000, 3
MODELS = {attention: Decoder(attention) for attention in SHAPES}
NOWHERE = {"L1": 0, "L2": 0, "L3": 0}


def prompt(number: int) -> list[int]:
    return [(number * 37 + i * i) % 256 for i in range(CACHED * PAGE + 5)]


@functools.cache
def recomputed(attention: str, number: int) -> torch.Tensor:
    tokens = prompt(number)
    pool = KvPages(SHAPES[attention], CACHED + 1)
    return MODELS[attention].prefill(pool, range(CACHED + 1), tokens, 0)


def served(cache: TieredCache, attention: str, number: int) -> dict[str, int]:
    """Where the prefix came from. The logits were right."""
    tokens = prompt(number)
    with cache.begin(tokens) as request:
        prefetcher = cache._moves.prefetcher
        assert prefetcher is not None
        with cache._changed:  # not even best_effort comes too early
            assert cache._changed.wait_for(lambda: not prefetcher._jobs, WAIT_MS / 1000)
        request.wait()
        load = request.load()
        request.extend(pages_of(len(tokens)) - len(request.device_pages))
        logits = MODELS[attention].prefill(
            cache.device, request.device_pages, tokens, request.cached_tokens, load.wait_layer
        )
        request.commit(tokens)
        tiers = request.tier_pages
    assert torch.equal(logits, recomputed(attention, number)), (number, tiers)
    assert cache.flush(timeout_ms=WAIT_MS)
    return tiers


@pytest.mark.parametrize("attention", SHAPES)
@pytest.mark.parametrize("device", LAYOUTS)
@pytest.mark.parametrize("host", LAYOUTS)
@pytest.mark.parametrize("prefetch", PREFETCH_POLICIES)
@pytest.mark.parametrize("write", WRITE_POLICIES)
def test_f66_logits_are_equal_from_every_tier(
    write: str, prefetch: str, host: str, device: str, attention: str
) -> None:
    store = MemoryStore()
    shape = SHAPES[attention]

    def cache() -> TieredCache:
        return TieredCache(
            KvPages(shape, 8, layout=device), KvPages(shape, 16, layout=host), store,
            key_prefix="test/",
            options=TierOptions(
                write_policy=write, prefetch_policy=prefetch, prefetch_tokens_min=1,
            ),
        )  # fmt: skip

    with cache() as one:
        assert served(one, attention, 0) == NOWHERE
        assert served(one, attention, 0) == NOWHERE | {"L1": CACHED}
        for number in (1, 2):
            assert served(one, attention, number) == NOWHERE
        assert served(one, attention, 0) == NOWHERE | {"L2": CACHED}
    with cache() as other:
        assert served(other, attention, 0) == NOWHERE | {"L3": CACHED}
        assert served(other, attention, 0) == NOWHERE | {"L1": CACHED}
