"""The transports that join the battery. `rdma` will, without a change to it."""

from __future__ import annotations

import numpy as np
import pytest
from transport_battery import TransportBattery, pytest_generate_tests
from transport_far import pattern
from transport_pair import MS, Pair, can_be, slices_for

from mooncake_py._native.memory import address_of
from mooncake_py.transfer import make_slices

__all__ = [
    "TestFake",
    "TestLocal",
    "TestShm",
    "TestShmForeign",
    "TestShmHidden",
    "TestTcp",
    "pytest_generate_tests",
]

LARGE = 64 << 20


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

    def test_the_rule_that_forbids_reading_our_memory_is_named(self, two: Pair) -> None:
        """At the process that may not look: the kernel's answer, and what would permit it."""
        (peer,) = two.tell("describe")["peers"]
        assert "through the socket (process_vm_readv: Operation not permitted" in peer["reason"]
        for rule in ("same user", "kernel.yama.ptrace_scope", "CAP_SYS_PTRACE"):
            assert rule in peer["reason"]
        (seen_from_here,) = two.near.describe()["peers"]
        assert "writes through the socket" in seen_from_here["reason"]


@pytest.mark.skipif(not can_be("hidden"), reason="no pid namespaces here")
class TestShmHidden(TransportBattery):
    """The far process does not see ours."""

    name = "shm"
    places = ("hidden",)
    maps = True

    def test_that_the_process_is_not_seen_is_named(self, two: Pair) -> None:
        (peer,) = two.tell("describe")["peers"]
        assert "the peer's process is not visible from here" in peer["reason"]


class TestTcp(TransportBattery):
    name = "tcp"
    lanes = 2  # as between hosts

    def test_a_small_read_does_not_wait_for_the_batch_before_it(self, two: Pair) -> None:
        """Batches take turns: here two gigabytes, and four kilobytes that are asked for later."""
        region = two.region(LARGE)
        target = np.zeros(LARGE, np.uint8)
        slices = make_slices(32)
        slices["op"], slices["region"], slices["length"] = 1, region, LARGE
        slices["local"] = address_of(target)[0]
        with two.near.submit(two.peer, slices, timeout_ms=6 * MS) as batch:
            small = np.zeros(4096, np.uint8)
            two.near.read(two.peer, slices_for(region, small, [(100, 4096)]), timeout_ms=6 * MS)
            assert not batch.done()
        assert (small == pattern(LARGE, 7)[100:4196]).all()


class TestFake(TransportBattery):
    """Without faults it is a transport like any other."""

    name = "fake"
