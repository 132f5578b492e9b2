"""Settings of the SGLang backend: the extra config first, the environment second, defaults last.

A key of `--hicache-storage-backend-extra-config` named like a field below wins over the variable
`MOONCAKE_HICACHE_<FIELD>`, which wins over the default. A key or variable that names no setting is
an error: a typing mistake is not to run for months.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from mooncake_py.config import Origin, refuse_unknown, resolve, split_address
from mooncake_py.errors import UsageError

PROCESS = "hicache"

# Keys of the same dictionary that are for SGLang; some releases remove them before we see it.
SGLANG_KEYS = frozenset(
    {
        "backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size",
        "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
    }
)  # fmt: skip
_SYNONYMS = {"extra_backend_tag": "tag", "master_server_address": "master", "tenant_id": "tenant"}
STOP_MS = 10_000  # SGLang gives its storage threads that long to stop


@dataclass(frozen=True, slots=True)
class HiCacheSettings:
    """How pages are stored, and for how long a call may keep one of SGLang's threads."""

    master: str = "127.0.0.1:50051"  # of several with commas between
    tenant: str = "default"
    transports: str = "local,shm,tcp"  # that may be used, comma-separated
    model: str = ""  # instead of the name that SGLang passes
    revision: str = ""  # of the weights; "": what SGLang was started with
    draft_model: str = ""  # of speculative decoding; "": what SGLang was started with
    kv_cache_dtype: str = ""  # "": what SGLang was started with
    quantization: str = ""  # of the weights; "": what SGLang was started with
    tag: str = ""  # keeps deployments apart that are equal otherwise
    replica_count: int = 1
    start_ms: int = 30_000  # what reaching the master may take at start
    exists_ms: int = 1_000  # longest query; later it is a miss
    get_ms: int = 3_000  # longest read of a batch; what has not arrived is a miss
    put_ms: int = 3_000  # longest write of a batch; what has not left is not stored
    pause_ms: int = 1_000  # after a call that met no store, others answer at once without asking

    def transport_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.transports.split(",") if name.strip())

    def validate(self) -> None:
        """UsageError: a value is out of bounds."""
        for master in self.master.split(","):
            split_address(master.strip())
        if not self.transport_names():
            raise UsageError("transports names at least one way", got=self.transports)
        for name in ("start_ms", "exists_ms", "get_ms", "put_ms", "replica_count"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1", got=getattr(self, name))
        if self.pause_ms < 0:
            raise UsageError("pause_ms is not negative", got=self.pause_ms)
        for name in ("exists_ms", "get_ms", "put_ms"):
            if getattr(self, name) >= STOP_MS:
                raise UsageError(
                    f"{name} must be below {STOP_MS}: SGLang waits that long for its threads",
                    got=getattr(self, name),
                )


def settings_of(
    extra: Mapping[str, object] | None, environ: Mapping[str, str] | None = None
) -> tuple[HiCacheSettings, list[Origin]]:
    """The settings, and where each came from. UsageError: unknown or unusable ones."""
    fields = {field.name: field for field in dataclasses.fields(HiCacheSettings)}
    options: dict[str, object] = {}
    for key, value in (extra or {}).items():
        name = _SYNONYMS.get(key, key)
        if name not in fields:
            if key in SGLANG_KEYS:
                continue
            near = difflib.get_close_matches(key, fields, 1)
            raise UsageError(
                f"the extra config has a key {key!r}, which names no setting",
                remedy=f"did you mean {near[0]!r}?" if near else f"settings: {', '.join(fields)}",
            )
        if value is None:
            continue
        default = fields[name].default
        if isinstance(value, bool) or not isinstance(value, (str, type(default))):
            raise UsageError(
                f"the extra config's {key!r} is no {type(default).__name__}", got=value
            )
        if name in options:
            raise UsageError(f"the extra config gives {name!r} twice, once as {key!r}")
        options[name] = value
    refuse_unknown(PROCESS, list(fields), environ)
    return resolve(HiCacheSettings, PROCESS, options, environ)
