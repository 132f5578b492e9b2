"""The main job: replay requests over a small cluster of real processes and say what came of it.

    master, nodes          started here, gone at the end (cluster.py)
    writer (one process)   serves every request as an engine would: the first half over one
                           transport, the second half over the other, on one growing cache
    reader (one process)   fetches the youngest pages that the writer left, half over each

The hit rate is the writer's. The reader comes last, so that its reads do not change what the
writer finds and the hit rate stays comparable with the models of `ideal.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_py.errors import ClusterError, UsageError
from mooncake_py.ops.child import Child
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.ops.ideal import clairvoyant_hits, lru_hits
from mooncake_py.ops.pages import check_page_bytes
from mooncake_py.ops.report import Ideal, Report
from mooncake_py.ops.session import Tally
from mooncake_py.ops.status import cluster_status
from mooncake_py.ops.trace import Request, generate_trace, read_trace
from mooncake_py.ops.worker import Job, Phase

_SILENCE_MAX_MS = 60_000  # a call has its own deadline, far below this
_STATUS_MS = 5_000
# A lease keeps what was read from being evicted. Replaying minutes of requests in seconds with
# leases of the usual length would pin most of a small cache, so they shrink with time.
_LEASE_MS = 500
Progress = Callable[[str, int, int], None]  # process, steps done, steps in all


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """trace: a file, or None for a made one. capacity_bytes: of all nodes together."""

    trace: Path | None = None
    requests_max: int = 2000
    page_bytes: int = 256 << 10
    capacity_bytes: int = 1 << 30
    node_count: int = 2
    transports: tuple[str, ...] = ("shm", "tcp")
    timeout_ms: int = 10_000  # of a call

    def __post_init__(self) -> None:
        check_page_bytes(self.page_bytes)
        if self.requests_max < 1 or self.node_count < 1:
            raise UsageError("a replay has at least one request and one node")
        if self.capacity_bytes < self.node_count * self.page_bytes:
            raise UsageError(
                "the capacity is below one page a node",
                remedy="raise --capacity or lower --page-bytes or --nodes",
                capacity_bytes=self.capacity_bytes,
                page_bytes=self.page_bytes,
            )

    def load(self) -> tuple[str, list[Request]]:
        """What is replayed, and its name."""
        if self.trace is None:
            return "a made trace", generate_trace(self.requests_max)
        return self.trace.name, read_trace(self.trace, self.requests_max)


def replay(options: ReplayOptions, progress: Progress = lambda *_: None) -> Report:
    """Run it. Raises ClusterError when a process does not start, or the master goes away."""
    source, requests = options.load()
    prompts = [list(request.hash_ids) for request in requests]
    capacity_pages = options.capacity_bytes // options.page_bytes
    report = Report(
        source=source,
        page_bytes=options.page_bytes,
        capacity_bytes=options.capacity_bytes,
        node_count=options.node_count,
        ideal=Ideal(
            capacity_pages,
            lru_hits(prompts, capacity_pages),
            clairvoyant_hits(prompts, capacity_pages),
        ),
    )
    segment_bytes = options.capacity_bytes // options.node_count
    leases = ("--set", f"lease_ms={_LEASE_MS}")
    shape = ClusterOptions(options.node_count, segment_bytes, master_arguments=leases)
    with Cluster(shape) as cluster:
        serve = phases("serve", prompts, options.transports)
        report.written = _work(cluster, options, "writer", serve, progress)
        fetch = phases("fetch", youngest(prompts, capacity_pages), options.transports)
        report.read = _work(cluster, options, "reader", fetch, progress)
        report.counters = cluster_status(cluster.address, _STATUS_MS).counters
        report.notes += cluster.casualties()
    return report


def phases(verb: str, prompts: Sequence[list[int]], transports: Sequence[str]) -> list[Phase]:
    """The prompts in order, cut into one stretch a transport."""
    count = len(transports)
    bounds = [len(prompts) * i // count for i in range(count + 1)]
    return [
        Phase(transport, verb, list(prompts[bounds[i] : bounds[i + 1]]))
        for i, transport in enumerate(transports)
    ]


def youngest(prompts: Sequence[Sequence[int]], pages_max: int) -> list[list[int]]:
    """Distinct pages by last use, latest prompt first, at most `pages_max`: what a cache of that
    size should still hold."""
    seen: set[int] = set()
    groups: list[list[int]] = []
    for prompt in reversed(prompts):
        fresh = [page for page in dict.fromkeys(prompt) if page not in seen]
        fresh = fresh[: pages_max - len(seen)]
        seen.update(fresh)
        if fresh:
            groups.append(fresh)
        if len(seen) >= pages_max:
            break
    return groups


def _work(
    cluster: Cluster, options: ReplayOptions, name: str, todo: list[Phase], progress: Progress
) -> list[Tally]:
    """Let a client process do the phases."""
    job = Job(cluster.address, options.page_bytes, options.timeout_ms, todo)
    total = sum(len(phase.prompts) for phase in todo)
    tallies = []
    progress(name, 0, total)
    child = Child(name, "mooncake_py.ops.worker", (), cluster.folder, stdin=job.to_json())
    with child:
        for event in _events(child):
            if not cluster.has_nodes():
                raise ClusterError("no node is left: " + ", ".join(cluster.casualties()), remedy="")
            if event["event"] == "progress":
                progress(name, event["done"], total)
            elif event["event"] == "phase":
                tallies.append(Tally(**event["tally"]))
            else:
                raise ClusterError(f"the {name} gave up: {event['cause']}", remedy="")
    if len(tallies) != len(todo):
        raise ClusterError(f"the {name} ended early: {child.complaint()}")
    return tallies


def _events(child: Child) -> Iterator[dict[str, Any]]:
    while (line := child.line(_SILENCE_MAX_MS)) is not None:
        yield json.loads(line)
