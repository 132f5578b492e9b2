"""Client side of the wire: requests out of plain values, and answers free of protobuf.

Per-key data are numpy arrays over the reply's own bytes (read-only, no copy). Rows refer to a
table of `Segment`s by index. Answers of a batch that was sent in several calls are joined in
request order: `key_index` of placements is moved; rows of grants stay as the master signed them,
and `key_base` is added by whoever reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from mooncake_py.errors import InternalError, NotLeader, ObjectNotFound
from mooncake_py.master import commands as c
from mooncake_py.model import (
    FAILED_ROW,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    ReplicaPolicy,
)
from mooncake_py.wire import status as outcome
from mooncake_py.wire.lane import Method
from mooncake_py.wire.rows import EXTENT, PART, PLACEMENT
from mooncake_py.wire.v1 import master_pb2 as pb

Status = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """What the master said of itself. `lane_address`: "" when it offers no lane."""

    release: str
    cluster_id: str
    term: int
    lane_address: str
    key_max_bytes: int
    object_max_bytes: int
    batch_max_keys: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment and how to reach the node that owns it."""

    segment_id: int
    node: str
    address: str
    region: int
    nbytes: int
    host_id: str
    incarnation: int
    disk_id: int = 0  # not 0: a disk; its objects are fetched into staging first


@dataclass(frozen=True, slots=True)
class Placements:
    """Where complete objects are. `rows`: PLACEMENT, replicas of a key together, keys in order;
    `segment_index` points into `segments`. With prefix, `status` ends with the first absent key.
    The lease began when the master answered, so it ends at the latest `lease_ms` after arrival.
    `parts`: PART, of objects that lie in several parts, which have no row in `rows`; parts of a key
    together and in order, replicas of a part together.
    """

    status: Status
    segments: Sequence[Segment]
    rows: npt.NDArray[np.void]
    lease_ms: int
    parts: npt.NDArray[np.void]
    named: npt.NDArray[np.uint64] | None = None  # `objects`, if some replica has another one

    def objects(self) -> npt.NDArray[np.uint64]:
        """Per key the generation that the object has wherever it lies, 0 for a miss. (A replica
        that was copied has one of its own.)"""
        if self.named is not None:
            return self.named
        return _own_generations(len(self.status), self.rows, self.parts)


def _own_generations(
    count: int, rows: npt.NDArray[np.void], parts: npt.NDArray[np.void]
) -> npt.NDArray[np.uint64]:
    """Of objects none of whose replicas was copied."""
    found = np.zeros(count, np.uint64)
    for table in (parts[::-1], rows):  # of parts the first one's
        found[table["key_index"]] = table["generation"]
    return found


@dataclass(frozen=True, slots=True)
class NodeGrant:
    """What one node is asked to write. `rows` and `mac` go to it unchanged; row r is about key
    `key_base + key_index[r]` of the batch."""

    segment: Segment
    rows: bytes
    mac: bytes
    key_base: int

    def table(self) -> npt.NDArray[np.void]:
        """`rows` as EXTENT."""
        return np.frombuffer(self.rows, EXTENT)


@dataclass(frozen=True, slots=True)
class Grants:
    """Reserved extents. `generations`: per key, 0 where `status` is not 0. `inherited_ms`: what is
    left of another object's soft pin and TTL, which these have instead of their policy's."""

    status: Status
    generations: npt.NDArray[np.uint64]
    grants: Sequence[NodeGrant]
    inherited_ms: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """`status`: per key, 0 also for an absent one; empty for remove_all."""

    status: Status
    removed: int
    kept: int


@dataclass(frozen=True, slots=True)
class Listing:
    keys: Sequence[bytes]
    lengths: npt.NDArray[np.uint64]
    replicas: npt.NDArray[np.uint32]
    more: bool


