"""What a perfect cache of a given size would have hit: the yardstick of a replay.

Both models see what the engine does: a request hits its longest leading run of cached pages, reads
those, and then stores all others.

* `lru_hits`: least recently used, one page the unit, no overhead, every page of capacity usable.
  Reading and storing make a page the youngest; storing one that is there already changes nothing.
* `clairvoyant_hits`: knows the future and keeps the pages that are needed soonest (and does not
  store a page that is needed later than all it has). No policy hits more. The prefix rule costs
  it nothing: a request for a page asks for all pages before it too, so those are never needed
  later; equally distant pages go deepest first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence

Prompt = Sequence[int]
_NEVER = 1 << 62


def count_pages(prompts: Iterable[Prompt]) -> int:
    return sum(len(prompt) for prompt in prompts)


def lru_hits(prompts: Sequence[Prompt], capacity_pages: int) -> int:
    """Pages hit when the prompts come one after the other, in a cache that starts empty."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        run = 0
        while run < len(prompt) and prompt[run] in cache:
            run += 1
        hits += run
        for page in prompt[:run]:
            cache.move_to_end(page)
        for page in prompt[run:]:
            if page in cache or capacity_pages == 0:
                continue
            if len(cache) >= capacity_pages:
                cache.popitem(last=False)
            cache[page] = None
    return hits


def clairvoyant_hits(prompts: Sequence[Prompt], capacity_pages: int) -> int:
    """The most page hits any cache of that size could have had, knowing the future."""
    if capacity_pages <= 0:
        return 0
    next_use = _next_uses(prompts)
    cache: dict[int, int] = {}  # page -> its next use
    farthest: list[tuple[int, int, int]] = []  # (-next use, -depth, page); stale ones are skipped
    hits = 0
    for prompt, uses in zip(prompts, next_use, strict=True):
        for depth, (page, use) in enumerate(zip(prompt, uses, strict=True)):
            hits += page in cache
            cache[page] = use
            heapq.heappush(farthest, (-use, -depth, page))
            while len(cache) > capacity_pages:
                minus_use, _, candidate = heapq.heappop(farthest)
                if cache.get(candidate) == -minus_use:
                    del cache[candidate]
    return hits


def _next_uses(prompts: Sequence[Prompt]) -> list[list[int]]:
    """For each page of each prompt the index of the next prompt with it."""
    seen: dict[int, int] = {}
    uses: list[list[int]] = []
    for index in range(len(prompts) - 1, -1, -1):
        uses.append([seen.get(page, _NEVER) for page in prompts[index]])
        seen.update(dict.fromkeys(prompts[index], index))
    uses.reverse()
    return uses
