"""A child process that cannot outlive us and that speaks in lines on its standard output.

It runs in a session of its own (a Ctrl-C at the terminal is ours to handle, in order) and under
`leash.py`. A thread moves its lines into a queue, so that every wait for one has a deadline and
the child never blocks on a full pipe. Standard error goes to a file, whose end explains a failure.

Not thread-safe. Start children from a thread that lives as long as they should: the leash is tied
to the thread that started them.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from mooncake_py.errors import ClusterError

_LEASH = Path(__file__).with_name("leash.py")
_LEAVE_MS = 5_000
_LINES_MAX = 10_000  # waiting to be read; beyond it the child waits
_STDERR_TAIL_BYTES = 4096


class Child:
    """`python -m MODULE ARGUMENTS...` under a name. `command` is sent to its standard input."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        *,
        stdin: str = "",
    ) -> None:
        self.name = name
        self._stderr_path = folder / f"{name}.stderr"
        self._lines: queue.Queue[str | None] = queue.Queue(_LINES_MAX)
        interpreter = [sys.executable, "-I", "-S", str(_LEASH), str(os.getpid())]
        command = [*interpreter, sys.executable, "-m", module, *arguments]
        with self._stderr_path.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._pump, name=f"lines of {name}", daemon=True).start()
        self._send(stdin)

    def _send(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text)
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already; whoever reads its lines will say so

    def _pump(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self, timeout_ms: int) -> str | None:
        """The next line of its standard output; None once it has closed it.

        Raises ClusterError when none comes in time.
        """
        try:
            return self._lines.get(timeout=timeout_ms / 1000)
        except queue.Empty:
            raise ClusterError(
                f"{self.name} said nothing for {timeout_ms} ms",
                remedy="look at the load of this machine and at " + self.complaint(),
            ) from None

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def complaint(self) -> str:
        """The last line it wrote to standard error, or a word on how it ended."""
        with self._stderr_path.open("rb") as stderr:
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _STDERR_TAIL_BYTES))
            lines = stderr.read().decode(errors="replace").splitlines()
        said = [line for line in lines if line.strip()]
        return said[-1] if said else f"exit code {self.exit_code()} and no word of explanation"

    def ask_to_stop(self) -> None:
        if self.exit_code() is None:
            self._process.terminate()

    def stop(self, timeout_ms: int) -> int:
        """SIGTERM, wait, and SIGKILL for one that does not leave in time. The exit code."""
        self.ask_to_stop()
        return self.wait(timeout_ms)

    def wait(self, timeout_ms: int) -> int:
        """Let it end by itself; SIGKILL for one that does not in time. The exit code."""
        try:
            return self._process.wait(timeout_ms / 1000)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """SIGKILL, and wait for the end of it. The exit code."""
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGKILL)
        return self._process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.wait(_LEAVE_MS)  # it has done its work
        else:
            self.kill()
