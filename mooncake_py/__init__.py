"""Distributed KV-cache object store and transfer engine for LLM inference.

The public names. Each is loaded at its first use, so that importing the package is cheap and works
on a machine where an optional part is missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_py.model import ReplicaPolicy as ReplicaPolicy
    from mooncake_py.store.aio import AsyncStoreClient as AsyncStoreClient
    from mooncake_py.store.client import StoreClient as StoreClient
    from mooncake_py.store.outcomes import ObjectInfo as ObjectInfo
    from mooncake_py.transfer import EngineOptions as EngineOptions
    from mooncake_py.transfer import TransferEngine as TransferEngine

__all__ = [
    "AsyncStoreClient",
    "EngineOptions",
    "ObjectInfo",
    "ReplicaPolicy",
    "StoreClient",
    "TransferEngine",
]

_HOMES = {
    "AsyncStoreClient": "mooncake_py.store.aio",
    "EngineOptions": "mooncake_py.transfer",
    "ObjectInfo": "mooncake_py.store.outcomes",
    "ReplicaPolicy": "mooncake_py.model",
    "StoreClient": "mooncake_py.store.client",
    "TransferEngine": "mooncake_py.transfer",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mooncake_py' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
