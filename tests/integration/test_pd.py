"""Hand-over of KV pages between prefill and decode ranks, in one process and between several."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from pd_peer import HEADS, LAYERS, PAGES, TOKENS, filled_pool, layout, model_bytes
from pd_rate import drive
from processes import wait_until

from mooncake_py.errors import (
    PeerUnreachable,
    TransferCancelled,
    TransferTimeout,
    UsageError,
)
from mooncake_py.pd import (
    Bootstrap,
    DecodeRank,
    HandOverSettings,
    KvPool,
    PrefillInstance,
    PrefillRank,
    find_instance,
    publish_rank,
)
from mooncake_py.pd.protocol import ABORT, DONE, OFFER, PART, PULSE, RESUME
from mooncake_py.transfer import EngineOptions, Region, TransferEngine

CALL_MS = 10_000
MODEL = model_bytes()
TCP = EngineOptions(listen="127.0.0.1:0", transports=("tcp",))
SHM = EngineOptions(listen="127.0.0.1:0", transports=("shm", "local"))


class Decoder:
    """A decode rank and its memory."""

    def __init__(self, rank: int = 0, count: int = 1, options: EngineOptions = SHM) -> None:
        self.layout = layout(rank, count)
        self.memory = [
            np.zeros(PAGES * self.layout.page_bytes, np.uint8) for _ in range(LAYERS * 2)
        ]
        self.rank = DecodeRank(KvPool(self.layout, self.memory), options)

    def check(self, here: list[int], there: list[int], layers: range = range(LAYERS)) -> None:
        heads = self.layout.heads
        for layer in layers:
            for plane in range(2):
                buffer = self.memory[layer * 2 + plane]
                got = buffer.reshape(PAGES, TOKENS, len(heads), -1)[here]
                wanted = MODEL[layer, plane, there][:, :, heads.start : heads.stop]
                assert np.array_equal(got, wanted), f"layer {layer}, plane {plane}"

    def untouched_but(self, pages: list[int]) -> None:
        others = [page for page in range(PAGES) if page not in pages]
        for buffer in self.memory:
            assert not buffer.reshape(PAGES, -1)[others].any()


@contextlib.contextmanager
def cluster(
    prefill_count: int = 1, decode_count: int = 1, options: EngineOptions = SHM
) -> Iterator[tuple[list[PrefillRank], PrefillInstance, list[Decoder]]]:
    with contextlib.ExitStack() as stack:
        prefills = [
            stack.enter_context(PrefillRank(filled_pool(layout(rank, prefill_count)), options))
            for rank in range(prefill_count)
        ]
        addresses = tuple(prefill.address for prefill in prefills)
        decoders = [Decoder(rank, decode_count, options) for rank in range(decode_count)]
        for decoder in decoders:
            stack.enter_context(decoder.rank)
        yield prefills, PrefillInstance(layout(0, prefill_count), addresses), decoders


def run(
    prefills: list[PrefillRank], decoders: list[Decoder], instance: PrefillInstance, room: int,
    there: list[int], here: list[int],
) -> None:  # fmt: skip
    """One request, all ranks."""
    with ThreadPoolExecutor(len(prefills)) as pool:
        incoming = [
            decoder.rank.receive(room, here, instance, timeout_ms=CALL_MS) for decoder in decoders
        ]

        def prefill(rank: PrefillRank) -> None:
            outgoing = rank.send(room, there)
            for layer in range(LAYERS):
                outgoing.write_layer(layer, timeout_ms=CALL_MS)
            outgoing.finish(timeout_ms=CALL_MS)

        for done in [pool.submit(prefill, rank) for rank in prefills]:
            done.result()
        for decoder, room_in in zip(decoders, incoming, strict=True):
            room_in.wait(timeout_ms=CALL_MS)
            decoder.check(here, there)


@pytest.mark.parametrize(
    ("counts", "options"),
    [
        ((1, 1), SHM), ((2, 1), SHM), ((1, 2), SHM), ((2, 4), SHM), ((16, 2), SHM),
        ((1, 1), TCP), ((2, 1), TCP), ((1, 2), TCP), ((2, 4), TCP),
    ],
)  # fmt: skip
def test_f26_kv_moves_between_any_division_of_heads(
    counts: tuple[int, int], options: EngineOptions
) -> None:
    with cluster(*counts, options) as (prefills, instance, decoders):
        run(prefills, decoders, instance, 1, [5, 6, 7, 2, 30], [0, 9, 1, 31, 8])
        for decoder in decoders:
            decoder.untouched_but([0, 9, 1, 31, 8])


def test_f26_decoding_of_early_layers_starts_before_late_ones_are_there() -> None:
    with cluster() as ((prefill,), instance, (decoder,)):
        incoming = decoder.rank.receive(3, [4, 5], instance, timeout_ms=CALL_MS)
        outgoing = prefill.send(3, [1, 0])
        outgoing.write_layer(2, timeout_ms=CALL_MS)
        incoming.wait_layer(2, timeout_ms=CALL_MS)
        decoder.check([4, 5], [1, 0], range(2, 3))
        assert incoming.layers() == [2]
        with pytest.raises(TransferTimeout, match="layer 0"):
            incoming.wait_layer(0, timeout_ms=1)
        with pytest.raises(UsageError, match="layers were not written"):
            outgoing.finish(timeout_ms=CALL_MS)
        for layer in (0, 1, 3):
            outgoing.write_layer(layer, timeout_ms=CALL_MS)
        outgoing.finish(timeout_ms=CALL_MS)
        incoming.wait(timeout_ms=CALL_MS)
        decoder.check([4, 5], [1, 0])


def test_a55_chunks_wait_for_what_computes_them() -> None:
    class Event:
        def synchronize(self) -> None:
            order.append("computed")

    order: list[str] = []
    with cluster() as ((prefill,), instance, (decoder,)):
        incoming = decoder.rank.receive(3, [4, 5, 6], instance, timeout_ms=CALL_MS)
        outgoing = prefill.send(3, [2, 3, 4])
        for part in (range(2), range(2, 3)):
            for layer in range(LAYERS):
                outgoing.write_layer(layer, part=part, ready=Event(), timeout_ms=CALL_MS)
            order.append("written")
            assert part.stop == 3 or incoming.layers() == []
        outgoing.finish(timeout_ms=CALL_MS)
        incoming.wait(timeout_ms=CALL_MS)
        decoder.check([4, 5, 6], [2, 3, 4])
    assert order == (["computed"] * LAYERS + ["written"]) * 2


def test_a57_a_room_number_used_again_starts_clean() -> None:
    with cluster() as ((prefill,), instance, (decoder,)):
        for life in range(3):
            run([prefill], [decoder], instance, 77, [life], [life + 10])
        first = decoder.rank.receive(78, [1], instance, timeout_ms=CALL_MS)
        outgoing = prefill.send(78, [1])
        outgoing.write_layer(0, timeout_ms=CALL_MS)
        first.abort()
        with pytest.raises(TransferCancelled, match="gave up"):
            first.wait(timeout_ms=CALL_MS)
        wait_until(lambda: outgoing.error, "the sender hears of it")
        second = decoder.rank.receive(78, [2], instance, timeout_ms=CALL_MS)
        assert second.layers() == []
        second.abort()


def test_a56_what_does_not_meet_is_an_error_on_both_sides() -> None:
    with cluster() as ((prefill,), instance, (decoder,)):
        other = PrefillInstance(
            type(instance.layout)(LAYERS, TOKENS * 2, HEADS, 64), instance.addresses
        )
        with pytest.raises(UsageError, match="page_tokens"):
            decoder.rank.receive(1, [1], other, timeout_ms=CALL_MS)
        incoming = decoder.rank.receive(1, [1, 2], instance, timeout_ms=CALL_MS)
        with pytest.raises(UsageError, match="another number of pages"):
            prefill.send(1, [1])
        with pytest.raises(TransferCancelled, match="another number of pages"):
            incoming.wait(timeout_ms=CALL_MS)
        prefill.send(2, [1])
        with pytest.raises(UsageError, match="another number of pages"):
            decoder.rank.receive(2, [1, 2], instance, timeout_ms=CALL_MS)
        decoder.rank.receive(3, [1, 2], instance, timeout_ms=CALL_MS)  # the pages are free again


def test_f26_duplicate_rooms_and_pages_are_refused() -> None:
    with cluster() as ((prefill,), instance, (decoder,)):
        decoder.rank.receive(1, [1, 2], instance, timeout_ms=CALL_MS)
        with pytest.raises(UsageError, match="open already"):
            decoder.rank.receive(1, [3], instance, timeout_ms=CALL_MS)
        with pytest.raises(UsageError, match="another open room"):
            decoder.rank.receive(2, [2, 3], instance, timeout_ms=CALL_MS)
        with Decoder().rank as other, pytest.raises(UsageError, match="a room of its own"):
            other.receive(1, [1, 2], instance, timeout_ms=CALL_MS)
        prefill.send(1, [4, 5])
        with pytest.raises(UsageError, match="open already"):
            prefill.send(1, [4, 5])
        for room in (-1, 1 << 63, "1", None, True):
            with pytest.raises(UsageError, match="a room is a number"):
                prefill.send(room, [1])  # type: ignore[arg-type] - that is the test


def test_orphaned_offers_end_and_say_so() -> None:
    settings = HandOverSettings(orphan_ms=300)
    with (
        PrefillRank(filled_pool(layout()), SHM, settings) as prefill,
        Decoder().rank as decoder,
    ):
        instance = PrefillInstance(layout(), (prefill.address,))
        incoming = decoder.receive(9, [1], instance, timeout_ms=CALL_MS)
        with pytest.raises(TransferCancelled, match="no request of this room"):
            incoming.wait(timeout_ms=CALL_MS)
        assert not prefill._orphans
        with pytest.raises(TransferTimeout, match="have not offered"):
            prefill.send(9, [1]).write_layer(0, timeout_ms=50)


def test_a54_an_abort_reaches_the_other_side() -> None:
    with cluster(2, 2) as (prefills, instance, decoders):
        incoming = [d.rank.receive(5, [1], instance, timeout_ms=CALL_MS) for d in decoders]
        outgoing = [p.send(5, [1]) for p in prefills]
        outgoing[0].write_layer(0, timeout_ms=CALL_MS)
        outgoing[0].abort("the user went away")
        with pytest.raises(TransferCancelled, match="the user went away"):
            incoming[0].wait(timeout_ms=CALL_MS)
        with pytest.raises(TransferCancelled, match="the user went away"):
            outgoing[0].write_layer(1, timeout_ms=CALL_MS)
        incoming[1].abort("no room for it")
        wait_until(lambda: outgoing[1].error, "the sender hears of it")
        with pytest.raises(TransferCancelled, match="no room for it"):
            outgoing[1].write_layer(1, timeout_ms=CALL_MS)


@pytest.mark.parametrize("options", [SHM, TCP], ids=["same host", "tcp"])
def test_f26_pages_are_safe_the_moment_an_abort_returned(options: EngineOptions) -> None:
    """The sender writes on as fast as it can; no byte of it arrives after `abort`."""
    with cluster(1, 1, options) as ((prefill,), instance, (decoder,)):
        pages = list(range(PAGES))
        for room in range(20):
            incoming = decoder.rank.receive(room, pages, instance, timeout_ms=CALL_MS)
            outgoing = prefill.send(room, pages)
            started = threading.Event()

            def write(outgoing=outgoing, started=started) -> None:  # type: ignore[no-untyped-def]
                with contextlib.suppress(TransferCancelled):
                    for layer in range(LAYERS):
                        outgoing.write_layer(layer, timeout_ms=CALL_MS)
                        started.set()

            writer = threading.Thread(target=write)
            writer.start()
            started.wait(10)
            incoming.abort()
            for buffer in decoder.memory:
                buffer[:] = 0xEE
            writer.join()
            for buffer in decoder.memory:
                assert (buffer == 0xEE).all()


def test_a53_pages_that_cannot_be_taken_back_are_told_at_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who waits for the room does not wait for its own deadline; a second `abort` may succeed."""
    with cluster() as ((_,), instance, (decoder,)):
        incoming = decoder.rank.receive(1, [3], instance, timeout_ms=CALL_MS)

        def stuck(_: Region) -> None:
            raise TransferTimeout("a copy in the region did not end in time: keep its memory")

        with monkeypatch.context() as patch:
            patch.setattr(Region, "close", stuck)
            with pytest.raises(TransferTimeout, match="does not end"):
                incoming.abort()
            with pytest.raises(TransferTimeout, match="keep its memory"):
                incoming.wait(timeout_ms=24 * 3600 * 1000)
            with pytest.raises(UsageError, match="another open room"):
                decoder.rank.receive(2, [3], instance, timeout_ms=CALL_MS)
        incoming.abort()
        decoder.rank.receive(2, [3], instance, timeout_ms=CALL_MS).abort()


