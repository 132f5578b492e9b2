"""Cables between ports of this machine: only a throw-away guest may be given them, or deprived."""

from __future__ import annotations

import os
import subprocess

import pytest
from rdma_ports import FAR, NEAR

from mooncake_py.transfer import Rdma

guest_only = pytest.mark.skipif(
    os.environ.get("RDMA_VM") != "1",
    reason="takes network links down: only in a throw-away guest",
)


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


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


def lay_second_cable() -> tuple[Rdma, Rdma]:
    """(near, far): a rail over each of two cables. The guest is thrown away with it: taking a
    device away would wait for ever for whatever a failed test has left open."""
    subprocess.run(["ip", "-batch", "-"], input=CABLE, text=True, check=True, capture_output=True)
    for number in (2, 3):
        run(f"rdma link add rxe{number} type rxe netdev rve{number}")
    return (
        Rdma(devices=(*NEAR.devices, "rxe2")),
        Rdma(devices=(*FAR.devices, "rxe3")),
    )


def restore_second_cable() -> None:
    """A link that went down has lost its routes and neighbours."""
    run("ip link set rve2 up")
    for line in (
        "ip neigh replace 10.78.0.2 lladdr 02:00:00:00:00:04 dev rve2 nud permanent",
        "ip route replace 10.78.0.2/32 dev rve2 src 10.78.0.1 table 102",
    ):
        run(line)
