"""Tensors whose parts are written at one parallel degree and read at another.

    put_tensor(client, "layer.3.w", mine, part=Part(axis=0, index=rank, count=4))   on 4 ranks
    get_tensor(client, "layer.3.w", part=Part(axis=0, index=rank, count=2))         on 2 ranks

Each part is one object, its bytes as they lie (C order): `KEY/part-INDEX-of-COUNT`. Beside them
stands `KEY`, a small JSON object that says what the whole is; every writer puts it, and the first
one's stays. It comes after the writer's own part, so a reader that finds it may still miss parts of
others: then it gets ObjectNotFound, as for any miss. A reader takes from each part only the bytes
that it needs, straight into their places.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_py._native import ffi
from mooncake_py.errors import MooncakeError, ObjectExists, UsageError
from mooncake_py.model import BATCH_MAX_KEYS, ReplicaPolicy
from mooncake_py.store.buffers import target_span
from mooncake_py.store.client import StoreClient

VERSION = 1
SIZE_MAX = 1 << 48


@dataclass(frozen=True, slots=True)
class Part:
    """The `index`th of `count` equal parts of a tensor along `axis`."""

    axis: int = 0
    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.axis < 0 or not 0 <= self.index < self.count:
            raise UsageError("a part has an axis, and an index below its count", got=self)


WHOLE = Part()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is stored: of the whole tensor, and how it was divided."""

    dtype: str  # as numpy and torch call it, without "torch."
    itemsize: int
    shape: tuple[int, ...]
    axis: int
    count: int

    def shape_of(self, part: Part) -> tuple[int, ...]:
        """UsageError: the tensor cannot be divided so."""
        if part.count == 1:
            return self.shape
        if part.axis >= len(self.shape) or self.shape[part.axis] % part.count:
            raise UsageError("the tensor has no such equal parts", shape=self.shape, part=part)
        shape = list(self.shape)
        shape[part.axis] //= part.count
        return tuple(shape)

    def encode(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"version": VERSION, **fields}, sort_keys=True).encode()

    @classmethod
    def decode(cls, value: bytes, key: str) -> TensorInfo:
        """UsageError: the object is no tensor."""
        try:
            found = json.loads(value)
            version = found.pop("version")
            info = cls(**found | {"shape": tuple(found["shape"])})
            sizes = (*info.shape, info.axis, info.count, info.itemsize)
            if version != VERSION or not all(_is_size(size) for size in sizes):
                raise ValueError("fields that cannot be")
            info.shape_of(Part(info.axis, 0, info.count))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError("this object is no tensor", key=key) from error
        return info


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one stored part: a range of it, and where in the reader's tensor they lie, in runs
    of equal length."""

    stored: int
    offset: int
    nbytes: int
    run_bytes: int
    targets: tuple[int, ...]


def plan(info: TensorInfo, part: Part) -> Iterator[Piece]:
    """What a reader of `part` takes from where. UsageError: divided along another axis."""
    info.shape_of(part)
    if part.count > 1 and info.count > 1 and part.axis != info.axis:
        raise UsageError(
            "the tensor was divided along another axis", stored=info.axis, wanted=part.axis,
            remedy="read it whole, and take your part of it",
        )  # fmt: skip
    axis = part.axis if info.count == 1 else info.axis
    outer = math.prod(info.shape[:axis])
    inner = math.prod(info.shape[axis + 1 :]) * info.itemsize
    length = info.shape[axis] if info.shape else 1
    each, wanted = length // info.count, length // part.count
    first = wanted * part.index
    for stored in range(first // each if each else 0, info.count):
        low, high = max(first, stored * each), min(first + wanted, (stored + 1) * each)
        if low >= high:
            return
        run = (high - low) * inner
        targets = tuple((row * wanted + low - first) * inner for row in range(outer))
        if high - low == each:
            yield Piece(stored, 0, outer * run, run, targets)
            continue
        for row, target in enumerate(targets):
            yield Piece(stored, (row * each + low - stored * each) * inner, run, run, (target,))


def put_tensor(
    client: StoreClient, key: str, tensor: Any, *, part: Part = WHOLE,
    policy: ReplicaPolicy | None = None, timeout_ms: int | None = None,
) -> None:  # fmt: skip
    """Store this rank's part of a tensor: a contiguous numpy array or CPU torch tensor.

    ObjectExists: this part is stored already, or the key holds a tensor of another kind.
    """
    shape = list(tensor.shape)
    if part.count > 1:
        if part.axis >= len(shape):
            raise UsageError("the tensor has no such axis", shape=tuple(shape), axis=part.axis)
        shape[part.axis] *= part.count
    dtype, itemsize = _dtype(tensor)
    info = TensorInfo(dtype, itemsize, tuple(map(int, shape)), part.axis, part.count)
    options = {"policy": policy, "timeout_ms": timeout_ms}
    options = {name: value for name, value in options.items() if value is not None}
    client.put(_key(key, part.index, part.count), tensor, **options)  # type: ignore[arg-type]  # by name
    try:
        client.put(key, info.encode(), **options)  # type: ignore[arg-type]  # likewise
    except ObjectExists:
        if tensor_info(client, key, timeout_ms=timeout_ms) != info:
            raise


def tensor_info(client: StoreClient, key: str, *, timeout_ms: int | None = None) -> TensorInfo:
    """ObjectNotFound; UsageError: no tensor."""
    return TensorInfo.decode(client.get(key, timeout_ms=timeout_ms), key)  # type: ignore[arg-type]  # without `into` it is bytes


def get_tensor(
    client: StoreClient, key: str, *, part: Part = WHOLE, into: Any = None,
    timeout_ms: int | None = None,
) -> Any:  # fmt: skip
    """The part, whatever parts it was written in: in `into` (a contiguous array or CPU tensor of
    its type and shape), or as a new numpy array.

    ObjectNotFound: it, or a part of it, is not there. UsageError: types or shapes do not fit, or
    numpy does not know the type. After an error `into` may hold anything.
    """
    info = tensor_info(client, key, timeout_ms=timeout_ms)
    shape = info.shape_of(part)
    if into is None:
        into = _new(info, shape)
    elif (*_dtype(into), tuple(into.shape)) != (info.dtype, info.itemsize, shape):
        raise UsageError(
            "the target is of another type or shape", key=key, wanted=(info.dtype, shape),
            got=(_dtype(into)[0], tuple(into.shape)),
        )  # fmt: skip
    if not math.prod(shape):
        return into
    span = target_span(into)
    memory = memoryview(ffi.buffer(ffi.cast("char *", span.address), span.nbytes))
    pieces = list(plan(info, part))
    for at in range(0, len(pieces), BATCH_MAX_KEYS):
        _read(client, key, info.count, pieces[at : at + BATCH_MAX_KEYS], memory, timeout_ms)
    return into


def _read(
    client: StoreClient, key: str, count: int, pieces: Sequence[Piece], memory: memoryview,
    timeout_ms: int | None,
) -> None:  # fmt: skip
    outcomes = client.get_batch(
        [_key(key, piece.stored, count) for piece in pieces],
        [[memory[to : to + piece.run_bytes] for to in piece.targets] for piece in pieces],
        ranges=[(piece.offset, piece.nbytes) for piece in pieces],
        timeout_ms=timeout_ms,
    )
    for piece, outcome in zip(pieces, outcomes, strict=True):
        if isinstance(outcome, MooncakeError):
            raise outcome
        if outcome != piece.nbytes:
            raise UsageError("a part of the tensor is of another size", key=key, part=piece.stored)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= SIZE_MAX


def _key(key: str, index: int, count: int) -> str:
    return f"{key}/part-{index}-of-{count}"


def _dtype(tensor: Any) -> tuple[str, int]:
    try:
        return str(tensor.dtype).removeprefix("torch."), int(tensor.dtype.itemsize)
    except AttributeError as error:
        raise UsageError("a tensor has a dtype and a shape", got=type(tensor).__name__) from error


def _new(info: TensorInfo, shape: tuple[int, ...]) -> Any:
    try:
        dtype = np.dtype(info.dtype)
    except TypeError as error:
        raise UsageError(
            f"numpy has no type {info.dtype!r}",
            remedy="pass a torch tensor of this type and shape as `into` (see tensor_info)",
        ) from error
    return np.empty(shape, dtype)
