"""Messages between clients and nodes as plain values. Pulls have the layout of
`native/abi/pulls.h`, everything else that of `proto/mooncake/v1/node.proto`."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hmac import compare_digest
from itertools import accumulate

from google.protobuf.message import DecodeError

from mooncake_py._native.pulls import grant_mac
from mooncake_py.errors import AccessRefused, UsageError
from mooncake_py.model import ReplicaPolicy
from mooncake_py.wire.rows import REPLICA
from mooncake_py.wire.v1 import node_pb2

PULL_KIND: int = node_pb2.NODE_PULL
HOLD_KIND: int = node_pb2.NODE_HOLD
UNSEAL_KIND: int = node_pb2.NODE_UNSEAL
FETCH_KIND: int = node_pb2.NODE_FETCH

_ROW_BYTES = 64
_ROW_MACS = 1  # MC_PULL_ROW_MACS
_PIECES = 2  # MC_PULL_PIECES
_HEAD = struct.Struct("<Q16sIIIIII")  # mc_pull_head
_NAMES = struct.Struct("<IIHHI")  # mc_pull_names
_HARD_PIN = 1
_U32_MAX = (1 << 32) - 1  # 49 days; what is longer is cut, should only the node remember it
_UNSEAL = struct.Struct("<Q16s")
_CODE = struct.Struct("<I")
PULLED_HEAD_BYTES = _CODE.size  # of a reply to a pull, before one status a row


@dataclass(slots=True)  # as if frozen, which would cost a small put 2 µs
class PullRequest:
    """Copy values into granted extents. `rows` and `mac` are the master's grant, unchanged;
    `sources` is one little-endian u64 a row, an offset in `region` of the sender or, when
    `region` is 0, in `inline_values`; with `pieces` (PULL_PIECE records) the index of the value's
    first one. `row_macs`: the rows are reservations, each with a mac of its own. `names`: of
    `pull_names`, one a row; without any the objects keep no names at their node."""

    segment_id: int
    rows: bytes
    mac: bytes
    region: int
    sources: bytes
    inline_values: bytes
    timeout_ms: int
    pieces: bytes = b""
    row_macs: bytes = b""
    names: bytes = b""

    def encode(self) -> bytes:
        head = _HEAD.pack(
            self.segment_id,
            self.mac,
            len(self.rows) // _ROW_BYTES,
            self.region,
            self.timeout_ms,
            (_ROW_MACS if self.row_macs else 0) | (_PIECES if self.pieces else 0),
            len(self.names),
            0,
        )
        values = self.pieces or self.inline_values
        return b"".join((head, self.rows, self.sources, self.row_macs, self.names, values))


def pull_names(tenant: str, keys: Sequence[bytes], policy: ReplicaPolicy) -> bytes:
    """What the objects of a pull are called, in the order of its rows, and how they are put."""
    text = tenant.encode()
    ends = array("Q", accumulate(map(len, keys)))
    flags = _HARD_PIN if policy.hard_pin else 0
    soft_pin_ms, ttl_ms = min(policy.soft_pin_ms, _U32_MAX), min(policy.ttl_ms, _U32_MAX)
    head = _NAMES.pack(soft_pin_ms, ttl_ms, len(text), flags, 0)
    padding = bytes(-(len(text) + ends[-1]) % 8)  # what follows is aligned
    return b"".join((head, ends, text, *keys, padding))


@dataclass(frozen=True, slots=True)
class PullReply:
    """`code` 0: `status` has one byte a row. Else the request as a whole was refused."""

    code: int = 0
    cause: str = ""
    status: bytes = b""

    @staticmethod
    def decode(payload: bytes) -> PullReply:
        """Raises UsageError for bytes that are no PullReply."""
        if len(payload) < _CODE.size:
            raise UsageError("the pull reply is too short", nbytes=len(payload))
        (code,) = _CODE.unpack_from(payload)
        rest = payload[_CODE.size :]
        return PullReply(code, rest.decode(errors="replace")) if code else PullReply(0, "", rest)


@dataclass(frozen=True, slots=True)
class HoldRequest:
    """Hold extents for reading in place, or `release` them. `rows`: EXTENT."""

    segment_id: int
    rows: bytes
    release: bool = False

    def encode(self) -> bytes:
        return node_pb2.HoldRequest(
            segment_id=self.segment_id, rows=self.rows, release=self.release
        ).SerializeToString()

    @staticmethod
    def decode(payload: bytes) -> HoldRequest:
        """Raises UsageError for bytes that are no HoldRequest."""
        try:
            m = node_pb2.HoldRequest.FromString(payload)
        except DecodeError as error:
            raise UsageError(f"the hold request cannot be parsed: {error}") from None
        return HoldRequest(m.segment_id, m.rows, m.release)


@dataclass(frozen=True, slots=True)
class HoldReply:
    """`code` 0: `status` has one byte a row. Else the request as a whole was refused."""

    code: int = 0
    cause: str = ""
    status: bytes = b""

    def encode(self) -> bytes:
        return node_pb2.HoldReply(
            code=self.code, cause=self.cause, status=self.status
        ).SerializeToString()

    @staticmethod
    def decode(payload: bytes) -> HoldReply:
        """Raises UsageError for bytes that are no HoldReply."""
        try:
            m = node_pb2.HoldReply.FromString(payload)
        except DecodeError as error:
            raise UsageError(f"the hold reply cannot be parsed: {error}") from None
        return HoldReply(m.code, m.cause, m.status)


def unseal_message(segment_id: int, replicas: bytes, secret: bytes) -> bytes:
    """The master's order to unseal these (rows REPLICA): segment id, mac under the segment's grant
    secret, rows. Repeating it does no harm: it may be sent or played back any number of times."""
    return _UNSEAL.pack(segment_id, grant_mac(segment_id, replicas, secret)) + replicas


def unseal_rows(payload: bytes, segment_id: int, secret: bytes) -> bytes:
    """The rows of such an order. UsageError, AccessRefused: it is none, or not for this segment."""
    if len(payload) < _UNSEAL.size or (len(payload) - _UNSEAL.size) % REPLICA.itemsize:
        raise UsageError("this is no order to unseal", nbytes=len(payload))
    named, mac = _UNSEAL.unpack_from(payload)
    rows = payload[_UNSEAL.size :]
    if named != segment_id or not compare_digest(mac, grant_mac(segment_id, rows, secret)):
        raise AccessRefused("the order was not signed by this node's master")
    return rows


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Bring objects from the disk into staging (`rows`: EXTENT), and let go of staged extents whose
    generations are in `done` (u64 each)."""

    segment_id: int
    rows: bytes
    timeout_ms: int
    done: bytes = b""

    def encode(self) -> bytes:
        return node_pb2.FetchRequest(
            segment_id=self.segment_id, rows=self.rows, timeout_ms=self.timeout_ms, done=self.done
        ).SerializeToString()

    @staticmethod
    def decode(payload: bytes) -> FetchRequest:
        """Raises UsageError for bytes that are no FetchRequest."""
        try:
            m = node_pb2.FetchRequest.FromString(payload)
        except DecodeError as error:
            raise UsageError(f"the fetch request cannot be parsed: {error}") from None
        return FetchRequest(m.segment_id, m.rows, m.timeout_ms, m.done)


@dataclass(frozen=True, slots=True)
class FetchReply:
    """`code` 0: one byte and one EXTENT row a row. Else the request as a whole was refused."""

    code: int = 0
    cause: str = ""
    status: bytes = b""
    rows: bytes = b""

    def encode(self) -> bytes:
        return node_pb2.FetchReply(
            code=self.code, cause=self.cause, status=self.status, rows=self.rows
        ).SerializeToString()

    @staticmethod
    def decode(payload: bytes) -> FetchReply:
        """Raises UsageError for bytes that are no FetchReply."""
        try:
            m = node_pb2.FetchReply.FromString(payload)
        except DecodeError as error:
            raise UsageError(f"the fetch reply cannot be parsed: {error}") from None
        return FetchReply(m.code, m.cause, m.status, m.rows)
