"""The examples do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "kv_migration.py"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def test_a_killed_prefill_process_is_resumed_where_it_was() -> None:
    decoder = start("decode")
    try:
        address = line(decoder)
        first = start("prefill", address, "--pause", "33")
        assert line(first) == "shm: 80 layers are missing"
        assert line(first) == "paused after 33 layers"
        first.kill()
        first.communicate()
        second = start("prefill", address)
        assert line(second) == "shm: 47 layers are missing"
        assert line(second) == "wrote 47 layers"
        second.communicate(timeout=60)
        assert second.returncode == 0
        assert decoder.communicate(timeout=60)[0] == "80 layers are there, 0 of them wrong\n"
        assert decoder.returncode == 0
    finally:
        decoder.kill()
        decoder.communicate()


def test_c07_serving_without_torch_is_one_line_with_the_remedy() -> None:
    program = (
        "import runpy, sys; sys.modules['torch'] = None;"
        f"runpy.run_path({str(ROOT / 'examples' / 'serving' / 'serve.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "all"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "Remedy: pip install torch" in line
