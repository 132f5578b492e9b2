"""A node's disk in the model: files that outlive the process, work for the master, reads.

Rules that the catalog relies on, and that the real node keeps as well (design/disk-tier.md):

* an offload copies a sealed extent of the generation that was named, and checks it once more when
  it has the bytes: what was overwritten meanwhile is no object on the disk;
* a promotion is written like a copy, under a generation of its own, and not after its expiry;
* a report is sent until it is answered; what is said to be deleted is deleted, and files of which
  nobody speaks are found by comparing lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sim_master import Answer
from sim_world import Call, Script, Sleep

from mooncake_py.errors import LeaseExpired, ObjectNotFound, OutOfSpace
from mooncake_py.master.commands import Mount, Mounted
from mooncake_py.master.disk_commands import DiskTasks, DiskWork
from mooncake_py.model import EXTENT_ROW
from mooncake_py.wire.rows import DISK_TASK

if TYPE_CHECKING:
    from sim_node import Node, Read

_OFFER_MS = 15


class Disk:
    def __init__(self, node: Node, disk_id: int) -> None:
        self.node = node
        self.disk_id = disk_id
        self.nbytes = node.world.random.choice([8, 32]) * 1024
        self.files: dict[int, tuple[bytes, int]] = {}  # by generation: key, length
        self.segment_id = 0
        self.done: list[tuple[int, int]] = []
        self.wanted: dict[int, bytes] = {}  # generation -> key, of what is worth a promotion

    def serve(self) -> Script:
        """For one life of the node."""
        mounted = False
        self.done.clear()
        self.wanted.clear()
        while True:
            mounted = (yield from self._work()) if mounted else (yield from self._mount())
            yield Sleep(self.node.world.random.randrange(1, 2 * _OFFER_MS))

    def _mount(self) -> Script:
        node = self.node
        command = Mount(
            node.name, node.incarnation, f"{node.name}:1", 1000 + node.incarnation, self.nbytes,
            node.name, self.segment_id, disk_id=self.disk_id,
        )  # fmt: skip
        answer = yield Call("master", command, 200)
        if not isinstance(answer, Answer) or not isinstance(answer.reply, Mounted):
            return False  # type: ignore[return-value]
        self.segment_id = answer.reply.segment_id
        return True  # type: ignore[return-value]

    def _work(self) -> Script:
        """Report and ask once; False: mount again."""
        node, random = self.node, self.node.world.random
        done, wanted = tuple(self.done), tuple(self.wanted)
        audit = random.random() < 0.05
        usable = self.nbytes if random.random() < 0.95 else self.nbytes // 2
        ask = DiskWork(
            node.name, node.incarnation, self.segment_id, usable, done, ["t"] * len(wanted),
            [self.wanted[each] for each in wanted], wanted, audit,
            sorted(self.files) if audit else (), 0, audit,
        )  # fmt: skip
        answer = yield Call("master", ask, 200)
        if not isinstance(answer, Answer):
            return True  # type: ignore[return-value]
        node.follow(answer)
        if not isinstance(answer.reply, DiskTasks):
            return False  # type: ignore[return-value]
        self.done = self.done[len(done) :]
        self.wanted.clear()
        for rows in answer.unseals:
            for row in EXTENT_ROW.iter_unpack(rows):
                self.files.pop(row[4], None)
        for generation in answer.reply.drops:
            self.files.pop(generation, None)
        for task in np.frombuffer(answer.reply.offloads, DISK_TASK):
            yield from self._offload(task)
        for task in np.frombuffer(answer.reply.promotions, DISK_TASK):
            yield from self._promote(task)
        return True  # type: ignore[return-value]

    def _offload(self, task: np.void) -> Script:
        node, random = self.node, self.node.world.random
        generation, own = int(task["generation"]), int(task["memory_generation"])
        offset, length = int(task["offset"]), int(task["length"])
        yield Sleep(random.choice([1, 5, 60, 600]))
        code = LeaseExpired.code
        header = node.headers.get(offset)
        if random.random() < 0.05:
            code = OutOfSpace.code
        elif (
            int(task["segment_id"]) == node.segment_id
            and header is not None
            and (header.sealed, header.generation, header.length) == (True, own, length)
            and node.holds(offset, length, own)
        ):
            self.files[generation] = (header.key, length)
            node.history.count("offloads")
            code = 0
        self.done.append((generation, code))

    def _promote(self, task: np.void) -> Script:
        node = self.node
        generation, own = int(task["generation"]), int(task["memory_generation"])
        offset, length = int(task["offset"]), int(task["length"])
        code = ObjectNotFound.code
        file = self.files.get(generation)
        if file is not None and int(task["segment_id"]) == node.segment_id:
            take_ms = node.world.random.choice([1, 5, 60])
            code = yield from node.write_extent(
                (offset, length, own), file[0], int(task["expires_ms"]), take_ms
            )
            node.history.count("promotions")
        self.done.append((own, code))

    def read(self, read: Read) -> int:
        """The generation that is there, or 0."""
        file = self.files.get(read.generation)
        if file is None or file[1] != read.length:
            return 0
        self.node.history.count("reads of a disk")
        if self.node.world.chance(0.7):
            self.wanted[read.generation] = file[0]
        return read.generation
