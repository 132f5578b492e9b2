"""What the master knows about the cluster, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from mooncake_py.clock import SystemClock
from mooncake_py.master.client import MasterClient
from mooncake_py.ops.sizes import size_text

_NOTES = {  # of counters whose names say too little
    "node_losses": "objects that ended because no other node had them",
    "group_losses": "objects that ended with another one of their group",
    "segments_lost": "by nodes that left, were started anew or died",
    "suspects": "times that a node was silent",
}


@dataclass(frozen=True, slots=True)
class NodeStatus:
    name: str
    state: str  # one of those of master/membership.py
    address: str
    used_bytes: int
    segment_bytes: int
    domain: str = ""
    disk: bool = False  # its disk tier, not its memory


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    objects: int
    used_bytes: int
    capacity_bytes: int
    nodes: list[NodeStatus]
    counters: dict[str, float]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def lines(self, zeros: bool = False) -> Iterator[str]:
        """For people. zeros: counters that are zero, too."""
        yield f"objects   {self.objects:,}"
        yield f"space     {_filled(self.used_bytes, self.capacity_bytes)}"
        for node in self.nodes:
            name = f"{node.name} (disk)" if node.disk else node.name
            domain = f", domain {node.domain}" if node.domain else ""
            filled = _filled(node.used_bytes, node.segment_bytes)
            yield f"node      {name} at {node.address}: {node.state}, {filled}{domain}"
        for name, value in sorted(self.counters.items()):
            note = f" ({_NOTES[name]})" if name in _NOTES else ""
            if value or zeros:
                yield f"counter   {name} {value:,.12g}{note}"


def _filled(used_bytes: int, nbytes: int) -> str:
    return f"{size_text(used_bytes)} of {size_text(nbytes)} ({used_bytes / max(1, nbytes):.1%})"


def cluster_status(master: str, timeout_ms: int) -> ClusterStatus:
    """Raises MasterUnavailable, VersionMismatch."""
    client = MasterClient(master, engine=None, role="tool", clock=SystemClock())
    try:
        client.connect(timeout_ms=timeout_ms)
        status = client.status(timeout_ms=timeout_ms)
    finally:
        client.close()
    nodes = [
        NodeStatus(s.node, s.state, s.address, s.used_bytes, s.nbytes, s.domain, s.disk_id != 0)
        for s in sorted(status.segments, key=lambda s: (s.node, s.disk_id != 0, s.segment_id))
    ]
    counters = dict(status.counters)
    return ClusterStatus(status.objects, status.used_bytes, status.capacity_bytes, nodes, counters)
