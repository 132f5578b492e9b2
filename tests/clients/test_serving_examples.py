"""The four ways to serve with cached KV give the logits of a run without a cache, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
SERVE = ROOT / "examples" / "serving" / "serve.py"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SERVE), *arguments, "--requests", "6"],
        capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 answers have the logits of the run without cache" in done.stdout
    return done.stdout


def rows(report: str) -> dict[str, int]:
    found = {}
    for line in report.splitlines():
        words = line.split()
        if len(words) > 3 and words[0] == "pages":
            found[words[2]] = int(words[3])
    return found


@pytest.mark.parametrize("kill", ["", "replica"])
def test_f66_one_process_or_two_behind_a_gateway(kill: str) -> None:
    report = run("gateway", *(["--kill", kill] if kill else []))
    if not kill:
        assert rows(report)["L1"] > 0


@pytest.mark.parametrize("kill", ["", "node", "master"])
def test_f66_replicas_share_the_store(kill: str) -> None:
    report = run("shared", *(["--kill", kill] if kill else []))
    if not kill:
        assert rows(report)["L3"] > 0, "what one replica computed is fetched by the other"
        assert "fetch from L3" in report


@pytest.mark.parametrize("kill", ["", "replica"])
def test_f67_prefill_and_decode_in_two_processes(kill: str) -> None:
    run("split-shared", *(["--kill", kill] if kill else []))
