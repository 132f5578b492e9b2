"""Tests over RDMA need two joined ports. They say what is missing where there are none.

By default the first two active ports of this machine, joined with one another; on other set-ups
MOONCAKE_RDMA_PORTS names them ("mlx5_0,mlx5_1").
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "conformance"))  # the battery that rdma joins
sys.path.insert(0, str(HERE.parent / "integration"))  # daemons

from rdma_cables import lay_second_cable  # noqa: E402
from rdma_ports import PORTS, why_not  # noqa: E402

from mooncake_py.transfer import Rdma  # noqa: E402


@pytest.fixture(scope="session")
def second_cable() -> tuple[Rdma, Rdma]:
    return lay_second_cable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if HERE in item.path.parents and reason and "without_device" not in item.name:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header() -> str:
    if "MOONCAKE_RDMA_PORTS" in os.environ or PORTS:
        return f"rdma ports: {', '.join(PORTS) or 'none'}"
    return "rdma ports: none"
