"""Client side of reservations: the request, and the answer in runs that need no unpacking."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from google.protobuf.message import Message

from mooncake_py.model import EXTENT_ROW
from mooncake_py.wire.answers import Segment, segment
from mooncake_py.wire.rows import EXTENT
from mooncake_py.wire.v1 import master_pb2 as pb

_MAC_BYTES = 16


class Reservations(NamedTuple):
    """Extents of one segment for objects that are named at the commit: EXTENT rows, and for each a
    mac of 16 bytes; both go to the node. `cut` counts rows."""

    segment: Segment
    rows: bytes
    macs: bytes

    @property
    def row_count(self) -> int:
        return len(self.rows) // EXTENT_ROW.size

    def cut(self, start: int, stop: int) -> Reservations:
        rows = self.rows[start * EXTENT_ROW.size : stop * EXTENT_ROW.size]
        return Reservations(self.segment, rows, self.macs[start * _MAC_BYTES : stop * _MAC_BYTES])

    def generations(self) -> list[int]:
        found: list[int] = np.frombuffer(self.rows, EXTENT)["generation"].tolist()
        return found


def reserve_request(tenant: str, length: int, count: int, host_id: str) -> Message:
    return pb.ReserveRequest(tenant=tenant, length=length, count=count, host_id=host_id)


def reservations(reply: pb.ReserveReply) -> list[Reservations]:
    segments = [segment(message) for message in reply.segments]
    return [
        Reservations(segments[grant.segment_index], grant.rows, grant.mac) for grant in reply.grants
    ]
