"""The checked-in messages are what the .proto files say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_regenerating_the_messages_gives_the_same_bytes() -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a developer's dependency")
    done = subprocess.run(
        [sys.executable, "proto/generate.py", "--check"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
