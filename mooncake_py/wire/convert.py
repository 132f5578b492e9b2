"""Server side of the wire: request bytes to catalog commands, catalog answers to reply bytes.

Rules. Whatever a stranger may send ends in `UsageError` with the field and its limit, decided
before the catalog sees it. Per-key data stay packed: lists of keys are handed on as protobuf's own
list of bytes objects (one copy of the list, none of the keys); rows stay bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message

from mooncake_py.errors import UsageError
from mooncake_py.master import commands as c
from mooncake_py.model import (
    BATCH_MAX_KEYS,
    COPY_ROW,
    EXTENT_ROW,
    FAILED_ROW,
    KEY_MAX_BYTES,
    MEMBERS_SHIFT,
    OBJECT_MAX_BYTES,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    REPLICA_ROW,
    TASK_DONE_ROW,
    TENANT_MAX_BYTES,
    ReplicaPolicy,
    is_reserved,
)
from mooncake_py.wire import disks, names
from mooncake_py.wire.lane import Method
from mooncake_py.wire.v1 import master_pb2 as pb

NAME_MAX_BYTES = 255
LIST_MAX_KEYS = 2048  # a page: 8 MiB of the longest keys, half of what a client accepts by default


@dataclass(frozen=True, slots=True)
class Edge:
    """What a command needs that is not in the request. `random` draws 64 bits for placement;
    `cluster_id`: of this cluster."""

    digests: Callable[[str, Sequence[bytes]], bytes]
    random: Callable[[], int]
    cluster_id: str = ""


def parse(method: Method, payload: bytes) -> Message:
    """The request message. UsageError: these bytes are not one."""
    try:
        return method.request.FromString(payload)
    except DecodeError:
        raise UsageError(f"{method.name}: the request is not a {method.request.__name__}") from None


# --- requests -----------------------------------------------------------------------------------


def _tenant(request: Any) -> str:
    tenant: str = request.tenant
    if len(tenant) > TENANT_MAX_BYTES or len(tenant.encode()) > TENANT_MAX_BYTES:
        raise UsageError(f"the tenant's name is longer than {TENANT_MAX_BYTES} bytes")
    return tenant


def _keys(request: Any) -> list[bytes]:
    keys = list(request.keys)
    if len(keys) > BATCH_MAX_KEYS:
        raise UsageError(f"{len(keys)} keys in one call, the limit is {BATCH_MAX_KEYS}")
    if keys and max(map(len, keys)) > KEY_MAX_BYTES:
        raise UsageError(f"a key is longer than {KEY_MAX_BYTES} bytes")
    if not all(keys):
        raise UsageError("a key is empty")
    return keys


def _real(keys: list[bytes]) -> list[bytes]:
    if any(map(is_reserved, keys)):
        raise UsageError("a key begins with the byte 0xFF, as no UTF-8 text does")
    return keys


def _aligned(name: str, values: Sequence[Any], keys: Sequence[bytes]) -> list[Any]:
    if len(values) != len(keys):
        raise UsageError(f"{len(values)} {name} for {len(keys)} keys")
    return list(values)


def _name(what: str, value: str) -> str:
    if not value or len(value.encode()) > NAME_MAX_BYTES:
        raise UsageError(f"{what} must have 1 to {NAME_MAX_BYTES} bytes")
    return value


def _exists(r: pb.ExistsRequest, edge: Edge) -> c.Exists:
    return c.Exists(_tenant(r), _keys(r), r.prefix)


def _locate(r: pb.LocateRequest, edge: Edge) -> c.Locate:
    return c.Locate(_tenant(r), _keys(r), r.prefix, r.lease_ms)


def _put_start(r: pb.PutStartRequest, edge: Edge) -> c.PutStart:
    tenant, keys = _tenant(r), _real(_keys(r))
    lengths = _aligned("lengths", r.lengths, keys)
    if lengths and max(lengths) > OBJECT_MAX_BYTES:
        raise UsageError(f"an object is longer than {OBJECT_MAX_BYTES} bytes")
    policy = ReplicaPolicy(
        replica_count=r.replica_count or 1,
        strict=r.strict,
        preferred_nodes=tuple(r.preferred_nodes),
        soft_pin_ms=r.soft_pin_ms,
        hard_pin=r.hard_pin,
        ttl_ms=r.ttl_ms,
        expires_with=r.expires_with,
        recompute_cost=r.recompute_cost or 1,
    )
    groups = _aligned("groups", r.group, keys) if r.group else ()
    digests = edge.digests(tenant, keys)
    return c.PutStart(
        tenant, keys, lengths, digests, policy, r.host_id, groups, edge.random(), r.upsert
    )


def _reserve(r: pb.ReserveRequest, edge: Edge) -> c.Reserve:
    tenant = _tenant(r)
    digest = edge.digests(tenant, [b""])
    return c.Reserve(tenant, r.length, r.count, r.host_id, edge.random(), digest)


def _put_end(r: pb.PutEndRequest, edge: Edge) -> c.PutEnd:
    keys = _keys(r)
    if len(r.failed) % FAILED_ROW.size:
        raise UsageError(f"failed: not a whole number of rows of {FAILED_ROW.size} bytes")
    failed = [(key, segment) for key, _, segment in FAILED_ROW.iter_unpack(r.failed)]
    if any(key >= len(keys) for key, _ in failed):
        raise UsageError("failed: a row's key_index is outside the batch")
    generations = _aligned("generations", r.generations, keys)
    return c.PutEnd(_tenant(r), _real(keys), generations, failed, r.reserved)


def _put_revoke(r: pb.PutRevokeRequest, edge: Edge) -> c.PutRevoke:
    keys = _keys(r)
    return c.PutRevoke(_tenant(r), keys, _aligned("generations", r.generations, keys))


def _remove(r: pb.RemoveRequest, edge: Edge) -> c.Remove:
    keys = _keys(r)
    if r.all and keys:
        raise UsageError("remove: `all` goes with a prefix, not with keys")
    if (r.prefix or r.pattern) and not r.all:
        raise UsageError("remove: a prefix or a pattern needs `all`")
    return c.Remove(_tenant(r), keys, r.force, r.all, r.prefix, r.pattern, r.cursor, r.patience_ms)


def _pin(r: pb.PinRequest, edge: Edge) -> c.Pin:
    return c.Pin(_tenant(r), _keys(r), r.soft_pin_ms, r.hard_pin)


def _list(r: pb.ListRequest, edge: Edge) -> c.List:
    limit = min(r.limit or LIST_MAX_KEYS, LIST_MAX_KEYS)
    return c.List(_tenant(r), r.prefix, r.after, limit)


def _report(r: pb.ReportRequest, edge: Edge) -> c.Report:
    keys = _keys(r)
    return c.Report(
        _tenant(r), keys,
        _aligned("generations", r.generations, keys),
        _aligned("segment_ids", r.segment_ids, keys),
        _aligned("codes", r.codes, keys),
        _aligned("incarnations", r.incarnations, keys) if r.incarnations else (),
    )  # fmt: skip


def _mount(r: pb.MountRequest, edge: Edge) -> c.Mount:
    if not r.incarnation or not r.nbytes:
        raise UsageError("mount: incarnation and nbytes must not be 0")
    return c.Mount(
        _name("the node's name", r.node), r.incarnation, _name("the node's address", r.address),
        r.region, r.nbytes, r.host_id, r.segment_id, r.domain, r.recovers,
        bool(r.cluster_id) and r.cluster_id != edge.cluster_id, r.warm, r.keeps, r.former_term,
        r.disk_id,
    )  # fmt: skip


def _inventory(r: pb.InventoryRequest, edge: Edge) -> c.Inventory:
    count, rest = divmod(len(r.rows), EXTENT_ROW.size)
    if rest or len(r.absent) % REPLICA_ROW.size or count > BATCH_MAX_KEYS:
        raise UsageError(f"inventory: rows are whole, and at most {BATCH_MAX_KEYS}")
    return c.Inventory(
        r.node, r.incarnation, r.segment_id, r.rows,
        list(names.split(r.names, r.name_ends, count)),
        r.recorded, r.compare, r.cursor, r.absent, r.first_generation,
    )  # fmt: skip


def _heartbeat(r: pb.HeartbeatRequest, edge: Edge) -> c.Heartbeat:
    return c.Heartbeat(r.node, r.incarnation, r.segment_id, r.draining, r.used_bytes)


def _tasks(r: pb.TasksRequest, edge: Edge) -> c.Tasks:
    if len(r.done) % TASK_DONE_ROW.size:
        raise UsageError(f"done: not a whole number of rows of {TASK_DONE_ROW.size} bytes")
    done = [(task, code) for task, code, _ in TASK_DONE_ROW.iter_unpack(r.done)]
    return c.Tasks(r.node, r.incarnation, r.segment_id, done, r.limit)


def _copy(r: pb.CopyRequest, edge: Edge) -> c.CopyObjects:
    return c.CopyObjects(_tenant(r), _keys(r), _name("to_node", r.to_node), r.from_node)


def _drain(r: pb.DrainRequest, edge: Edge) -> c.Drain:
    return c.Drain(_name("what", r.what), r.cancel)


def _unmount(r: pb.UnmountRequest, edge: Edge) -> c.Unmount:
    return c.Unmount(r.node, r.incarnation, r.segment_id, r.returns)


def _status(r: pb.StatusRequest, edge: Edge) -> c.Status:
    return c.Status()


def _set_quota(r: pb.SetQuotaRequest, edge: Edge) -> c.SetQuota:
    return c.SetQuota(_tenant(r), r.bytes_max, r.keys_max, r.policy or "reject", r.remove)


def _events(r: pb.EventsRequest, edge: Edge) -> c.Events:
    return c.Events(r.after, min(r.limit or LIST_MAX_KEYS, LIST_MAX_KEYS))


_COMMANDS: dict[int, Callable[[Any, Edge], c.Command]] = {
    pb.LANE_EXISTS: _exists,
    pb.LANE_LOCATE: _locate,
    pb.LANE_PUT_START: _put_start,
    pb.LANE_RESERVE: _reserve,
    pb.LANE_PUT_END: _put_end,
    pb.LANE_PUT_REVOKE: _put_revoke,
    pb.LANE_REMOVE: _remove,
    pb.LANE_PIN: _pin,
    pb.LANE_LIST: _list,
    pb.LANE_REPORT: _report,
    pb.LANE_MOUNT: _mount,
    pb.LANE_HEARTBEAT: _heartbeat,
    pb.LANE_UNMOUNT: _unmount,
    pb.LANE_DISK_WORK: lambda request, edge: disks.command(request),
    pb.LANE_STATUS: _status,
    pb.LANE_SET_QUOTA: _set_quota,
    pb.LANE_EVENTS: _events,
    pb.LANE_TASKS: _tasks,
    pb.LANE_COPY: _copy,
    pb.LANE_DRAIN: _drain,
    pb.LANE_INVENTORY: _inventory,
}


def command(method: Method, request: Message, edge: Edge) -> c.Command:
    """The command of a request (any method but Connect). UsageError: a field is out of bounds."""
    return _COMMANDS[method.number](request, edge)


# --- replies ------------------------------------------------------------------------------------


def _ok(term: int) -> pb.Outcome:
    return pb.Outcome(term=term)


def segment(info: c.SegmentInfo) -> pb.Segment:
    """A segment as replies describe it; may be kept and used in many replies."""
    return pb.Segment(
        segment_id=info.segment_id,
        node=info.node,
        address=info.address,
        region=info.region,
        nbytes=info.nbytes,
        host_id=info.host_id,
        incarnation=info.incarnation,
        domain=info.domain,
        disk_id=info.disk_id,
    )


def connected(term: int, cluster_id: str, release: str, lane_address: str) -> bytes:
    return pb.ConnectReply(
        outcome=_ok(term),
        protocol_major=PROTOCOL_MAJOR,
        protocol_minor=PROTOCOL_MINOR,
        release=release,
        cluster_id=cluster_id,
        lane_address=lane_address,
        key_max_bytes=KEY_MAX_BYTES,
        object_max_bytes=OBJECT_MAX_BYTES,
        batch_max_keys=BATCH_MAX_KEYS,
    ).SerializeToString()


def done(method: Method, term: int) -> bytes:
    return method.reply(outcome=_ok(term)).SerializeToString()


def present(answer: c.Present, term: int) -> bytes:
    return pb.ExistsReply(outcome=_ok(term), present=answer.present).SerializeToString()


def located(answer: c.Located, term: int, segments: list[pb.Segment]) -> bytes:
    return pb.LocateReply(
        outcome=_ok(term),
        status=answer.status,
        segments=segments,
        placements=answer.placements,
        lease_ms=answer.lease_ms,
        parts=answer.parts,
        objects=answer.objects,
    ).SerializeToString()


def granted(
    answer: c.Granted, term: int, segments: list[pb.Segment], macs: Sequence[bytes]
) -> bytes:
    """`macs`: one a segment, over that segment's rows."""
    grants = [
        pb.NodeGrant(segment_index=index, rows=rows, mac=mac)
        for index, (rows, mac) in enumerate(zip(answer.rows, macs, strict=True))
    ]
    left = answer.inherited_ms
    return pb.PutStartReply(
        outcome=_ok(term),
        status=answer.status,
        generations=answer.generations,
        segments=segments,
        grants=grants,
        inherited=left and pb.Ends(soft_pin_ms=left[0], ttl_ms=left[1]),
    ).SerializeToString()


