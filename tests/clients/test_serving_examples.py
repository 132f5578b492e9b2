"""The ways to serve with cached KV give the logits of a run without a cache, bit for bit, also when
a process is killed in the middle of a request."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as Xml
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(180)  # of processes, each of which imports torch
ROOT = Path(__file__).resolve().parents[2]
SERVE = ROOT / "examples" / "serving" / "serve.py"
TRACE = Path(os.environ.get("MOONCAKE_TRACES", "")) / "conversation_trace.jsonl"


def run(*arguments: str, requests: int = 6) -> dict[str, list[str]]:
    """The report's rows, by name; a column each, the first without cache."""
    done = subprocess.run(
        [sys.executable, str(SERVE), *arguments, "--requests", str(requests)],
        capture_output=True, text=True, timeout=170, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "answers have the logits of the run without cache" in lines[-1]
    rows = {}
    for line in lines:
        name, *values = [word for word in line.split("  ") if word.strip()] or [""]
        rows[name.strip()] = [value.strip() for value in values]
    return rows


def test_f66_four_ways_in_one_report_beside_the_run_without_cache(tmp_path: Path) -> None:
    drawn = tmp_path / "report.svg"
    rows = run("all", "--picture", str(drawn), requests=8)
    assert rows["answers with equal logits"] == ["8"] * 6
    without, one, gateway, _, split, split_shared = rows["from L1"]
    assert without == "0"
    assert "0" not in (one, gateway, split, split_shared)
    assert rows["from L3"][3] != "0", "what one replica computed is fetched by the other"
    assert rows["bytes L2 to L3"][1:3] == ["0", "0"]
    assert rows["recomputed"][0].endswith("(100%)")
    for part in ("first token, p50", "match", "L3", "recompute", "between tokens, p50"):
        assert len(rows[part]) == 6, part
    assert any(name.startswith("shared: prefix in pages") for name in rows)
    names = [text.text for text in Xml.parse(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"no cache", "one", "split-shared", "recompute"} <= set(names)


def test_f66_replicas_node_and_master_killed_in_the_middle_of_requests() -> None:
    rows = run("one", "gateway", "shared", "--kill", "each", requests=8)
    assert rows["answers with equal logits"] == ["8"] * 4


def test_f67_either_side_of_a_hand_over_killed_in_the_middle_and_what_it_stands_on() -> None:
    """With a latent cache, pages of whole layers on the host, over tcp."""
    latent = ("--attention", "mla", "--layout", "layer_first", "--hand-over", "tcp")
    rows = run("split", "split-shared", "--kill", "each", *latent, requests=10)
    assert rows["answers with equal logits"] == ["10"] * 3


@pytest.mark.skipif(not TRACE.is_file(), reason="MOONCAKE_TRACES names no folder of traces")
def test_f66_conversations_of_a_published_trace_share_their_prefixes() -> None:
    rows = run("one", "--trace", str(TRACE), requests=12)
    assert rows["from L1"][1] != "0"
