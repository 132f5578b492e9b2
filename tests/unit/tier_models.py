"""What the tests of the tiered cache share: a small shape, a store in memory, KV by its tokens."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import torch

from mooncake_py.hicache.kv_pages import KvShape
from mooncake_py.hicache.radix_tree import chain_keys, split_pages

SHAPE = KvShape(layer_count=3, page_tokens=4, head_count=2, head_dim=4)


class MemoryStore:
    """L3 in a dictionary, with failures by a seed, and a gate that holds reads back."""

    def __init__(self, seed: int = 0, failures: float = 0.0) -> None:
        self.objects: dict[str, bytes] = {}
        self.random = random.Random(seed)
        self.failures = failures
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Event()
        self.calls = 0

    def fails(self) -> bool:
        return self.random.random() < self.failures

    def leading(self, keys: Sequence[str]) -> int:
        self.calls += 1
        if self.fails():
            return 0
        return next((i for i, key in enumerate(keys) if key not in self.objects), len(keys))

    def get(self, keys, targets, sizes) -> list[bool]:  # type: ignore[no-untyped-def]
        self.reading.set()
        assert self.gate.wait(30)
        done = []
        for key, views, size in zip(keys, targets, sizes, strict=True):
            value = None if self.fails() else self.objects.get(key)
            done.append(value is not None and len(value) == size)
            at = 0
            for view in views:
                part = value[at : at + view.nbytes] if value else b"\xee" * view.nbytes
                view[: len(part)] = part  # a failed read leaves rubbish behind
                at += view.nbytes
        return done

    def put(self, keys, values) -> list[bool]:  # type: ignore[no-untyped-def]
        done = []
        for key, views in zip(keys, values, strict=True):
            done.append(not self.fails())
            if done[-1]:
                self.objects.setdefault(key, b"".join(views))
        return done


def page_values(namespace: str, tokens: Sequence[int]) -> list[torch.Tensor]:
    """One value a page: derived from its chain key."""
    keys = chain_keys(namespace, split_pages(tokens, SHAPE.page_tokens))
    return [torch.tensor(int.from_bytes(key[:2], "little"), dtype=torch.float32) for key in keys]


def prompt(number: int, pages: int) -> list[int]:
    return [number * 1000 + i for i in range(pages * SHAPE.page_tokens + 1)]
