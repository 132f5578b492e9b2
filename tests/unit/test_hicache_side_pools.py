"""Which lengths of a prefix can be restored, compared with the definition itself."""

from __future__ import annotations

from itertools import product

import pytest

from mooncake_py.hicache.side_pools import PoolAsk, boundary, possible

PAGES = 6


def every_presence() -> list[tuple[bool, ...]]:
    return list(product((False, True), repeat=PAGES))


def test_a62_all_pages_ends_at_the_first_hole() -> None:
    for present in every_presence():
        run = next((i for i, there in enumerate(present) if not there), PAGES)
        assert boundary(present) == run
        assert possible(PoolAsk("all_pages"), present, PAGES) == (run, list(range(1, run + 1)))


@pytest.mark.parametrize("window", [1, 2, 4])
def test_a62_a_window_may_end_wherever_it_is_complete(window: int) -> None:
    for present in every_presence():
        allowed = [
            length
            for length in range(1, PAGES + 1)
            if all(present[max(0, length - window) : length])
        ]
        found = possible(PoolAsk("trailing_pages", trailing=window), present, PAGES)
        assert found == (max(allowed, default=0), allowed)


def test_block_groups_have_a_verdict_and_limit_nobody() -> None:
    ask = PoolAsk("block_groups", block_pages=3, group_pages=1)
    present = [False, False, True, False, False, False]
    assert possible(ask, present, PAGES) == (3, list(range(1, PAGES + 1)))
    assert possible(ask, [True] * PAGES, PAGES)[0] == PAGES
    assert possible(ask, [False] * PAGES, PAGES)[0] == 0


def test_what_lies_beyond_the_main_pool_does_not_count() -> None:
    assert possible(PoolAsk("all_pages"), [True] * PAGES, 2) == (2, [1, 2])
    assert possible(PoolAsk("trailing_pages"), [True] * PAGES, 0) == (0, [])


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(ValueError, match="some_pages"):
        possible(PoolAsk("some_pages"), [True], 1)
