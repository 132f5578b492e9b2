"""The tiers' report as a picture (SVG): where tokens came from, what the first token waited for.

Two rows of stacked bars, one bar for each column of numbers, in the form of
`TierSnapshot.to_json`. Nothing but text is needed to draw it, and any browser shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mooncake_py.hicache.tier_report import PARTS, TIERS

COLOURS = ("#1b6ca8", "#4fa3d1", "#a8d5e5", "#e0a458", "#8c8c8c")
BAR, GAP, HEIGHT, LEFT, TOP = 70, 40, 160, 20, 40

Values = Mapping[str, Any]


def picture(columns: Sequence[tuple[str, Values]]) -> str:
    """An SVG document. columns: (name, numbers) in order."""
    tokens = [_tokens(numbers) for _, numbers in columns]
    times = [_times(numbers) for _, numbers in columns]
    names = [name for name, _ in columns]
    width = LEFT * 2 + len(columns) * (BAR + GAP) + 150
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{2 * (HEIGHT + 90)}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_row("tokens by where they came from", "{:,.0f}", names, tokens, 0),
        *_row("time to the first token, mean, in ms", "{:.2f}", names, times, HEIGHT + 90),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _tokens(numbers: Values) -> dict[str, float]:
    found = numbers["hit_tokens"]
    return {tier: found.get(tier, 0) for tier in TIERS} | {"computed": numbers["recomputed_tokens"]}


def _times(numbers: Values) -> dict[str, float]:
    count = numbers["ttft"]["count"]
    found = numbers["ttft_parts_s"]
    return {part: found.get(part, 0.0) / count * 1e3 if count else 0.0 for part in PARTS}


def _row(
    title: str, form: str, names: Sequence[str], bars: Sequence[Mapping[str, float]], at: int
) -> list[str]:
    top = max((sum(bar.values()) for bar in bars), default=0.0) or 1.0
    lines = [f'<text x="{LEFT}" y="{at + 20}" font-weight="bold">{escape(title)}</text>']
    floor = at + TOP + HEIGHT
    for number, (name, bar) in enumerate(zip(names, bars, strict=True)):
        x, y = LEFT + number * (BAR + GAP), float(floor)
        for colour, (part, value) in zip(COLOURS, bar.items(), strict=False):
            height = value / top * HEIGHT
            y -= height
            lines.append(
                f'<rect x="{x}" y="{y:.1f}" width="{BAR}" height="{height:.1f}" fill="{colour}">'
                f"<title>{escape(part)}: {form.format(value)}</title></rect>"
            )
        total = form.format(sum(bar.values()))
        lines.append(f'<text x="{x}" y="{y - 4:.1f}">{total}</text>')
        lines.append(f'<text x="{x}" y="{floor + 15}">{escape(name)}</text>')
    for number, part in enumerate(bars[0] if bars else ()):
        x, y = LEFT + len(bars) * (BAR + GAP), at + TOP + number * 18
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[number]}"/>')
        lines.append(f'<text x="{x + 18}" y="{y + 10}">{escape(part)}</text>')
    return lines
