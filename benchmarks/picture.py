"""The medians as a picture (SVG): a row a case, a dot a contender, a logarithmic axis of µs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from benchmarks.plan import MEMCACHED, MEMORY, OUR_TCP, REDIS, SHM, UP_DUMMY, UP_LOCAL, UP_TCP
from benchmarks.report import Found, index
from benchmarks.run import Timing

_COLOURS = {
    SHM: "#d1242f",
    OUR_TCP: "#f79a9a",
    UP_TCP: "#0550ae",
    UP_LOCAL: "#54aeff",
    UP_DUMMY: "#8250df",
    REDIS: "#bf8700",
    MEMCACHED: "#1a7f37",
    MEMORY: "#8c959f",
}
_ROW, _LEFT, _WIDTH, _TOP = 22, 150, 760, 54


def svg(timings: Sequence[Timing]) -> str:
    """The text of the file. Contenders without a colour are left out."""
    found: Found = index(timings)
    cases = list(dict.fromkeys(case for case, name in found if name in _COLOURS))
    names = [name for name in _COLOURS if any(who == name for _, who in found)]
    values = [t.p50_us for (_, name), t in found.items() if name in _COLOURS] or [1.0, 10.0]
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))

    def x(us: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 20) * (math.log10(us) - low) / (high - low)

    height = _TOP + _ROW * len(cases) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        '<text x="12" y="18" font-size="13">median time of one call, µs; less is better</text>',
    ]
    for place, name in enumerate(names):
        at = 12 + place * (_WIDTH - 24) / len(names)
        parts.append(f'<circle cx="{at + 5:.0f}" cy="34" r="5" fill="{_COLOURS[name]}"/>')
        parts.append(f'<text x="{at + 14:.0f}" y="38">{escape(name)}</text>')
    bottom = _TOP + _ROW * len(cases)
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<path d="M{at:.1f} {_TOP - 6}V{bottom}" stroke="#d0d7de"/>')
        parts.append(
            f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{10**power:g}</text>'
        )
    for row, case in enumerate(cases):
        y = _TOP + _ROW * row + _ROW / 2
        parts.append(f'<path d="M{_LEFT} {y}H{_WIDTH - 20}" stroke="#eaeef2"/>')
        parts.append(f'<text x="12" y="{y + 4}">{escape(str(case))}</text>')
        for name in reversed(names):  # ours on top
            timing = found.get((case, name))
            if timing is not None:
                dot = f'<circle cx="{x(timing.p50_us):.1f}" cy="{y}" r="5" fill="{_COLOURS[name]}"'
                what = f"{name}: {timing.p50_us:.1f} µs"
                parts.append(f'{dot} fill-opacity="0.85"><title>{escape(what)}</title></circle>')
    return "\n".join([*parts, "</svg>"]) + "\n"
