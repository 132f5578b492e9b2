"""Which host this is, for placement near the writer. Never used to decide that memory is shared:
that takes the engine's proof."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def host_id() -> str:
    """Equal for processes of one running kernel; "" when it cannot be known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