@dataclass(frozen=True, slots=True)
class Beat:
    """Answer to a heartbeat. `known` is False when the master asks for a new mount; `unseal`:
    EXTENT rows whose extents the node unseals."""

    known: bool
    master_now_ms: int
    unseal: npt.NDArray[np.void]
    tasks_waiting: int = 0


# --- requests -----------------------------------------------------------------------------------


def connect_request(release: str, role: str) -> Message:
    return pb.ConnectRequest(
        protocol_major=PROTOCOL_MAJOR, protocol_minor=PROTOCOL_MINOR, release=release, role=role
    )


def exists_request(tenant: str, keys: Sequence[bytes], prefix: bool) -> Message:
    return pb.ExistsRequest(tenant=tenant, keys=keys, prefix=prefix)


def locate_request(tenant: str, keys: Sequence[bytes], prefix: bool, lease_ms: int) -> Message:
    return pb.LocateRequest(tenant=tenant, keys=keys, prefix=prefix, lease_ms=lease_ms)


@dataclass(frozen=True, slots=True)
class PutAsk:
    """What is the same for every key of a put."""

    tenant: str
    policy: ReplicaPolicy
    host_id: str
    upsert: bool = False


def put_start_request(
    ask: PutAsk, keys: Sequence[bytes], lengths: Sequence[int], groups: Sequence[int]
) -> Message:
    policy = ask.policy
    return pb.PutStartRequest(
        tenant=ask.tenant,
        keys=keys,
        lengths=lengths,
        replica_count=policy.replica_count,
        strict=policy.strict,
        preferred_nodes=policy.preferred_nodes,
        host_id=ask.host_id,
        soft_pin_ms=policy.soft_pin_ms,
        hard_pin=policy.hard_pin,
        ttl_ms=policy.ttl_ms,
        group=groups,
        upsert=ask.upsert,
        expires_with=policy.expires_with,
        recompute_cost=policy.recompute_cost,
    )


def put_end_request(
    tenant: str,
    keys: Sequence[bytes],
    generations: Sequence[int],
    failed: Sequence[tuple[int, int]],
    reserved: bool = False,
) -> Message:
    rows = b"".join(FAILED_ROW.pack(key, 0, segment) for key, segment in failed)
    return pb.PutEndRequest(
        tenant=tenant, keys=keys, generations=generations, failed=rows, reserved=reserved
    )


def put_revoke_request(tenant: str, keys: Sequence[bytes], generations: Sequence[int]) -> Message:
    return pb.PutRevokeRequest(tenant=tenant, keys=keys, generations=generations)


def remove_request(tenant: str, keys: Sequence[bytes], force: bool) -> pb.RemoveRequest:
    return pb.RemoveRequest(tenant=tenant, keys=keys, force=force)


def remove_all_request(removal: c.Remove, cursor: bytes) -> pb.RemoveRequest:
    return pb.RemoveRequest(
        tenant=removal.tenant,
        prefix=removal.prefix,
        pattern=removal.pattern,
        force=removal.force,
        all=True,
        cursor=cursor,
    )


def pin_request(tenant: str, keys: Sequence[bytes], soft_pin_ms: int, hard_pin: bool) -> Message:
    return pb.PinRequest(tenant=tenant, keys=keys, soft_pin_ms=soft_pin_ms, hard_pin=hard_pin)


def list_request(tenant: str, prefix: bytes, after: bytes, limit: int) -> Message:
    return pb.ListRequest(tenant=tenant, prefix=prefix, after=after, limit=limit)


def report_request(report: c.Report) -> Message:
    return pb.ReportRequest(
        tenant=report.tenant,
        keys=report.keys,
        generations=report.generations,
        segment_ids=report.segment_ids,
        codes=report.codes,
        incarnations=report.incarnations,
    )


