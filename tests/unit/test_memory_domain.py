"""Which memory domain a node's memory and threads come from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mooncake_py.config import NodeSettings
from mooncake_py.errors import UsageError
from mooncake_py.store import memory_domain
from mooncake_py.store.memory_domain import choose, free_bytes
from mooncake_py.transfer.topology import Topology, parse

ALL = frozenset(range(8))


def machine(**numa_of: int) -> Topology:
    """Two domains of four processors; cards by name: mlx... are RDMA devices as well."""
    files = {
        "devices/system/node/node0/cpulist": "0-3", "devices/system/node/node0/distance": "10 21",
        "devices/system/node/node1/cpulist": "4-7", "devices/system/node/node1/distance": "21 10",
    }  # fmt: skip
    for name, numa in numa_of.items():
        if name.startswith("mlx"):
            files[f"class/infiniband/{name}/device/numa_node"] = str(numa)
            files[f"class/infiniband/{name}/ports/1/state"] = "4: ACTIVE"
            files[f"class/infiniband/{name}/ports/1/rate"] = "200 Gb/sec (4X HDR)"
        else:
            files[f"class/net/{name}/operstate"] = "up"
            files[f"class/net/{name}/speed"] = "25000"
            if numa >= 0:
                files[f"class/net/{name}/device/numa_node"] = str(numa)
    return parse(files)


def test_a47_memory_and_threads_come_from_the_best_cards_domain() -> None:
    both = machine(eth0=0, mlx5_0=1)
    over_rdma = choose("auto", both, ALL, ("shm", "rdma", "tcp"))
    assert (over_rdma.node, over_rdma.cpus, over_rdma.why) == (
        1,
        (4, 5, 6, 7),
        "the domain of mlx5_0",
    )
    over_tcp = choose("auto", both, ALL, ("shm", "tcp"))
    assert (over_tcp.node, over_tcp.cpus) == (0, (0, 1, 2, 3))
    two = machine(mlx5_0=0, mlx5_1=1)
    assert choose("auto", two, ALL, ("rdma:mlx5_1",)).node == 1, "the one that was named"
    assert choose("auto", two, {5, 6}, ("rdma",)).cpus == (5, 6), "where it may run"


def test_a47_without_a_reason_nothing_is_bound_and_why_is_said() -> None:
    assert choose("auto", machine(lo=-1), ALL, ("tcp",)).why.endswith("which domain it is in")
    assert choose("auto", parse({}), ALL, ("tcp",)).why.endswith("one memory domain")
    assert choose("off", machine(eth0=1), ALL, ("tcp",)).node == -1


def test_a47_a_domain_can_be_forced_and_what_cannot_be_is_an_error() -> None:
    both = machine(eth0=0, mlx5_0=1)
    assert choose("1", both, ALL, ("tcp",)).cpus == (4, 5, 6, 7)
    with pytest.raises(UsageError, match=r"no such memory domain.*choose one of: 0, 1"):
        choose("2", both, ALL, ("tcp",))
    with pytest.raises(UsageError, match="none of its processors"):
        choose("1", both, {0, 1}, ("tcp",))
    with pytest.raises(UsageError, match="mlx5_0 is in domain 1"):
        choose("0", both, ALL, ("rdma:mlx5_0",))
    with pytest.raises(UsageError, match="numa_node is auto, off or"):
        NodeSettings(numa_node="near").validate()


def test_a47_a_domain_that_has_not_the_memory_is_refused_when_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "devices/system/node/node1"
    folder.mkdir(parents=True)
    (folder / "meminfo").write_text(
        "Node 1 MemTotal:       8000 kB\nNode 1 MemFree:        1000 kB\nNode 1 FilePages: 24 kB\n"
    )
    assert free_bytes(1, tmp_path) == 1024 << 10
    assert free_bytes(0, tmp_path) is None
    bound: list[object] = []
    monkeypatch.setattr(memory_domain, "read_snapshot", dict)
    monkeypatch.setattr(memory_domain, "parse", lambda _: machine(eth0=1))
    monkeypatch.setattr(memory_domain, "free_bytes", lambda node: free_bytes(node, tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(ALL))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(cpus))
    with pytest.raises(UsageError, match="1048576 bytes are free there"):
        memory_domain.bind("1", ("tcp",), 2 << 20)
    assert memory_domain.bind("auto", ("tcp",), 2 << 20).node == -1
    assert bound == []
    assert memory_domain.bind("auto", ("tcp",), 1 << 20).node == 1
    assert bound == [(4, 5, 6, 7)]
