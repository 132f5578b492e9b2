"""Children and scratch folders go when their maker goes, however it goes.

The child is the standard library's HTTP server: it serves for ever and says when it is ready.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_py.errors import ClusterError
from mooncake_py.ops.child import Child
from mooncake_py.ops.cluster import Scratch

MAKER = """
import sys
from mooncake_py.ops.child import Child
from mooncake_py.ops.cluster import Scratch
scratch = Scratch()
child = Child("web", "http.server", ["0", "--bind", "127.0.0.1"], scratch.folder)
print(child.pid, scratch.folder, flush=True)
try:
    sys.stdin.read()
finally:
    child.stop(5000)
    scratch.close()
"""


def wait_gone(pidfd: int, timeout_s: float = 10) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])


def wait_removed(folder: Path) -> None:
    """The janitor ends right after the removal; inotify would be much machinery for this."""
    waiter = select.poll()
    for _ in range(1000):
        if not folder.exists():
            return
        waiter.poll(10)
    raise AssertionError(f"{folder} is still there")


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_maker_that_is_killed(ending: signal.Signals) -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert maker.stdin is not None
    assert maker.stdout is not None
    with maker.stdin, maker.stdout:
        pid, folder = maker.stdout.readline().split()
        pidfd = os.pidfd_open(int(pid))
        assert Path(folder).is_dir()
        maker.send_signal(ending)
        maker.wait(20)
    assert wait_gone(pidfd)
    os.close(pidfd)
    wait_removed(Path(folder))


def test_lines_come_in_order_and_end_with_none(tmp_path: Path) -> None:
    with Child("table", "calendar", ["2026", "1"], tmp_path) as child:
        lines = []
        while (line := child.line(10_000)) is not None:
            lines.append(line)
    assert lines[0].strip() == "January 2026"
    assert child.exit_code() == 0


def ten_lines(child: Child, timeout_ms: int) -> list[str | None]:
    return [child.line(timeout_ms) for _ in range(10)]


def test_silence_is_an_error_with_a_deadline(tmp_path: Path) -> None:
    # The server greets at most (its output may be buffered) and then logs requests only, elsewhere.
    with Child("web", "http.server", ["0", "--bind", "127.0.0.1"], tmp_path) as child:
        with pytest.raises(ClusterError, match="web said nothing for 50 ms"):
            ten_lines(child, 50)
        child.kill()


def test_a_child_that_fails_is_quoted(tmp_path: Path) -> None:
    with Child("web", "http.server", ["no-port"], tmp_path) as child:
        assert child.line(10_000) is None
        assert child.stop(10_000) == 2
        assert "invalid int value: 'no-port'" in child.complaint()


def test_a_child_gets_its_standard_input(tmp_path: Path) -> None:
    with Child("json", "json.tool", ["--compact"], tmp_path, stdin='{"a": 1}') as child:
        assert child.line(10_000) == '{"a":1}'


def test_scratch_folders_are_removed_when_closed() -> None:
    with Scratch() as scratch:
        (scratch.folder / "file").write_text("x")
    assert not scratch.folder.exists()
