"""The native core's own test programs, under the sanitizers that see what Python cannot."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "native/test/run.sh"
TIMEOUT_S = 600  # both cores busy elsewhere, everything to compile: five minutes were seen


@pytest.mark.timeout(TIMEOUT_S + 10)
@pytest.mark.parametrize("mode", ["asan", "tsan"])
def test_native_programs_pass_under(mode: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build the native test programs with")
    ended = subprocess.run(
        [RUN, mode], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_a34_the_frame_decoder_withstands_libfuzzer() -> None:
    """Beside the mutations of `native/test/test_frames.cc`, which need no clang."""
    if not any(map(shutil.which, ("clang++", "clang++-14", "clang++-15"))):
        pytest.skip("no clang++, which has libFuzzer")
    ended = subprocess.run(
        [RUN, "fuzz"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
