"""A contender's process as the runner sees it: one command, one answer, each with a deadline."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

from mooncake_py.ops import leash

ROOT = Path(__file__).resolve().parents[1]
START_S = 60.0
ANSWER_S = 120.0


class BenchError(Exception):
    """A contender did not start or did not answer; in words for the reader of the report."""


class Process:
    """A process that dies with us. The end of its standard error says why it failed."""

    def __init__(
        self,
        name: str,
        command: list[str],
        folder: Path,
        *,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = folder / f"{name.replace(' ', '-')}.log"
        leashed = [sys.executable, "-I", "-S", str(leash.__file__), str(os.getpid()), *command]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                leashed,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=os.environ | (environment or {}),
                text=True,
                start_new_session=True,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._pump, name=f"lines of {name}", daemon=True).start()

    def _pump(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self, timeout_s: float) -> str:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise BenchError(f"{self.name} said nothing for {timeout_s:.0f} s") from None
        if line is None:
            raise BenchError(f"{self.name} ended: {self.complaint()}")
        return line

    def say(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BenchError(f"{self.name} ended: {self.complaint()}") from None

    def running(self) -> bool:
        return self._process.poll() is None

    def ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def complaint(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        said = [line for line in lines if line.strip()]
        return said[-1] if said else "without a word"

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what does not leave in five seconds."""
        if self.running():
            self._process.terminate()
        if not self.ends_within(5):
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


class Contender:
    """A worker (`worker.py`) over one store module."""

    def __init__(self, process: Process) -> None:
        self.name = process.name
        self.pids = [process.pid]  # whose CPU time is this contender's; whoever starts it adds more
        self._process = process

    @classmethod
    def start(
        cls,
        name: str,
        module: str,
        settings: dict[str, object],
        batch_bytes: int,
        folder: Path,
        *,
        python: str = sys.executable,
    ) -> Contender:
        arguments = [module, json.dumps(settings), str(batch_bytes)]
        process = Process(name, [python, "-m", "benchmarks.worker", *arguments], folder)
        try:
            process.line(START_S)
        except BenchError:
            process.stop()
            raise
        return cls(process)

    def ask(self, do: str, **fields: object) -> dict[str, list[int]]:
        """Raises BenchError, with the contender's own words when it has some."""
        self.say(do, **fields)
        return self.answer()

    def say(self, do: str, **fields: object) -> None:
        """The first half of `ask`, so that several may work at once."""
        self._process.say(json.dumps({"do": do} | fields))

    def answer(self) -> dict[str, list[int]]:
        reply = json.loads(self._process.line(ANSWER_S))
        if "error" in reply:
            raise BenchError(f"{self.name}: {reply['error']}")
        return dict(reply)

    def stop(self) -> None:
        if self._process.running():
            try:
                self._process.say(json.dumps({"do": "quit"}))
                self._process.line(5)
            except BenchError:
                pass  # it has left, or has not and is made to
        self._process.stop()
