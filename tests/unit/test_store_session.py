"""A reading session follows its objects wherever they go, and never takes another one for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mooncake_py.clock import Deadline, ManualClock
from mooncake_py.errors import ObjectNotFound
from mooncake_py.store.outcomes import GetOutcome
from mooncake_py.store.session import LOOK_MS, ReadSession
from mooncake_py.wire.answers import Segment
from mooncake_py.wire.rows import EXTENT

LEASE_MS = 3_000
KEYS = ["a", "b"]


class Cluster:
    """Key i is object `objects[i]` (0: none), readable under `replicas[i]` (0: nowhere)."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.objects = [1, 2]
        self.replicas = [1, 2]
        self.questions = 0
        self.reads: list[list[int]] = []  # keys of each call

    def locate(self, deadline: Deadline) -> tuple[list[bytes], list[int]]:
        self.questions += 1
        rows = []
        for there, generation in zip(self.objects, self.replicas, strict=True):
            row = np.zeros(1, EXTENT)
            row["generation"], row["expires_ms"] = generation, self.clock.now_ms() + LEASE_MS
            rows.append(row.tobytes() if there and generation else b"")
        known = [own if row else 0 for own, row in zip(self.objects, rows, strict=True)]
        return rows, known

    def read(
        self, rows: list[bytes], into: Any, ranges: Sequence[tuple[int, int]], deadline: Deadline
    ) -> list[GetOutcome]:
        self.reads.append([i for i, row in enumerate(rows) if row])
        outcomes: list[GetOutcome] = []
        for i, row in enumerate(rows):
            generation = int(np.frombuffer(row, EXTENT)["generation"][0]) if row else 0
            if generation and generation == self.replicas[i]:
                outcomes.append(b"object %d" % self.objects[i])
            else:
                outcomes.append(ObjectNotFound("not there"))
        return outcomes

    def session(self) -> ReadSession:
        clock = self.clock
        return ReadSession(
            KEYS, self.locate, self.read, lambda: Deadline(10_000, clock), clock.now_ms, segment
        )


def segment(index: int) -> Segment:
    """Every other one is a disk."""
    return Segment(index, f"node-{index}", "127.0.0.1:1", 1, 1 << 20, "host", 1, index % 2)


def test_f50_a_session_knows_where_each_object_lies_memory_before_disks() -> None:
    rows = np.zeros(4, EXTENT)
    rows["segment_index"] = [1, 2, 1, 4]

    def locate(_: Deadline) -> tuple[list[bytes], list[int]]:
        return [rows.tobytes(), b""], [1, 0]

    clock = ManualClock()
    session = ReadSession(
        KEYS, locate, Cluster().read, lambda: Deadline(1, clock), clock.now_ms, segment
    )
    assert [[home.node for home in homes] for homes in session.homes()] == [
        ["node-2", "node-4", "node-1"],
        [],
    ]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.mark.parametrize("renewed", [False, True])
def test_f33_an_object_that_moved_is_the_same_one(cluster: Cluster, renewed: bool) -> None:
    session = cluster.session()
    assert session.read(0, 8) == [b"object 1", b"object 2"]
    cluster.replicas[0] = 70
    if renewed:
        cluster.clock.advance(LEASE_MS)
    assert session.read(8, 8) == [b"object 1", b"object 2"]
    assert cluster.questions == 2
    assert cluster.reads[-1] == ([0, 1] if renewed else [0]), "what was read is not read again"


@pytest.mark.parametrize("renewed", [False, True])
def test_f33_what_replaced_an_object_is_another_one(cluster: Cluster, renewed: bool) -> None:
    session = cluster.session()
    cluster.objects[0] = cluster.replicas[0] = 3
    if renewed:
        cluster.clock.advance(LEASE_MS)
    outcomes = session.read(0, 8)
    assert isinstance(outcomes[0], ObjectNotFound)
    assert outcomes[1] == b"object 2"
    asked = cluster.questions
    cluster.objects[0] = cluster.replicas[0] = 1  # no generation is given twice, but if it were
    assert isinstance(session.read(8, 8)[0], ObjectNotFound)
    assert cluster.questions == asked, "it is known to be gone"
    cluster.clock.advance(LEASE_MS)
    assert isinstance(session.read(8, 8)[0], ObjectNotFound)


def test_f33_a_key_without_an_object_stays_without_one(cluster: Cluster) -> None:
    cluster.objects = [0, 0]
    session = cluster.session()
    assert session.present == [False, False]
    cluster.objects = [1, 2]
    for _ in range(3):
        cluster.clock.advance(LEASE_MS)
        assert all(isinstance(each, ObjectNotFound) for each in session.read(0, 8))
    assert cluster.questions == 1


def test_f33_an_object_that_nobody_may_be_sent_to_is_looked_for_again(cluster: Cluster) -> None:
    session = cluster.session()
    cluster.replicas = [0, 0]  # its node is suspect
    for _ in range(5):
        assert all(isinstance(each, ObjectNotFound) for each in session.read(0, 8))
    assert cluster.questions == 2, "not for every part"
    cluster.replicas = [1, 70]
    cluster.clock.advance(LOOK_MS)
    assert session.read(0, 8) == [b"object 1", b"object 2"]