def test_a58_many_rooms_at_once() -> None:
    with cluster(2, 1) as (prefills, instance, (decoder,)):
        with ThreadPoolExecutor(8) as pool:
            jobs = [
                pool.submit(run, prefills, [decoder], instance, room, [room], [room])
                for room in range(PAGES)
            ]
            for job in jobs:
                job.result(60)
        decoder.check([*range(PAGES)], [*range(PAGES)])
        assert not decoder.rank._rooms
        assert not decoder.rank._reserved
        assert not any(p._rooms or p._orphans for p in prefills)
        assert len(decoder.rank.engine.describe()["regions"]) == 0


def test_a58_no_request_waits_to_be_opened_at_64_a_second() -> None:
    """Ten minutes of it by `python -m tests.integration.pd_rate`."""
    traffic = drive(seconds=3, rate=64)
    assert not traffic.failed
    assert len(traffic.total_s) == 192
    assert max(traffic.opening_s) < 3


def test_f26_a_cut_connection_is_resumed_without_sending_again() -> None:
    with cluster(1, 1, TCP) as ((prefill,), instance, (decoder,)):
        incoming = decoder.rank.receive(5, [1, 2], instance, timeout_ms=CALL_MS)
        outgoing = prefill.send(5, [3, 4])
        written: list[int] = []
        submit = prefill.engine.submit

        def counted(peer, slices, **more):  # type: ignore[no-untyped-def]
            written.append(int(slices["length"].sum()))
            return submit(peer, slices, **more)

        prefill.engine.submit = counted  # type: ignore[method-assign]
        for layer in range(LAYERS):
            prefill.engine.open(decoder.rank.address, timeout_ms=CALL_MS).close()  # cuts it
            outgoing.write_layer(layer, timeout_ms=CALL_MS)
        prefill.engine.open(decoder.rank.address, timeout_ms=CALL_MS).close()
        outgoing.finish(timeout_ms=CALL_MS)
        incoming.wait(timeout_ms=CALL_MS)
        decoder.check([1, 2], [3, 4])
        layer_bytes = 2 * 2 * layout().page_bytes
        assert sum(written) <= layer_bytes * LAYERS * 2


