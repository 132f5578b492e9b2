"""The gate around a client's calls: what close waits for, and what a fork copies of it."""

from __future__ import annotations

import os
import select
import threading

import pytest

from mooncake_py.errors import UsageError
from mooncake_py.store.calls import CallGate


def test_close_waits_for_running_calls_and_refuses_new_ones() -> None:
    gate = CallGate()
    closed = threading.Event()

    def close() -> None:
        assert gate.close(60_000)
        closed.set()

    with gate:
        closer = threading.Thread(target=close)
        closer.start()
        assert gate.closing.wait(30)
        assert not closed.is_set()
    closer.join(30)
    assert closed.is_set()
    assert not gate.close(60_000)
    with pytest.raises(UsageError, match="closed"), gate:
        raise AssertionError("a closed gate let a call in")


def test_a72_a_child_closes_at_once_what_its_parent_is_using() -> None:
    """The calls that run in the parent, and whatever lock they hold, do not exist in the child."""
    gate = CallGate()
    ours, childs = os.pipe()
    with gate, gate._lock:
        pid = os.fork()
        if pid == 0:
            os.write(childs, b"closed" if not gate.close(60_000) else b"wrong")
            os._exit(0)
        ready, _, _ = select.select([ours], [], [], 30)
        said = os.read(ours, 16) if ready else b"nothing"
        if not ready:
            os.kill(pid, 9)
        os.waitpid(pid, 0)
    os.close(ours)
    os.close(childs)
    assert said == b"closed"
    with gate:
        pass  # the parent's is as it was
