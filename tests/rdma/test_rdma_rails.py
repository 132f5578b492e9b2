"""Several rails at once: they share a transfer, one that breaks hands its work to the others, and
it comes back. Two of them need a second cable, which only a throw-away guest can be given."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from rdma_cables import guest_only, restore_second_cable, run
from rdma_ports import FAR, FAR_BOTH, NEAR, NEAR_BOTH
from transport_far import pattern
from transport_pair import MS, PART, slices_for

from mooncake_py.errors import MooncakeError, PeerUnreachable
from mooncake_py.transfer import EngineOptions, Rdma, TransferEngine


def paths(engine: TransferEngine) -> list[dict[str, Any]]:
    (peer,) = engine.describe()["peers"]
    found: list[dict[str, Any]] = peer["paths"]
    return found


class Joined:
    """Two engines of this process, a source there and a target here, both registered."""

    def __init__(self, near: TransferEngine, far: TransferEngine, nbytes: int) -> None:
        self.near, self.peer = near, near.open(far.address, timeout_ms=MS)
        self.source, self.target = pattern(nbytes, 7), np.zeros(nbytes, np.uint8)
        self.region = far.register(self.source, access="read_write")
        self.mine = near.register(self.target)

    def read(self, timeout_ms: int = MS) -> None:
        self.target[:] = 0
        slices = slices_for(self.region.id, self.target, [(0, self.source.size)])
        self.near.read(self.peer, slices, timeout_ms=timeout_ms)
        assert np.array_equal(self.target, self.source)


@contextmanager
def joined(
    near: Rdma, far: Rdma, nbytes: int = 8 * PART, transports: tuple[str, ...] = ("rdma",)
) -> Iterator[Joined]:
    with (
        TransferEngine(EngineOptions("127.0.0.1:0", transports=transports, rdma=far)) as there,
        TransferEngine(EngineOptions(transports=transports, rdma=near)) as here,
    ):
        yield Joined(here, there, nbytes)


def test_f25_both_rails_carry_one_transfer() -> None:
    with joined(NEAR_BOTH, FAR_BOTH) as two:
        two.read()  # the rails come up
        before = [path["bytes_read"] for path in paths(two.near)]
        two.read()
        carried = [
            path["bytes_read"] - old for path, old in zip(paths(two.near), before, strict=True)
        ]
        assert sum(carried) == two.source.size
        assert min(carried) >= two.source.size // 4, carried


@guest_only
@pytest.mark.timeout(60)
def test_f25_a_rail_that_goes_down_hands_its_work_over_and_comes_back(
    second_cable: tuple[Rdma, Rdma],
) -> None:
    with joined(*second_cable, nbytes=16 * PART) as two:
        two.read()
        assert [path["state"] for path in paths(two.near)] == ["ready", "ready"]
        failures: list[MooncakeError] = []
        stop = threading.Event()

        def keep_reading() -> None:
            while not stop.is_set():
                try:
                    two.read()
                except MooncakeError as error:
                    failures.append(error)

        reading = threading.Thread(target=keep_reading)
        reading.start()
        try:
            busy(two, lambda path: path["posted"] > 0)
            run("ip link set rve2 down")
            busy(two, lambda path: path["errors"] > 0)
            carried = paths(two.near)[0]["bytes_read"]
            wait_for(lambda: paths(two.near)[0]["bytes_read"] > carried + 2 * two.source.size)
            restore_second_cable()
            back = paths(two.near)[1]["bytes_read"]
            busy(two, lambda path: path["state"] == "ready" and path["bytes_read"] > back)
        finally:
            stop.set()
            reading.join()
        assert failures == []
        assert paths(two.near)[1]["connects"] >= 2


@contextmanager
def slow_cables() -> Iterator[None]:
    """Each carries 50 MB/s, much less than one processor drives: what counts is the cables."""
    for device in ("rve1", "rve3"):  # where bytes that are read leave
        run(f"tc qdisc add dev {device} root netem rate 400mbit limit 20000")
    try:
        yield
    finally:
        for device in ("rve1", "rve3"):
            run(f"tc qdisc del dev {device} root")


@guest_only
@pytest.mark.timeout(60)
def test_f25_two_cables_carry_nearly_twice_what_one_does(second_cable: tuple[Rdma, Rdma]) -> None:
    """Each cable needs as long as its own bytes take, both at the same time: they are faster than
    one by what all of it is to the larger part. No clock is asked: a busy machine falsifies it."""
    with joined(*second_cable, nbytes=16 * PART) as two:
        two.read()  # the rails come up
        before = [path["bytes_read"] for path in paths(two.near)]
        with slow_cables():
            for _ in range(3):
                two.read()
        after = paths(two.near)
        assert all(path["errors"] == 0 for path in after), after
        carried = [path["bytes_read"] - old for path, old in zip(after, before, strict=True)]
        assert sum(carried) == 3 * two.source.size
        assert sum(carried) > 1.6 * max(carried), carried


def busy(two: Joined, condition: Any) -> None:
    wait_for(lambda: condition(paths(two.near)[1]))


def wait_for(condition: Any, seconds: float = 20) -> None:
    end, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        pause.wait(0.01)


@guest_only
@pytest.mark.timeout(60)
@pytest.mark.parametrize("allowed", [("rdma",), ("rdma", "tcp")])
def test_a39_a_path_that_stays_down_gets_a_verdict(
    second_cable: tuple[Rdma, Rdma], allowed: tuple[str, ...]
) -> None:
    """The pause grows, the verdict comes, and then tcp stands in if it may: nothing loops."""
    near, far = (Rdma(devices=side.devices[1:]) for side in second_cable)
    with joined(near, far, PART, allowed) as two:
        two.read()
        run("ip link set rve2 down")
        try:
            if allowed == ("rdma",):
                with pytest.raises(PeerUnreachable, match=r"no path: .*down|given up"):
                    two.read()
            else:
                two.read()
                (peer,) = two.near.describe()["peers"]
                assert "data over tcp" in peer["reason"]
            (path,) = paths(two.near)
            assert path["state"] == "down"
            assert path["errors"] >= 5
        finally:
            restore_second_cable()
        wait_for(lambda: is_back(two))


def is_back(two: Joined) -> bool:
    try:
        two.read()
    except PeerUnreachable:
        return False
    return bool(paths(two.near)[0]["state"] == "ready")


def test_the_peer_is_described_path_by_path() -> None:
    with joined(NEAR, FAR, PART) as two:
        two.read()
        (path,) = paths(two.near)
        assert path["state"] == "ready"
        assert path["bytes_read"] == PART
        assert path["errors"] == path["resent"] == 0
        assert path["connects"] == 1
        assert "MTU" in path["path"]
        described = two.near.describe()["rdma"]
        assert "GID" in described["reason"]
        assert "traffic class 0" in described["reason"]


def test_an_address_that_was_asked_for_is_used() -> None:
    """GID 0 is the link-local one of soft-RoCE; both ports have one."""
    asked = [Rdma(devices=side.devices, gid_index=0) for side in (NEAR, FAR)]
    with joined(asked[0], asked[1], PART) as two:
        two.read()
        (path,) = paths(two.near)
        assert "as asked" in two.near.describe()["rdma"]["reason"]
        assert "fe80::" in path["path"]
