"""Pages recognise what is not theirs."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_py.errors import UsageError
from mooncake_py.ops.pages import Pages

PAGE_BYTES = 4096


def page_of(pages: Pages, page_id: int) -> np.ndarray:
    page = np.zeros(pages.page_bytes, dtype=np.uint8)
    pages.fill(page_id, page)
    return page


@pytest.fixture
def pages() -> Pages:
    return Pages(PAGE_BYTES)


def test_a_page_is_right_in_another_process_too(pages: Pages) -> None:
    assert Pages(PAGE_BYTES).wrong_bytes(7, page_of(pages, 7)) == 0
    assert Pages(PAGE_BYTES, seed=2).wrong_bytes(7, page_of(pages, 7)) > PAGE_BYTES * 0.9


def test_another_page_is_wrong_nearly_everywhere(pages: Pages) -> None:
    for other in (0, 6, 8, 7 + (1 << 32)):
        assert pages.wrong_bytes(7, page_of(pages, other)) > PAGE_BYTES * 0.4


def test_a_shifted_page_is_wrong(pages: Pages) -> None:
    for shift in (1, 8, 64, 2048):
        assert pages.wrong_bytes(7, np.roll(page_of(pages, 7), shift)) > PAGE_BYTES * 0.9


def test_a_page_with_a_piece_of_another_is_wrong_there(pages: Pages) -> None:
    mixed = page_of(pages, 7)
    mixed[1024:1088] = page_of(pages, 8)[1024:1088]
    assert 0 < pages.wrong_bytes(7, mixed) <= 64


def test_one_flipped_bit_is_one_wrong_byte(pages: Pages) -> None:
    page = page_of(pages, 7)
    page[-1] ^= 1
    assert pages.wrong_bytes(7, page) == 1


def test_a_page_of_another_length_is_wrong(pages: Pages) -> None:
    assert pages.wrong_bytes(7, page_of(pages, 7)[:-8]) == PAGE_BYTES


@pytest.mark.parametrize("page_bytes", [0, -8, 12])
def test_a_size_that_cannot_be_made_is_refused(page_bytes: int) -> None:
    with pytest.raises(UsageError, match="multiple of 8"):
        Pages(page_bytes)