def reserved(
    answer: c.Reserved, term: int, segments: list[pb.Segment], macs: Sequence[bytes]
) -> bytes:
    """`macs`: one entry a segment, 16 bytes a row of it."""
    grants = [
        pb.NodeGrant(segment_index=index, rows=rows, mac=mac)
        for index, (rows, mac) in enumerate(zip(answer.rows, macs, strict=True))
    ]
    return pb.ReserveReply(
        outcome=_ok(term), segments=segments, grants=grants, lifetime_ms=answer.lifetime_ms
    ).SerializeToString()


def statuses(method: Method, answer: c.Statuses, term: int) -> bytes:
    """Reply of PutEnd, PutRevoke, Remove, Pin, Copy and Report."""
    reply: Any = method.reply(outcome=_ok(term))
    if not isinstance(reply, pb.ReportReply):
        reply.status = answer.status
    if isinstance(reply, pb.RemoveReply):
        reply.removed, reply.kept, reply.cursor = answer.removed, answer.kept, answer.cursor
    raw: bytes = reply.SerializeToString()
    return raw


def listed(answer: c.Listed, term: int) -> bytes:
    return pb.ListReply(
        outcome=_ok(term),
        keys=answer.keys,
        lengths=answer.lengths,
        replicas=answer.replicas,
        more=answer.more,
    ).SerializeToString()