def mount_request(mount: c.Mount, cluster_id: str) -> Message:
    """`cluster_id`: of the cluster it was mounted in before, or ""."""
    return pb.MountRequest(
        node=mount.node,
        incarnation=mount.incarnation,
        address=mount.address,
        region=mount.region,
        nbytes=mount.nbytes,
        host_id=mount.host_id,
        segment_id=mount.segment_id,
        domain=mount.domain,
        cluster_id=cluster_id,
        recovers=mount.recovers,
        warm=mount.warm,
        keeps=mount.keeps,
        former_term=mount.former_term,
        disk_id=mount.disk_id,
        protocol_major=PROTOCOL_MAJOR,
        protocol_minor=PROTOCOL_MINOR,
    )


def heartbeat_request(beat: c.Heartbeat) -> Message:
    return pb.HeartbeatRequest(
        node=beat.node,
        incarnation=beat.incarnation,
        segment_id=beat.segment_id,
        draining=beat.draining,
        used_bytes=beat.used_bytes,
    )


def unmount_request(unmount: c.Unmount) -> Message:
    return pb.UnmountRequest(
        node=unmount.node,
        incarnation=unmount.incarnation,
        segment_id=unmount.segment_id,
        returns=unmount.returns,
    )


def status_request() -> Message:
    return pb.StatusRequest()


def set_quota_request(quota: c.SetQuota) -> Message:
    return pb.SetQuotaRequest(
        tenant=quota.tenant,
        bytes_max=quota.bytes_max,
        keys_max=quota.keys_max,
        policy=quota.policy,
        remove=quota.remove,
    )


def events_request(after: int, limit: int) -> Message:
    return pb.EventsRequest(after=after, limit=limit)


# --- replies ------------------------------------------------------------------------------------


def parse(method: Method, payload: bytes) -> Any:
    """The reply message. InternalError: these bytes are not one."""
    try:
        return method.reply.FromString(payload)
    except DecodeError:
        raise InternalError(f"{method.name}: the answer is not a {method.reply.__name__}") from None


def check(method: Method, reply: Any, **context: object) -> None:
    """Raise what the call as a whole was refused with."""
    outcome.check(reply.outcome, call=method.name, **context)


def check_leader(method: Method, reply: Any) -> None:
    """Raise NotLeader, which is about whom to ask and not about what was asked."""
    if reply.outcome.code == NotLeader.code:
        outcome.check(reply.outcome, call=method.name)


def term_of(reply: Any) -> int:
    return cast(int, reply.outcome.term)


def cluster(reply: pb.ConnectReply) -> ClusterInfo:
    return ClusterInfo(
        reply.release, reply.cluster_id, reply.outcome.term, reply.lane_address,
        reply.key_max_bytes, reply.object_max_bytes, reply.batch_max_keys,
    )  # fmt: skip


def _status(raw: bytes) -> Status:
    return np.frombuffer(raw, np.uint8)


def join_status(parts: Sequence[bytes]) -> Status:
    return _status(parts[0] if len(parts) == 1 else b"".join(parts))


def segment(message: pb.Segment) -> Segment:
    return Segment(
        message.segment_id, message.node, message.address, message.region, message.nbytes,
        message.host_id, message.incarnation, message.disk_id,
    )  # fmt: skip


def placements(replies: Sequence[tuple[int, pb.LocateReply]]) -> Placements:
    """Join (first key's index, reply) pairs."""
    segments: list[Segment] = []
    tables = []
    parts = []
    for base, reply in replies:
        tables.append(_shifted(np.frombuffer(reply.placements, PLACEMENT), base, len(segments)))
        parts.append(_shifted(np.frombuffer(reply.parts, PART), base, len(segments)))
        segments += map(segment, reply.segments)
    return Placements(
        join_status([reply.status for _, reply in replies]),
        segments,
        tables[0] if len(tables) == 1 else np.concatenate(tables),
        min(reply.lease_ms for _, reply in replies),
        parts[0] if len(parts) == 1 else np.concatenate(parts),
        _named([reply for _, reply in replies]),
    )


