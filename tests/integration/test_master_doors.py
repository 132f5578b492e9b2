"""Both doors of a master in this process, and one battery for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mooncake_py.clock import SystemClock
from mooncake_py.config import MasterSettings
from mooncake_py.master.client import MasterClient
from mooncake_py.master.process import Master
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.transfer import TransferEngine
from tests.conformance.master_battery import MasterBattery

# No node here heartbeats by itself, or answers, so removals by force wait for leases.
PATIENT = CatalogSettings(
    suspect_ms=60_000, dead_ms=120_000, events_max=1_000, step_max=500, lease_ms=1_000
)


@contextmanager
def running_master(listen: str = "127.0.0.1:0", lane_listen: str = "off") -> Iterator[str]:
    """A master in this process; its gRPC address."""
    settings = MasterSettings(listen=listen, metadata="memory", lane_listen=lane_listen)
    master = Master(settings, PATIENT, SystemClock())
    try:
        yield master.grpc
    finally:
        master.close()


class TestGrpc(MasterBattery):
    @pytest.fixture
    def client(self) -> Iterator[MasterClient]:
        with running_master() as address:
            client = MasterClient(address, role="test")
            yield client
            client.close()


class TestLane(MasterBattery):
    @pytest.fixture
    def client(self) -> Iterator[MasterClient]:
        with running_master(lane_listen="auto") as address, TransferEngine() as engine:
            client = MasterClient(address, engine=engine, role="test")
            client.connect(timeout_ms=5_000)
            yield client
            client.status(timeout_ms=5_000)
            counters = client.status(timeout_ms=5_000).counters
            assert counters["lane_sent_bytes"] > 0
            assert counters["grpc_received_bytes"] < 100, "only Connect goes over gRPC"
            client.close()
