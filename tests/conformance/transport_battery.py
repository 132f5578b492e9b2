"""What every transport promises (rules in `native/src/transport/transport.h`).

A transport joins with a class derived from `TransportBattery` that names it; it brings no new test
idea. Each promise is tested with the far engine in this process and in one of its own, except
where a transport lives in one process only.
"""

from __future__ import annotations

import json
import select
import threading
from contextlib import suppress

import numpy as np
import pytest
from transport_far import COMMAND, ECHO, NOTE, SILENCE, pattern, wait_for
from transport_lifetimes import LifetimeBattery
from transport_pair import MS, PART, SIZES, Pair, pytest_generate_tests, slices_for

from mooncake_py._native.memory import address_of, crc32c
from mooncake_py.errors import (
    AccessRefused,
    TransferCancelled,
    TransferTimeout,
    UsageError,
)
from mooncake_py.transfer import (
    FLAG_CRC,
    FLAG_FENCE,
    Memory,
    make_slices,
)

__all__ = ["TransportBattery", "pytest_generate_tests"]


def send_for_ever(two: Pair) -> None:
    while True:
        two.peer.send(NOTE, bytes(1 << 14), timeout_ms=100)


class TransportBattery(LifetimeBattery):
    # ---- messages

    def test_the_transport_is_the_one_that_was_asked_for(self, two: Pair) -> None:
        assert two.peer.transport == self.name
        (described,) = two.near.describe()["peers"]
        assert described["transport"] == self.name
        assert described["reason"]

    @pytest.mark.parametrize("nbytes", [0, 1, 4096, 131_072, 1_000_003])
    def test_a_request_gets_the_reply_to_it(self, two: Pair, nbytes: int) -> None:
        payload = pattern(nbytes, 1).tobytes()
        for form in (payload, bytearray(payload), memoryview(payload)):
            assert two.peer.request(ECHO, form, timeout_ms=MS) == payload

    def test_one_way_messages_arrive_in_order(self, two: Pair) -> None:
        sent = [f"{i} {'x' * (i * 97 % 5000)}" for i in range(300)]
        for text in sent:
            two.peer.send(NOTE, text.encode(), timeout_ms=MS)
        assert two.tell("notes") == sent

    def test_a_message_above_the_limit_is_refused_here(self, place: str) -> None:
        with self.pair(place, message_max_bytes=1000) as two:
            assert len(two.peer.request(ECHO, bytes(1000), timeout_ms=MS)) == 1000
            with pytest.raises(UsageError, match="1001"):
                two.peer.request(ECHO, bytes(1001), timeout_ms=MS)
            assert two.peer.request(ECHO, b"still there", timeout_ms=MS) == b"still there"

    def test_a42_a_timed_out_request_leaves_the_peer_usable(self, two: Pair) -> None:
        for _ in range(3):
            with pytest.raises(TransferTimeout):
                two.peer.request(SILENCE, b"", timeout_ms=20)
        assert two.peer.request(ECHO, b"next", timeout_ms=MS) == b"next"

    def test_a51_many_threads_get_their_own_answers(self, two: Pair) -> None:
        wrong: list[object] = []
        region = two.region(PART)
        expected = pattern(PART, 7)

        def work(number: int) -> None:
            target = np.zeros(5000, np.uint8)
            for i in range(60):
                text = f"{number} {i}".encode()
                if two.peer.request(ECHO, text, timeout_ms=MS) != text:
                    wrong.append(text)
                offset = (number * 7919 + i * 104_729) % (PART - 5000)
                slices = slices_for(region, target, [(offset, 5000)])
                two.near.read(two.peer, slices, timeout_ms=MS)
                if not np.array_equal(target, expected[offset : offset + 5000]):
                    wrong.append((number, i))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_a74_a_full_queue_holds_up_messages_only(self, place: str) -> None:
        """The far program takes nothing: data and replies pass all the same."""
        with self.pair(place, queue_max_bytes=1 << 17, message_max_bytes=1 << 16) as two:
            mine = pattern(3 * PART, 5)
            offered = two.near.register(mine)
            flag = two.region(PART, "heap", "read_write")
            two.near.on_message(lambda message: message.reply(b""))
            outcome: list[int] = []
            command = {"region": flag, "nbytes": offered.id << 32 | mine.size}
            busy = threading.Thread(
                target=lambda: outcome.append(two.tell("stop_taking", **command))
            )
            busy.start()
            with pytest.raises(TransferTimeout):
                send_for_ever(two)
            target = np.zeros(PART, np.uint8)
            two.near.read(two.peer, slices_for(flag, target, [(0, PART)]), timeout_ms=MS)
            assert np.array_equal(target, pattern(PART, 7))
            target[0] = 0xFF
            two.near.write(two.peer, slices_for(flag, target, [(0, 1)]), timeout_ms=MS)
            busy.join()
            assert outcome == [crc32c(mine)]
            assert two.peer.request(ECHO, b"goes on", timeout_ms=MS) == b"goes on"

    def test_progress_goes_on_when_quick_calls_end(self, two: Pair) -> None:
        """Who calls again and again makes its engine's progress itself; then it stops to."""
        memory = np.zeros(PART, np.uint8)
        source = two.region(PART, "heap")
        with two.near.register(memory, access="read_write") as region:
            for _ in range(50):
                two.peer.request(ECHO, b"", timeout_ms=MS)
            two.peer.send(
                COMMAND, json.dumps({"do": "write_to_sender", "region": region.id,
                                     "source": source, "nbytes": PART}).encode(),
                timeout_ms=MS,
            )  # fmt: skip
            wait_for(lambda: np.array_equal(memory, pattern(PART, 7)))

    # ---- reads and writes

    @pytest.mark.parametrize("kind", ["memfd", "heap"])
    def test_reads_of_every_size_bring_the_right_bytes(self, two: Pair, kind: str) -> None:
        region = two.region(4 * PART, kind)
        source = pattern(4 * PART, 7)
        for offset in (0, 1, 4095):
            target = np.full(sum(SIZES) + 1, 0xEE, np.uint8)
            slices = slices_for(region, target, [(offset, size) for size in SIZES])
            slices["flags"] = FLAG_CRC
            two.near.read(two.peer, slices, timeout_ms=MS)
            at = 0
            for row, size in zip(slices, SIZES, strict=True):
                piece = target[at : at + size]
                assert np.array_equal(piece, source[offset : offset + size])
                assert row["crc"] == crc32c(piece)
                assert row["status"] == 0
                at += size
            assert target[-1] == 0xEE  # nothing behind the last slice

    @pytest.mark.parametrize("kind", ["memfd", "heap"])
    def test_writes_of_every_size_arrive_before_success(self, two: Pair, kind: str) -> None:
        region = two.region(sum(SIZES), kind, "read_write")
        source = pattern(sum(SIZES), 99)
        offsets = np.cumsum([0, *SIZES])[:-1]
        slices = slices_for(region, source, list(zip(offsets.tolist(), SIZES, strict=True)))
        slices["flags"] = FLAG_CRC
        two.near.write(two.peer, slices, timeout_ms=MS)
        assert two.tell("crc", region=region) == crc32c(source)
        for row, offset, size in zip(slices, offsets, SIZES, strict=True):
            assert row["crc"] == crc32c(source[offset : offset + size])

    def test_a_region_of_many_pieces_reads_as_one(self, two: Pair) -> None:
        sizes = [1, 4096, 3, 70_000, 12_345, PART]
        region = two.region(sizes, "heap", "read_write")
        whole = np.concatenate([pattern(n, 7 + i) for i, n in enumerate(sizes)])
        target = np.zeros(whole.size, np.uint8)
        two.near.read(two.peer, slices_for(region, target, [(0, whole.size)]), timeout_ms=MS)
        assert np.array_equal(target, whole)
        fresh = pattern(whole.size - 2, 5)
        two.near.write(two.peer, slices_for(region, fresh, [(1, fresh.size)]), timeout_ms=MS)
        whole[1:-1] = fresh
        assert two.tell("crc", region=region) == crc32c(whole)

    def test_thousands_of_slices_in_one_batch(self, two: Pair) -> None:
        region = two.region(PART)
        source = pattern(PART, 7)
        n, length = 6000, 100
        offsets = (np.arange(n) * 7919) % (PART - length)
        target = np.zeros(n * length, np.uint8)
        slices = slices_for(region, target, [(int(offset), length) for offset in offsets])
        two.near.read(two.peer, slices, timeout_ms=MS)
        expected = source[offsets[:, None] + np.arange(length)]
        assert np.array_equal(target.reshape(n, length), expected)

    def test_f24_a34_what_is_outside_is_refused_slice_by_slice(self, two: Pair) -> None:
        region = two.region(4096, access="read_write")
        huge = (1 << 64) - 1
        good = [(0, 4096), (4096, 0), (4095, 1)]
        bad = [(4096, 1), (1, 4096), (huge, 1), (huge - 4095, 4096), (0, 4097)]
        for act in (two.near.read, two.near.write):
            target = np.zeros(4 * 4097, np.uint8)
            slices = make_slices(len(good + bad) + 1)
            slices["region"] = region
            slices["remote_offset"][:-1] = np.array([o for o, _ in good + bad], np.uint64)
            slices["length"][:-1] = [n for _, n in good + bad]
            slices["local"] = address_of(target)[0]
            slices["region"][-1] = 999  # never registered
            slices["length"][-1] = 1
            with pytest.raises(AccessRefused):
                act(two.peer, slices, timeout_ms=MS)
            statuses = slices["status"].tolist()
            assert statuses == [0] * len(good) + [-AccessRefused.code] * (len(bad) + 1)
        assert two.peer.request(ECHO, b"alive", timeout_ms=MS) == b"alive"

    def test_a45_slices_side_by_side_keep_their_own_outcomes(self, two: Pair) -> None:
        """They may travel together; what lies behind the region's end fails alone."""
        count, length = 300, 4096
        region = two.region(count * length, access="read_write")
        whole = pattern(count * length, 7)
        target = np.zeros((count + 3) * length, np.uint8)
        pieces = [(i * length, length) for i in range(count + 3)]
        with pytest.raises(AccessRefused, match=f"slice {count}"):
            two.near.read(two.peer, slices := slices_for(region, target, pieces), timeout_ms=MS)
        assert slices["status"].tolist() == [0] * count + [-AccessRefused.code] * 3
        assert np.array_equal(target[: whole.size], whole)
        fresh = pattern(target.size, 8)
        with pytest.raises(AccessRefused, match=f"slice {count}"):
            two.near.write(two.peer, slices := slices_for(region, fresh, pieces), timeout_ms=MS)
        assert slices["status"].tolist() == [0] * count + [-AccessRefused.code] * 3
        assert two.tell("crc", region=region) == crc32c(fresh[: whole.size])

    def test_a_region_for_reading_refuses_writes(self, two: Pair) -> None:
        region = two.region(4096)
        before = two.tell("crc", region=region)
        source = pattern(4096, 3)
        with pytest.raises(AccessRefused):
            two.near.write(two.peer, slices_for(region, source, [(0, 4096)]), timeout_ms=MS)
        assert two.tell("crc", region=region) == before

    def test_f24_after_deregistering_every_access_is_refused(self, two: Pair) -> None:
        region = two.region(2 * PART, access="read_write")
        target = np.zeros(2 * PART, np.uint8)
        slices = slices_for(region, target, [(0, 2 * PART)])
        two.near.read(two.peer, slices, timeout_ms=MS)
        two.tell("deregister", region=region)
        for act in (two.near.read, two.near.write):
            with pytest.raises(AccessRefused):
                act(two.peer, slices, timeout_ms=MS)
        assert two.region(4096) > region  # ids are never used again

    def test_deregistering_during_reads_ends_them_or_lets_them_finish(self, two: Pair) -> None:
        source = pattern(8 * PART, 7)
        for kind in ("memfd", "heap"):
            region = two.region(8 * PART, kind)
            target = np.zeros(8 * PART, np.uint8)
            slices = slices_for(region, target, [(i * PART, PART) for i in range(8)])
            slices["op"] = 1
            batch = two.near.submit(two.peer, slices, timeout_ms=MS)
            two.tell("deregister", region=region)
            with suppress(AccessRefused):
                batch.wait(MS)
            assert batch.done()
            for i, row in enumerate(slices):
                assert row["status"] in (0, -AccessRefused.code)
                if row["status"] == 0:
                    here = slice(i * PART, (i + 1) * PART)
                    assert np.array_equal(target[here], source[here])

    def test_both_sides_may_read_whoever_connected(self, two: Pair) -> None:
        memory = Memory(PART)
        np.frombuffer(memory.view(), np.uint8)[:] = pattern(PART, 21)
        heap = pattern(PART + 5, 22)
        for buffer, expected in ((memory, crc32c(memory.view())), (heap, crc32c(heap))):
            region = two.near.register(buffer)
            nbytes = region.nbytes
            assert two.tell("read_back", region=region.id, nbytes=nbytes) == expected
            region.close()

    def test_a_fenced_slice_waits_for_those_before_it(self, two: Pair) -> None:
        region = two.region(2 * PART, "heap", "read_write")
        first, second = pattern(2 * PART, 31), pattern(100, 32)
        back = np.zeros(2 * PART, np.uint8)
        slices = make_slices(3)
        slices["op"] = [2, 2, 1]  # write all, write over its middle, read all back
        slices["region"] = region
        slices["remote_offset"] = [0, 1000, 0]
        slices["length"] = [2 * PART, 100, 2 * PART]
        slices["local"] = [address_of(first)[0], address_of(second)[0], address_of(back)[0]]
        slices["flags"] = [0, FLAG_FENCE, FLAG_FENCE]
        with two.near.submit(two.peer, slices, timeout_ms=MS) as batch:
            batch.wait(MS)
        first[1000:1100] = second
        assert np.array_equal(back, first)

    def test_a_call_that_is_wrong_moves_nothing(self, two: Pair) -> None:
        region = two.region(4096)
        target = np.zeros(4096, np.uint8)
        slices = slices_for(region, target, [(0, 4096), (0, 16)])
        slices["flags"][1] = 1 << 20
        with pytest.raises(UsageError, match="slice 1"):
            two.near.read(two.peer, slices, timeout_ms=MS)
        assert not target.any()

    # ---- batches

    def test_a_batch_is_done_by_itself(self, two: Pair) -> None:
        region = two.region(2 * PART)
        target = np.zeros(2 * PART, np.uint8)
        slices = slices_for(region, target, [(0, 2 * PART)])
        slices["op"] = 1
        for _ in range(3):
            target[:] = 0
            batch = two.near.submit(two.peer, slices, timeout_ms=MS)
            readable, _, _ = select.select([batch], [], [], MS / 1000)
            assert readable
            assert batch.done()
            batch.wait(0)
            assert np.array_equal(target, pattern(2 * PART, 7))
            batch.close()

    def test_a_cancelled_batch_is_over_at_once(self, two: Pair) -> None:
        region = two.region(8 * PART, "heap")
        target = np.zeros(8 * PART, np.uint8)
        slices = slices_for(region, target, [(i * PART, PART) for i in range(8)])
        slices["op"] = 1
        for _ in range(5):
            batch = two.near.submit(two.peer, slices, timeout_ms=MS)
            batch.cancel()
            after = target.copy()
            with suppress(TransferCancelled):
                batch.wait(0)
            assert batch.done()
            assert two.peer.request(ECHO, b"x", timeout_ms=MS) == b"x"
            assert np.array_equal(target, after)
            batch.close()

    def test_mapping_a_region_of_the_peer(self, two: Pair) -> None:
        region, heap = two.region(PART), two.region(PART, "heap")
        if self.maps:
            mapping = two.peer.map(region, timeout_ms=MS)
            view = mapping.view()
            mapping.close()
            assert view.readonly
            assert np.array_equal(np.frombuffer(view, np.uint8), pattern(PART, 7))
        else:
            with pytest.raises(AccessRefused):
                two.peer.map(region, timeout_ms=MS)
        with pytest.raises(AccessRefused):
            two.peer.map(heap, timeout_ms=MS)
