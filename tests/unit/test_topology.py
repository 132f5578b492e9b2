"""The ranking of paths, on recorded machines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake_py.transfer.topology import choose_address, parse, read_snapshot

# Two sockets, a fast and a slow card on the far and the near one, an RDMA device on each.
SERVER = {
    "devices/system/node/node0/cpulist": "0-3,8-11",
    "devices/system/node/node0/distance": "10 21",
    "devices/system/node/node1/cpulist": "4-7,12-15",
    "devices/system/node/node1/distance": "21 10",
    "class/net/lo/operstate": "unknown",
    "class/net/lo/mtu": "65536",
    "class/net/eno1/operstate": "up",
    "class/net/eno1/speed": "10000",
    "class/net/eno1/mtu": "1500",
    "class/net/eno1/device/numa_node": "0",
    "class/net/ens5/operstate": "up",
    "class/net/ens5/speed": "100000",
    "class/net/ens5/mtu": "9000",
    "class/net/ens5/device/numa_node": "1",
    "class/net/ens6/operstate": "down",
    "class/net/ens6/speed": "-1",
    "class/net/ens6/device/numa_node": "0",
    "class/net/docker0/operstate": "up",
    "class/infiniband/mlx5_0/device/numa_node": "0",
    "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    "class/infiniband/mlx5_1/device/numa_node": "1",
    "class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
    "class/infiniband/mlx5_1/ports/1/rate": "2.5 Gb/sec (1X SDR)",
}
# A container: one virtual card, no speed, one node.
CONTAINER = {
    "devices/system/node/node0/cpulist": "0-1",
    "devices/system/node/node0/distance": "10",
    "class/net/eth0/operstate": "up",
    "class/net/eth0/speed": "-1",
    "class/net/lo/operstate": "unknown",
}
ADDRESSES = {
    "lo": ["127.0.0.1", "::1"],
    "eno1": ["10.0.0.5", "fe80::1"],
    "ens5": ["2001:db8::5", "10.1.0.5"],
    "docker0": ["172.17.0.1"],
}


def test_what_the_machine_has() -> None:
    topology = parse(SERVER)
    assert [node.cpus for node in topology.nodes] == [
        (0, 1, 2, 3, 8, 9, 10, 11),
        (4, 5, 6, 7, 12, 13, 14, 15),
    ]
    assert [nic.name for nic in topology.interfaces] == ["docker0", "eno1", "ens5", "ens6", "lo"]
    assert [(port.name, port.up, port.speed_mbps) for port in topology.rdma_ports] == [
        ("mlx5_0", True, 400_000),
        ("mlx5_1", False, 2_500),
    ]


def test_near_goes_before_fast_and_down_is_last() -> None:
    topology = parse(SERVER)
    for node, first in ((0, "eno1"), (1, "ens5"), (-1, "ens5")):
        ranked = [nic.name for nic in topology.rank(topology.interfaces, node)]
        assert ranked[0] == first
        assert ranked[-1] == "ens6"
        assert set(ranked[2:4]) == {"docker0", "lo"}
    assert topology.rank(topology.rdma_ports, 1)[0].name == "mlx5_0"  # the near one is down


def test_the_address_of_the_best_interface_is_chosen() -> None:
    server, container = parse(SERVER), parse(CONTAINER)
    assert choose_address(server, ADDRESSES, 0) == "10.0.0.5"
    assert choose_address(server, ADDRESSES, 1) == "10.1.0.5"
    assert choose_address(server, {"ens5": ["fe80::2"], "lo": ["127.0.0.1"]}) is None
    assert (
        choose_address(container, {"lo": ["127.0.0.1"], "eth0": ["192.168.1.9"]}) == "192.168.1.9"
    )
    assert choose_address(parse({}), {"wg0": ["10.9.0.1"]}) == "10.9.0.1"  # /sys hidden


@given(st.dictionaries(st.sampled_from(sorted(SERVER)), st.text(max_size=30)))
def test_nonsense_is_not_known_and_never_an_error(texts: dict[str, str]) -> None:
    topology = parse({**SERVER, **texts})
    assert len(topology.rank(topology.interfaces, 0)) == 5
    assert choose_address(topology, ADDRESSES) != "127.0.0.1"


def test_this_machine_can_be_read() -> None:
    topology = parse(read_snapshot())
    assert topology.interfaces
    assert choose_address(topology, {"lo": ["127.0.0.1"]}) is None
