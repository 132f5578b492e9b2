"""Finding the processes that a test started, by a mark in their environment."""

from __future__ import annotations

import os
import select
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MARK = "TEST_RUN_MARK"


def states_of(pid: int) -> set[str]:
    """Of the threads of a process, as the kernel calls them: T is stopped."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {stat.rpartition(") ")[2][0] for stat in stats}


@dataclass(frozen=True)
class Marked:
    """Give `environment()` to what a test starts; all its descendants can then be found."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def environment(self, **more: str) -> dict[str, str]:
        return os.environ | {MARK: self.mark} | more

    def pids(self, words: str = "") -> list[int]:
        """Live descendants whose command line holds `words`."""
        return [pid for pid in _all_pids() if self._is_ours(pid) and words in command_line(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # gone, or another user's
            return False
        return f"{MARK}={self.mark}".encode() in environment.split(b"\0")


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30) -> None:
    """Ask again every 10 ms until the condition holds; AssertionError when it does not in time."""
    pause = select.poll()
    for _ in range(int(timeout_s * 100)):
        if condition():
            return
        pause.poll(10)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def shared_memory_names() -> set[str]:
    """What lies in /dev/shm under our name."""
    return {name for name in os.listdir("/dev/shm") if "mooncake" in name}


def holders_of_memory(words: str) -> dict[int, list[str]]:
    """Processes that hold or map anonymous shared memory with `words` in its name -> the names."""
    held: dict[int, list[str]] = {}
    for pid in _all_pids():
        names = [name for name in _open_files(pid) if "memfd:" in name and words in name]
        if names:
            held[pid] = names
    return held


def _open_files(pid: int) -> Iterator[str]:
    for number in _listed(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed meanwhile
            yield os.readlink(f"/proc/{pid}/fd/{number}")
    with suppress(OSError):  # gone meanwhile
        yield from Path(f"/proc/{pid}/maps").read_text().splitlines()


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
