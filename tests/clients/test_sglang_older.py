"""The HiCache backend under older releases of SGLang, over their own factory and host pools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_py.ops.cluster import Cluster

HERE = Path(__file__).parent
RELEASES = Path(sys.prefix) / "releases"  # where ./dev clients puts them
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


@pytest.mark.parametrize(
    ("release", "calls"),
    [("0.5.3", "generic v1"), ("0.5.10", "generic v1 v2"), ("0.5.14", "generic v1 v2")],
)
def test_f27_an_older_release_stores_and_finds_its_pages(
    cluster: Cluster, release: str, calls: str
) -> None:
    folder = RELEASES / release
    if not folder.exists():
        pytest.skip(f"SGLang {release} is not installed in {RELEASES}")
    done = subprocess.run(
        [sys.executable, str(HERE / "older_release.py"), cluster.address],
        env={**os.environ, "PYTHONPATH": f"{folder}:{HERE.parents[1]}:{HERE}"},
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2_000:]
    said = [line for line in done.stdout.splitlines() if line.startswith(LAYOUTS)]
    assert said == [f"{layout} {calls} equal" for layout in LAYOUTS]
