"""The soak of the other transports over RDMA: the connection by which both sides agree is cut,
reset, delayed and corrupted, peers are stopped and killed, while bytes go by the devices.
SOAK_SECONDS makes it a long one (`./dev rdma -k soak`)."""

from __future__ import annotations

import pytest
from rdma_ports import FAR_BOTH, NEAR_BOTH
from test_soak import SECONDS, endure


@pytest.mark.timeout(SECONDS + 150)
def test_a40_a_soak_over_rdma_leaves_nothing_stuck_wrong_or_behind() -> None:
    endure("rdma", NEAR_BOTH, FAR_BOTH)
