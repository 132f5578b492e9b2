"""Which of the machine's memory domains (NUMA nodes) a node's memory and threads are taken from.

Memory is where the thread that first touches it runs, and threads run where their maker may. So a
process that is bound to the processors of one domain before it takes its memory has both there, and
prefers network cards of the same domain for the rest (`transfer/topology.py`, the RDMA rails).

Rules. `auto` takes the domain of the best network card: of the RDMA devices that were named, or of
all where RDMA is allowed, else of the interfaces. Where no card says where it is, or there is
one domain only, nothing is bound. A number forces that domain; `off` binds nothing. What was asked
for and cannot be is an error: a domain that is not there, that this process may not run on, that
has not so much memory, or that none of the named devices is in. Choosing is pure.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from mooncake_py.errors import UsageError
from mooncake_py.transfer.topology import Nic, NumaNode, Topology, parse, read_snapshot

log = logging.getLogger(__name__)

AUTO, OFF = "auto", "off"


@dataclass(frozen=True, slots=True)
class Domain:
    """node: -1 binds nothing. why: for the log. cpus: to run on."""

    node: int
    why: str
    cpus: tuple[int, ...] = ()


def choose(
    wanted: str, topology: Topology, cpus: Collection[int], transports: Sequence[str]
) -> Domain:
    """cpus: that this process may run on. Raises UsageError for a wish that cannot be met."""
    if wanted == OFF:
        return Domain(-1, "not bound: --numa-node off")
    named = {
        device
        for each in transports
        if each.startswith("rdma:")
        for device in each.partition(":")[2].split("+")
    }
    if wanted != AUTO:
        return _forced(int(wanted), topology, cpus, named)
    if len(topology.nodes) < 2:
        return Domain(-1, "not bound: this machine has one memory domain")
    asks_rdma = any(each.partition(":")[0] == "rdma" for each in transports)
    ports = [port for port in topology.rdma_ports if not named or port.name in named]
    cards = [*topology.rank(ports), *topology.rank(topology.interfaces)]
    for card in cards if asks_rdma else topology.rank(topology.interfaces):
        node = _find(topology, card.numa_node)
        if card.up and node is not None and (usable := _usable(node, cpus)):
            return Domain(node.index, f"the domain of {card.name}", usable)
    return Domain(-1, "not bound: no network card says which domain it is in")


def _forced(index: int, topology: Topology, cpus: Collection[int], named: set[str]) -> Domain:
    node = _find(topology, index)
    if node is None:
        there = ", ".join(str(each.index) for each in topology.nodes) or "none that is known"
        raise UsageError(
            f"--numa-node {index}: this machine has no such memory domain",
            remedy=f"choose one of: {there}; or auto, or off",
        )
    usable = _usable(node, cpus)
    if not usable:
        raise UsageError(
            f"--numa-node {index}: this process may run on none of its processors",
            remedy="widen its affinity (taskset, the container's cpuset), or choose another domain",
        )
    cards = [port for port in topology.rdma_ports if port.name in named and port.numa_node >= 0]
    if cards and all(card.numa_node != index for card in cards):
        raise UsageError(
            f"--numa-node {index}: {_places(cards)}",
            remedy="name a device of that domain in --transports, or choose the devices' domain",
        )
    return Domain(index, "as asked for", usable)


def _places(cards: Sequence[Nic]) -> str:
    return ", ".join(f"{card.name} is in domain {card.numa_node}" for card in cards)


def _find(topology: Topology, index: int) -> NumaNode | None:
    return next((node for node in topology.nodes if node.index == index), None)


def _usable(node: NumaNode, cpus: Collection[int]) -> tuple[int, ...]:
    return tuple(cpu for cpu in node.cpus if cpu in cpus)


def free_bytes(node: int, root: Path = Path("/sys")) -> int | None:
    """Memory of the domain that nobody uses, or that caches would give back; None: not known."""
    try:
        text = (root / f"devices/system/node/node{node}/meminfo").read_text()
    except OSError:
        return None
    amounts = {
        match[1]: int(match[2]) << 10
        for match in re.finditer(r"^Node \d+ (\w+(?:\(\w+\))?): +(\d+) kB", text, re.MULTILINE)
    }
    return amounts["MemFree"] + amounts.get("FilePages", 0) if "MemFree" in amounts else None


def bind(wanted: str, transports: Sequence[str], nbytes: int) -> Domain:
    """Bind this process, before it takes its memory, and log to what. nbytes: how much that will
    be. Raises UsageError."""
    domain = choose(wanted, parse(read_snapshot()), os.sched_getaffinity(0), transports)
    free = free_bytes(domain.node) if domain.node >= 0 else None
    if free is not None and free < nbytes:
        if wanted != AUTO:
            raise UsageError(
                f"--numa-node {domain.node}: {free} bytes are free there", wanted=nbytes,
                remedy="offer less (--segment-bytes), or choose another domain",
            )  # fmt: skip
        domain = Domain(-1, f"not bound: {domain.why} has not {nbytes} bytes free")
    if domain.node < 0:
        log.info("memory and threads: %s", domain.why)
        return domain
    os.sched_setaffinity(0, domain.cpus)
    log.info("memory and threads: domain %d, %s", domain.node, domain.why)
    return domain
