"""A small transformer of the Llama kind that keeps its keys and values in pages.

Random weights of a fixed seed, one token a byte, float32. It is written out, instead of taken from
the transformers package, because the KV must lie in our pools: an engine's attention reads pages in
place, and so does this one. Two kinds of attention: "gqa" keeps keys and values of two heads;
"mla" keeps one latent a token, from which every head's keys and values are made (DeepSeek-V2), and
a key part with the position, which all heads share.

The prompt is computed page by page, whatever of it was cached: so a page's arithmetic has the same
shapes whether the pages before it were computed, copied or fetched, and logits come out equal to
the last bit. (Generated tokens are computed one by one; a later turn that recomputes them as part
of a prompt differs in the last bits, as in every engine.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from mooncake_py.hicache.kv_pages import KvPages, KvShape

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 256, 128, 4, 4, 2, 32, 16
LATENT, ROPE = 48, 16
SHAPES = {
    "gqa": KvShape(LAYERS, PAGE, KV_HEADS, HEAD_DIM),
    "mla": KvShape(LAYERS, PAGE, 1, LATENT + ROPE, plane_count=1),
}


def model_name(attention: str) -> str:
    return f"tiny-decoder-{attention}-{WIDTH}x{LAYERS}-seed7"


class Decoder:
    def __init__(self, attention: str = "gqa") -> None:
        torch.set_num_threads(1)  # equal sums in every process, and replicas share few cores
        draw = torch.Generator().manual_seed(7)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw) / shape[-1] ** 0.5

        self.shape = SHAPES[attention]
        self._write_and_read = self._heads if attention == "gqa" else self._latent
        query_dim = HEADS * (HEAD_DIM if attention == "gqa" else HEAD_DIM + ROPE)
        self.embedding = weight(VOCABULARY, WIDTH) * 4
        self.layers = [
            {
                "q": weight(query_dim, WIDTH),
                "k": weight(KV_HEADS * HEAD_DIM, WIDTH),
                "v": weight(KV_HEADS * HEAD_DIM, WIDTH),
                "latent": weight(LATENT + ROPE, WIDTH),
                "k_of_latent": weight(HEADS * HEAD_DIM, LATENT),
                "v_of_latent": weight(HEADS * HEAD_DIM, LATENT),
                "o": weight(WIDTH, HEADS * HEAD_DIM),
                "gate": weight(2 * WIDTH, WIDTH),
                "up": weight(2 * WIDTH, WIDTH),
                "down": weight(WIDTH, 2 * WIDTH),
            }
            for _ in range(LAYERS)
        ]
        self.head = weight(VOCABULARY, WIDTH)

    def prefill(
        self,
        pool: KvPages,
        pages: Sequence[int],
        tokens: Sequence[int],
        cached: int,
        before: Callable[[int], object] = lambda layer: None,
        after: Callable[[int], object] = lambda layer: None,
    ) -> torch.Tensor:
        """Logits of the last token. The first `cached` tokens (whole pages) have their KV in
        `pages`; the others are computed into it, layer by layer, page by page inside a layer.
        `before` is called before a layer reads its pages, `after` when they are complete."""
        starts = range(cached, len(tokens), PAGE)
        chunks = [torch.tensor(tokens[at : at + PAGE]) for at in starts]
        hidden = [self.embedding[chunk] for chunk in chunks]
        for layer in range(LAYERS):
            before(layer)
            for i, at in enumerate(starts):
                hidden[i] = self._layer(layer, hidden[i], at, pool, pages)
            after(layer)
        return functional.rms_norm(hidden[-1][-1], (WIDTH,)) @ self.head.T

    def decode(self, pool: KvPages, pages: Sequence[int], token: int, at: int) -> torch.Tensor:
        """Logits behind one more token, the `at`th of the text."""
        hidden = self.embedding[torch.tensor([token])]
        for layer in range(LAYERS):
            hidden = self._layer(layer, hidden, at, pool, pages)
        return functional.rms_norm(hidden[-1], (WIDTH,)) @ self.head.T

    def _layer(
        self, layer: int, hidden: torch.Tensor, at: int, pool: KvPages, pages: Sequence[int]
    ) -> torch.Tensor:
        weights = self.layers[layer]
        count, end = hidden.shape[0], at + hidden.shape[0]
        memory = pool.layer(layer)
        held = torch.tensor(pages[: pages_of(end)])
        here = (memory, (pages[at // PAGE], at % PAGE), held)
        query, keys, values = self._write_and_read(
            weights, functional.rms_norm(hidden, (WIDTH,)), at, here
        )
        mask = torch.arange(end) <= torch.arange(at, end)[:, None]
        mixed = functional.scaled_dot_product_attention(
            query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1),
            attn_mask=mask, enable_gqa=True,
        )  # fmt: skip
        hidden = hidden + mixed.transpose(0, 1).reshape(count, -1) @ weights["o"].T
        normed = functional.rms_norm(hidden, (WIDTH,))
        gate, up = normed @ weights["gate"].T, normed @ weights["up"].T
        return hidden + (functional.silu(gate) * up) @ weights["down"].T

    @staticmethod
    def _heads(weights: Weights, normed: torch.Tensor, at: int, here: Place) -> Attended:
        memory, (page, slot), held = here
        count, end = normed.shape[0], at + normed.shape[0]
        query = rotate((normed @ weights["q"].T).view(count, HEADS, HEAD_DIM), at)
        key = rotate((normed @ weights["k"].T).view(count, KV_HEADS, HEAD_DIM), at)
        memory[page, 0, slot : slot + count] = key
        memory[page, 1, slot : slot + count] = (normed @ weights["v"].T).view_as(key)
        keys, values = memory[held].transpose(0, 1).reshape(2, -1, KV_HEADS, HEAD_DIM)[:, :end]
        return query, keys, values

    @staticmethod
    def _latent(weights: Weights, normed: torch.Tensor, at: int, here: Place) -> Attended:
        memory, (page, slot), held = here
        count, end = normed.shape[0], at + normed.shape[0]
        query = (normed @ weights["q"].T).view(count, HEADS, HEAD_DIM + ROPE)
        query = torch.cat([query[..., :HEAD_DIM], rotate(query[..., HEAD_DIM:], at)], -1)
        made = (normed @ weights["latent"].T).view(count, 1, LATENT + ROPE)
        made = torch.cat([made[..., :LATENT], rotate(made[..., LATENT:], at)], -1)
        memory[page, 0, slot : slot + count] = made
        latent, shared = memory[held].reshape(-1, LATENT + ROPE)[:end].split([LATENT, ROPE], -1)
        keys = (latent @ weights["k_of_latent"].T).view(end, HEADS, HEAD_DIM)
        keys = torch.cat([keys, shared[:, None].expand(end, HEADS, ROPE)], -1)
        return query, keys, (latent @ weights["v_of_latent"].T).view(end, HEADS, HEAD_DIM)


Weights = dict[str, torch.Tensor]
Place = tuple[torch.Tensor, tuple[int, int], torch.Tensor]  # a layer; page and slot; pages so far
Attended = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, keys, values


def rotate(x: torch.Tensor, at: int) -> torch.Tensor:
    """Rotary position embedding (Su et al., 2021), halves as in Llama."""
    half = x.shape[-1] // 2
    speed = 10_000 ** (-torch.arange(half) / half)
    angle = (torch.arange(x.shape[0]) + at)[:, None, None] * speed
    one, other = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


def pages_of(tokens: int) -> int:
    return (tokens + PAGE - 1) // PAGE
