"""Several rails at once: they share a transfer, one that breaks hands its work to the others, and
it comes back. Two of them need a second cable, which only a throw-away guest can be given."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from rdma_ports import FAR, FAR_BOTH, NEAR, NEAR_BOTH
from transport_far import pattern
from transport_pair import MS, PART, slices_for

from mooncake_py.errors import MooncakeError, PeerUnreachable
from mooncake_py.transfer import EngineOptions, Rdma, TransferEngine

guest_only = pytest.mark.skipif(
    os.environ.get("RDMA_VM") != "1",
    reason="takes network links down: only in a throw-away guest",
)


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


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


CABLE = """
link add rve2 mtu 4500 address 02:00:00:00:00:03 type veth peer name rve3 mtu 4500 address 02:00:00:00:00:04
link set rve2 up
link set rve3 up
addr add 10.78.0.1/24 dev rve2
addr add 10.78.0.2/24 dev rve3
neigh add 10.78.0.2 lladdr 02:00:00:00:00:04 dev rve2 nud permanent
neigh add 10.78.0.1 lladdr 02:00:00:00:00:03 dev rve3 nud permanent
route add 10.78.0.2/32 dev rve2 src 10.78.0.1 table 102
route add 10.78.0.1/32 dev rve3 src 10.78.0.2 table 103
rule add pref 8 iif lo oif rve2 lookup 102
rule add pref 9 iif lo oif rve3 lookup 103
rule add pref 14 iif lo from 10.78.0.1 to 10.78.0.2 lookup 102
rule add pref 15 iif lo from 10.78.0.2 to 10.78.0.1 lookup 103
"""  # noqa: E501  (a batch for ip, one command a line)


@pytest.fixture(scope="module")
def second_cable() -> Iterator[tuple[Rdma, Rdma]]:
    """(near, far): a rail over each of two cables."""
    subprocess.run(["ip", "-batch", "-"], input=CABLE, text=True, check=True, capture_output=True)
    for number in (2, 3):
        run(f"rdma link add rxe{number} type rxe netdev rve{number}")
    yield (
        Rdma(devices=(*NEAR.devices, "rxe2")),
        Rdma(devices=(*FAR.devices, "rxe3")),
    )
    for number in (2, 3):
        run(f"rdma link delete rxe{number}")
    run("ip link delete rve2")


def restore_second_cable() -> None:
    """A link that went down has lost its routes and neighbours."""
    run("ip link set rve2 up")
    for line in (
        "ip neigh replace 10.78.0.2 lladdr 02:00:00:00:00:04 dev rve2 nud permanent",
        "ip route replace 10.78.0.2/32 dev rve2 src 10.78.0.1 table 102",
    ):
        run(line)


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


BOTH_CABLES = 100e6  # bytes a second, together


@contextmanager
def slow_cables() -> Iterator[None]:
    """Each carries half of it, much less than one processor drives: what counts is the cables."""
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
    def seconds(near: Rdma, far: Rdma) -> float:
        with joined(near, far, nbytes=16 * PART) as two:
            two.read()  # the rails come up
            took = []
            for _ in range(3):
                began = time.monotonic()
                two.read()
                took.append(time.monotonic() - began)
            assert all(path["errors"] == 0 for path in paths(two.near)), paths(two.near)
            return min(took)

    free = seconds(NEAR, FAR)
    if free > 0.5 * 16 * PART / BOTH_CABLES:
        pytest.skip(
            f"busy: without a limit {16 * PART / free / 1e6:.0f} MB/s, too near the cables'"
        )
    with slow_cables():
        one, both = seconds(NEAR, FAR), seconds(*second_cable)
    assert one > 1.6 * both, (one, both)


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
