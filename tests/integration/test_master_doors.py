"""Both doors of a master in this process, and one battery for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mooncake_py.clock import SystemClock
from mooncake_py.config import MasterSettings
from mooncake_py.master.client import MasterClient
from mooncake_py.master.process import Master
from mooncake_py.master.settings import CatalogSettings
from tests.conformance.master_battery import MasterBattery

SETTINGS = MasterSettings(listen="127.0.0.1:0", metadata="memory", lane_listen="off")
PATIENT = CatalogSettings(suspect_ms=60_000, dead_ms=120_000)  # no node here heartbeats by itself


class TestGrpc(MasterBattery):
    @pytest.fixture
    def client(self) -> Iterator[MasterClient]:
        master = Master(SETTINGS, PATIENT, SystemClock())
        client = MasterClient(master.grpc, role="test")
        yield client
        client.close()
        master.close()
