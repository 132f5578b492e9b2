"""Pages of ranks that divide their heads differently."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_py.errors import UsageError
from mooncake_py.pd import KvLayout, KvPool
from mooncake_py.pd.layout import Target, partners


def layout(rank: int = 0, rank_count: int = 1, **changes: int) -> KvLayout:
    fields = {"layer_count": 2, "page_tokens": 4, "head_count": 8, "head_bytes": 16} | changes
    return KvLayout(rank=rank, rank_count=rank_count, **fields)


@given(
    heads=st.integers(1, 6).map(lambda n: 1 << n - 1),
    prefill=st.integers(1, 6).map(lambda n: 1 << n - 1),
    decode=st.integers(1, 6).map(lambda n: 1 << n - 1),
)
def test_f26_every_head_comes_from_exactly_one_rank(heads: int, prefill: int, decode: int) -> None:
    source = layout(0, prefill, head_count=heads)
    target = layout(0, decode, head_count=heads)
    table = partners(source, target)
    for rank, sources in table.items():
        got = [head for span in sources.values() for head in span]
        assert sorted(got) == list(target.of_rank(rank).heads)
        for prefill_rank, span in sources.items():
            assert set(span) <= set(source.of_rank(prefill_rank).heads)
    told = [rank for sources in table.values() for rank in sources]
    assert set(told) == set(range(prefill))  # each learns of every room


def test_replicated_heads_are_sent_by_different_ranks() -> None:
    table = partners(layout(0, 4, head_count=1), layout(0, 4, head_count=1))
    assert [set(sources) for sources in table.values()] == [{0}, {1}, {2}, {3}]


@given(
    st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (1, 8), (8, 1), (16, 2)]),
    st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True),
    st.lists(st.integers(0, 9), min_size=10, max_size=10, unique=True),
)
def test_f26_slices_put_every_byte_where_the_other_division_has_it(
    ranks: tuple[int, int], pages: list[int], spare: list[int]
) -> None:
    """Copies by the slices, and compares with the whole model's array."""
    prefill_count, decode_count = ranks
    theirs = spare[: len(pages)]
    whole = np.random.default_rng(7).integers(0, 256, (2, 2, 10, 4, 8, 16), dtype=np.uint8)
    for rank in range(decode_count):
        target = layout(rank, decode_count)
        memory = [np.zeros(10 * target.page_bytes, np.uint8) for _ in range(4)]
        pool = KvPool(target, memory)
        pieces = pool.pieces(np.array(theirs))
        region = np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])
        for source_rank, heads in partners(layout(0, prefill_count), target)[rank].items():
            source = layout(source_rank, prefill_count)
            held = whole[:, :, :, :, source.heads.start : source.heads.stop]
            sender = KvPool(source, [np.ascontiguousarray(held[i // 2, i % 2]) for i in range(4)])
            for layer in range(2):
                copy(sender, layer, pages, Target(target, 0, heads), region)
        at = 0
        for piece in pieces:
            view = np.frombuffer(piece, np.uint8)
            view[:] = region[at : at + view.size]
            at += view.size
        for i, buffer in enumerate(memory):
            got = buffer.reshape(10, 4, len(target.heads), 16)[theirs]
            wanted = whole[i // 2, i % 2, pages][:, :, target.heads.start : target.heads.stop]
            assert np.array_equal(got, wanted)


def copy(sender: KvPool, layer: int, pages: list[int], target: Target, region: np.ndarray) -> None:
    half = len(pages) // 2
    for part in (range(half), range(half, len(pages))):
        if not part or not target.heads:
            continue
        for row in sender.slices(layer, np.array(pages), part, target):
            source = np.ctypeslib.as_array(
                (np.ctypeslib.ctypes.c_uint8 * int(row["length"])).from_address(int(row["local"]))
            )
            at = int(row["remote_offset"])
            region[at : at + source.size] = source


def test_a56_layouts_that_differ_name_what_differs() -> None:
    with pytest.raises(UsageError, match=r"page_tokens=\(4, 8\)") as caught:
        layout().check_meets(layout(page_tokens=8))
    assert "page size" in str(caught.value)
    layout(0, 2).check_meets(layout(3, 4))  # another division is fine


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer_count": 0}, {"page_tokens": -1}, {"plane_count": 3}, {"head_count": 3},
        {"rank": 2}, {"rank_count": 0}, {"head_bytes": 1 << 40}, {"layer_count": True},
        {"rank_count": 1 << 19}, {"dtype": 5}, {"model": "m" * 300},
    ],
)  # fmt: skip
def test_a56_impossible_layouts_are_refused(wrong: dict[str, object]) -> None:
    fields = layout(1, 2).to_json() | wrong
    with pytest.raises(UsageError):
        KvLayout.from_json(fields)


def test_a07_pools_and_pages_that_cannot_be_are_refused() -> None:
    shape = layout()
    good = [bytearray(3 * shape.page_bytes) for _ in range(4)]
    with pytest.raises(UsageError, match="one buffer a layer"):
        KvPool(shape, good[:3])
    with pytest.raises(UsageError, match="same whole number"):
        KvPool(shape, [*good[:3], bytearray(shape.page_bytes)])
    with pytest.raises(UsageError, match="same whole number"):
        KvPool(shape, [bytearray(10)] * 4)
    pool = KvPool(shape, good)
    assert pool.page_count == 3
    for pages in ([], [3], [-1], [0, 0], [0, 1, 2, 0], ["x"], [[0]], [1 << 70]):
        with pytest.raises(UsageError):
            pool.check_pages(pages)  # type: ignore[arg-type] - that is the test
