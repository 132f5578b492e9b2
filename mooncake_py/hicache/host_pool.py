"""Where the pages of one of the engine's host pools lie, as memory that the store reads and writes.

A pool says itself where a page is (`get_page_buffer_meta`: addresses and sizes, a fixed number a
page, whatever its layout), so nothing here knows layouts. Pools that cannot say it give and take
pages as flat tensors: those are *staged*, with one copy more.

One page is one object. Its pieces lie in it in the order of a flat page (`get_data_page`), which
for pools of one buffer is the order of their addresses: so pages written in place and pages written
as flat tensors are the same bytes. With heads split for other degrees of tensor parallelism a page
is one object a target rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mooncake_py.errors import UsageError
from mooncake_py.store.raw_memory import Piece, RawMemory


def buffers_of(pool: Any) -> list[Piece]:
    """The pool's memory as ranges, none twice, neighbours joined. Empty for a pool that only
    hands out indices."""
    found = pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else None
    if found is None:
        found = [getattr(pool, "kv_buffer", None)]
    tensors = [
        tensor
        for entry in found
        for tensor in (entry if isinstance(entry, (list, tuple)) else (entry,))
    ]
    ranges = sorted(
        {
            (int(tensor.data_ptr()), int(tensor.numel() * tensor.element_size()))
            for tensor in tensors
            if tensor is not None and tensor.numel()
        }
    )
    joined: list[Piece] = []
    for address, nbytes in ranges:
        if joined and address <= sum(joined[-1]):
            first = joined[-1][0]
            joined[-1] = (first, max(sum(joined[-1]), address + nbytes) - first)
        else:
            joined.append((address, nbytes))
    return joined


def descriptor_of(pool: Any, address: int) -> int:
    """The memfd that begins at this address, when the pool was allocated as one ("allocator":
    "shm"), or -1. Of a pool of several allocations only the first is known."""
    fd = getattr(pool, "fd", None)
    kv_buffer: Any = getattr(pool, "kv_buffer", None)
    if not isinstance(fd, int) or fd < 0 or not hasattr(kv_buffer, "data_ptr"):
        return -1
    return fd if int(kv_buffer.data_ptr()) == address else -1


class HostPool:
    """One pool: geometry found by asking about one page. Thread-safe, as far as the pool is."""

    def __init__(self, name: str, pool: Any, arange: Callable[[int], Any], split: int = 1) -> None:
        """arange(n): the indices of n tokens, in the kind the pool takes. split: objects a page.

        Raises UsageError for a pool whose pages can be had in no way.
        """
        self.name = name
        self.pool = pool
        self.split = split
        self.dtype = _dtype_text(pool)
        self.layout = str(getattr(pool, "layout", "none"))
        self.stride = int(getattr(pool, "logical_page_size", 0) or getattr(pool, "page_size", 1))
        self.staged = False
        self._order: list[int] | None = None  # of an object's pieces; None: as the pool has them
        try:
            addresses, found = self._meta(arange(self.stride))
            sizes = list(map(int, found))
        except (NotImplementedError, ValueError, AttributeError, TypeError) as error:
            if split > 1:
                raise UsageError(
                    f"pool {name!r} cannot split its heads: {error}",
                    remedy="use --hicache-mem-layout page_head, or leave out tp_lcm_size",
                ) from None
            sizes = [self._staged_bytes(error)]
            self.staged = True
        if len(sizes) % split or not sizes:
            raise UsageError(f"pool {name!r} has {len(sizes)} pieces a page for {split} objects")
        self.piece_count = len(sizes) // split  # of one object
        objects = {
            sum(sizes[i : i + self.piece_count]) for i in range(0, len(sizes), self.piece_count)
        }
        if len(objects) != 1:
            raise UsageError(f"pool {name!r} has objects of unlike sizes", got=sorted(objects))
        (self.page_bytes,) = objects  # of one object
        if not self.staged:
            self._order = self._flat_order(addresses, sizes)

    def _flat_order(self, addresses: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
        kv_buffer: Any = getattr(self.pool, "kv_buffer", None)
        each = self.piece_count
        if each == 1 or not hasattr(kv_buffer, "data_ptr"):
            return None
        start = int(kv_buffer.data_ptr())
        end = start + int(kv_buffer.numel() * kv_buffer.element_size())
        if not all(
            start <= int(address) and int(address) + nbytes <= end
            for address, nbytes in zip(addresses, sizes, strict=True)
        ):
            return None
        order = sorted(range(each), key=lambda i: int(addresses[i]))
        return None if order == list(range(each)) else order

    def _staged_bytes(self, why: Exception) -> int:
        try:
            page = self.pool.get_dummy_flat_data_page()
        except (NotImplementedError, ValueError, AttributeError) as error:
            raise UsageError(
                f"pages of pool {self.name!r} in layout {self.layout!r} cannot be moved ({why})",
                remedy="use --hicache-mem-layout page_first",
            ) from error
        return int(page.numel() * page.element_size())

    def _meta(self, indices: Any) -> tuple[Sequence[int], Sequence[int]]:
        if self.split > 1:
            addresses, sizes = self.pool.get_split_heads_page_buffer_meta(indices, self.split)
        else:
            addresses, sizes = self.pool.get_page_buffer_meta(indices)
        return addresses, sizes

    # --- pages ---

    def pieces(self, indices: Any, count: int) -> list[Piece]:
        """All pieces of `count` pages, in order. Raises UsageError when the indices are not of
        that many pages."""
        if len(indices) != count * self.stride:
            raise UsageError(
                f"{len(indices)} indices are not {count} pages of {self.stride} tokens",
                pool=self.name,
            )
        addresses, sizes = self._meta(indices)
        if len(addresses) != count * self.split * self.piece_count:
            raise UsageError(f"{len(addresses)} pieces for {count} pages", pool=self.name)
        return list(zip(map(int, addresses), map(int, sizes), strict=True))

    def values(self, arenas: RawMemory, indices: Any, count: int) -> list[Any]:
        """One value an object: a view, or a list of views."""
        views = arenas.slices(self.pieces(indices, count))
        each = self.piece_count
        if each == 1:
            return list(views)
        if self._order is None:
            return [views[i : i + each] for i in range(0, len(views), each)]
        order = self._order
        return [[views[i + at] for at in order] for i in range(0, len(views), each)]

    def parts_of_flat(self, page: Any) -> list[Any]:
        """The objects of a flat page: itself, or with split heads one a target rank, which has its
        part of the keys and its part of the values."""
        if self.split == 1:
            return [page]
        part = len(page) // (self.piece_count * self.split)
        half = part * self.split
        return [
            [page[at * half + i * part : at * half + (i + 1) * part] for at in range(2)]
            for i in range(self.split)
        ]

    def first_indices(self, indices: Any, count: int) -> list[int]:
        """First index of every page, for the staged way."""
        if len(indices) != count * self.stride:
            raise UsageError("indices and pages differ", pool=self.name)
        return [int(index) for index in indices[:: self.stride]]

    def staged_values(self, indices: Any, count: int) -> list[Any]:
        """Copies of the pages, flat."""
        return [
            flat_bytes(self.pool.get_data_page(index))
            for index in self.first_indices(indices, count)
        ]

    def staged_targets(self, count: int) -> list[Any]:
        return [self.pool.get_dummy_flat_data_page() for _ in range(count)]

    def unstage(self, indices: Any, pages: Sequence[Any], done: Sequence[bool]) -> None:
        """Put what arrived into the pool."""
        for index, page, there in zip(
            self.first_indices(indices, len(pages)), pages, done, strict=True
        ):
            if there:
                self.pool.set_from_flat_data_page(index, page)


def flat_bytes(tensor: Any) -> Any:
    """A contiguous tensor with the same bytes (itself when it is contiguous)."""
    return tensor.contiguous()


def _dtype_text(pool: Any) -> str:
    names = [
        str(getattr(pool, name)).removeprefix("torch.")
        for name in ("dtype", "temporal_dtype", "conv_dtype")
        if getattr(pool, name, None) is not None
    ]
    return "+".join(names) or "bytes"


def is_rank_sharded(name: str, pool: Any, mla: bool) -> bool:
    """Does every rank hold another part of the pool's pages? Recurrent state and heads are split
    over ranks even beside KV that is the same on all of them."""
    if not mla or name == "kv":
        return not mla
    return name == "mamba" or int(getattr(pool, "head_num", 0) or 0) > 0
