"""A node's disk as the catalog sees it: takes work, has what it reported, deletes what it must."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mooncake_py.errors import OK
from mooncake_py.master.commands import Mount
from mooncake_py.master.disk_commands import DiskTasks, DiskWork
from mooncake_py.wire.rows import DISK_TASK

DISK_BYTES = 1 << 18


class DiskNode:
    def __init__(self, name: str, disk_id: int, nbytes: int = DISK_BYTES) -> None:
        self.name = name
        self.disk_id = disk_id
        self.nbytes = nbytes
        self.incarnation = 0
        self.segment_id = 0
        self.has: set[int] = set()
        self.done: list[tuple[int, int]] = []
        self.offloaded = self.promoted = 0

    def mount(self, incarnation: int) -> Mount:
        self.incarnation = incarnation
        self.done.clear()
        return Mount(
            self.name, incarnation, f"{self.name}:1", 4, self.nbytes, f"h{self.name}",
            disk_id=self.disk_id,
        )  # fmt: skip

    def ask(
        self, wanted: Sequence[tuple[str, bytes, int]] = (), *, auditing: bool = False
    ) -> DiskWork:
        done, self.done = self.done, []
        return DiskWork(
            self.name, self.incarnation, self.segment_id, self.nbytes, done,
            [each[0] for each in wanted], [each[1] for each in wanted],
            [each[2] for each in wanted], auditing, sorted(self.has) if auditing else (), 0,
            auditing,
        )  # fmt: skip

    def carry_out(self, tasks: DiskTasks, code: int = OK) -> None:
        """Every offload and promotion ends with this code; what is not there cannot be promoted."""
        self.has -= set(tasks.drops)
        for row in np.frombuffer(tasks.offloads, DISK_TASK):
            if code == OK:
                self.has.add(int(row["generation"]))
                self.offloaded += 1
            self.done.append((int(row["generation"]), code))
        for row in np.frombuffer(tasks.promotions, DISK_TASK):
            self.promoted += 1
            self.done.append((int(row["memory_generation"]), code))
