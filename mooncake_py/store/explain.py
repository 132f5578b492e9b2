"""Where an object is, or why it is not to be had; and where the time of reading it goes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mooncake_py import errors
from mooncake_py.clock import Deadline, stopwatch_ns
from mooncake_py.errors import MooncakeError
from mooncake_py.store.get import BatchReader
from mooncake_py.store.placement_cache import ROW_BYTES
from mooncake_py.store.results import ResultPool
from mooncake_py.store.segments import SegmentDirectory
from mooncake_py.store.stripes import object_length
from mooncake_py.store.targets import NewTargets
from mooncake_py.wire.rows import EXTENT


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica as this client sees it. `way`: mapped, or the transport's name, or why not."""

    node: str
    address: str
    segment_id: int
    offset: int
    generation: int
    way: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `StoreClient.explain` found. `remembered`: the placement was known here.

    us: microseconds of each step of one real read; they add up to the wall time of the call.
    cache: looking for a known placement; metadata: waiting for the master, also when it was asked
    again; reach: opening the way to each replica's node; allocate: memory for the bytes; copy: out
    of mapped memory, with its checksum; wire: through the engine, until all bytes had arrived and
    were proven; disk: until a node had them in memory; judge: what this client decided in between;
    describe: making this answer. retries: how many replicas were tried in vain; used: the number in
    `replicas` of the one that was read, -1 for none."""

    key: str
    nbytes: int
    replicas: Sequence[Replica]
    remembered: bool
    outcome: str
    us: dict[str, float] = field(default_factory=dict)
    retries: int = 0
    used: int = -1

    def __str__(self) -> str:
        lines = [f"{self.key!r}: {self.outcome}, {self.nbytes} bytes, {self.retries} tried in vain"]
        for number, r in enumerate(self.replicas):
            mark = "read" if number == self.used else "    "
            lines.append(f"  {mark} {r.node} {r.address} +{r.offset} by {r.way}")
        lines += [f"  {step:<10}{us:10.1f} us" for step, us in self.us.items()]
        return "\n".join(lines)


class _Steps:
    def __init__(self) -> None:
        self._last = stopwatch_ns()
        self.us: dict[str, float] = {}

    def done(self, step: str) -> None:
        now = stopwatch_ns()
        self.us[step] = self.us.get(step, 0.0) + (now - self._last) / 1000
        self._last = now


def explain(
    key: str, name: bytes, reader: BatchReader, directory: SegmentDirectory, deadline: Deadline
) -> Explanation:
    """Read the object once, slowly enough to tell the steps apart. Raises what locating raises."""
    steps = _Steps()
    rows = reader.recall(name)
    steps.done("cache")
    remembered = rows is not None
    if rows is None:
        (rows,) = reader.locate([name], deadline)
        steps.done("metadata")
    if not rows:
        return Explanation(key, 0, (), False, "no replica that can be read", steps.us)
    table = np.frombuffer(rows, EXTENT)
    ways = [_way(directory, int(index), deadline) for index in table["segment_index"]]
    steps.done("reach")
    target = NewTargets(1, None, ResultPool(0))
    lengths = [object_length(rows)]
    target.place([0], lengths)
    steps.done("allocate")
    result = _timed(reader, steps).read([name], target, deadline)
    steps.done("judge")
    code = result.codes[0]
    outcome = "readable" if code == errors.OK else errors.BY_CODE[code].__name__
    failed = {(broken.segment_id, broken.generation) for broken in result.broken}
    replicas = []
    for at, way in enumerate(ways):
        row = np.frombuffer(rows[at * ROW_BYTES : (at + 1) * ROW_BYTES], EXTENT)[0]
        segment = directory.segment(int(row["segment_index"]))
        offset, generation = int(row["offset"]), int(row["generation"])
        place = (segment.node, segment.address, segment.segment_id)
        replicas.append(Replica(*place, offset, generation, way))
    good = [n for n, r in enumerate(replicas) if (r.segment_id, r.generation) not in failed]
    used = good[0] if good and code == errors.OK else -1
    steps.done("describe")
    retries = len(result.broken)
    return Explanation(key, lengths[0], replicas, remembered, outcome, steps.us, retries, used)


class _Asked:
    """The master, whose answers are waited for as a step of their own."""

    def __init__(self, master: Any, steps: _Steps) -> None:
        self._master = master
        self._steps = steps

    def locate(self, *args: Any, **given: Any) -> Any:
        self._steps.done("judge")
        try:
            return self._master.locate(*args, **given)
        finally:
            self._steps.done("metadata")


def _timed(reader: BatchReader, steps: _Steps) -> BatchReader:
    """The same reader, with the same state, that tells when its steps end."""
    twin = copy(reader)
    twin.lap = steps.done
    twin._master = _Asked(reader._master, steps)  # type: ignore[assignment]  # as far as it is used
    return twin


def _way(directory: SegmentDirectory, index: int, deadline: Deadline) -> str:
    if index in directory.disks:
        return "disk"
    try:
        reach = directory.reach(directory.segment(index), deadline)
        return "mapped" if reach.mapping is not None else reach.peer.transport
    except MooncakeError as error:
        return f"unreachable: {error.cause}"
