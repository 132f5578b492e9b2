"""Page contents that recognise themselves.

Word i of page `id` is `table[i] ^ mask(id)`: the table is random by position, the mask random by
id. A page that is another's, shifted, torn or mixed differs in nearly every word that is not its
own, and one pass over memory makes or judges a page, so checking does not hide the store's speed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mooncake_py.errors import UsageError

_WORD_BYTES = 8
Bytes = npt.NDArray[np.uint8]


def check_page_bytes(page_bytes: int) -> None:
    """UsageError unless pages of that size can be made."""
    if page_bytes <= 0 or page_bytes % _WORD_BYTES:
        raise UsageError(
            f"a page of {page_bytes} bytes cannot be made",
            remedy="use a positive multiple of 8",
        )


class Pages:
    """Makes and checks pages of `page_bytes`, a multiple of 8. Not thread-safe (scratch page)."""

    def __init__(self, page_bytes: int, seed: int = 1) -> None:
        check_page_bytes(page_bytes)
        words = page_bytes // _WORD_BYTES
        generator = np.random.default_rng(seed)
        self._table = generator.integers(0, 1 << 64, words, dtype=np.uint64)
        self._scratch = np.empty(words, dtype=np.uint64)
        self._seed = seed
        self.page_bytes = page_bytes

    def fill(self, page_id: int, target: Bytes) -> None:
        """Write page `page_id` into `target` (uint8, page_bytes long, contiguous)."""
        np.bitwise_xor(self._table, self._mask(page_id), out=target.view(np.uint64))

    def wrong_bytes(self, page_id: int, page: Bytes) -> int:
        """How many bytes of `page` are not those of `page_id`; a wrong length is all wrong."""
        if page.nbytes != self.page_bytes:
            return max(page.nbytes, self.page_bytes)
        np.bitwise_xor(page.view(np.uint64), self._mask(page_id), out=self._scratch)
        if np.array_equal(self._scratch, self._table):
            return 0
        return int(np.count_nonzero(self._scratch.view(np.uint8) != self._table.view(np.uint8)))

    def _mask(self, page_id: int) -> np.uint64:
        """SplitMix64 of id and seed: neighbouring ids differ in half of their bits."""
        word = (page_id * 2 + 1 + self._seed * 0x632BE59BD9B4E019) * 0x9E3779B97F4A7C15
        word &= (1 << 64) - 1
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = ((word ^ (word >> shift)) * factor) & ((1 << 64) - 1)
        return np.uint64(word ^ (word >> 31))
