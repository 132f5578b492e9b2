"""What is asked, and the right answers: prompts with the structure of a request trace, and a run
without any cache."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from decoder import PAGE, Decoder, pages_of

from mooncake_py.hicache.kv_pages import KvPages
from mooncake_py.ops.trace import PAGE_TOKENS, Request, generate_trace, read_trace

PROMPT_PAGES_MAX = 40
NEW_TOKENS = 4
TURNS_MIN = 3


def prompts(trace: Path | None, count: int) -> list[list[int]]:
    """Byte tokens: equal pages of the trace are equal bytes, a page of it is a page of the model.

    From a published trace whole conversations are taken, in their order and mixed as they were,
    because among its first hundred requests hardly two have to do with each other.
    """
    requests = conversations(read_trace(trace), count) if trace else generate_trace(count, seed=3)
    found = []
    for request in requests:
        ids = request.hash_ids[:PROMPT_PAGES_MAX] or (0,)
        tokens = [byte for each in ids for byte in random.Random(each).randbytes(PAGE)]
        spare = (-request.input_length % PAGE_TOKENS) * PAGE // PAGE_TOKENS
        found.append(tokens[: len(tokens) - spare] or tokens[:1])
    return found


def conversations(trace: list[Request], count: int) -> list[Request]:
    """`count` requests of the first conversations with several turns. A request belongs to the
    conversation that brought the last page of it which was known before."""
    owner: dict[int, int] = {}  # page -> conversation
    turns: list[list[int]] = []
    for number, request in enumerate(trace):
        pages = request.hash_ids[:PROMPT_PAGES_MAX]
        known = [page for page in pages[1:] if page in owner]  # all share the first
        if not known:
            turns.append([])
        at = owner[known[-1]] if known else len(turns) - 1
        turns[at].append(number)
        for page in pages[1:]:
            owner.setdefault(page, at)
    chosen: list[int] = []
    for numbers in turns:
        if len(numbers) >= TURNS_MIN and len(chosen) < count:
            chosen += numbers
    return [trace[number] for number in sorted(chosen)[:count]]


class Reference:
    """No cache: every prompt is computed. Also how long that takes, and a token afterwards."""

    def __init__(self, attention: str) -> None:
        self.model = Decoder(attention)
        self.pages = range(PROMPT_PAGES_MAX + pages_of(NEW_TOKENS) + 1)
        self.pool = KvPages(self.model.shape, len(self.pages))
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self._known: dict[tuple[Any, ...], tuple[Any, list[int], Any]] = {}

    def answer(self, tokens: list[int], split: bool) -> tuple[Any, list[int], Any]:
        """Logits behind the prompt, the text with what was generated, logits behind its last
        token. split: the decode side begins with the prompt's last token."""
        key = (split, *tokens)
        if key not in self._known:
            self._known[key] = self._compute(tokens, split)
        return self._known[key]

    def _compute(self, tokens: list[int], split: bool) -> tuple[Any, list[int], Any]:
        began = time.perf_counter()
        logits = self.model.prefill(self.pool, self.pages, tokens, 0)
        self.first_s.append(time.perf_counter() - began)
        first, text = logits, list(tokens)
        if split:
            logits = self.model.decode(self.pool, self.pages, tokens[-1], len(tokens) - 1)
        for _ in range(NEW_TOKENS):
            text.append(int(logits.argmax()))
            began = time.perf_counter()
            logits = self.model.decode(self.pool, self.pages, text[-1], len(text) - 1)
            self.gaps_s.append(time.perf_counter() - began)
        return first, text, logits
