"""Ranks of tensor parallelism over one tiered cache each: what they agree on, what they can hold.

Every rank has the same tokens and its own part of their heads. So ranks hold a prefix only as far
as all of them do, and the capacity of the group is that of its smallest rank: four ranks with room
for 1,000 tokens hold 1,000 tokens together, not 4,000.

`TieredCache(agree=ranks.agree)` asks three times a request, in the same order on all ranks. One
thread of each rank may use a group: collectives have no names, only an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mooncake_py.clock import duration
from mooncake_py.errors import PeerUnreachable
from mooncake_py.hicache.kv_pages import KvPages


@dataclass(frozen=True, slots=True)
class RankCapacity:
    """What one rank has room for: tokens of the whole model, bytes of its own part of their KV."""

    rank: int
    device_tokens: int
    host_tokens: int
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of the group, in logical tokens. `str` explains it rank by rank."""

    ranks: tuple[RankCapacity, ...]

    @property
    def device_tokens(self) -> int:
        return min(rank.device_tokens for rank in self.ranks)

    @property
    def host_tokens(self) -> int:
        return min(rank.host_tokens for rank in self.ranks)

    def __str__(self) -> str:
        lines = [
            f"{self.device_tokens:,} tokens on the device and {self.host_tokens:,} on the host: "
            f"each of {len(self.ranks)} ranks holds its part of the same tokens, so the smallest "
            "counts and they are not added up"
        ]
        lines += [
            f"  rank {rank.rank}: device {rank.device_tokens:,} tokens in {rank.device_bytes:,} "
            f"bytes, host {rank.host_tokens:,} tokens in {rank.host_bytes:,} bytes"
            for rank in self.ranks
        ]
        return "\n".join(lines)


def capacity_of(rank: int, device: KvPages, host: KvPages | None) -> RankCapacity:
    pools: Sequence[KvPages | None] = (device, host)
    tokens = [pool.page_count * pool.shape.page_tokens if pool else 0 for pool in pools]
    nbytes = [pool.page_count * pool.shape.page_bytes if pool else 0 for pool in pools]
    return RankCapacity(rank, *tokens, *nbytes)


class TorchRanks:
    """The ranks of a torch.distributed group whose tensors may be on the CPU (gloo).

    Every call is collective. PeerUnreachable: a rank is gone, or silent for `timeout_ms`; the group
    is of no use afterwards.
    """

    def __init__(self, group: Any = None, *, timeout_ms: int = 30_000) -> None:
        self._group, self._timeout = group, duration(timeout_ms)
        self.rank, self.rank_count = dist.get_rank(group), dist.get_world_size(group)

    def agree(self, count: int) -> int:
        """The smallest of all ranks' counts."""
        least = torch.tensor([count], dtype=torch.int64)
        self._wait(least, dist.ReduceOp.MIN)
        return int(least.item())

    def capacity(self, device: KvPages, host: KvPages | None) -> Capacity:
        """The same answer on every rank."""
        own = capacity_of(self.rank, device, host)
        table = torch.zeros((self.rank_count, 4), dtype=torch.int64)
        table[self.rank] = torch.tensor(
            [own.device_tokens, own.host_tokens, own.device_bytes, own.host_bytes]
        )
        self._wait(table, dist.ReduceOp.SUM)
        return Capacity(tuple(RankCapacity(i, *row) for i, row in enumerate(table.tolist())))

    def _wait(self, tensor: torch.Tensor, operation: Any) -> None:
        try:
            work = dist.all_reduce(tensor, operation, group=self._group, async_op=True)
            assert work is not None
            work.wait(self._timeout)
        except RuntimeError as error:
            raise PeerUnreachable(
                f"another rank did not take part: {str(error).splitlines()[0]}", rank=self.rank,
                remedy="end this rank's requests and start the ranks together again",
            ) from error  # fmt: skip