@dataclass(frozen=True, slots=True)
class MountTerms:
    """What a node is told when its segment is mounted."""

    segment_id: int
    grant_secret: bytes
    master_now_ms: int
    heartbeat_ms: int
    lane_address: str
    cluster_id: str = ""
    name_secret: bytes = b""


def mounted(answer: c.Mounted, terms: MountTerms, term: int) -> bytes:
    return pb.MountReply(
        outcome=_ok(term),
        segment_id=terms.segment_id,
        grant_secret=terms.grant_secret,
        master_now_ms=terms.master_now_ms,
        heartbeat_ms=terms.heartbeat_ms,
        lane_address=terms.lane_address,
        cluster_id=terms.cluster_id,
        name_secret=terms.name_secret,
        recover=answer.recover,
        unrecorded=b"".join(REPLICA_ROW.pack(*each) for each in answer.unrecorded),
        first_generation=answer.first_generation,
    ).SerializeToString()


def inventoried(answer: c.Inventoried, term: int) -> bytes:
    return pb.InventoryReply(
        outcome=_ok(term),
        unseal=answer.unseal,
        believed=answer.believed,
        cursor=answer.cursor,
        more=answer.more,
    ).SerializeToString()


def beat(term: int, master_now_ms: int, unseal: bytes, tasks: int) -> bytes:
    return pb.HeartbeatReply(
        outcome=_ok(term), master_now_ms=master_now_ms, unseal=unseal, tasks_waiting=tasks
    ).SerializeToString()


