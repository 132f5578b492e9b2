"""The battery of transports over RDMA: everything `tests/conformance` promises, with real verbs.

Near and far use one port each, so that every byte crosses the cable between them.
"""

from __future__ import annotations

from rdma_ports import FAR, FAR_BOTH, NEAR, NEAR_BOTH
from transport_battery import TransportBattery, pytest_generate_tests

__all__ = ["TestRdma", "TestRdmaTwoRails", "pytest_generate_tests"]


class TestRdma(TransportBattery):
    name = "rdma"
    near_rdma = NEAR
    far_rdma = FAR


class TestRdmaTwoRails(TransportBattery):
    name = "rdma"
    places = ("thread",)
    near_rdma = NEAR_BOTH
    far_rdma = FAR_BOTH
