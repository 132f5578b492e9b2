"""Tensors written at one parallel degree and read at another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mooncake_py import StoreClient
from mooncake_py.errors import ObjectExists, ObjectNotFound, UsageError
from mooncake_py.ops.cluster import Cluster
from mooncake_py.store.tensors import WHOLE, Part, TensorInfo, get_tensor, plan, put_tensor

SHAPE = (8, 16, 24)
WHOLE_TENSOR = np.random.default_rng(5).standard_normal(SHAPE).astype(np.float32)


@pytest.fixture
def store(cluster: Cluster):  # type: ignore[no-untyped-def]
    with StoreClient(cluster.address) as client:
        yield client
        for info in client.list():
            client.remove(info.key, force=True)


def part_of(tensor: np.ndarray, part: Part) -> np.ndarray:
    return np.ascontiguousarray(np.split(tensor, part.count, part.axis)[part.index])


def put_parts(store: StoreClient, key: str, tensor: np.ndarray, axis: int, count: int) -> None:
    for index in range(count):
        part = Part(axis, index, count)
        put_tensor(store, key, part_of(tensor, part), part=part)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_f53_written_at_one_degree_and_read_at_every_other(store: StoreClient, axis: int) -> None:
    for written in (1, 2, 4, 8):
        put_parts(store, f"w{written}", WHOLE_TENSOR, axis, written)
    for written, read in itertools.product((1, 2, 4, 8), repeat=2):
        for index in range(read):
            part = Part(axis, index, read)
            got = get_tensor(store, f"w{written}", part=part)
            np.testing.assert_array_equal(got, part_of(WHOLE_TENSOR, part))
    # As the promise has it: written with four ranks, read with two, and put together again.
    halves = [get_tensor(store, "w4", part=Part(axis, index, 2)) for index in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves, axis), WHOLE_TENSOR)


def test_f53_torch_tensors_keep_types_that_numpy_does_not_have(store: StoreClient) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.randn(8, 6).to(torch.bfloat16)
    for index in range(4):
        put_tensor(store, "bf16", whole[index * 2 : index * 2 + 2], part=Part(0, index, 4))
    target = torch.zeros(4, 6, dtype=torch.bfloat16)
    assert get_tensor(store, "bf16", part=Part(0, 1, 2), into=target) is target
    assert torch.equal(target, whole[4:])
    with pytest.raises(UsageError, match="numpy has no type 'bfloat16'"):
        get_tensor(store, "bf16")


def test_a10_what_does_not_fit_is_said(store: StoreClient) -> None:
    put_parts(store, "w", WHOLE_TENSOR, 1, 4)
    with pytest.raises(UsageError, match="another axis"):
        get_tensor(store, "w", part=Part(0, 0, 2))
    with pytest.raises(UsageError, match="no such equal parts"):
        get_tensor(store, "w", part=Part(1, 0, 3))
    with pytest.raises(UsageError, match="another type or shape"):
        get_tensor(store, "w", into=np.zeros(SHAPE, np.float64))
    with pytest.raises(UsageError, match="index below its count"):
        Part(0, 4, 4)
    with pytest.raises(UsageError, match="no such axis"):
        put_tensor(store, "x", WHOLE_TENSOR, part=Part(3, 0, 2))
    store.put("text", b"no tensor")
    with pytest.raises(UsageError, match="no tensor"):
        get_tensor(store, "text")


def test_a10_parts_that_are_missing_or_there_already(store: StoreClient) -> None:
    with pytest.raises(ObjectNotFound):
        get_tensor(store, "w")
    parts = [Part(0, index, 4) for index in range(4)]
    for part in parts[:3]:
        put_tensor(store, "w", part_of(WHOLE_TENSOR, part), part=part)
    np.testing.assert_array_equal(
        get_tensor(store, "w", part=Part(0, 0, 2)), part_of(WHOLE_TENSOR, Part(0, 0, 2))
    )
    with pytest.raises(ObjectNotFound):
        get_tensor(store, "w")
    with pytest.raises(ObjectExists):
        put_tensor(store, "w", part_of(WHOLE_TENSOR, parts[0]), part=parts[0])
    with pytest.raises(ObjectExists):  # a tensor of another kind under the same key
        put_tensor(store, "w", WHOLE_TENSOR)


@pytest.mark.parametrize("shape", [(), (0, 4), (3,)])
def test_a10_small_shapes(store: StoreClient, shape: tuple[int, ...]) -> None:
    tensor = np.ones(shape, np.int16)
    put_tensor(store, "small", tensor)
    got = get_tensor(store, "small")
    assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype)
    np.testing.assert_array_equal(got, tensor)


def test_f53_whole_parts_are_read_in_one_piece_each() -> None:
    info = TensorInfo("float32", 4, (8, 16), 1, 4)
    pieces = list(plan(info, Part(1, 1, 2)))
    assert [(piece.stored, piece.offset, piece.nbytes) for piece in pieces] == [
        (2, 0, 128),
        (3, 0, 128),
    ]
    assert pieces[0].targets[:2] == (0, 32)
    assert sum(piece.nbytes for piece in plan(info, WHOLE)) == 8 * 16 * 4
