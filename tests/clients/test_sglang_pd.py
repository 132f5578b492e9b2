"""SGLang's prefill/decode manager, unchanged, over mooncake_py.compat: two processes, one dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sglang_pd as pd

HERE = Path(__file__).parent
Child = subprocess.Popen[str]


@pytest.fixture(scope="module")
def prefill() -> Iterator[tuple[pd.Side, str]]:
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_ENABLE_FAILED_SESSION_PROBE", "1")
        server = pd.conn.MooncakeKVBootstrapServer("127.0.0.1", port)
        side = pd.Side("prefill", port)
        yield side, f"127.0.0.1:{port}"  # its threads end with this process
        server.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def decode(prefill: tuple[pd.Side, str]) -> Iterator[Child]:
    child = start(prefill[1])
    yield child
    child.kill()
    child.communicate()


def start(address: str) -> Child:
    child = launch(address)
    assert answer(child, "ready") == ""
    return child


def launch(*arguments: str, **more: str) -> Child:
    """It says `ready` when it is."""
    paths = f"{HERE.parents[1]}:{HERE.parents[1] / 'compat'}:{HERE}"
    return subprocess.Popen(
        [sys.executable, str(HERE / "sglang_pd.py"), *arguments], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, **more},
    )  # fmt: skip


def answer(child: Child, word: str = "end") -> str:
    assert child.stdout is not None
    while not (line := child.stdout.readline()).startswith(word):
        assert line, "the decode side ended"
    return line[len(word) :].strip()


def tell(child: Child, command: str, room: int, pages: list[int]) -> None:
    assert child.stdin is not None
    print(command, room, *pages, file=child.stdin, flush=True)


def hand_over(
    prefill: tuple[pd.Side, str], decode: Child, room: int, chunks: list[list[int]]
) -> None:
    """Send these pages, a chunk at a time, and compare what arrived in other places."""
    side, address = prefill
    pages = [page for chunk in chunks for page in chunk]
    there = [63 - page for page in pages]
    aux = room % 8
    side.fill(pages, seed=room)
    side.aux[aux] = room
    sender = side.sender(address, room, len(pages), aux)
    tell(decode, "receive", room, there)
    assert pd.outcome(sender, (pd.KVPoll.WaitingForInput,)) == pd.KVPoll.WaitingForInput
    for chunk in chunks:
        sender.send(np.array(chunk, dtype=np.int32))
    assert pd.outcome(sender) == pd.KVPoll.Success
    sender.clear()
    assert answer(decode) == "done"
    assert answer(decode) == side.digest(pages, aux)


def test_f68_f26_pages_arrive_where_the_decode_side_wants_them(
    prefill: tuple[pd.Side, str], decode: Child
) -> None:
    """In order, scattered, and in chunks as a chunked prefill sends them."""
    assert type(prefill[0].manager.engine.engine).__module__ == "mooncake_py.compat.engine"
    hand_over(prefill, decode, 11, [list(range(16))])
    hand_over(prefill, decode, 12, [[5, 40, 7, 2, 33]])
    hand_over(prefill, decode, 13, [[0, 1, 2, 3], [9, 8], [20, 21, 30]])


def test_f68_a53_a_decode_side_that_dies_fails_its_requests_and_no_others(
    prefill: tuple[pd.Side, str], decode: Child
) -> None:
    """The write to it ends in seconds; SGLang then refuses the session at once. A decode side that
    comes later is served as ever."""
    side, address = prefill
    other = start(address)
    try:
        pages = list(range(32))
        side.fill(pages, seed=1)
        senders = [side.sender(address, room, len(pages), room % 8) for room in (21, 22)]
        for room in (21, 22):
            tell(decode, "accept", room, pages)
            assert answer(decode) == "accepted"
        for sender in senders:
            assert pd.outcome(sender, (pd.KVPoll.WaitingForInput,)) == pd.KVPoll.WaitingForInput
        decode.send_signal(signal.SIGKILL)
        decode.wait(10)
        start_s = time.monotonic()
        senders[0].send(np.array(pages, dtype=np.int32))
        assert pd.outcome(senders[0]) == pd.KVPoll.Failed
        assert time.monotonic() - start_s < 10
        with pytest.raises(Exception, match="21"):
            senders[0].failure_exception()
        assert len(side.manager.failed_sessions) == 1
        start_s = time.monotonic()
        senders[1].send(np.array(pages, dtype=np.int32))
        assert pd.outcome(senders[1]) == pd.KVPoll.Failed
        assert time.monotonic() - start_s < 2
        senders[1].clear()
        hand_over(prefill, other, 23, [list(range(8))])
    finally:
        other.kill()
        other.communicate()


def test_f68_a53_a_decode_side_that_dies_in_the_middle(
    prefill: tuple[pd.Side, str], decode: Child
) -> None:
    """Some chunks have arrived, the rest cannot: the sender hears of it and its pages are free."""
    side, address = prefill
    pages = list(range(48))
    side.fill(pages, seed=2)
    sender = side.sender(address, 31, len(pages), 0)
    tell(decode, "accept", 31, pages)
    assert pd.outcome(sender, (pd.KVPoll.WaitingForInput,)) == pd.KVPoll.WaitingForInput
    sender.send(np.array(pages[:16], dtype=np.int32))
    decode.send_signal(signal.SIGKILL)
    start_s = time.monotonic()
    sender.send(np.array(pages[16:], dtype=np.int32))
    assert pd.outcome(sender) == pd.KVPoll.Failed
    assert time.monotonic() - start_s < 10
    sender.clear()
    fresh = start(address)
    try:
        hand_over(prefill, fresh, 32, [pages])
    finally:
        fresh.kill()
        fresh.communicate()


def test_f68_a_stopped_decode_side_is_taken_up_again_once_it_answers_a_probe(
    prefill: tuple[pd.Side, str], decode: Child
) -> None:
    """`send_probe`, which SGLang asks in a loop about sessions that it has given up."""
    side, _ = prefill
    hand_over(prefill, decode, 41, [[1, 2, 3]])
    engine = side.manager.engine.engine
    peers = list(side.manager.decode_kv_args_table)
    (session,) = [name for name in peers if engine.send_probe(name) == 0]
    os.kill(decode.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, decode.pid, os.WSTOPPED | os.WNOWAIT)  # all its threads stand
    start_s = time.monotonic()
    assert engine.send_probe(session) < 0
    assert time.monotonic() - start_s < 5
    os.kill(decode.pid, signal.SIGCONT)
    end = time.monotonic() + 20
    while engine.send_probe(session) != 0:
        assert time.monotonic() < end
    hand_over(prefill, decode, 42, [[4, 5, 6]])


def say(child: Child, *words: object) -> None:
    assert child.stdin is not None
    print(*words, file=child.stdin, flush=True)


@pytest.mark.timeout(240)  # two more processes with all of SGLang in them
def test_f68_a53_a_prefill_side_that_dies_fails_the_request_of_the_decode_side(
    prefill: tuple[pd.Side, str],
) -> None:
    """With half of the pages sent. SGLang's heartbeats find out, within their interval and so many
    failures as it is told; the decode side goes on with another prefill side."""
    port = free_port()
    quick = {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2"}  # seconds; with two failures
    children = [launch("prefill", str(port)), launch(f"127.0.0.1:{port}", **quick)]
    first, decode = children
    pages = list(range(24))
    try:
        for child in children:
            answer(child, "ready")
        for room, count in ((51, 24), (52, 48)):
            say(decode, "receive", room, *range(count))
            say(first, room, count, *pages)
            sent = answer(first)
            if room == 51:
                assert [answer(decode), answer(decode)] == ["done", sent]
        first.send_signal(signal.SIGKILL)
        start_s = time.monotonic()
        assert answer(decode) == "failed"
        assert time.monotonic() - start_s < 20
        answer(decode)
        say(decode, "turn", prefill[1])
        hand_over(prefill, decode, 53, [pages])
    finally:
        for child in children:
            child.kill()
            child.communicate()
