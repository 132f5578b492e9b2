"""The master as its clients and nodes see it: `MasterClient`, one method a call.

Rules (those of the connection are in `link.py`):
* Every call ends within its `timeout_ms`, whatever the master does.
* Batches larger than the master accepts are sent in parts and the answers joined in order. When a
  later part fails, the earlier ones have happened; the error is raised.

Thread-safe. Outcomes of single keys are in the answers' status arrays and never raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from mooncake_py.clock import Deadline
from mooncake_py.errors import MasterUnavailable, ObjectNotFound, PeerUnreachable
from mooncake_py.master import commands as c
from mooncake_py.master.disk_commands import DiskWork
from mooncake_py.master.link import PART_BYTES, MasterLink
from mooncake_py.model import KEY_MAX_BYTES, ReplicaPolicy
from mooncake_py.wire import answers, disks, lane, moves, reserved
from mooncake_py.wire.answers import (
    Beat,
    ClusterInfo,
    Grants,
    Listing,
    NodeGrant,
    Placements,
    Removed,
    Segment,
    Status,
)
from mooncake_py.wire.disks import DiskOrders
from mooncake_py.wire.inventory import (
    Inventoried,
    MountedSegment,
    Page,
    inventoried,
    inventory_request,
    mounted,
)
from mooncake_py.wire.moves import TaskBatch
from mooncake_py.wire.reserved import Reservations

if TYPE_CHECKING:
    from mooncake_py.transfer import Peer

__all__ = [
    "Beat", "ClusterInfo", "Grants", "Listing", "MasterClient", "MountedSegment", "NodeGrant",
    "Placements", "Removed", "Reservations", "Segment", "Status", "TaskBatch",
]  # fmt: skip


_REMOVE_AGAIN_MS = 50  # from a removal that was not answered for to the next try
_REPLY_MS = 20  # that a reply may take
_PAGE_MS = 200  # that a page of a removal of all waits for nodes, if none was silent before
_STILL_READ = (
    "remove it again with a timeout_ms above that time, which waits for it; or let the node answer"
)


@contextmanager
def _about_nodes() -> Iterator[None]:
    """What was not found is a node, and no miss of a cache."""
    try:
        yield
    except ObjectNotFound as error:
        error.advice = "mooncake status lists the nodes"
        raise


class MasterClient(MasterLink):
    """Calls of the master, over the hot lane where possible and gRPC otherwise."""

    # --- clients --------------------------------------------------------------------------------

    def exists(
        self, tenant: str, keys: Sequence[bytes], *, prefix: bool = False, timeout_ms: int
    ) -> Status:
        """1 or 0 a key. With prefix, the array ends with the first 0."""
        deadline = Deadline(timeout_ms, self._clock)
        found: list[bytes] = []
        for start, stop in self._parts(keys, deadline):
            request = answers.exists_request(tenant, keys[start:stop], prefix)
            present = self._call(lane.EXISTS, request, deadline).present
            found.append(present)
            if prefix and not all(present):
                break
        return answers.join_status(found)

    def locate(
        self,
        tenant: str,
        keys: Sequence[bytes],
        *,
        prefix: bool = False,
        lease_ms: int = 0,
        timeout_ms: int,
    ) -> Placements:
        """Placements under a lease (0: the master's default length)."""
        deadline = Deadline(timeout_ms, self._clock)
        replies = []
        for start, stop in self._parts(keys, deadline):
            request = answers.locate_request(tenant, keys[start:stop], prefix, lease_ms)
            reply = self._call(lane.LOCATE, request, deadline)
            replies.append((start, reply))
            if prefix and any(reply.status):
                break
        return answers.placements(replies)

    def put_start(  # noqa: PLR0913  (two of them describe the batch, two the writer)
        self,
        tenant: str,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        policy: ReplicaPolicy = ReplicaPolicy(),
        *,
        host_id: str = "",
        groups: Sequence[int] = (),
        upsert: bool = False,
        timeout_ms: int,
    ) -> Grants:
        """Reserve extents for values of these lengths in bytes. `upsert`: a key that exists is
        granted, too; its old value is found until the put end replaces it."""
        deadline = Deadline(timeout_ms, self._clock)
        ask = answers.PutAsk(tenant, policy, host_id, upsert)
        replies = []
        for start, stop in self._parts(keys, deadline):
            request = answers.put_start_request(
                ask, keys[start:stop], lengths[start:stop], groups[start:stop]
            )
            replies.append((start, self._call(lane.PUT_START, request, deadline)))
        return answers.grants(replies)

    def reserve(
        self, tenant: str, length: int, count: int, *, host_id: str = "", timeout_ms: int
    ) -> tuple[list[Reservations], int]:
        """Extents for at most `count` objects of this length that are named at the commit, and how
        many ms commits of them are accepted. Fewer, or none, when they are not to be had for
        nothing."""
        deadline = Deadline(timeout_ms, self._clock)
        request = reserved.reserve_request(tenant, length, count, host_id)
        reply = self._call(lane.RESERVE, request, deadline)
        return reserved.reservations(reply), reply.lifetime_ms

    def put_end(
        self,
        tenant: str,
        keys: Sequence[bytes],
        generations: Sequence[int],
        *,
        failed: Sequence[tuple[int, int]] = (),
        reserved: bool = False,
        timeout_ms: int,
    ) -> Status:
        """Commit. `failed`: (key index, segment id) of replicas that were not sealed. `reserved`:
        the generations are of reservations, which become these keys, if they are free."""
        deadline = Deadline(timeout_ms, self._clock)
        found = []
        for start, stop in self._parts(keys, deadline):
            mine = [(key - start, segment) for key, segment in failed if start <= key < stop]
            request = answers.put_end_request(
                tenant, keys[start:stop], generations[start:stop], mine, reserved
            )
            found.append(self._call(lane.PUT_END, request, deadline).status)
        return answers.join_status(found)

    def lane(self) -> Peer | None:
        """The open lane of the only master there is, for messages that a caller sends by itself; or
        None."""
        due = self._info is None or self._lane_retry_ms or self._route.several
        return None if due else self._peer

    def put_end_payload(
        self, tenant: str, keys: Sequence[bytes], generations: Sequence[int]
    ) -> bytes | None:
        """What `put_end` of reservations would send; None: it takes more than one call."""
        info = self._info
        if info is None or len(keys) > min(info.batch_max_keys, PART_BYTES // KEY_MAX_BYTES):
            return None
        request = answers.put_end_request(tenant, keys, generations, (), True)
        return request.SerializeToString()

    def put_ended(self, raw: bytes, *, timeout_ms: int) -> Status:
        """The outcome of a put end that the caller sent by itself. Raises what `put_end` raises;
        NotLeader is for `put_end` to go on with."""
        reply = self._judged(lane.PUT_END, raw, Deadline(timeout_ms, self._clock))
        answers.check(lane.PUT_END, reply)
        return answers.join_status([reply.status])

    def put_revoke(
        self, tenant: str, keys: Sequence[bytes], generations: Sequence[int], *, timeout_ms: int
    ) -> Status:
        """Give grants back."""
        deadline = Deadline(timeout_ms, self._clock)
        found = []
        for start, stop in self._parts(keys, deadline):
            request = answers.put_revoke_request(tenant, keys[start:stop], generations[start:stop])
            found.append(self._call(lane.PUT_REVOKE, request, deadline).status)
        return answers.join_status(found)

    def remove(
        self, tenant: str, keys: Sequence[bytes], *, force: bool = False, timeout_ms: int
    ) -> Removed:
        """Remove objects; answered once that is durable and nobody reads them any more. `force`:
        leased and pinned ones, too. PeerUnreachable: they are gone from the catalog, but a node
        could not be told, and readers' leases outlast the deadline."""
        deadline = Deadline(timeout_ms, self._clock)
        requests = [
            answers.remove_request(tenant, keys[start:stop], force)
            for start, stop in self._parts(keys, deadline)
        ]
        # All of them before any is waited for: a node that is silent holds up its own keys only.
        tried = [
            self._try_remove(request, deadline, left)
            for left, request in zip(range(len(requests), 0, -1), requests, strict=True)
        ]
        return answers.removed(
            [self._removed(*each, deadline) for each in zip(requests, tried, strict=True)]
        )

    def _try_remove(
        self, request: Any, deadline: Deadline, share: int = 1, patience_ms: int = 0
    ) -> tuple[Any, PeerUnreachable | None]:
        """The reply, and the error (not raised) of one that is done, but of which not all nodes are
        told. share: so many share the time that is left. patience_ms: for nodes; 0: all of that."""
        left_ms = deadline.left_ms() // share
        left_ms = max(1, left_ms - max(_REPLY_MS, left_ms // 10))
        request.patience_ms = min(left_ms, patience_ms or left_ms)
        reply = self._call(lane.REMOVE, request, deadline, check=False)
        try:
            answers.check(lane.REMOVE, reply)
        except PeerUnreachable as error:
            return reply, PeerUnreachable(error.cause, remedy=_STILL_READ)
        return reply, None

    def _removed(
        self, request: Any, tried: tuple[Any, PeerUnreachable | None], deadline: Deadline
    ) -> Any:
        """While a node cannot be told, the master answers now and then: ask until it is told or
        nobody has a lease any more."""
        while (unread := tried[1]) is not None:
            if deadline.left_ms() <= _REMOVE_AGAIN_MS:
                raise unread
            self._pause.wait(_REMOVE_AGAIN_MS / 1000)
            with suppress(MasterUnavailable):  # what is known is more than that
                tried = self._try_remove(request, deadline)
        return tried[0]

    def remove_all(
        self,
        tenant: str,
        prefix: bytes = b"",
        *,
        pattern: bytes = b"",
        force: bool = False,
        timeout_ms: int,
    ) -> Removed:
        """Remove every object of the tenant whose key begins with `prefix` and in which `pattern`
        is found (syntax: `pattern.py`), in as many calls as it takes. UsageError: the pattern is
        not one. MasterUnavailable after the deadline: some are removed, some are not.
        PeerUnreachable: all of them are, as for `remove`."""
        deadline = Deadline(timeout_ms, self._clock)
        removal = c.Remove(tenant, (), force, True, prefix, pattern)
        replies: list[Any] = []
        cursor, patience_ms = b"", _PAGE_MS
        while True:
            request = answers.remove_all_request(removal, cursor)
            tried = self._try_remove(request, deadline, patience_ms=patience_ms)
            cursor = tried[0].cursor
            if not cursor:  # the last one answers for what those before have left to be read, too
                return answers.removed([*replies, self._removed(request, tried, deadline)])
            replies.append(tried[0])
            if tried[1] is not None:
                patience_ms = 1

    def pin(
        self,
        tenant: str,
        keys: Sequence[bytes],
        soft_pin_ms: int = 0,
        hard_pin: bool = False,
        *,
        timeout_ms: int,
    ) -> Status:
        """Each object is pinned so from now on, in place of any other pin; neither: not at all."""
        deadline = Deadline(timeout_ms, self._clock)
        found = []
        for start, stop in self._parts(keys, deadline):
            request = answers.pin_request(tenant, keys[start:stop], soft_pin_ms, hard_pin)
            found.append(self._call(lane.PIN, request, deadline).status)
        return answers.join_status(found)

    def list(
        self,
        tenant: str,
        prefix: bytes = b"",
        *,
        after: bytes = b"",
        limit: int = 1_000,
        timeout_ms: int,
    ) -> Listing:
        """One page of complete objects in key order, beginning behind the key `after`."""
        request = answers.list_request(tenant, prefix, after, limit)
        return answers.listing(self._call(lane.LIST, request, Deadline(timeout_ms, self._clock)))

    def report(  # noqa: PLR0913  (columns of one table)
        self,
        tenant: str,
        keys: Sequence[bytes],
        generations: Sequence[int],
        segment_ids: Sequence[int],
        codes: Sequence[int],
        *,
        incarnations: Sequence[int] = (),
        timeout_ms: int,
    ) -> None:
        """Placements that could not be read, each with the error's code."""
        deadline = Deadline(timeout_ms, self._clock)
        for start, stop in self._parts(keys, deadline):
            part = c.Report(
                tenant, keys[start:stop], generations[start:stop], segment_ids[start:stop],
                codes[start:stop], incarnations[start:stop],
            )  # fmt: skip
            self._call(lane.REPORT, answers.report_request(part), deadline)

    # --- nodes and tools ------------------------------------------------------------------------

    def mount(self, mount: c.Mount, cluster_id: str = "", *, timeout_ms: int) -> MountedSegment:
        """Offer a segment, mounted before in this cluster. UsageError: the name is taken."""
        deadline = Deadline(timeout_ms, self._clock)
        request = answers.mount_request(mount, cluster_id)
        return mounted(self._call(lane.MOUNT, request, deadline))

    def inventory(self, page: Page, *, timeout_ms: int) -> Inventoried:
        """One page of what a node holds. ObjectNotFound: it is not mounted there."""
        deadline = Deadline(timeout_ms, self._clock)
        request = inventory_request(page)
        return inventoried(self._call(lane.INVENTORY, request, deadline))

    def heartbeat(self, heartbeat: c.Heartbeat, *, timeout_ms: int) -> Beat:
        """Not `known`: mount again."""
        deadline = Deadline(timeout_ms, self._clock)
        request = answers.heartbeat_request(heartbeat)
        return answers.beat(self._call(lane.HEARTBEAT, request, deadline, check=False))

    def tasks(self, tasks: c.Tasks, *, timeout_ms: int) -> TaskBatch:
        """Report tasks and fetch others. Not `known`: mount again."""
        deadline = Deadline(timeout_ms, self._clock)
        request = moves.tasks_request(tasks)
        return moves.task_batch(self._call(lane.TASKS, request, deadline, check=False))

    def copy(self, copy: c.CopyObjects, *, timeout_ms: int) -> Status:
        """Have objects copied or moved to a node. A status a key, at once: OK when it is so,
        BACKPRESSURE while it is in the making: ask again. Raises ObjectNotFound: no such node."""
        deadline = Deadline(timeout_ms, self._clock)
        found = []
        with _about_nodes():
            for start, stop in self._parts(copy.keys, deadline):
                request = moves.copy_request(copy, copy.keys[start:stop])
                found.append(self._call(lane.COPY, request, deadline).status)
        return answers.join_status(found)

    def drain(self, drain: c.Drain, *, timeout_ms: int) -> c.DrainInfo:
        """Begin to empty a node or segment, or ask how far that is. Raises ObjectNotFound: there is
        none of this name; it may have left, or be away."""
        deadline = Deadline(timeout_ms, self._clock)
        with _about_nodes():
            return moves.drain_info(self._call(lane.DRAIN, moves.drain_request(drain), deadline))

    def disk_work(self, work: DiskWork, *, timeout_ms: int) -> DiskOrders:
        """Tell what a disk did and has, and take its work. Not `known`: mount again."""
        deadline = Deadline(timeout_ms, self._clock)
        return disks.orders(self._call(lane.DISK_WORK, disks.request(work), deadline, check=False))

    def unmount(self, unmount: c.Unmount, *, timeout_ms: int) -> None:
        """Withdraw a segment; its objects are forgotten."""
        deadline = Deadline(timeout_ms, self._clock)
        self._call(lane.UNMOUNT, answers.unmount_request(unmount), deadline)

    def status(self, *, timeout_ms: int) -> c.StatusInfo:
        """Numbers of the cluster and of the master."""
        deadline = Deadline(timeout_ms, self._clock)
        return answers.status_info(self._call(lane.STATUS, answers.status_request(), deadline))

    def set_quota(self, quota: c.SetQuota, *, timeout_ms: int) -> None:
        """What a tenant may hold from now on; answered once that is durable. UsageError: there is
        no such policy."""
        deadline = Deadline(timeout_ms, self._clock)
        self._call(lane.SET_QUOTA, answers.set_quota_request(quota), deadline)

    def events(self, after: int = 0, *, limit: int = 1_000, timeout_ms: int) -> c.EventPage:
        """What happened to objects after this sequence number, oldest first. With `gap` the caller
        lists the keys anew and goes on from the answer's `newest` as it was before the listing."""
        deadline = Deadline(timeout_ms, self._clock)
        request = answers.events_request(after, limit)
        return answers.event_page(self._call(lane.EVENTS, request, deadline))
