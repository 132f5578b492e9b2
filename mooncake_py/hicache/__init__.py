"""KV caches above the store.

`HiCacheBackend` is the storage backend that SGLang loads by name; it is looked up here at its
first use only, because it needs SGLang and nothing else of this package does.
"""

from __future__ import annotations

from importlib import import_module


def __getattr__(name: str) -> object:
    if name != "HiCacheBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("mooncake_py.hicache.sglang_backend").HiCacheBackend
