"""What a call of the master does: request bytes in, reply bytes out, records to be kept.

One `Service` is used by one thread, the owner of the catalog (`owner.py`); neither door decides
anything. It adds to the pure catalog what that must not know: protocol versions, the cluster's
secret and what is derived from it, random numbers, and the descriptions of segments in replies.

Secrets, all derived from the cluster's one by keyed BLAKE2b, so that a restarted master makes the
same ones: the grant secret of a segment (known to its node, which checks the macs of grants) and
the digest secret of a tenant (by way of the name secret, known to all nodes: they check that the
names they keep are those that the master granted).
"""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from mooncake_py._native import memory
from mooncake_py._native.pulls import grant_mac, row_macs
from mooncake_py.errors import (
    InternalError,
    MooncakeError,
    OutOfSpace,
    VersionMismatch,
    error_of,
)
from mooncake_py.master import commands as c
from mooncake_py.master import node_log
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.disk_commands import DiskTasks, DiskWork
from mooncake_py.master.lease import LEASE_MARGIN_MS
from mooncake_py.master.membership import ALIVE, DRAINING
from mooncake_py.master.shortage_log import ShortageLog
from mooncake_py.master.snapshots import Slices
from mooncake_py.master.unsealer import Order
from mooncake_py.model import BATCH_MAX_KEYS, EXTENT_ROW, PROTOCOL_MAJOR, PROTOCOL_MINOR, RELEASE
from mooncake_py.wire import convert, disks, lane
from mooncake_py.wire.lane import Method
from mooncake_py.wire.status import refusal

log = logging.getLogger(__name__)

TENANT_SECRETS_MAX = 1024
UNSEAL_BYTES_MAX = 8 << 20  # of rows that wait for one segment's heartbeats; records outlive them
UNSEAL_BYTES_PER_BEAT = 1 << 20
_DIGEST_AT = 40  # in an EXTENT_ROW


@dataclass(slots=True)
class Answer:
    """`payload` is the reply; with `durable_first` it leaves after `records` are durable."""

    payload: bytes
    code: int = 0
    records: list[bytes] = field(default_factory=list)
    durable_first: bool = False
    term_wanted: int = 0  # refused until this term is durable and begun
    again: bool = False  # there is no reply yet: handle the same call once more, after others
    orders: Sequence[Order] = ()  # for nodes, to be carried out before the reply
    patience_ms: int = 0  # that the caller has for this; 0: unknown


@dataclass(frozen=True, slots=True)
class Cluster:
    """Who this master is, in replies."""

    cluster_id: str
    secret: bytes
    term: int
    heartbeat_ms: int


