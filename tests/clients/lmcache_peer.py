"""A process whose memory others read by LMCache's transfer channel.

    python lmcache_peer.py URL NBYTES

Prints `ready`, then lives until its input ends. Byte i of the memory is i * 7 % 251.
"""

from __future__ import annotations

import sys

import torch
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.transfer_channel import create_transfer_channel_context


def pattern(nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes, dtype=torch.int64) * 7 % 251).to(torch.uint8)


def channel(url: str, memory: torch.Tensor) -> object:
    described = L1MemoryDesc(ptr=memory.data_ptr(), size=memory.numel(), align_bytes=4096)
    return create_transfer_channel_context("mooncake_te", described, url, url)


if __name__ == "__main__":
    offered = pattern(int(sys.argv[2]))
    kept = channel(sys.argv[1], offered)
    print("ready", flush=True)
    sys.stdin.read()
