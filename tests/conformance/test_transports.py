"""The transports that join the battery. `rdma` will, without a change to it."""

from __future__ import annotations

from transport_battery import TransportBattery, pytest_generate_tests

__all__ = ["TestFake", "TestLocal", "TestShm", "TestTcp", "pytest_generate_tests"]


class TestLocal(TransportBattery):
    name = "local"
    places = ("thread",)
    maps = True


class TestShm(TransportBattery):
    name = "shm"
    maps = True


class TestTcp(TransportBattery):
    name = "tcp"


class TestFake(TransportBattery):
    """Without faults it is a transport like any other."""

    name = "fake"
