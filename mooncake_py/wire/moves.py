"""Client side of the wire for what moves objects: tasks of nodes, copies, drains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from mooncake_py.errors import ObjectNotFound
from mooncake_py.master import commands as c
from mooncake_py.model import TASK_DONE_ROW
from mooncake_py.wire import status as outcome
from mooncake_py.wire.answers import Segment, segment
from mooncake_py.wire.rows import COPY
from mooncake_py.wire.v1 import master_pb2 as pb


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """Tasks for a node. `copies`: COPY rows, whose `source_index` points into `segments`. Not
    `known`: mount again, these tasks have ended."""

    known: bool
    segments: Sequence[Segment]
    copies: npt.NDArray[np.void]
    waiting: int
    names: Sequence[bytes] = ()


def tasks_request(tasks: c.Tasks) -> Message:
    done = b"".join(TASK_DONE_ROW.pack(task, code, 0) for task, code in tasks.done)
    return pb.TasksRequest(
        node=tasks.node,
        incarnation=tasks.incarnation,
        segment_id=tasks.segment_id,
        done=done,
        limit=tasks.limit,
    )


def copy_request(copy: c.CopyObjects, keys: Sequence[bytes]) -> Message:
    return pb.CopyRequest(
        tenant=copy.tenant, keys=keys, to_node=copy.to_node, from_node=copy.from_node
    )


def drain_request(drain: c.Drain) -> Message:
    return pb.DrainRequest(what=drain.what, cancel=drain.cancel)


def task_batch(reply: pb.TasksReply) -> TaskBatch:
    known = reply.outcome.code != ObjectNotFound.code
    if known:
        outcome.check(reply.outcome, call="Tasks")
    segments = [segment(message) for message in reply.segments]
    return TaskBatch(
        known, segments, np.frombuffer(reply.copies, COPY), reply.waiting, list(reply.names)
    )


def drain_info(reply: pb.DrainReply) -> c.DrainInfo:
    return c.DrainInfo(
        reply.state, reply.moved, reply.moved_bytes, reply.dropped, reply.ended, reply.failed,
        reply.left, reply.left_bytes,
    )  # fmt: skip
