"""The transports that join the battery. `rdma` will, without a change to it."""

from __future__ import annotations

import pytest
from transport_battery import TransportBattery, pytest_generate_tests
from transport_pair import can_be

__all__ = [
    "TestFake",
    "TestLocal",
    "TestShm",
    "TestShmForeign",
    "TestShmHidden",
    "TestTcp",
    "pytest_generate_tests",
]


class TestLocal(TransportBattery):
    name = "local"
    places = ("thread",)
    maps = True


class TestShm(TransportBattery):
    name = "shm"
    maps = True


@pytest.mark.skipif(not can_be("foreign"), reason="no other user can run this here")
class TestShmForeign(TransportBattery):
    """The far process may not read our memory: its reads and our writes go through the socket."""

    name = "shm"
    places = ("foreign",)
    maps = True


@pytest.mark.skipif(not can_be("hidden"), reason="no pid namespaces here")
class TestShmHidden(TransportBattery):
    """The far process does not see ours."""

    name = "shm"
    places = ("hidden",)
    maps = True


class TestTcp(TransportBattery):
    name = "tcp"


class TestFake(TransportBattery):
    """Without faults it is a transport like any other."""

    name = "fake"
