"""What differs between releases of SGLang, found by looking at it and never by its version.

0.5.3 has generic calls only; later ones add v1 (zero copy) and v2 (side pools), and fields to the
config and to results. Whatever is missing has the value it had before it existed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Who this process is in SGLang's deployment, and what it serves."""

    model: str
    mla: bool  # KV is the same on all tensor parallel ranks
    ranks: dict[str, int]  # by axis, of those that split KV
    sizes: dict[str, int]
    split: int  # objects a page, for other degrees of tensor parallelism
    with_stats: bool
    extra: dict[str, Any]


def deployment_of(config: Any) -> Deployment:
    """Read a HiCacheStorageConfig of any release (or None)."""

    def number(name: str, default: int) -> int:
        value = getattr(config, name, None)
        return default if value is None else int(value)

    ranks, sizes = {}, {}
    for axis, field in (("tp", "tp"), ("pp", "pp"), ("cp", "attn_cp"), ("dcp", "dcp")):
        size = number(f"{field}_size", 1)
        if size > 1:
            ranks[axis], sizes[axis] = number(f"{field}_rank", 0), size
    tp_size = number("tp_size", 1)
    split = 1
    if getattr(config, "should_split_heads", False):
        split = max(1, number("tp_lcm_size", tp_size) // tp_size)
    return Deployment(
        model=str(getattr(config, "model_name", None) or ""),
        mla=bool(getattr(config, "is_mla_model", False)),
        ranks=ranks,
        sizes=sizes,
        split=split,
        with_stats=bool(getattr(config, "enable_storage_metrics", False)),
        extra=dict(getattr(config, "extra_config", None) or {}),
    )


# Arguments of SGLang's server that change the bytes of KV, and their values that do not.
_FACTS = {
    "revision": None,
    "quantization": None,
    "kv_cache_dtype": "auto",
    "json_model_override_args": "{}",
    "speculative_draft_model_path": None,
    "speculative_draft_model_revision": None,
}


def server_facts() -> dict[str, str]:
    """Those of `_FACTS` that this process's SGLang server was started with; empty when there is
    no server (a tool, a test) or when this release does not tell."""
    arguments = None
    for module, name in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        try:
            arguments = getattr(import_module(module), name)()
        except Exception as error:  # a probe of code that moves: any failure means "not here"
            logger.debug("%s.%s does not answer: %s", module, name, error)
            continue
        if arguments is not None:
            break
    facts = {}
    for name, neutral in _FACTS.items():
        value = getattr(arguments, name, None)
        if value is not None and value != neutral and str(value) != "":
            facts[name] = str(value)
    return facts


def pool_result(kinds: Any, pages: int, by_pool: dict[Any, int], restorable: Sequence[int]) -> Any:
    """A PoolTransferResult of this release. kinds: the module that has the class."""
    cls = kinds.PoolTransferResult
    known = {field.name for field in dataclasses.fields(cls)}
    fields: dict[str, Any] = {"kv_hit_pages": pages, "extra_pool_hit_pages": by_pool}
    if "restorable_prefix_pages" in known:
        fields["restorable_prefix_pages"] = list(restorable)
    return cls(**fields)


def stats_maker() -> Callable[[], Any] | None:
    """The class of what `get_stats` answers, or None when this release has none."""
    for module in (
        "sglang.srt.observability.metrics_collector",
        "sglang.srt.metrics.collector",
    ):
        try:
            found: Callable[[], Any] = import_module(module).StorageMetrics
        except (ImportError, AttributeError):
            continue
        return found
    return None
