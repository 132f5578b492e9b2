"""Keys of pages: a format that others compute, so its vectors are pinned."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from mooncake_py.errors import UsageError
from mooncake_py.hicache.page_keys import PageFormat, page_keys, shard_name

MHA = PageFormat(
    model="meta-llama/Llama-3.1-8B", revision="", pool="kv", dtype="bfloat16",
    layout="page_first", page_tokens=64, page_bytes=8_388_608, sizes={"tp": 2},
)  # fmt: skip
MLA = PageFormat(
    model="deepseek-ai/DeepSeek-V3", revision="main", pool="kv", dtype="uint8:fp8_e4m3",
    layout="page_first_direct", page_tokens=64, page_bytes=2_248_704,
    variant={"quantization": "fp8"}, tag="blue",
)  # fmt: skip
PAGE = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

# As in design/hicache.md; whoever changes them breaks every router.
VECTORS = [
    (
        MHA,
        {"tp": 1},
        '{"dtype":"bfloat16","layout":"page_first","model":"meta-llama/Llama-3.1-8B",'
        '"page_bytes":8388608,"page_tokens":64,"pool":"kv","revision":"","sizes":{"tp":2},'
        '"tag":"","variant":{}}',
        "hc1/kv/@/tp1/" + PAGE,
    ),
    (
        MLA,
        {},
        '{"dtype":"uint8:fp8_e4m3","layout":"page_first_direct",'
        '"model":"deepseek-ai/DeepSeek-V3","page_bytes":2248704,"page_tokens":64,"pool":"kv",'
        '"revision":"main","sizes":{},"tag":"blue","variant":{"quantization":"fp8"}}',
        "hc1/kv/@/all/" + PAGE,
    ),
]
DIGESTS = ["229b96b74a33e42fa93302b5296198c6", "a9262a05a752d5bcaa401c046161e34e"]


@pytest.mark.parametrize(("vector", "digest"), list(zip(VECTORS, DIGESTS, strict=True)))
def test_a59_a61_the_documented_vectors_hold(vector: tuple, digest: str) -> None:
    page_format, ranks, text, key = vector
    assert page_format.text() == text
    assert page_format.digest() == digest
    prefix = page_format.prefix(shard_name(ranks))
    assert page_keys([prefix], [PAGE]) == [key.replace("@", digest)]


def test_a61_keys_are_the_same_whatever_the_hash_seed() -> None:
    program = (
        "from mooncake_py.hicache.page_keys import PageFormat;"
        "print(PageFormat('m','r','kv','bfloat16','page_first',16,32,{'tp':2,'pp':4},"
        "{'b':'1','a':'2'}).prefix('tp1-pp0'))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(seen) == 1


OTHER = {
    "model": "x", "revision": "x", "pool": "x", "dtype": "x", "layout": "x", "page_tokens": 1,
    "page_bytes": 1, "sizes": {"pp": 2}, "variant": {"quantization": "x"}, "tag": "x",
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(PageFormat)])
def test_a59_whatever_changes_the_bytes_changes_the_key(field: str) -> None:
    assert dataclasses.replace(MHA, **{field: OTHER[field]}).prefix() != MHA.prefix()


def test_a60_shards_never_share_a_key_and_whole_pages_have_one() -> None:
    names = {
        shard_name({"tp": tp, "pp": pp, "cp": cp, "dcp": dcp})
        for tp in range(12) for pp in range(12) for cp in range(2) for dcp in range(2)
    }  # fmt: skip
    assert len(names) == 12 * 12 * 4
    assert shard_name({}) == "all"
    assert shard_name({"pp": 1, "tp": 0}) == "tp0-pp1"


def test_objects_of_a_page_lie_together() -> None:
    assert page_keys(["a/", "b/"], ["1", "2"]) == ["a/1", "b/1", "a/2", "b/2"]


@pytest.mark.parametrize("change", [{"model": ""}, {"pool": "a/b"}, {"sizes": {"tp": 1}}])
def test_a_format_that_says_nothing_is_refused(change: dict) -> None:
    with pytest.raises(UsageError):
        dataclasses.replace(MHA, **change)
