"""Upstream's package name over mooncake_py. Provided by mooncake_py-compat, not by upstream."""

from __future__ import annotations

import importlib.metadata as _metadata

_UPSTREAM = sorted(
    name
    for found in _metadata.distributions()
    if (name := (found.metadata["Name"] or "").lower().replace("_", "-")).startswith(
        "mooncake-transfer-engine"
    )
)
if _UPSTREAM:
    raise ImportError(
        f"{_UPSTREAM[0]} and mooncake_py-compat are both installed and share the package "
        "`mooncake`. Remedy: uninstall one of them, then install the other again"
    )
