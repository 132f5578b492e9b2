"""Upstream's calls for tensors. Beside the engines' tests because these have torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mooncake_py.compat.store import MooncakeDistributedStore
from mooncake_py.compat.tensors import HEADER_BYTES, MARK
from mooncake_py.ops.cluster import Cluster


@pytest.fixture(scope="module")
def store(cluster: Cluster) -> Iterator[MooncakeDistributedStore]:
    made = MooncakeDistributedStore()
    assert made.setup("127.0.0.1", "", 0, 1 << 20, "tcp", "", cluster.address) == 0
    yield made
    assert made.close() == 0


def at(array: np.ndarray[Any, Any]) -> int:
    return int(array.ctypes.data)


def test_f50_tensors_come_back_with_their_shape_and_type(store: MooncakeDistributedStore) -> None:
    tensors = [
        torch.randn(3, 5), torch.randn(2, 2, 4).to(torch.bfloat16), torch.arange(7),
        torch.tensor(2.5), torch.randn(6, 4).t(), torch.zeros(0, 3),
        torch.ones(3, dtype=torch.bool),
    ]  # fmt: skip
    keys = [f"tensor{i}" for i in range(len(tensors))]
    assert store.batch_put_tensor([*keys, "no"], [*tensors, "no tensor"]) == [0] * 7 + [-600]
    for found, tensor in zip(
        store.batch_get_tensor([*keys, "none"]), [*tensors, None], strict=True
    ):
        assert (found is None) == (tensor is None)
        assert tensor is None or (found.dtype == tensor.dtype and torch.equal(found, tensor))
    space = np.zeros(1024, np.uint8)
    there = store.get_tensor_into(keys[0], at(space), space.nbytes)
    assert torch.equal(there, tensors[0])
    assert there.data_ptr() == at(space) + 304
    assert store.put_tensor_from("again", at(space), 304 + 60) == 0
    assert torch.equal(store.get_tensor("again"), tensors[0])
    assert store.get_tensor_into(keys[0], at(space), 10) is None
    assert store.upsert_tensor(keys[0], tensors[2]) == 0
    assert torch.equal(store.get_tensor(keys[0]), tensors[2])
    assert store.upsert_tensor(keys[0], "no tensor") == -600
    assert torch.equal(store.get_tensor(keys[0]), tensors[2])
    store.put("bytes", b"x" * 400)
    assert store.get_tensor("bytes") is None
    assert store.batch_put_tensor(["sparse"], [torch.eye(3).to_sparse()]) == [-600]


@pytest.mark.parametrize(
    "header",
    [
        "{", "5", '{"shape":[1]}', '{"dtype":"float32","shape":[9]}',
        '{"dtype":"load","shape":[1]}',
        '{"dtype":"float32","shape":[-1,-1]}', '{"dtype":"float32","shape":[0,-7]}',
        '{"dtype":"float32","shape":"ab"}', '{"dtype":"float32","shape":[4611686018427387904,4]}',
    ],
)  # fmt: skip
def test_f50_a_header_that_describes_no_tensor_is_a_miss_for_its_key_alone(
    store: MooncakeDistributedStore, header: str
) -> None:
    good = torch.randn(2, 2)
    assert store.upsert_tensor("good", good) == 0
    assert store.upsert("hostile", (MARK + header.encode()).ljust(HEADER_BYTES) + b"x" * 4) == 0
    found = store.batch_get_tensor(["hostile", "good"])
    assert found[0] is None
    assert torch.equal(found[1], good)


def test_f50_tensors_are_cut_for_tensor_parallel_ranks(store: MooncakeDistributedStore) -> None:
    tensor = torch.randn(8, 6)
    assert store.put_tensor_with_tp("cut", tensor, tp_size=2, split_dim=1) == 0
    parts = [store.get_tensor_with_tp("cut", rank, 2, 1) for rank in range(2)]
    assert torch.equal(torch.cat(parts, 1), tensor)
    assert store.is_exist("cut_tp_1") == 1
    assert store.put_tensor("whole", tensor) == 0
    assert torch.equal(store.get_tensor_with_tp("whole", 1, 4, 0), tensor[2:4])
    assert store.put_tensor_with_tp("thin", tensor, tp_size=9) == -600
    assert [each.shape for each in store.batch_get_tensor_with_tp(["cut"], 1, 2)] == [(8, 3)]


def test_f50_tensors_go_into_safetensors_files_and_back(
    store: MooncakeDistributedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
        name, file = f"file {dtype}", tmp_path / f"{dtype}.safetensors"
        tensor = torch.rand(3, 5).mul(9).to(dtype)
        assert store.put_tensor(name, tensor) == 0
        assert store.save_tensor_to_safetensor(name, str(file)) == 0
        assert store.remove(name, force=True) == 0
        assert torch.equal(store.load_tensor_from_safetensor(name, str(file)), tensor)
        assert torch.equal(store.get_tensor(name), tensor)
        other = store.load_tensor_from_safetensor(str(file), name + " again")  # the other way round
        assert torch.equal(other, tensor)
        assert torch.equal(store.get_tensor(name + " again"), tensor)
    monkeypatch.chdir(tmp_path)
    assert store.put_tensor("plain", torch.ones(2)) == 0
    assert store.save_tensor_to_safetensor("plain") == 0
    assert torch.equal(store.load_tensor_from_safetensor("plain"), torch.ones(2))
    assert store.save_tensor_to_safetensor("absent", str(tmp_path / "x")) == -704
    assert not (tmp_path / "x").exists()
    assert store.save_tensor_to_safetensor("plain", str(tmp_path / "no" / "folder")) == -1103
    assert store.load_tensor_from_safetensor("plain", str(tmp_path / "none")) is None
    (tmp_path / "torn").write_bytes(b"\x10" * 40)
    assert store.load_tensor_from_safetensor("plain", str(tmp_path / "torn")) is None
    assert MooncakeDistributedStore().save_tensor_to_safetensor("plain") == -600
