"""`DiskWork` on both sides of the wire: what a disk has done and has, and what it is told to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from mooncake_py.errors import ObjectNotFound, UsageError
from mooncake_py.master.disk_commands import DiskTasks, DiskWork
from mooncake_py.wire import status as outcome
from mooncake_py.wire.rows import DISK_DONE, DISK_TASK, EXTENT
from mooncake_py.wire.v1 import master_pb2 as pb


@dataclass(frozen=True, slots=True)
class DiskOrders:
    """Answer to a disk. Not `known`: mount again. `offloads`, `promotions`: DISK_TASK rows, the
    former with the names of their objects; `drops`: generations; `more`: ask again at once."""

    known: bool
    offloads: npt.NDArray[np.void]
    tenants: Sequence[str]
    keys: Sequence[bytes]
    promotions: npt.NDArray[np.void]
    drops: npt.NDArray[np.uint64]
    more: bool


def command(r: pb.DiskWorkRequest) -> DiskWork:
    """UsageError: a field is out of bounds."""
    if len(r.done) % DISK_DONE.itemsize or len(r.wanted) % 8 or len(r.held) % 8:
        raise UsageError("disk work: rows and generations are whole records")
    done = np.frombuffer(r.done, DISK_DONE)
    wanted = np.frombuffer(r.wanted, "<u8").tolist()
    if not len(r.tenants) == len(r.keys) == len(wanted):
        raise UsageError("disk work: tenants, keys and generations differ in number")
    return DiskWork(
        r.node, r.incarnation, r.segment_id, r.usable_bytes,
        list(zip(done["task"].tolist(), done["code"].tolist(), strict=True)),
        list(r.tenants), list(r.keys), wanted, r.auditing,
        np.frombuffer(r.held, "<u8").tolist(), r.held_after, r.held_last,
        {each.name: each.value for each in r.counters},
    )  # fmt: skip


def request(work: DiskWork) -> Message:
    done = np.zeros(len(work.done), DISK_DONE)
    if work.done:
        done["task"], done["code"] = zip(*work.done, strict=True)
    return pb.DiskWorkRequest(
        node=work.node,
        incarnation=work.incarnation,
        segment_id=work.segment_id,
        usable_bytes=work.usable_bytes,
        done=done.tobytes(),
        tenants=work.tenants,
        keys=work.keys,
        wanted=np.array(work.wanted, "<u8").tobytes(),
        auditing=work.auditing,
        held=np.array(work.held, "<u8").tobytes(),
        held_after=work.held_after,
        held_last=work.held_last,
        counters=[pb.Counter(name=name, value=value) for name, value in work.numbers.items()],
    )


def reply(answer: DiskTasks, term: int, unseal: bytes) -> bytes:
    """`unseal`: EXTENT rows of objects that have ended since the last answer."""
    ended = np.frombuffer(unseal, EXTENT)["generation"]
    return pb.DiskWorkReply(
        outcome=pb.Outcome(term=term),
        offload=answer.offloads,
        tenants=answer.tenants,
        keys=answer.keys,
        promote=answer.promotions,
        drop=np.array(answer.drops, "<u8").tobytes() + ended.tobytes(),
        more=answer.more,
    ).SerializeToString()


def orders(message: Any) -> DiskOrders:
    """Unlike other calls, "unknown here" is an answer and not an error."""
    known = message.outcome.code != ObjectNotFound.code
    if known:
        outcome.check(message.outcome, call="DiskWork")
    return DiskOrders(
        known,
        np.frombuffer(message.offload, DISK_TASK),
        list(message.tenants),
        list(message.keys),
        np.frombuffer(message.promote, DISK_TASK),
        np.frombuffer(message.drop, "<u8"),
        message.more,
    )
