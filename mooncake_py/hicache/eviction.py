"""In which order cached pages leave a tier. The tree asks for a priority; the lowest goes first.

* least recently used
* least frequently used, the older first among equals
* by cost: GreedyDual-Size-Frequency (Cherkasova, HPL-98-69, 1998). A node is worth how often it was
  used times what recomputing one of its pages costs, plus the worth of what was evicted last, so
  that old fame fades. A page far behind costs more to compute: it attends to all before it.
"""

from __future__ import annotations

from typing import Protocol

from mooncake_py.errors import UsageError


class Cached(Protocol):
    """What a policy may look at."""

    hits: int
    tick: int  # of the last use, counted by the tree
    depth: int  # pages before it
    worth: float  # the policy's own


class EvictionPolicy(Protocol):
    def used(self, node: Cached) -> None:
        """It was matched or inserted."""

    def evicted(self, node: Cached) -> None:
        """It is about to go."""

    def priority(self, node: Cached) -> float: ...


class LruEviction:
    def used(self, node: Cached) -> None: ...

    def evicted(self, node: Cached) -> None: ...

    def priority(self, node: Cached) -> float:
        return float(node.tick)


class LfuEviction:
    def used(self, node: Cached) -> None: ...

    def evicted(self, node: Cached) -> None: ...

    def priority(self, node: Cached) -> float:
        return node.hits + node.tick / (1 << 40)


class CostEviction:
    """attention_share: what a page costs more for each page before it, as a share of the first."""

    def __init__(self, attention_share: float = 0.002) -> None:
        if attention_share < 0:
            raise UsageError("attention_share is not negative", got=attention_share)
        self._share = attention_share
        self._floor = 0.0

    def used(self, node: Cached) -> None:
        node.worth = self._floor

    def evicted(self, node: Cached) -> None:
        self._floor = max(self._floor, self.priority(node))

    def priority(self, node: Cached) -> float:
        return node.worth + (node.hits + 1) * (1 + self._share * node.depth)


POLICIES: dict[str, type[LruEviction] | type[LfuEviction] | type[CostEviction]] = {
    "lru": LruEviction,
    "lfu": LfuEviction,
    "cost": CostEviction,
}