def _named(replies: Sequence[pb.LocateReply]) -> npt.NDArray[np.uint64] | None:
    """Own generations, unless each replica has that of its object."""
    if not any(reply.objects for reply in replies):
        return None
    found = []
    for reply in replies:
        tables = np.frombuffer(reply.placements, PLACEMENT), np.frombuffer(reply.parts, PART)
        named = np.frombuffer(reply.objects, np.uint64)
        found.append(named if len(named) else _own_generations(len(reply.status), *tables))
    return np.concatenate(found)


def _shifted(rows: npt.NDArray[np.void], keys: int, segments: int) -> npt.NDArray[np.void]:
    """Rows of a later reply: so many keys and segments came before."""
    if not keys and not segments:
        return rows
    rows = rows.copy()
    rows["key_index"] += keys
    rows["segment_index"] += segments
    return rows


def grants(replies: Sequence[tuple[int, pb.PutStartReply]]) -> Grants:
    """Join (first key's index, reply) pairs."""
    found = []
    inherited: tuple[int, int] | None = None
    for base, reply in replies:
        segments = [segment(message) for message in reply.segments]
        if reply.HasField("inherited"):
            inherited = (reply.inherited.soft_pin_ms, reply.inherited.ttl_ms)
        found += [
            NodeGrant(segments[grant.segment_index], grant.rows, grant.mac, base)
            for grant in reply.grants
        ]
    generations = [np.array(reply.generations, np.uint64) for _, reply in replies]
    status = join_status([reply.status for _, reply in replies])
    return Grants(status, np.concatenate(generations), found, inherited)


def removed(replies: Sequence[pb.RemoveReply]) -> Removed:
    return Removed(
        join_status([reply.status for reply in replies]),
        sum(reply.removed for reply in replies),
        sum(reply.kept for reply in replies),
    )


def listing(reply: pb.ListReply) -> Listing:
    return Listing(
        list(reply.keys),
        np.array(reply.lengths, np.uint64),
        np.array(reply.replicas, np.uint32),
        reply.more,
    )


def beat(reply: pb.HeartbeatReply) -> Beat:
    """Unlike other calls, "unknown here" is an answer and not an error."""
    known = reply.outcome.code != ObjectNotFound.code
    if known:
        outcome.check(reply.outcome, call="Heartbeat")
    unseal = np.frombuffer(reply.unseal, EXTENT)
    return Beat(known, reply.master_now_ms, unseal, reply.tasks_waiting)


def drain_info(reply: pb.DrainReply) -> c.DrainInfo:
    return c.DrainInfo(
        reply.state, reply.moved, reply.moved_bytes, reply.dropped, reply.ended, reply.failed,
        reply.left, reply.left_bytes,
    )  # fmt: skip


def status_info(reply: pb.StatusReply) -> c.StatusInfo:
    segments = [
        c.SegmentInfo(
            s.segment_id, s.node, s.incarnation, s.address, s.region, s.nbytes, s.host_id,
            used_bytes, state, s.domain, s.disk_id,
        )
        for s, used_bytes, state in zip(
            reply.segments, reply.segment_used_bytes, reply.segment_states, strict=True
        )
    ]  # fmt: skip
    return c.StatusInfo(
        reply.objects, reply.used_bytes, reply.capacity_bytes, segments,
        {counter.name: counter.value for counter in reply.counters},
        [
            c.TenantInfo(
                each.tenant, each.keys, each.used_bytes, each.bytes_max, each.keys_max, each.policy,
                {counter.name: int(counter.value) for counter in each.counters},
            )
            for each in reply.tenants
        ],
    )  # fmt: skip


def event_page(reply: pb.EventsReply) -> c.EventPage:
    rows = zip(reply.what, reply.tenants, reply.keys, reply.generations, strict=True)
    found = [c.ObjectEvent(number, *row) for number, row in enumerate(rows, reply.first)]
    return c.EventPage(found, reply.newest, reply.gap)
