"""How far a prefix can be used when several pools hold parts of its pages. Pure.

Each pool says for which lengths of the prefix it has what is needed:

* all_pages: every page up to there.
* trailing_pages: the last few pages before the end (recurrent state, sliding windows); such a pool
  has holes, so 5 may be possible where 4 is not.
* block_groups: whole groups at block boundaries; a verdict of its own, which limits nobody.

What can be restored is the set of lengths that every limiting pool agrees to. It is a set and not
a number because the ranks intersect theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolAsk:
    """What is asked of a pool. trailing: pages of its window. block_pages, group_pages: geometry
    of block groups."""

    policy: str
    trailing: int = 1
    block_pages: int = 0
    group_pages: int = 0


def boundary(present: Sequence[bool]) -> int:
    """Length of the leading run."""
    for count, there in enumerate(present):
        if not there:
            return count
    return len(present)


def possible(ask: PoolAsk, present: Sequence[bool], pages: int) -> tuple[int, list[int]]:
    """(the pool's own boundary, the prefix lengths up to `pages` that it allows).

    Raises ValueError for a policy that is not known.
    """
    if ask.policy == "all_pages":
        run = min(boundary(present[:pages]), pages)
        return run, list(range(1, run + 1))
    if ask.policy == "trailing_pages":
        window = max(1, ask.trailing)
        allowed = []
        streak = 0
        for length in range(1, pages + 1):
            streak = streak + 1 if present[length - 1] else 0
            if streak >= min(window, length):
                allowed.append(length)
        return max(allowed, default=0), allowed
    if ask.policy == "block_groups":
        return _group_boundary(ask, present, pages), list(range(1, pages + 1))
    raise ValueError(f"unknown hit policy {ask.policy!r}")


def _group_boundary(ask: PoolAsk, present: Sequence[bool], pages: int) -> int:
    """Pages that the leading complete groups cover. A group is the last pages of its block."""
    block = max(1, ask.block_pages)
    group = min(max(1, ask.group_pages), block)
    covered = 0
    while covered + block <= pages:
        end = covered + block
        if not all(present[end - group : end]):
            break
        covered = end
    return covered
