"""Counts of bytes as people write and read them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"^(\d+)\s*([KMGT]iB|B)?$", re.IGNORECASE)
_UNITS = ("B", "KIB", "MIB", "GIB", "TIB")


def size(text: str) -> int:
    """4096, 256KiB, 1GiB -> bytes. ValueError when it is no such text."""
    match = _SIZE.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 4096, 256KiB or 1GiB")
    return int(match[1]) << (10 * _UNITS.index((match[2] or "B").upper()))


def size_text(nbytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
