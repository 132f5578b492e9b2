"""Placement: which segments the replicas of one put start go to.

Order of preference: the nodes the caller prefers, in its order; then segments on the writer's own
host (a put is then a memory copy); then the rest. Within a tier two segments are drawn and the one
with the larger share of free space is taken, which fills segments of different sizes in
proportion. A new segment in an old cluster would win every such draw and be flooded, so in its
first `slow_start_ms` it loses most of them, fewer as time goes on. Replicas of one object are on
distinct nodes, on distinct hosts as long as there are any, and before that on distinct failure
domains, for nodes that are labelled with theirs. Random numbers come from the
command, so the same command always decides the same. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_py.master.membership import Segment
from mooncake_py.master.objects import PLACE_BITS
from mooncake_py.model import ReplicaPolicy

_MASK64 = (1 << 64) - 1
_MULTIPLIER = 6364136223846793005  # Knuth's MMIX generator
_INCREMENT = 1442695040888963407
FREE = "free"  # of two that are drawn the one with the larger free share
RANDOM = "random"  # whichever is drawn
CHOICES = (FREE, RANDOM)
_RUN = 16  # keys that follow each other onto one segment: few messages, yet spread


class Placer:
    """Finds extents for the keys of one put start."""

    __slots__ = ("_by_free_share", "_handicaps", "_random", "_tiers")

    def __init__(
        self,
        segments: Sequence[Segment],
        policy: ReplicaPolicy,
        host_id: str,
        random: int,
        handicaps: dict[int, int] | None = None,
        choice: str = FREE,
    ) -> None:
        """`handicaps`: of 256 draws against an old segment this one (by index) loses so many."""
        self._by_free_share = choice == FREE
        self._handicaps = handicaps or {}
        self._random = (random ^ _INCREMENT) & _MASK64
        left = list(segments)
        tiers: list[list[Segment]] = []
        for node in policy.preferred_nodes:
            tiers.append([each for each in left if each.node == node])
            left = [each for each in left if each.node != node]
        if host_id:
            tiers.append([each for each in left if each.host_id == host_id])
            left = [each for each in left if each.host_id != host_id]
        tiers.append(left)
        self._tiers = [tier for tier in tiers if tier]

    def one(self, units: int) -> int:
        """A place for `units` on any segment, now taken; or -1."""
        for tier in self._tiers:
            segment = tier[0] if len(tier) == 1 else self._draw(tier)
            start = segment.allocator.take(units)
            if start >= 0:
                segment.used_units += units
                return segment.index << PLACE_BITS | start
            if len(tier) > 1:
                place = self._take(units, [each for each in tier if each is not segment])
                if place >= 0:
                    return place
        return -1

    def many(self, units: int, count: int) -> list[int]:
        """Up to `count` places of `units` each, in runs of `_RUN` a segment, taken; as `one` does,
        for a fraction of the cost."""
        places: list[int] = []
        for tier in self._tiers:
            open_ = tier
            while open_ and len(places) < count:
                segment = self._draw(open_)
                wanted = count - len(places)
                if len(open_) > 1:
                    wanted = min(wanted, _RUN)
                starts = segment.allocator.take_many(units, wanted)
                segment.used_units += units * len(starts)
                base = segment.index << PLACE_BITS
                places += [base | start for start in starts]
                if len(starts) < wanted:
                    open_ = [each for each in open_ if each is not segment]
        return places

    def another(self, units: int, chosen: Sequence[Segment]) -> int:
        """A place on a node (if possible a host, if possible a domain) other than those of
        `chosen`; or -1."""
        nodes = {each.node for each in chosen}
        hosts = {each.host_id for each in chosen if each.host_id}
        domains = {each.domain for each in chosen if each.domain}
        nearness = {
            each.index: 2 if each.host_id in hosts else int(each.domain in domains)
            for tier in self._tiers
            for each in tier
            if each.node not in nodes
        }
        for near in sorted(set(nearness.values())):
            for tier in self._tiers:
                fit = [each for each in tier if nearness.get(each.index) == near]
                place = self._take(units, fit)
                if place >= 0:
                    return place
        return -1

    def _take(self, units: int, segments: list[Segment]) -> int:
        while segments:
            segment = self._draw(segments)
            start = segment.allocator.take(units)
            if start >= 0:
                segment.used_units += units
                return segment.index << PLACE_BITS | start
            segments = [each for each in segments if each is not segment]
        return -1

    def _draw(self, segments: list[Segment]) -> Segment:
        """Of two random ones the one with the larger free share, or the first."""
        self._random = number = (self._random * _MULTIPLIER + _INCREMENT) & _MASK64
        count = len(segments)
        one = segments[(number >> 33) % count]
        other = segments[(number >> 48) % count]
        if self._handicaps and one is not other:
            mine = self._handicaps.get(one.index, 0)
            theirs = self._handicaps.get(other.index, 0)
            if bool(mine) != bool(theirs) and number & 255 < mine + theirs:
                return other if mine else one
        if not self._by_free_share:
            return one
        a, b = one.allocator, other.allocator
        return one if a.free * b.units >= b.free * a.units else other


def handicaps(
    segments: Sequence[Segment], slow_start_ms: int, now_ms: int
) -> dict[int, int] | None:
    """Of segments in their slow start; None when there are none, or nothing else."""
    young = {
        each.index: 256 - 256 * (now_ms - each.new_ms) ** 2 // slow_start_ms**2
        for each in segments
        if now_ms - each.new_ms < slow_start_ms
    }
    return young if 0 < len(young) < len(segments) else None
