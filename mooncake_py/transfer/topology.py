"""Where memory and network cards are: a value parsed from a snapshot of /sys, and a ranking.

A snapshot is a mapping of paths below /sys to the text of those files, so that machines can be
recorded and the ranking tested without them. `read_snapshot` and `read_addresses` look at this
machine; everything else here is pure.

Ranking. A path from a NUMA node to a NIC is better, in this order, when the NIC
  1. is up,
  2. is real hardware (a loopback or virtual device has no NUMA node and is last),
  3. is near: the distance that the firmware reports from the memory's node to the NIC's,
  4. is fast,
and by name among equals, so that every process of a host ranks alike.
"""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOCAL_DISTANCE = 10  # what firmware calls a node's distance to itself
UNKNOWN_DISTANCE = 255
TEXT_MAX = 4096
_SIOCGIFADDR = 0x8915

_WANTED = (
    "devices/system/node/node*/cpulist",
    "devices/system/node/node*/distance",
    "class/net/*/operstate",
    "class/net/*/speed",
    "class/net/*/mtu",
    "class/net/*/device/numa_node",
    "class/infiniband/*/device/numa_node",
    "class/infiniband/*/ports/*/state",
    "class/infiniband/*/ports/*/rate",
    "class/infiniband/*/ports/*/link_layer",
)


@dataclass(frozen=True, slots=True)
class NumaNode:
    index: int
    cpus: tuple[int, ...]
    distances: tuple[int, ...]  # to node 0, 1, ...


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface, or a port of an RDMA device (`port` is above 0)."""

    name: str
    port: int
    up: bool
    speed_mbps: int  # 0: not known
    mtu: int  # 0: not known
    numa_node: int  # -1: not known, or no hardware
    hardware: bool


@dataclass(frozen=True, slots=True)
class Topology:
    nodes: tuple[NumaNode, ...]
    interfaces: tuple[Nic, ...]
    rdma_ports: tuple[Nic, ...]

    def distance(self, from_node: int, to_node: int) -> int:
        """As firmware reports it; unknown nodes are as near as any: LOCAL_DISTANCE."""
        if from_node < 0 or to_node < 0:
            return LOCAL_DISTANCE
        for node in self.nodes:
            if node.index == from_node and to_node < len(node.distances):
                return node.distances[to_node]
        return LOCAL_DISTANCE if from_node == to_node else UNKNOWN_DISTANCE

    def rank(self, nics: Iterable[Nic], memory_node: int = -1) -> list[Nic]:
        """`nics` from the best to the worst for memory of that NUMA node (-1: any)."""
        return sorted(
            nics,
            key=lambda nic: (
                not nic.up,
                not nic.hardware,
                self.distance(memory_node, nic.numa_node),
                -nic.speed_mbps,
                nic.name,
                nic.port,
            ),
        )


def parse(snapshot: Mapping[str, str]) -> Topology:
    """The topology a snapshot describes. What it lacks, or what is nonsense, is "not known"."""
    interfaces = [
        _interface(snapshot, name) for name in _names(snapshot, r"class/net/([^/]+)/operstate")
    ]
    ports = [
        _rdma_port(snapshot, *name.split("/ports/"))
        for name in _names(snapshot, r"class/infiniband/([^/]+/ports/\d+)/state")
    ]
    nodes = [
        NumaNode(
            index,
            _cpus(snapshot.get(f"devices/system/node/node{index}/cpulist", "")),
            tuple(
                _number(word)
                for word in snapshot.get(f"devices/system/node/node{index}/distance", "").split()
            ),
        )
        for index in sorted(map(int, _names(snapshot, r"devices/system/node/node(\d+)/cpulist")))
    ]
    return Topology(tuple(nodes), tuple(interfaces), tuple(ports))


def choose_address(
    topology: Topology, addresses: Mapping[str, Iterable[str]], memory_node: int = -1
) -> str | None:
    """The address that peers on other hosts should use: of the best interface that has one.

    `addresses` are the interfaces' own. Loopback and link-local ones never leave the host; IPv4 is
    preferred on the same interface. None: there is no such address.
    """
    known = {nic.name: nic for nic in topology.interfaces}
    strangers = [
        Nic(name, 0, True, 0, 0, -1, hardware=False) for name in addresses if name not in known
    ]
    for nic in topology.rank([*topology.interfaces, *strangers], memory_node):
        usable = [
            address
            for address in map(ipaddress.ip_address, addresses.get(nic.name, ()))
            if not (address.is_loopback or address.is_link_local or address.is_unspecified)
        ]
        if nic.up and usable:
            return str(min(usable, key=lambda address: (address.version, int(address))))
    return None


def read_snapshot(root: Path = Path("/sys")) -> dict[str, str]:
    """This machine's. Files that cannot be read (a NIC that is down has no speed) are left out."""
    snapshot = {}
    for pattern in _WANTED:
        for path in root.glob(pattern):
            try:
                with path.open(encoding="utf-8", errors="replace") as file:
                    snapshot[str(path.relative_to(root))] = file.read(TEXT_MAX).strip()
            except OSError:
                continue
    return snapshot


def read_addresses() -> dict[str, list[str]]:
    """This machine's: interface to its addresses. Those that cannot be asked for are left out."""
    addresses: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, name.encode().ljust(40, b"\0"))
            except OSError:  # it has none
                continue
            addresses[name] = [socket.inet_ntoa(answer[20:24])]
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as lines:
        for line in lines:
            digits, *_, name = line.split()
            address = str(ipaddress.IPv6Address(int(digits, 16)))
            addresses.setdefault(name, []).append(address)
    return addresses


def _names(snapshot: Mapping[str, str], pattern: str) -> list[str]:
    matches = (re.fullmatch(pattern, path) for path in snapshot)
    return sorted(match[1] for match in matches if match)


def _interface(snapshot: Mapping[str, str], name: str) -> Nic:
    base = f"class/net/{name}/"
    return Nic(
        name=name,
        port=0,
        up=snapshot[base + "operstate"] in ("up", "unknown"),  # loopback says unknown
        speed_mbps=max(0, _number(snapshot.get(base + "speed", ""))),
        mtu=max(0, _number(snapshot.get(base + "mtu", ""))),
        numa_node=_number(snapshot.get(base + "device/numa_node", ""), -1),
        hardware=base + "device/numa_node" in snapshot,
    )


def _rdma_port(snapshot: Mapping[str, str], device: str, port: str) -> Nic:
    base = f"class/infiniband/{device}/"
    rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", snapshot.get(f"{base}ports/{port}/rate", ""))
    return Nic(
        name=device,
        port=int(port),
        up="ACTIVE" in snapshot[f"{base}ports/{port}/state"],
        speed_mbps=int(float(rate[1]) * 1000) if rate else 0,
        mtu=0,
        numa_node=_number(snapshot.get(base + "device/numa_node", ""), -1),
        hardware=True,
    )


def _number(text: str, otherwise: int = 0) -> int:
    return int(text) if re.fullmatch(r"-?\d{1,12}", text.strip()) else otherwise


def _cpus(text: str) -> tuple[int, ...]:
    """ "0-3,8" is 0, 1, 2, 3, 8."""
    cpus: list[int] = []
    for piece in re.findall(r"\d+(?:-\d+)?", text):
        first, _, last = piece.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)
