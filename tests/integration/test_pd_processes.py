"""Hand-overs between real processes that are killed, stopped, aborted, cut off. tests/rdma runs the
same tests with each side at one end of a cable."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pd_peer import (
    CALL_MS,
    LAYERS,
    PAGES,
    empty_memory,
    filled_pool,
    layout,
    model_bytes,
    options_of,
)
from processes import wait_until

from mooncake_py.errors import PeerUnreachable, TransferCancelled
from mooncake_py.pd import (
    Bootstrap,
    DecodeRank,
    Incoming,
    KvPool,
    PrefillRank,
    find_instance,
    publish_rank,
)

MODEL = model_bytes()
LAYER_BYTES = 2 * layout().page_bytes  # of one page
FOUND_MS = 1_000  # a dead peer, by the clock of who finds it
Ways = tuple[str, str]  # of the other process, and of this one


class Peer:
    """A rank in another process."""

    def __init__(self, role: str, url: str, way: str) -> None:
        program = str(Path(__file__).with_name("pd_peer.py"))
        self.process = subprocess.Popen(
            [sys.executable, program, role, url, "p", "0", "1", way],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        )  # fmt: skip

    def say(self, words: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def do(self, words: str) -> str:
        self.say(words)
        return self.hear()

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]


@pytest.fixture(params=["shm", "tcp"])
def ways(request: pytest.FixtureRequest) -> Ways:
    return request.param, request.param


@pytest.fixture
def url() -> Iterator[str]:
    with Bootstrap() as bootstrap:
        yield bootstrap.url


@pytest.fixture
def start(url: str, ways: Ways) -> Iterator[Callable[[str], Peer]]:
    with contextlib.ExitStack() as stack:

        def begin(role: str) -> Peer:
            peer = Peer(role, url, ways[0])
            stack.callback(peer.end)
            assert peer.hear() == "ready"
            return peer

        yield begin


class Here:
    """The decode side in this process."""

    def __init__(self, way: str) -> None:
        self.memory = empty_memory(layout())
        self.rank = DecodeRank(KvPool(layout(), self.memory), options_of(way))

    def check(self, here: list[int], there: list[int]) -> None:
        for layer in range(LAYERS):
            for plane in range(2):
                got = self.memory[layer * 2 + plane].reshape(MODEL.shape[2:])[here]
                assert np.array_equal(got, MODEL[layer, plane, there]), (layer, plane)

    def overwrite(self) -> None:
        for buffer in self.memory:
            buffer[:] = 0xEE

    def is_untouched(self) -> bool:
        return all((buffer == 0xEE).all() for buffer in self.memory)


@pytest.fixture
def here(ways: Ways) -> Iterator[Here]:
    decoder = Here(ways[1])
    with decoder.rank:
        yield decoder


def received(url: str, here: Here, pages: list[int], room: int = 5) -> Incoming:
    instance = find_instance(url, "p", timeout_ms=CALL_MS)
    return here.rank.receive(room, pages, instance, timeout_ms=CALL_MS)


Start = Callable[[str], Peer]


def test_f26_f67_pages_arrive_layer_by_layer(url: str, start: Start, here: Here) -> None:
    prefill = start("prefill")
    incoming = received(url, here, [1, 2])
    assert prefill.do("send 5 8 9") == "ok"
    for layer in range(LAYERS):
        assert prefill.do(f"layer {layer}") == "ok"
        incoming.wait_layer(layer, timeout_ms=CALL_MS)
        assert incoming.layers() == list(range(layer + 1))
    assert prefill.do("finish") == "ok"
    incoming.wait(timeout_ms=CALL_MS)
    here.check([1, 2], [8, 9])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a53_a_dead_sender_is_found_within_a_second(
    url: str, start: Start, here: Here, how: signal.Signals
) -> None:
    prefill = start("prefill")
    incoming = received(url, here, [1, 2])
    prefill.do("send 5 8 9")
    prefill.do("layer 0")
    incoming.wait_layer(0, timeout_ms=CALL_MS)
    began = time.monotonic()
    prefill.process.send_signal(how)
    with pytest.raises(PeerUnreachable, match="was not heard") as caught:
        incoming.wait(timeout_ms=CALL_MS)
    assert time.monotonic() - began < 8  # a second, and whatever busy cores add
    assert caught.value.context["silent_ms"] <= FOUND_MS
    here.overwrite()
    if how == signal.SIGSTOP:  # it wakes up and goes on: nothing of it arrives
        prefill.process.send_signal(signal.SIGCONT)
        assert prefill.do("layer 1") != "ok"
        assert here.is_untouched()
    assert not here.rank._reserved


def test_a53_a_dead_receiver_is_found_within_a_second(url: str, start: Start, ways: Ways) -> None:
    with PrefillRank(filled_pool(layout()), options_of(ways[1])) as prefill:
        publish_rank(url, "p", layout(), prefill.address, timeout_ms=CALL_MS)
        decode = start("decode")
        assert decode.do("receive 5 1 2") == "ok"
        outgoing = prefill.send(5, [8, 9])
        outgoing.write_layer(0, timeout_ms=CALL_MS)
        decode.process.kill()
        wait_until(lambda: outgoing.error, "the sender finds it")
        assert isinstance(outgoing.error, PeerUnreachable)
        assert outgoing.error.context["silent_ms"] <= FOUND_MS
        with pytest.raises(PeerUnreachable):
            outgoing.write_layer(1, timeout_ms=CALL_MS)
        assert not prefill._rooms, "its pages are the engine's again"


def test_f26_pages_are_safe_the_moment_an_abort_returned(
    url: str, start: Start, here: Here
) -> None:
    """The other process writes on as fast as it can."""
    prefill = start("prefill")
    pages = list(range(PAGES))
    for room in range(6):
        incoming = received(url, here, pages, room)
        prefill.do(f"send {room} {' '.join(map(str, pages))}")
        prefill.say(f"layers 0 {LAYERS - 1}")
        with contextlib.suppress(TransferCancelled):
            incoming.wait_layer(0, timeout_ms=CALL_MS)
        incoming.abort()
        here.overwrite()
        assert prefill.hear() in ("TransferCancelled", "ok")
        assert prefill.do("finish") != "ok"
        assert here.is_untouched()


def test_f26_what_arrived_before_a_cut_is_not_sent_again(
    url: str, start: Start, here: Here
) -> None:
    prefill = start("prefill")
    incoming = received(url, here, [1, 2, 7])
    prefill.do("send 5 3 4 5")
    for layer in range(LAYERS):
        assert prefill.do("cut") == "ok"
        assert prefill.do(f"layer {layer}") == "ok"
    assert prefill.do("cut") == "ok"
    assert prefill.do("finish") == "ok"
    incoming.wait(timeout_ms=CALL_MS)
    here.check([1, 2, 7], [3, 4, 5])
    assert int(prefill.do("sent")) == 3 * LAYERS * LAYER_BYTES, "not a byte more"


def test_f26_cuts_in_the_middle_of_a_layer_cost_that_layer_at_most(
    url: str, start: Start, here: Here
) -> None:
    prefill = start("prefill")
    pages, least, cuts = list(range(PAGES)), 0, 0
    for room in range(100):
        incoming = received(url, here, pages, room)
        prefill.do(f"send {room} {' '.join(map(str, pages))}")
        prefill.say(f"layers 0 {LAYERS - 1}")
        peers = {peer for source in incoming._sources.values() for peer in source.peer_ids}
        for peer_id in peers:
            here.rank._cut(peer_id)
        cuts += len(incoming.layers()) < LAYERS
        assert prefill.hear() == "ok"
        assert prefill.do("finish") == "ok"
        incoming.wait(timeout_ms=CALL_MS)
        here.check(pages, pages)
        least += PAGES * LAYERS * LAYER_BYTES
        if cuts == 5:
            break
    assert cuts, "none met a layer on its way"
    assert least <= int(prefill.do("sent")) <= least + (room + 1) * PAGES * LAYER_BYTES
