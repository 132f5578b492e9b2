"""The keys of KV pages. Pure, and a format: routers compute the same keys (`design/hicache.md`).

    hc1 / <pool> / <format digest> / <shard> / <page hash>

* A page holds the KV of a fixed run of tokens in one pool of one shard. `page hash` is the engine's
  own chain hash of the tokens up to and including the page; it says which tokens, nothing else.
* Everything else that decides what the bytes are stands in a `PageFormat`. Its digest is in the
  key, so deployments that differ in any of it can never read each other's pages, and deployments
  that agree in all of it share them, whichever process wrote them.
* `shard` names the part of a page that this rank holds, by the coordinates that split it. What is
  identical on all ranks has the shard "all" and is stored once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from mooncake_py.errors import UsageError

VERSION = "hc1"
DIGEST_CHARS = 32
WHOLE = "all"
AXES = ("tp", "pp", "cp", "dcp")  # the order of the coordinates in a shard's name


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What two deployments must have in common for their pages of a pool to be the same bytes.

    model: its name, with its revision. pool: the engine's name of the pool. dtype, layout: of the
    bytes. page_tokens: tokens a page; page_bytes: bytes of one object, which catches every
    difference of geometry (heads, layers, head size). sizes: how many ways each axis splits the
    page (`tp`, `pp`, `cp`, `dcp`); those that do not are left out. variant: what else changes the
    bytes, by name (quantization of the weights, draft model ...). tag: chosen by the operator.
    """

    model: str
    revision: str
    pool: str
    dtype: str
    layout: str
    page_tokens: int
    page_bytes: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    variant: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""

    def __post_init__(self) -> None:
        if not self.model:
            raise UsageError("a page format needs the model's name")
        if "/" in self.pool or not self.pool:
            raise UsageError("a pool's name is a word without slashes", pool=self.pool)
        wrong = {axis: size for axis, size in self.sizes.items() if axis not in AXES or size < 2}
        if wrong:
            raise UsageError(f"sizes names axes of {AXES} that split, above 1", got=wrong)

    def text(self) -> str:
        """What the digest is made of: JSON, keys sorted, no blanks, ASCII."""
        fields = asdict(self)
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def digest(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()[:DIGEST_CHARS]

    def prefix(self, shard: str = WHOLE) -> str:
        """What all keys of this pool and shard begin with; append a page hash."""
        return f"{VERSION}/{self.pool}/{self.digest()}/{shard}/"


def shard_name(ranks: Mapping[str, int]) -> str:
    """Name of a shard: `tp3`, `tp0-pp1`, or "all" when nothing splits the page.

    ranks: the coordinate on each axis that splits the page.
    """
    parts = [f"{axis}{ranks[axis]}" for axis in AXES if axis in ranks]
    return "-".join(parts) or WHOLE


def page_keys(prefixes: Sequence[str], pages: Iterable[str]) -> list[str]:
    """The keys of all objects of these pages: page after page, each in the order of prefixes."""
    if len(prefixes) == 1:
        (prefix,) = prefixes
        return [prefix + page for page in pages]
    return [prefix + page for page in pages for prefix in prefixes]