def test_a84_hostile_words_change_nothing() -> None:
    with cluster() as ((prefill,), instance, (decoder,)), TransferEngine() as stranger:
        incoming = decoder.rank.receive(5, [1, 2], instance, timeout_ms=CALL_MS)
        outgoing = prefill.send(5, [3, 4])
        noise = np.random.default_rng(3)
        for address in (prefill.address, decoder.rank.address):
            peer = stranger.open(address, timeout_ms=CALL_MS)
            for kind in (OFFER, PART, RESUME, DONE, ABORT, PULSE, 7):
                for size in (0, 3, 20, 32, 32, 200):
                    word = noise.integers(0, 256, size, dtype=np.uint8).tobytes()
                    assert peer.request(kind, word, timeout_ms=CALL_MS)
            for word in (b"{}", b"[]", b"null", b"[" * 5000, b'{"version": 1, "layout": 5}'):
                peer.request(OFFER, word, timeout_ms=CALL_MS)
        for layer in range(LAYERS):
            outgoing.write_layer(layer, timeout_ms=CALL_MS)
        outgoing.finish(timeout_ms=CALL_MS)
        incoming.wait(timeout_ms=CALL_MS)
        decoder.check([1, 2], [3, 4])


@pytest.fixture
def url() -> Iterator[str]:
    with Bootstrap() as bootstrap:
        yield bootstrap.url