def tasks(
    answer: c.TaskList, term: int, segments: list[pb.Segment], digests: Sequence[bytes]
) -> bytes:
    """`digests`: one a copy, of its key."""
    rows = [
        COPY_ROW.pack(
            row, copy.members << MEMBERS_SHIFT, copy.offset, copy.length, copy.generation,
            copy.expires_ms, digest, copy.group, copy.source, 0, copy.source_offset,
            copy.source_generation,
        )
        for row, (copy, digest) in enumerate(zip(answer.copies, digests, strict=True))
    ]  # fmt: skip
    return pb.TasksReply(
        outcome=_ok(term),
        segments=segments,
        copies=b"".join(rows),
        waiting=answer.waiting,
        names=[names.common(copy.name) + copy.name.key for copy in answer.copies],
    ).SerializeToString()


def drained(answer: c.DrainInfo, term: int) -> bytes:
    return pb.DrainReply(
        outcome=_ok(term),
        state=answer.state,
        moved=answer.moved,
        moved_bytes=answer.moved_bytes,
        dropped=answer.dropped,
        ended=answer.ended,
        failed=answer.failed,
        left=answer.left,
        left_bytes=answer.left_bytes,
    ).SerializeToString()


def status(answer: c.StatusInfo, term: int, counters: Mapping[str, float]) -> bytes:
    """`counters` of the process are added to the catalog's."""
    counted = {**answer.counters, **counters}
    return pb.StatusReply(
        outcome=_ok(term),
        objects=answer.objects,
        used_bytes=answer.used_bytes,
        capacity_bytes=answer.capacity_bytes,
        segments=[segment(info) for info in answer.segments],
        segment_used_bytes=[info.used_bytes for info in answer.segments],
        segment_states=[info.state for info in answer.segments],
        counters=_counters(counted),
        tenants=[_tenant_numbers(each) for each in answer.tenants],
    ).SerializeToString()


def _counters(counted: Mapping[str, float]) -> list[pb.Counter]:
    return [pb.Counter(name=name, value=value) for name, value in counted.items()]


def _tenant_numbers(info: c.TenantInfo) -> pb.TenantNumbers:
    return pb.TenantNumbers(
        tenant=info.name,
        keys=info.keys,
        used_bytes=info.used_bytes,
        bytes_max=info.bytes_max,
        keys_max=info.keys_max,
        policy=info.policy,
        counters=_counters(info.counters),
    )


def events(answer: c.EventPage, term: int) -> bytes:
    found = answer.events
    return pb.EventsReply(
        outcome=_ok(term),
        first=found[0].sequence if found else 0,
        what=[each.what for each in found],
        tenants=[each.tenant for each in found],
        keys=[each.key for each in found],
        generations=[each.generation for each in found],
        newest=answer.newest,
        gap=answer.gap,
    ).SerializeToString()
