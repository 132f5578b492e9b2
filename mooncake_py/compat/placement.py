"""Where objects lie: copying and moving them by tasks, and memory that is offered by call.

Upstream's segments have identifiers of their own; here a segment that a process offers is a node,
and its name serves as the identifier: in `preferred_segment`, as the target of a copy, to unmount.

A task is known to the process that created it. The master does the work, and begins with it at
once; `query_task` asks how far it is.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from mooncake_py.clock import SystemClock
from mooncake_py.compat import codes
from mooncake_py.compat.calls import StoreCalls
from mooncake_py.compat.lifecycle import SetupOptions, open_node, transports_of
from mooncake_py.errors import Backpressure, MooncakeError, ObjectNotFound, UsageError
from mooncake_py.store.client import StoreClient
from mooncake_py.store.node_process import Node

TASKS_MAX = 10_000  # that are remembered; older ones are forgotten
GRACE_MAX_S = 3_600
_clock = SystemClock()


class TaskType(IntEnum):
    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class TaskStatus(IntEnum):
    PENDING = 0
    PROCESSING = 1
    SUCCESS = 2
    FAILED = 3


@dataclass(slots=True)
class QueryTaskResponse:
    """How far a task is. Times are ms since 1970."""

    id: str
    type: TaskType
    status: TaskStatus
    created_at_ms_epoch: int
    last_updated_at_ms_epoch: int
    assigned_client: str = ""
    message: str = ""


@dataclass(slots=True)
class _Task:
    answer: QueryTaskResponse
    key: str
    source: str
    left: list[str]  # nodes that do not have it yet
    code: int = codes.OK  # why it failed
    busy: threading.Lock = field(default_factory=threading.Lock)


class PlacementCalls(StoreCalls):
    def __init__(self) -> None:
        super().__init__()
        self._options: SetupOptions | None = None  # of the setup that succeeded
        self._tasks: dict[str, _Task] = {}
        self._mounted: dict[str, Node] = {}
        self._mounting = threading.Lock()

    # --- tasks ---

    def create_copy_task(self, key: str, target_segments: Sequence[str]) -> tuple[str, int]:
        """(id, 0) of a task that gives the object a replica on each of these, or ("", code)."""
        targets = [target_segments] if isinstance(target_segments, str) else list(target_segments)
        return self._create(TaskType.REPLICA_COPY, key, "", targets)

    def create_move_task(self, key: str, source: str, target: str) -> tuple[str, int]:
        """(id, 0) of a task that gives the object a replica on `target` instead of `source`."""
        if not source or not isinstance(source, str):
            return "", codes.INVALID_PARAMS
        return self._create(TaskType.REPLICA_MOVE, key, source, [target])

    def query_task(self, task_id: Any) -> tuple[QueryTaskResponse | None, int]:
        """(how far it is, 0), or (None, code)."""
        with self._lock:
            task = self._tasks.get(str(task_id))
        if task is None:
            return None, codes.TASK_NOT_FOUND
        with task.busy:
            code = self._code(lambda client: self._advance(client, task))
        return (task.answer, codes.OK) if code == codes.OK else (None, code)

    def _create(self, kind: TaskType, key: str, source: str, targets: list[str]) -> tuple[str, int]:
        if not key or not targets or not all(isinstance(each, str) and each for each in targets):
            return "", codes.INVALID_PARAMS
        now_ms = _clock.now_ms()
        name = str(uuid.uuid4())
        answer = QueryTaskResponse(name, kind, TaskStatus.PROCESSING, now_ms, now_ms)
        task = _Task(answer, key, source, targets)
        code = self._code(lambda client: self._advance(client, task))
        if code or task.code:
            return "", code or task.code
        with self._lock:
            while len(self._tasks) >= TASKS_MAX:
                del self._tasks[next(iter(self._tasks))]
            self._tasks[name] = task
        return name, codes.OK

    @staticmethod
    def _advance(client: StoreClient, task: _Task) -> int:
        """Ask the master for what is left of it. A node that is not there is an error of the call
        that names it, and the end of a task that runs."""
        answer = task.answer
        if answer.status in (TaskStatus.SUCCESS, TaskStatus.FAILED):
            return codes.OK
        left: list[str] = []
        for node in task.left:
            outcome: MooncakeError | None
            try:
                (outcome,) = client.copy([task.key], node, from_node=task.source)
            except ObjectNotFound as error:  # the node
                outcome = error
            if isinstance(outcome, Backpressure):
                left.append(node)
            elif outcome is not None:
                answer.status, answer.message = TaskStatus.FAILED, str(outcome)
                task.code = codes.code_of(outcome)
                break
        else:
            task.left = left
            answer.status = TaskStatus.PROCESSING if left else TaskStatus.SUCCESS
        answer.last_updated_at_ms_epoch = _clock.now_ms()
        return codes.OK

    # --- memory that is offered by call ---

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Offer memory that lies in this file and outlives the process with its objects. The file
        is new or one that was mounted before; it is the segment's alone, so offset is 0."""
        if not path or not isinstance(path, str) or offset:
            return {"ret": codes.INVALID_PARAMS, "segment_ids": []}
        code, node = self._mount(size, protocol, path)
        return {"ret": code, "segment_ids": [node.name] if node is not None else []}

    def allocate_and_mount_segment(
        self, size: int, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Offer memory of this process, for as long as it lives."""
        code, node = self._mount(size, protocol, "")
        return {
            "ret": code,
            "segment_ids": [node.name] if node is not None else [],
            "allocated_size": node.segment_bytes if node is not None else 0,
        }

    def unmount_segment(self, segment_ids: Any, grace_period_seconds: float = 0) -> int:
        """Take memory back. In the grace period nothing new comes into it and other nodes copy what
        is there."""
        names = [segment_ids] if isinstance(segment_ids, str) else list(segment_ids)
        grace_ms = int(1_000 * min(max(0.0, float(grace_period_seconds)), GRACE_MAX_S))
        if self._client is None:
            return codes.INVALID_PARAMS
        with self._mounting:
            if any(name not in self._mounted for name in names):
                return codes.SEGMENT_NOT_FOUND
            nodes = [self._mounted.pop(name) for name in dict.fromkeys(names)]
        for node in nodes:
            node.stop(grace_ms)
        return codes.OK

    unmount_and_free_segment = unmount_segment

    def _mount(self, size: int, protocol: str, file: str) -> tuple[int, Node | None]:
        nbytes = int(size)
        if nbytes <= 0:
            return codes.INVALID_PARAMS, None
        mounted: list[Node] = []

        def mount(_: StoreClient) -> int:
            options = self._options
            if options is None:
                raise UsageError("setup comes first")
            transports_of(protocol)  # UsageError: none of ours
            node = open_node(options, nbytes, file)
            with self._mounting:
                self._mounted[node.name] = node
            mounted.append(node)
            return codes.OK

        code = self._code(mount)
        return code, mounted[0] if mounted else None

    def _unmount_all(self) -> None:
        with self._mounting:
            nodes, self._mounted = list(self._mounted.values()), {}
        for node in nodes:
            try:
                node.stop()
            except MooncakeError:  # it is gone either way; the caller closes
                continue