class Service:
    """Owner thread only."""

    def __init__(self, catalog: Catalog, cluster: Cluster) -> None:
        self._catalog = catalog
        self._cluster = cluster
        self._lane_address = ""
        self._counters: Callable[[], Mapping[str, float]] = dict
        self._name_secret = blake2b(b"names", key=cluster.secret, digest_size=16).digest()
        self._tenant_secrets: dict[str, bytes] = {}
        self._segments: dict[int, tuple[c.SegmentInfo, Any]] = {}
        self._unseal: dict[int, deque[bytes]] = {}  # rows of one effect each
        self._unseal_nbytes: defaultdict[int, int] = defaultdict(int)
        self._edge = convert.Edge(self._digests, lambda: secrets.randbits(64), cluster.cluster_id)
        self._adopts = catalog.adopts_segments
        self._nodes = node_log.NodeLog()
        self._shortages = ShortageLog()
        self.version_refusals = 0
        self.behind = False  # the last tick left work that was due

    def offer(self, lane_address: str, counters: Callable[[], Mapping[str, float]]) -> None:
        """Before the first call: the lane's address ("" for none), and the process's counters."""
        self._lane_address = lane_address
        self._counters = counters

    def handle(self, method: Method, payload: bytes, now_ms: int) -> Answer:
        """Answer one call. Never raises: a defect of ours is an answer, too."""
        try:
            request = convert.parse(method, payload)
            if method is lane.CONNECT:
                return self._connect(request)
            if method is lane.MOUNT:
                self._check_version("node", request)
            command = convert.command(method, request, self._edge)
            applied = self._catalog.apply(command, now_ms)
            self._keep(applied.effects)
            if method is lane.MOUNT:
                self._report_adoption()
                self._nodes.look(self._catalog.state.members, now_ms, node_log.REPLACED)
            elif method is lane.UNMOUNT:
                self._nodes.look(self._catalog.state.members, now_ms, node_log.LEFT)
            if isinstance(applied.reply, c.Granted) and OutOfSpace.code in applied.reply.status:
                assert isinstance(command, c.PutStart)
                members = self._catalog.state.members
                self._shortages.look(command, applied.reply, members, now_ms)
            if isinstance(applied.reply, c.Refused):
                error = error_of(applied.reply.code, applied.reply.cause)
                refused = self._refused(method, error, applied.records)
                refused.term_wanted = applied.term_wanted
                return refused
            if isinstance(applied.reply, c.Again):
                return Answer(b"", records=applied.records, again=True)
            return Answer(
                self._reply(method, command, applied.reply, now_ms),
                0,
                applied.records,
                applied.durable_first,
                orders=self._orders(applied, now_ms) if applied.durable_first else (),
                patience_ms=command.patience_ms if isinstance(command, c.Remove) else 0,
            )
        except MooncakeError as error:
            return self._refused(method, error)
        except Exception as error:
            log.exception("%s failed", method.name)
            evidence = f"{method.name} failed in the master: {type(error).__name__}: {error}"
            return self._refused(method, InternalError(evidence))

    def tick(self, now_ms: int, evict_max: int | None = None, excused_ms: int = 0) -> list[bytes]:
        """Let time pass in the catalog; its records. evict_max 0: what a master does that can
        record nothing. It judges no node either: those that it answers NotLeader look for another
        master and may be stuck with one that is silent, and others wait for a mount's record."""
        command = c.Tick(excused_ms=excused_ms)
        if evict_max is not None:
            command = c.Tick(evict_max, bury=evict_max > 0, excused_ms=excused_ms)
        applied = self._catalog.apply(command, now_ms)
        self.behind = isinstance(applied.reply, c.Done) and applied.reply.more
        self._keep(applied.effects)
        self._nodes.look(self._catalog.state.members, now_ms, node_log.SILENT)
        return applied.records

    @property
    def term(self) -> int:
        return self._cluster.term

    def raise_term(self, term: int) -> list[bytes]:
        """Go on in this term, which is durable; its records. A smaller one changes nothing."""
        if term <= self._cluster.term:
            return []
        log.warning("what a lost cluster left is as young as this one: term %d begins", term)
        self._cluster = replace(self._cluster, term=term)
        return self._catalog.raise_term(term)

    def _report_adoption(self) -> None:
        adopts = self._catalog.adopts_segments
        if adopts and not self._adopts:
            log.warning(
                "nodes bring objects of a cluster whose metadata is lost. Its tenants' quotas are "
                "lost with it. Remedy: set quotas again (mooncake quota); `objects_adopted` counts "
                "what is back, of memory and of disks"
            )
        self._adopts = adopts

    def removes_all(self, payload: bytes) -> bool:
        """Of a Remove: is it one by prefix or pattern, which costs as much as many others?"""
        try:
            request: Any = convert.parse(lane.REMOVE, payload)
            return bool(request.all)
        except MooncakeError:
            return False  # whoever serves it says what is wrong

    def settle(
        self, tenant: str, keys: Sequence[bytes], generations: Sequence[int], at_ms: int
    ) -> list[bytes]:
        """Commit reservations as was promised already (quick.py); the records."""
        records: list[bytes] = []
        for start in range(0, len(keys), BATCH_MAX_KEYS):
            some = slice(start, start + BATCH_MAX_KEYS)
            command = c.PutEnd(tenant, keys[some], generations[some], reserved=True)
            try:
                applied = self._catalog.apply(command, at_ms)
            except Exception:
                log.exception("%d acknowledged puts were lost", len(keys[some]))
                continue
            self._keep(applied.effects)
            records += applied.records
            if not isinstance(applied.reply, c.Statuses) or any(applied.reply.status):
                log.error("puts were acknowledged that the catalog refuses: %r", applied.reply)
        return records

    def slices(self, now_ms: int) -> Slices:
        """Begin a snapshot."""
        return self._catalog.slices(now_ms)

    def refuse(self, method: Method, error: MooncakeError) -> bytes:
        """The reply for a call that is not even tried. Any thread."""
        return refusal(method, error, self._cluster.term)

    def _refused(
        self, method: Method, error: MooncakeError, records: Sequence[bytes] = ()
    ) -> Answer:
        return Answer(self.refuse(method, error), error.code, list(records))

    # --- calls that are not the catalog's -------------------------------------------------------

    def _connect(self, request: Any) -> Answer:
        self._check_version(request.role or "client", request)
        cluster = self._cluster
        return Answer(
            convert.connected(cluster.term, cluster.cluster_id, RELEASE, self._lane_address)
        )

    def _check_version(self, role: str, request: Any) -> None:
        if request.protocol_major != PROTOCOL_MAJOR:
            self.version_refusals += 1
            theirs = f"{request.protocol_major}.{request.protocol_minor}"
            raise VersionMismatch(
                f"this {role} speaks protocol {theirs}, the master {PROTOCOL_MAJOR}."
                f"{PROTOCOL_MINOR} (release {RELEASE})"
            )

    # --- replies --------------------------------------------------------------------------------

    def _reply(self, method: Method, command: c.Command, reply: c.Reply, now_ms: int) -> bytes:
        """Match on what the catalog answered; in the order of how often it does."""
        term = self._cluster.term
        match reply:
            case c.Present():
                return convert.present(reply, term)
            case c.Located():
                return convert.located(reply, term, self._describe(reply.segment_ids))
            case c.Granted():
                if reply.part_rows and isinstance(command, c.PutStart):
                    reply = self._with_digests(command.tenant, reply)
                pairs = zip(reply.segment_ids, reply.rows, strict=True)
                macs = [self._mac(segment_id, rows) for segment_id, rows in pairs]
                return convert.granted(reply, term, self._describe(reply.segment_ids), macs)
            case c.Reserved():
                pairs = zip(reply.segment_ids, reply.rows, strict=True)
                macs = [row_macs(each, rows, self.grant_secret(each)) for each, rows in pairs]
                return convert.reserved(reply, term, self._describe(reply.segment_ids), macs)
            case c.Statuses():
                return convert.statuses(method, reply, term)
            case _:
                return self._rare_reply(method, command, reply, now_ms)

    def _rare_reply(self, method: Method, command: c.Command, reply: c.Reply, now_ms: int) -> bytes:
        term = self._cluster.term
        match reply:
            case c.Listed():
                return convert.listed(reply, term)
            case c.StatusInfo():
                return convert.status(reply, term, self._counters())
            case c.Mounted():
                return convert.mounted(reply, self._terms(reply.segment_id, now_ms), term)
            case c.Done() if isinstance(command, c.Heartbeat):
                return convert.beat(term, now_ms, self._to_unseal(command.segment_id), reply.tasks)
            case c.TaskList():
                digests = [
                    self._digests(each.name.tenant, [each.name.key]) for each in reply.copies
                ]
                return convert.tasks(reply, term, self._describe(reply.segment_ids), digests)
            case c.DrainInfo():
                return convert.drained(reply, term)
            case c.Done():
                return convert.done(method, term)
            case c.Inventoried():
                return convert.inventoried(reply, term)
            case DiskTasks():
                segment_id = command.segment_id if isinstance(command, DiskWork) else 0
                return disks.reply(reply, term, self._to_unseal(segment_id))
            case c.EventPage():
                return convert.events(reply, term)
        raise InternalError(f"{method.name}: the catalog answered {type(reply).__name__}")

    def _terms(self, segment_id: int, now_ms: int) -> convert.MountTerms:
        return convert.MountTerms(
            segment_id,
            self.grant_secret(segment_id),
            now_ms,
            self._cluster.heartbeat_ms,
            self._lane_address,
            self._cluster.cluster_id,
            self._name_secret,
        )

    def _describe(self, segment_ids: Sequence[int]) -> list[Any]:
        """Segment messages, made once for as long as the segment stays the same."""
        messages = []
        for segment_id in segment_ids:
            info = self._catalog.segment(segment_id)
            if info is None:
                raise InternalError(f"the catalog names segment {segment_id} and does not know it")
            known = self._segments.get(segment_id)
            if known is None or known[0].incarnation != info.incarnation:
                known = self._segments[segment_id] = (info, convert.segment(info))
            messages.append(known[1])
        return messages

    # --- effects --------------------------------------------------------------------------------

    def _keep(self, effects: Sequence[c.Effect]) -> None:
        """Effects wait for the node's next heartbeat. The oldest are dropped beyond a bound: what
        they say is in the records as well."""
        for effect in effects:
            waiting = self._unseal.setdefault(effect.segment_id, deque())
            waiting.append(effect.rows)
            self._unseal_nbytes[effect.segment_id] += len(effect.rows)
            while self._unseal_nbytes[effect.segment_id] > UNSEAL_BYTES_MAX:
                self._unseal_nbytes[effect.segment_id] -= len(waiting.popleft())

    def _orders(self, applied: c.Applied, now_ms: int) -> list[Order]:
        """For nodes that are there, and for leases that have to end. A node that is silent may
        still be read from, so it is told of what somebody may read."""
        orders = []
        for effect in applied.effects:
            info = self._catalog.segment(effect.segment_id)
            there = info is not None and info.state in (ALIVE, DRAINING)
            if info is not None and (there or effect.read_until_ms + LEASE_MARGIN_MS > now_ms):
                secret = self.grant_secret(effect.segment_id)
                known = (info.address, effect.segment_id, secret, effect.rows)
                orders.append(Order(*known, effect.read_until_ms, info.node))
        if applied.hold_until_ms + LEASE_MARGIN_MS > now_ms:
            orders.append(Order("", 0, b"", b"", applied.hold_until_ms))
        return orders

    def told(self, unsealed: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Nodes have unsealed these: (segment id, generations)."""
        for segment_id, generations in unsealed:
            self._catalog.told(segment_id, generations)

    def _to_unseal(self, segment_id: int) -> bytes:
        waiting = self._unseal.get(segment_id)
        if not waiting:
            return b""
        taken = [waiting.popleft()]
        nbytes = len(taken[0])
        while waiting and nbytes + len(waiting[0]) <= UNSEAL_BYTES_PER_BEAT:
            taken.append(waiting.popleft())
            nbytes += len(taken[-1])
        self._unseal_nbytes[segment_id] -= nbytes
        if not waiting:
            del self._unseal[segment_id]
        return b"".join(taken)

    # --- secrets --------------------------------------------------------------------------------

    def grant_secret(self, segment_id: int) -> bytes:
        name = b"grant" + segment_id.to_bytes(8, "little")
        return blake2b(name, key=self._cluster.secret, digest_size=32).digest()

    def _mac(self, segment_id: int, rows: bytes) -> bytes:
        return grant_mac(segment_id, rows, self.grant_secret(segment_id))

    def _with_digests(self, tenant: str, granted: c.Granted) -> c.Granted:
        """Further parts of striped objects have keys, and therefore digests, of their own."""
        rows = [bytearray(each) for each in granted.rows]
        digests = self._digests(tenant, [key for _, _, key in granted.part_rows])
        for number, (entry, row, _) in enumerate(granted.part_rows):
            start = row * EXTENT_ROW.size + _DIGEST_AT
            rows[entry][start : start + 16] = digests[16 * number : 16 * number + 16]
        return replace(granted, rows=[bytes(each) for each in rows])

    def _digests(self, tenant: str, keys: Sequence[bytes]) -> bytes:
        secret = self._tenant_secrets.get(tenant)
        if secret is None:
            if len(self._tenant_secrets) >= TENANT_SECRETS_MAX:
                self._tenant_secrets.clear()
            secret = memory.digests((tenant.encode(),), self._name_secret)
            self._tenant_secrets[tenant] = secret
        return memory.digests(keys, secret)
