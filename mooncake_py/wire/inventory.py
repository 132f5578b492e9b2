"""Mounting and the pages of an inventory (master/recovery.py), as nodes see them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from mooncake_py.wire.rows import EXTENT, GENERATIONS, REPLICA
from mooncake_py.wire.v1 import master_pb2 as pb


@dataclass(frozen=True, slots=True)
class MountedSegment:
    segment_id: int
    grant_secret: bytes
    master_now_ms: int
    heartbeat_ms: int
    lane_address: str
    term: int
    cluster_id: str
    name_secret: bytes
    recover: bool
    unrecorded: npt.NDArray[np.void]  # GENERATIONS
    first_generation: int


@dataclass(frozen=True, slots=True)
class Page:
    """A page of an inventory as the node sends it: rows, names and ends are bytes of arrays."""

    node: str
    incarnation: int
    segment_id: int
    rows: bytes = b""
    names: bytes = b""
    name_ends: bytes = b""
    recorded: bool = False
    compare: bool = False
    cursor: int = 0
    absent: bytes = b""
    first_generation: int = 0  # of the mount that this answers


@dataclass(frozen=True, slots=True)
class Inventoried:
    """`unseal`: EXTENT; `believed`: REPLICA, of which `more` follow at `cursor`."""

    unseal: npt.NDArray[np.void]
    believed: npt.NDArray[np.void]
    cursor: int
    more: bool


def inventory_request(page: Page) -> Message:
    return pb.InventoryRequest(
        node=page.node,
        incarnation=page.incarnation,
        segment_id=page.segment_id,
        rows=page.rows,
        names=page.names,
        name_ends=page.name_ends,
        recorded=page.recorded,
        compare=page.compare,
        cursor=page.cursor,
        absent=page.absent,
        first_generation=page.first_generation,
    )


def inventoried(reply: pb.InventoryReply) -> Inventoried:
    return Inventoried(
        np.frombuffer(reply.unseal, EXTENT), np.frombuffer(reply.believed, REPLICA),
        reply.cursor, reply.more,
    )  # fmt: skip


def mounted(reply: pb.MountReply) -> MountedSegment:
    return MountedSegment(
        reply.segment_id, reply.grant_secret, reply.master_now_ms, reply.heartbeat_ms,
        reply.lane_address, reply.outcome.term, reply.cluster_id, reply.name_secret, reply.recover,
        np.frombuffer(reply.unrecorded, GENERATIONS), reply.first_generation,
    )  # fmt: skip