@pytest.mark.parametrize("name", ["prefill 0", "a/b", "ü?#%2f", "x" * 200])
def test_an_instance_may_have_any_name(url: str, name: str) -> None:
    publish_rank(url, name, layout(), "a:1", timeout_ms=CALL_MS)
    assert find_instance(url, name, timeout_ms=CALL_MS).addresses == ("a:1",)


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_an_instance_without_a_usable_name_is_refused(url: str, name: str) -> None:
    with pytest.raises(UsageError, match="name of 1 to 200"):
        publish_rank(url, name, layout(), "a:1", timeout_ms=CALL_MS)


def test_what_is_no_http_at_the_bootstrap_is_a_typed_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as one:
                one.recv(4096)
                one.sendall(b"\0\1\2 is this HTTP?\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(PeerUnreachable, match="did not answer"):
            find_instance(f"http://127.0.0.1:{server.getsockname()[1]}", "x", timeout_ms=CALL_MS)
        thread.join(CALL_MS / 1000)


def test_a49_a_bootstrap_knows_complete_instances_only(url: str) -> None:
    with pytest.raises(PeerUnreachable, match="not complete"):
        find_instance(url, "x", timeout_ms=1_000)
    publish_rank(url, "x", layout(0, 2), "a:1", timeout_ms=CALL_MS)
    with pytest.raises(PeerUnreachable, match="not complete"):
        find_instance(url, "x", timeout_ms=1_000)
    publish_rank(url, "x", layout(1, 2), "b:2", timeout_ms=CALL_MS)
    assert find_instance(url, "x", timeout_ms=CALL_MS).addresses == ("a:1", "b:2")
    publish_rank(url, "x", layout(1, 2), "c:3", timeout_ms=CALL_MS)
    assert find_instance(url, "x", timeout_ms=CALL_MS).addresses == ("a:1", "c:3")
    publish_rank(url, "x", layout(0, 4), "d:4", timeout_ms=CALL_MS)  # another layout: starts anew
    with pytest.raises(PeerUnreachable):
        find_instance(url, "x", timeout_ms=1_000)
    with pytest.raises(UsageError, match="host:port"):
        publish_rank(url, "x", layout(), "nowhere", timeout_ms=CALL_MS)
    with pytest.raises(PeerUnreachable, match="did not answer"):
        find_instance("http://127.0.0.1:9", "x", timeout_ms=500)
