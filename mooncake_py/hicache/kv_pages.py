"""Pools of KV pages in torch tensors: one for the device (L1), one for the host (L2).

A page is `page_tokens` tokens of all layers and planes (keys and values, or the one latent of MLA).
Two layouts hold the same elements in different orders:

    layer_first  [layer, plane, page, token, head, dim]   a layer is one piece for its kernels
    page_first   [page, layer, plane, token, head, dim]   a page is one piece for the store

As an object of the store a page is its layers in order, planes inside, whichever layout it lay in:
so pools of both layouts read each other's objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mooncake_py.errors import UsageError

LAYOUTS = ("layer_first", "page_first")


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one rank keeps for a token. head_count is of this rank; MLA: plane_count 1, head_count 1
    and the latent's size as head_dim."""

    layer_count: int
    page_tokens: int
    head_count: int
    head_dim: int
    plane_count: int = 2
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        sizes = (self.layer_count, self.page_tokens, self.head_count, self.head_dim)
        if min(sizes) < 1 or self.plane_count not in (1, 2):
            raise UsageError("a KV shape has layers, tokens, heads and one or two planes", got=self)

    @property
    def piece_bytes(self) -> int:
        """One layer and plane of a page."""
        return self.page_tokens * self.head_count * self.head_dim * int(self.dtype.itemsize)

    @property
    def page_bytes(self) -> int:
        return self.layer_count * self.plane_count * self.piece_bytes


class KvPages:
    """`page_count` pages and the list of free ones. The list is not thread-safe: its owner locks.

    memory: a writable buffer of page_count * shape.page_bytes to lie in (host pools: memory that
    nodes map, `StoreClient.alloc`), which outlives the pool; None: torch allocates. Host memory is
    pinned when a GPU is there, so that copies do not hold up the host.
    """

    def __init__(
        self,
        shape: KvShape,
        page_count: int,
        *,
        layout: str = "layer_first",
        device: str = "cpu",
        memory: memoryview | None = None,
    ) -> None:
        if layout not in LAYOUTS:
            raise UsageError(f"layout is one of {LAYOUTS}", got=layout)
        if page_count < 1:
            raise UsageError("a pool has pages", page_count=page_count)
        self.shape, self.page_count, self.layout = shape, page_count, layout
        page = (shape.page_tokens, shape.head_count, shape.head_dim)
        outer = (shape.layer_count, shape.plane_count)
        sizes = (
            (*outer, page_count, *page) if layout == "layer_first" else (page_count, *outer, *page)
        )
        if memory is None:
            pinned = device == "cpu" and torch.cuda.is_available()
            self.tensor = torch.zeros(sizes, dtype=shape.dtype, device=device, pin_memory=pinned)
        else:
            needed = page_count * shape.page_bytes
            if device != "cpu" or memory.readonly or memory.nbytes < needed:
                raise UsageError("memory is writable, on the host, and large enough", needed=needed)
            flat = torch.frombuffer(memory.cast("B")[:needed], dtype=torch.uint8)
            self.tensor = flat.view(shape.dtype).view(sizes)
            if torch.cuda.is_available():
                _pin(self, flat)
        self._bytes: Any = self.tensor.view(torch.uint8).numpy() if device == "cpu" else None
        self._free = list(range(page_count - 1, -1, -1))
        self._is_free = [True] * page_count

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Free pages, or None when there are not so many."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._is_free[page] = False
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert not self._is_free[page], f"page {page} is freed twice"
            self._is_free[page] = True
            self._free.append(page)

    def layer(self, layer: int) -> torch.Tensor:
        """[page, plane, token, head, dim] of one layer, in place."""
        if self.layout == "layer_first":
            return self.tensor[layer].transpose(0, 1)
        return self.tensor[:, layer]

    def piece(self, layer: int, plane: int, page: int) -> torch.Tensor:
        """[token, head, dim], contiguous, in place."""
        at = (layer, plane, page) if self.layout == "layer_first" else (page, layer, plane)
        return self.tensor[at]

    def views(self, page: int) -> list[memoryview]:
        """The page's bytes in the order of its object. Host pools only."""
        if self._bytes is None:
            raise UsageError("pages of a GPU have no bytes in this process")
        if self.layout == "page_first":
            return [self._bytes[page].reshape(-1).data]
        layers, planes = self.shape.layer_count, self.shape.plane_count
        return [
            self._bytes[layer, plane, page].reshape(-1).data
            for layer in range(layers)
            for plane in range(planes)
        ]


def copy_layer(
    source: KvPages, target: KvPages, layer: int, from_pages: Sequence[int], to_pages: Sequence[int]
) -> None:
    """One layer of these pages between pools on the CPU, whichever layouts."""
    here, there = torch.as_tensor(from_pages), torch.as_tensor(to_pages)
    target.layer(layer).index_copy_(0, there, source.layer(layer).index_select(0, here))


def copy_pieces(
    source: KvPages, target: KvPages, layer: int, from_pages: Sequence[int], to_pages: Sequence[int]
) -> None:
    """The same on the current CUDA stream, from or to a GPU. Each piece is contiguous on both
    sides, so that it is one transfer straight into its place: a detour through a temporary tensor
    would be read before it is filled, or hold up the host."""
    for here, there in zip(from_pages, to_pages, strict=True):
        for plane in range(source.shape.plane_count):
            piece = source.piece(layer, plane, here)
            target.piece(layer, plane, there).copy_(piece, non_blocking=True)


def _pin(pool: KvPages, memory: torch.Tensor) -> None:
    """Memory that torch did not allocate. UsageError: the driver refuses it."""
    runtime = torch.cuda.cudart()
    address = memory.data_ptr()
    code = int(runtime.cudaHostRegister(address, memory.numel(), 0))
    if code:
        raise UsageError(
            f"host memory cannot be pinned (CUDA error {code})", nbytes=memory.numel(),
            remedy="raise the limit of locked memory: ulimit -l unlimited",
        )  # fmt: skip
    weakref.finalize(pool, runtime.cudaHostUnregister, address)
