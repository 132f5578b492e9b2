"""Settings of the catalog: every limit and every time of an object's life, with its default.

Times must fit together or the master does not start (`validate`): a node is asked to heartbeat
several times before it is suspect, is suspect before it is dead, and a grant outlives the slowest
pull that a client will wait for.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_py.errors import UsageError
from mooncake_py.model import OBJECT_MAX_BYTES


@dataclass(frozen=True, slots=True)
class CatalogSettings:
    tick_ms: int = 100  # how often the server sends Tick
    grant_ttl_ms: int = 10_000  # a put must be committed within this time
    grant_margin_ms: int = 2_000  # an expired grant's space is used again this much later
    lease_ms: int = 5_000  # default and least lease of a Locate
    lease_max_ms: int = 60_000  # longest lease a Locate may ask for
    heartbeat_ms: int = 250  # what nodes are asked for
    suspect_ms: int = 1_000  # silence after which a node is not used
    dead_ms: int = 10_000  # silence after which a node's objects are forgotten
    slow_start_ms: int = 10_000  # a new segment is preferred for its free space only after this
    doubt_ms: int = 2_000  # a reported placement is not given out for this long
    evict_high_ratio: float = 0.95  # eviction starts
    evict_low_ratio: float = 0.90  # eviction stops
    offload_ahead_ratio: float = 0.10  # of memory: objects kept ready on disks before they must go
    offload_ms: int = 30_000  # a disk that has not reported a copy by then has not made it
    disk_away_ms: int = 86_400_000  # a disk without its node is remembered for this long
    eviction: str = "lru"  # or "s3fifo" or "cost" (eviction.py, s3fifo.py, worth.py)
    placement: str = "free"  # or "random", see placement.py
    spare_ms: int = 1_000  # for so long a new object is not evicted while all older ones are leased
    soft_pin_max_ms: int = 3_600_000  # longest soft pin; longer wishes are cut to it
    hard_pin_max_ratio: float = 0.5  # of the cluster's bytes; more hard pins are refused
    tenant_hard_pin_max_ratio: float = 0.5  # likewise, of one tenant
    tenant_soft_pin_max_ratio: float = 0.5  # likewise, of soft pins that have not ended
    replica_max: int = 8
    object_max_bytes: int = OBJECT_MAX_BYTES
    stripe_min_bytes: int = 1 << 20  # least part of an object that is cut over several holes
    objects_max: int = 16_000_000  # more objects evict others; 43 bytes of address space each
    tenants_max: int = 10_000
    list_max: int = 10_000  # keys a page
    events_max: int = 0  # newest events kept for mirrors, about 250 bytes each; 0: none
    repair_bytes_per_s: int = 256 << 20  # copied for lost replicas and hot objects, at most
    hot_copies_max: int = 0  # replicas that a hot object gets beyond those it wants; 0: none
    hot_factor: int = 10  # times the mean Locates of all others located make one hot
    hot_min: int = 32  # Locates in a window that make one hot at all
    hot_window_ms: int = 5_000  # over which Locates are counted
    away_ms: int = 600_000  # a segment whose memory outlives its node is waited for this long
    recovery_ms: int = 60_000  # a new cluster takes over segments of a lost one for this long
    reclaim_max: int = 500  # objects and grants of lost nodes forgotten per tick
    step_max: int = 500  # ended by one tick for each reason, or by one call of a removal of all
    generation_block: int = 1 << 20  # generations reserved by one durable record

    def validate(self) -> None:
        """Raise `UsageError` naming the two settings that contradict each other."""
        if self.eviction not in ("lru", "s3fifo", "cost"):
            raise UsageError(f"eviction is {self.eviction!r}; it must be lru, s3fifo or cost")
        if self.placement not in ("free", "random"):
            raise UsageError(f"placement is {self.placement!r}; it must be free or random")
        for name in ("evict_high_ratio", "evict_low_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name} is above 0 and at most 1", got=getattr(self, name))
        rules = (
            (0 < self.tick_ms <= self.suspect_ms, "tick_ms", "suspect_ms"),
            (self.heartbeat_ms >= 10, "10", "heartbeat_ms"),
            (2 * self.heartbeat_ms <= self.suspect_ms, "2 * heartbeat_ms", "suspect_ms"),
            (self.suspect_ms < self.dead_ms, "suspect_ms", "dead_ms"),
            (0 < self.lease_ms <= self.lease_max_ms, "lease_ms", "lease_max_ms"),
            (0 < self.grant_margin_ms <= self.grant_ttl_ms, "grant_margin_ms", "grant_ttl_ms"),
            (
                self.evict_low_ratio <= self.evict_high_ratio,
                "evict_low_ratio",
                "evict_high_ratio",
            ),
            (self.stripe_min_bytes >= 1 << 10, "1024", "stripe_min_bytes"),
            (self.slow_start_ms >= 0, "0", "slow_start_ms"),
            (
                0 <= self.offload_ahead_ratio <= self.evict_low_ratio,
                "offload_ahead_ratio",
                "evict_low_ratio",
            ),
            (self.dead_ms <= self.disk_away_ms, "dead_ms", "disk_away_ms"),
            (self.offload_ms >= self.tick_ms, "tick_ms", "offload_ms"),
            (self.step_max >= 1, "1", "step_max"),
            (1 <= self.replica_max <= 127, "1", "replica_max (at most 127)"),
            (self.repair_bytes_per_s >= 1 << 20, "1048576", "repair_bytes_per_s"),
            (0 <= self.hot_copies_max < self.replica_max, "hot_copies_max + 1", "replica_max"),
            (self.hot_factor >= 1 and self.hot_min >= 2, "1 and 2", "hot_factor and hot_min"),
            (self.hot_window_ms >= self.tick_ms, "tick_ms", "hot_window_ms"),
            (1 << 12 <= self.objects_max < 1 << 32, "4096", "objects_max (below 2 ** 32)"),
            (self.tenants_max < 1 << 16, "tenants_max", "65535"),
            (self.generation_block >= 1 << 13, "8192", "generation_block"),
        )
        for holds, smaller, larger in rules:
            if not holds:
                raise UsageError(f"settings contradict: {smaller} must not exceed {larger}")
