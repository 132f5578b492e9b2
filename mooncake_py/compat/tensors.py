"""Tensors as objects: a header that says what they are, then their bytes.

The header has upstream's size, so that buffers made for it fit, and our own content: a mark, then
JSON with the element type and the shape, filled up with blanks. A tensor of a tensor-parallel rank
is an object of its own, `KEY_tp_RANK`.

torch is imported by the first call that needs it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_py.compat import codes
from mooncake_py.compat.calls import StoreCalls
from mooncake_py.errors import UsageError
from mooncake_py.store.client import StoreClient

HEADER_BYTES = 304
MARK = b"mctensor1 "
_NO_TENSOR = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError)


def header_of(tensor: Any) -> bytes:
    """Raises UsageError for what is no tensor, or has too many dimensions to describe."""
    if not (hasattr(tensor, "dtype") and hasattr(tensor, "shape") and hasattr(tensor, "numel")):
        raise UsageError("this is no tensor", got=type(tensor).__name__)
    what = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    text = MARK + json.dumps(what, separators=(",", ":")).encode()
    if len(text) > HEADER_BYTES:
        raise UsageError("the tensor has too many dimensions", got=len(tensor.shape))
    return text.ljust(HEADER_BYTES)


def payload_of(tensor: Any) -> Any:
    """Its bytes, in order, on the host; without a copy where it lies so already."""
    import torch  # noqa: PLC0415 - only callers with tensors have it

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def tensor_of(data: Any) -> Any:
    """The tensor over this memory: header and bytes. Raises UsageError for other bytes."""
    import torch  # noqa: PLC0415

    view = memoryview(data).cast("B")
    head = bytes(view[:HEADER_BYTES])
    if not head.startswith(MARK):
        raise UsageError("the object holds no tensor")
    try:  # anybody may have written it
        what = json.loads(head[len(MARK) :])
        dtype, shape = getattr(torch, what["dtype"]), what["shape"]
        count = int(np.prod(shape, dtype=np.int64))
        if not count:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(view, dtype=dtype, count=count, offset=HEADER_BYTES)
        return flat.reshape(shape)
    except _NO_TENSOR as error:
        raise UsageError("the object holds no tensor, or not all of it") from error


def _values(tensors: Sequence[Any]) -> list[Any]:
    """Header and bytes of each; None for what is no tensor."""
    values: list[Any] = []
    for tensor in tensors:
        try:
            values.append([header_of(tensor), payload_of(tensor)])
        except (UsageError, *_NO_TENSOR):  # torch's own words for a layout without plain bytes
            values.append(None)
    return values


def shard_key(key: str, rank: int) -> str:
    return f"{key}_tp_{rank}"


class TensorCalls(StoreCalls):
    # --- putting ---

    def put_tensor(self, key: str, tensor: Any) -> int:
        return self.batch_put_tensor([key], [tensor])[0]

    def pub_tensor(self, key: str, tensor: Any, config: Any = None) -> int:
        return self.batch_pub_tensor([key], [tensor], config)[0]

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        return self.batch_pub_tensor(keys, tensors_list)

    def batch_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: Any = None
    ) -> list[int]:
        """One code a key; what is no tensor is an invalid parameter."""
        if len(keys) != len(tensors_list):
            return [codes.INVALID_PARAMS] * len(keys)
        return self._put_all(keys, _values(tensors_list), config)

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_put_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_put_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """From memory that holds header and bytes, as `get_tensor_into` leaves it."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [codes.INVALID_PARAMS] * len(keys)
        values = [self._pieces([ptr], [size]) for ptr, size in zip(buffer_ptrs, sizes, strict=True)]
        whole = [
            value if value and bytes(value[0][: len(MARK)]) == MARK else None for value in values
        ]
        return self._put_all(keys, whole, None)

    def upsert_tensor(self, key: str, tensor: Any) -> int:
        return self.batch_upsert_pub_tensor([key], [tensor])[0]

    def upsert_pub_tensor(self, key: str, tensor: Any, config: Any = None) -> int:
        return self.batch_upsert_pub_tensor([key], [tensor], config)[0]

    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        return self.batch_upsert_pub_tensor(keys, tensors_list)

    def batch_upsert_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: Any = None
    ) -> list[int]:
        """Replace; the former object is read until the new one is complete."""
        if len(keys) != len(tensors_list):
            return [codes.INVALID_PARAMS] * len(keys)
        return self._put_all(keys, _values(tensors_list), config, upsert=True)

    # --- getting ---

    def get_tensor(self, key: str) -> Any:
        """None for a miss."""
        return self.batch_get_tensor([key])[0]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Any]:
        def read(client: StoreClient) -> list[Any]:
            found = client.get_batch(keys)
            return [self._as_tensor(bytearray(e)) if isinstance(e, bytes) else None for e in found]

        return self._try(read, [None] * len(keys))

    @staticmethod
    def _as_tensor(data: Any) -> Any:
        try:
            return tensor_of(data)
        except UsageError:
            return None

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Any:
        return self.batch_get_tensor_into([key], [buffer_ptr], [size])[0]

    def batch_get_tensor_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Any]:
        """Tensors over the callers' memory; None for a miss or memory that is too small."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [None] * len(keys)
        targets = [
            self._pieces([ptr], [size]) for ptr, size in zip(buffer_ptrs, sizes, strict=True)
        ]
        good = [i for i, target in enumerate(targets) if target]

        def read(client: StoreClient) -> list[Any]:
            into = [targets[i] for i in good]
            return client.get_batch([keys[i] for i in good], into)

        found: list[Any] = [None] * len(keys)
        for i, done in zip(good, self._try(read, [None] * len(good)), strict=True):
            target = targets[i]
            if isinstance(done, int) and done >= HEADER_BYTES and target:
                found[i] = self._as_tensor(target[0])
        return found

    # --- one object a rank of tensor parallelism ---

    def put_tensor_with_tp(
        self, key: str, tensor: Any, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        return self.pub_tensor_with_tp(key, tensor, None, tp_rank, tp_size, split_dim)

    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Any,
        config: Any = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Cut the tensor into an object a rank; the first code that is no success."""
        if tp_size <= 1:
            return self.pub_tensor(key, tensor, config)
        header_of(tensor)
        if not -tensor.dim() <= split_dim < tensor.dim() or tensor.shape[split_dim] < tp_size:
            return codes.INVALID_PARAMS
        shards = tensor.chunk(tp_size, split_dim)
        if len(shards) != tp_size:
            return codes.INVALID_PARAMS
        names = [shard_key(key, rank) for rank in range(tp_size)]
        return next((code for code in self.batch_pub_tensor(names, shards, config) if code), 0)

    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        if len(base_keys) != len(tensors_list):
            return [codes.INVALID_PARAMS] * len(base_keys)
        return [
            self.put_tensor_with_tp(key, tensor, tp_rank, tp_size, split_dim)
            for key, tensor in zip(base_keys, tensors_list, strict=True)
        ]

    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Any:
        """This rank's part: its own object, or cut out of the whole where that was put."""
        if tp_size <= 1:
            return self.get_tensor(key)
        if not 0 <= tp_rank < tp_size:
            return None
        found = self.get_tensor(shard_key(key, tp_rank))
        if found is not None:
            return found
        whole = self.get_tensor(key)
        shards = () if whole is None else whole.chunk(tp_size, split_dim)
        return shards[tp_rank] if len(shards) == tp_size else None

    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Any]:
        if tp_size <= 1:
            return self.batch_get_tensor(base_keys)
        return self.batch_get_tensor([shard_key(key, tp_rank) for key in base_keys])
