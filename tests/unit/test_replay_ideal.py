"""The yardsticks, against slow models that share no code with them."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mooncake_py.ops.ideal import clairvoyant_hits, count_pages, lru_hits
from mooncake_py.ops.trace import generate_trace


def chains(branches: list[list[int]]) -> list[tuple[int, ...]]:
    """Turn lists of branch numbers into prompts whose ids name the whole path, as real ids do."""
    names: dict[tuple[int, ...], int] = {}
    return [
        tuple(names.setdefault(tuple(b[: i + 1]), len(names)) for i in range(len(b)))
        for b in branches
    ]


PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=3), max_size=6).map(chains)


def best_possible(prompts: list[tuple[int, ...]], capacity: int) -> int:
    """Try every choice of what to keep after every request."""

    @cache
    def best(index: int, kept: frozenset[int]) -> int:
        if index == len(prompts):
            return 0
        prompt = prompts[index]
        run = 0
        while run < len(prompt) and prompt[run] in kept:
            run += 1
        may_keep = kept | frozenset(prompt)
        size = min(capacity, len(may_keep))
        return run + max(
            best(index + 1, frozenset(choice)) for choice in combinations(sorted(may_keep), size)
        )

    return best(0, frozenset())


@settings(max_examples=120, deadline=None)
@given(PROMPTS, st.integers(0, 4))
def test_no_choice_of_what_to_keep_beats_the_clairvoyant(
    prompts: list[tuple[int, ...]], capacity: int
) -> None:
    bound = clairvoyant_hits(prompts, capacity)
    assert bound >= best_possible(prompts, capacity)
    # A prompt that fits can be served as it was counted; only larger ones make the bound loose.
    if all(len(prompt) <= capacity for prompt in prompts):
        assert bound == best_possible(prompts, capacity)


@settings(max_examples=200, deadline=None)
@given(PROMPTS, st.integers(1, 8))
def test_lru_equals_a_list_kept_in_order_of_use(
    prompts: list[tuple[int, ...]], capacity: int
) -> None:
    kept: list[int] = []
    hits = 0
    for prompt in prompts:
        run = next((i for i, page in enumerate(prompt) if page not in kept), len(prompt))
        hits += run
        kept = [page for page in kept if page not in prompt[:run]] + list(prompt[:run])
        for page in prompt[run:]:
            kept = (kept if page in kept else [*kept, page])[-capacity:]
    assert lru_hits(prompts, capacity) == hits


def test_a_cache_that_holds_everything_hits_all_but_first_uses() -> None:
    prompts = [request.hash_ids for request in generate_trace(200)]
    distinct = len({page for prompt in prompts for page in prompt})
    expected = count_pages(prompts) - distinct
    assert lru_hits(prompts, distinct) == expected
    assert clairvoyant_hits(prompts, distinct) == expected


@pytest.mark.parametrize("capacity", [0, 50, 200, 800])
def test_lru_never_beats_the_clairvoyant(capacity: int) -> None:
    prompts = [request.hash_ids for request in generate_trace(200)]
    assert lru_hits(prompts, capacity) <= clairvoyant_hits(prompts, capacity)
