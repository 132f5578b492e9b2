"""What a run of an earlier day took, beside today's: `--json` writes it, `--baseline` reads it.

Machines have moods, so a median alone says little. A case counts as slower when its median and,
where the limit of the machine was measured in the same run, its distance from that limit are both
more than `SLOWER` times what they were. A baseline of another machine is compared with, and said.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.peer import BenchError
from mooncake_py.model import RELEASE

SLOWER = 1.25
_SAME = ("processor", "cores", "memory_gib")


def machine() -> dict[str, Any]:
    """Facts that figures depend on."""
    processor = ""
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / (1 << 30)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "release": RELEASE,
        "load": round(os.getloadavg()[0], 1),
    }


def compared(now: dict[str, Any], before: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each case and contender of ours that both runs measured."""
    try:
        known = {(row["case"], row["contender"]): row for row in before["timings"]}
    except (KeyError, TypeError):
        raise BenchError("the baseline is no file that --json has written") from None
    rows = []
    for row in now["timings"]:
        old = known.get((row["case"], row["contender"]), {})
        if not row["contender"].startswith("ours") or "p50_us" not in row or "p50_us" not in old:
            continue
        ratio = row["p50_us"] / old["p50_us"]
        limits = (row.get("times_limit"), old.get("times_limit"))
        by_limit = limits[0] / limits[1] if all(limits) else None
        rows.append(
            {
                "case": row["case"],
                "contender": row["contender"],
                "before_us": old["p50_us"],
                "now_us": row["p50_us"],
                "ratio": round(ratio, 2),
                "ratio_to_limit": None if by_limit is None else round(by_limit, 2),
                "slower": min(ratio, by_limit or ratio) > SLOWER,
            }
        )
    return rows


def other_machine(now: dict[str, Any], before: dict[str, Any]) -> str:
    """A note if the baseline is of another machine, else empty."""
    there = before.get("machine", {})
    differ = [name for name in _SAME if there.get(name) != now["machine"][name]]
    return f"the baseline is of another machine: {', '.join(differ)} differ" if differ else ""


def table(rows: list[dict[str, Any]]) -> Table:
    drawn = Table(title=f"beside the baseline (slower: both ratios above {SLOWER})")
    for column in ("", "", "before µs", "now µs", "ratio", "distance from limit", ""):
        drawn.add_column(column, justify="right" if column else "left")
    for row in rows:
        by_limit = row["ratio_to_limit"]
        drawn.add_row(
            row["case"], row["contender"], f"{row['before_us']:.1f}", f"{row['now_us']:.1f}",
            f"{row['ratio']:.2f}", "" if by_limit is None else f"{by_limit:.2f}",
            "[red]slower[/red]" if row["slower"] else "",
        )  # fmt: skip
    return drawn
