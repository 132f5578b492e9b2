"""The ports that tests over RDMA use."""

from __future__ import annotations

import os
from pathlib import Path

from mooncake_py.errors import MooncakeError
from mooncake_py.transfer import EngineOptions, Rdma, TransferEngine


def _ports() -> tuple[str, ...]:
    named = os.environ.get("MOONCAKE_RDMA_PORTS", "")
    if named:
        return tuple(name.strip() for name in named.split(","))
    states = sorted(Path("/sys/class/infiniband").glob("*/ports/1/state"))
    return tuple(path.parts[-4] for path in states if "ACTIVE" in path.read_text())[:2]


PORTS = _ports()
NEAR, FAR = Rdma(devices=PORTS[:1]), Rdma(devices=PORTS[1:2])
NEAR_BOTH, FAR_BOTH = Rdma(devices=PORTS), Rdma(devices=PORTS[::-1])  # two rails, each crossing


def why_not() -> str:
    """Why the tests cannot run here; "" when they can."""
    if len(PORTS) < 2:
        return f"two active RDMA ports are needed, and there are {len(PORTS)} (see ./dev rdma)"
    try:
        TransferEngine(EngineOptions(transports=("rdma",), rdma=NEAR_BOTH)).close()
    except MooncakeError as error:
        return str(error)
    return ""
