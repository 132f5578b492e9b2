"""What the master knows about the cluster, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from mooncake_py.clock import SystemClock
from mooncake_py.master.client import MasterClient


@dataclass(frozen=True, slots=True)
class NodeStatus:
    name: str
    state: str  # alive, suspect, draining
    address: str
    used_bytes: int
    segment_bytes: int
    domain: str = ""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    objects: int
    used_bytes: int
    capacity_bytes: int
    nodes: list[NodeStatus]
    counters: dict[str, float]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        full = self.used_bytes / max(1, self.capacity_bytes)
        yield f"objects   {self.objects:,}"
        yield f"space     {self.used_bytes:,} of {self.capacity_bytes:,} bytes ({full:.1%})"
        for node in self.nodes:
            full = node.used_bytes / max(1, node.segment_bytes)
            domain = f", domain {node.domain}" if node.domain else ""
            yield f"node      {node.name} at {node.address}: {node.state}, {full:.1%} full{domain}"
        for name, value in sorted(self.counters.items()):
            yield f"counter   {name} {value:,.12g}"


def cluster_status(master: str, timeout_ms: int) -> ClusterStatus:
    """Raises MasterUnavailable, VersionMismatch."""
    client = MasterClient(master, engine=None, role="tool", clock=SystemClock())
    try:
        client.connect(timeout_ms=timeout_ms)
        status = client.status(timeout_ms=timeout_ms)
    finally:
        client.close()
    nodes = [
        NodeStatus(s.node, s.state, s.address, s.used_bytes, s.nbytes, s.domain)
        for s in sorted(status.segments, key=lambda s: (s.node, s.segment_id))
    ]
    counters = dict(status.counters)
    return ClusterStatus(status.objects, status.used_bytes, status.capacity_bytes, nodes, counters)
