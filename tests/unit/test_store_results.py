"""Memory of results is used again, and never while anybody can see it."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mooncake_py._native import ffi
from mooncake_py.store.results import LARGE_BYTES, ResultPool

NBYTES = LARGE_BYTES


def fill(value: bytes, content: int) -> None:
    """As the reader does: through the address."""
    ctypes.memset(int(ffi.cast("uintptr_t", ffi.from_buffer("char[]", value))), content, NBYTES)


def test_f03_the_memory_of_a_result_that_is_gone_is_used_again() -> None:
    pool = ResultPool()
    seen = set()
    for _ in range(10):
        value = pool.new(NBYTES)
        seen.add(id(value))
        del value
    assert len(seen) == 1


KEEPERS: list[Callable[[bytes], Any]] = [
    lambda value: value,
    lambda value: [(value,)],
    memoryview,
    lambda value: memoryview(value)[100:200],
    lambda value: np.frombuffer(value, np.uint8)[1000::2],
    ctypes.c_char_p,
    lambda value: ffi.from_buffer("char[]", value),
    iter,
    lambda value: value.hex,
    lambda value: lambda: value,
    lambda value: {value: 1},
]


@pytest.mark.parametrize("keep", KEEPERS)
def test_a46_no_result_is_written_again_while_somebody_can_see_it(
    keep: Callable[[bytes], Any],
) -> None:
    pool = ResultPool()
    value = pool.new(NBYTES)
    fill(value, 7)
    address = id(value)
    kept = keep(value)
    del value
    other = pool.new(NBYTES)
    assert id(other) != address
    del other, kept
    again = {id(pool.new(NBYTES)), id(pool.new(NBYTES))}
    assert address in again or len(again) == 1


def test_a46_a_torch_view_keeps_its_result() -> None:
    torch = pytest.importorskip("torch")
    pool = ResultPool()
    value = pool.new(NBYTES)
    address = id(value)
    tensor = torch.frombuffer(value, dtype=torch.uint8)[5:]
    del value
    assert id(pool.new(NBYTES)) != address
    del tensor


def test_a_result_that_is_used_again_has_its_own_hash() -> None:
    pool = ResultPool()
    value = pool.new(NBYTES)
    fill(value, 1)
    former = hash(value)
    address = id(value)
    del value
    value = pool.new(NBYTES)
    assert id(value) == address
    fill(value, 2)
    assert hash(value) == hash(b"\2" * NBYTES) != former
    assert {value: "found"}[b"\2" * NBYTES] == "found"


def test_what_is_kept_is_bounded_and_the_latest() -> None:
    pool = ResultPool(4 * NBYTES)
    values = [pool.new(NBYTES) for _ in range(10)]
    assert sum(map(len, pool._kept)) == 4 * NBYTES
    last = {id(value) for value in values[-4:]}
    del values
    again = [pool.new(NBYTES) for _ in range(4)]
    assert {id(value) for value in again} == last
    larger = pool.new(5 * NBYTES)
    assert len(larger) == 5 * NBYTES
    assert sum(map(len, pool._kept)) == 4 * NBYTES
    pool.clear()
    assert not pool._kept


def test_a46_threads_never_share_a_result() -> None:
    """Each thread writes its number into what it got, looks again later, and lets go at random."""
    pool = ResultPool(6 * NBYTES)
    wrong: list[int] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        held: list[tuple[bytes, int]] = []
        for turn in range(60):
            value = pool.new(NBYTES)
            content = (number * 60 + turn) % 251
            fill(value, content)
            held.append((value, content))
            del value
            if len(held) > rng.randrange(3):
                value, content = held.pop(rng.randrange(len(held)))
                if value.count(content) != NBYTES:
                    wrong.append(number)
                del value

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong
