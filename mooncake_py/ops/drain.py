"""`mooncake drain`, `copy` and `move`: ask the master, again and again, until it is so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict

from mooncake_py import errors
from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.errors import ObjectNotFound, TransferTimeout
from mooncake_py.master.client import MasterClient
from mooncake_py.master.commands import CopyObjects, Drain, DrainInfo

_LOOK_S = 0.1  # between two questions
_CALL_MS = 5_000
_STUCK_LOOKS = 5  # as often in a row there is no place for what is left, before that is believed

Progress = Callable[[DrainInfo], None]


def drain(master: str, what: str, timeout_ms: int, progress: Progress) -> DrainInfo:
    """Empty a node (by name) or segment (by id); what became of it, at the deadline at the latest.
    It goes on taking no new objects. Raises ObjectNotFound, MasterUnavailable."""
    deadline, pause = Deadline(timeout_ms, SystemClock()), threading.Event()
    client = _open(master, deadline)
    last: DrainInfo | None = None
    stuck = 0
    try:
        while True:
            try:
                info = client.drain(Drain(what), timeout_ms=_CALL_MS)
            except ObjectNotFound:
                if last is None:
                    raise
                return last  # it has left meanwhile
            progress(info)
            last = info
            stuck = stuck + 1 if info.state == "stuck" else 0
            if info.state == "done" or stuck >= _STUCK_LOOKS or deadline.passed():
                return info
            pause.wait(_LOOK_S)
    finally:
        client.close()


def cancel(master: str, what: str, timeout_ms: int) -> DrainInfo:
    """It takes new objects again."""
    client = _open(master, Deadline(timeout_ms, SystemClock()))
    try:
        return client.drain(Drain(what, cancel=True), timeout_ms=timeout_ms)
    finally:
        client.close()


def copy(master: str, wish: CopyObjects, timeout_ms: int) -> list[int]:
    """Copy or move objects; one code a key, TransferTimeout for what was not there in time."""
    deadline, pause = Deadline(timeout_ms, SystemClock()), threading.Event()
    client = _open(master, deadline)
    try:
        codes: list[int] = client.copy(wish, timeout_ms=_CALL_MS).tolist()
        while todo := [i for i, code in enumerate(codes) if code == errors.Backpressure.code]:
            if deadline.passed():
                for i in todo:
                    codes[i] = TransferTimeout.code
                break
            pause.wait(_LOOK_S)
            again = CopyObjects(
                wish.tenant, [wish.keys[i] for i in todo], wish.to_node, wish.from_node
            )
            found = client.copy(again, timeout_ms=_CALL_MS).tolist()
            for i, code in zip(todo, found, strict=True):
                codes[i] = code
        return codes
    finally:
        client.close()


def _open(master: str, deadline: Deadline) -> MasterClient:
    client = MasterClient(master, engine=None, role="tool", clock=SystemClock())
    client.connect(timeout_ms=deadline.left_ms())
    return client


def report(info: DrainInfo) -> list[str]:
    """For people."""
    lines = [
        f"{info.state}: {info.moved:,} objects moved ({info.moved_bytes:,} bytes), "
        f"{info.dropped:,} had replicas elsewhere, {info.ended:,} ended meanwhile"
    ]
    if info.left or info.left_bytes:
        lines.append(f"left: {info.left:,} objects ({info.left_bytes:,} bytes of extents)")
    if info.state == "stuck":
        lines.append("no other node has room for what is left: add one, or --cancel")
    return lines


def as_dict(info: DrainInfo) -> dict[str, object]:
    return asdict(info)


def codes_in_words(keys: Sequence[str], codes: Sequence[int]) -> dict[str, str]:
    """Key to what it failed with."""
    return {
        key: errors.error_of(code, "").__class__.__name__
        for key, code in zip(keys, codes, strict=True)
        if code
    }
