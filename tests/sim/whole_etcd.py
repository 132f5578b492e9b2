"""An etcd of one member, and gRPC's face of it, for masters that share it.

It keeps what the real one promises: one order of revisions, transactions that compare, reads of the
past until it is compacted, leases that end with what hangs on them, watches that leave nothing out.
It never fails by itself; the network between it and the masters does. A call may be carried out
although its answer is lost. No call comes twice, since each is a stream of its own connection.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from whole_net import ETCD, RESET, Net, RpcError
from whole_threads import Fiber, Host

from mooncake_py.wire import etcd as wire
from mooncake_py.wire.etcd import pb

_DELETE = 1


@dataclass
class _Lease:
    until_ms: int
    ttl_ms: int
    keys: set[bytes] = field(default_factory=set)


class Etcd:
    def __init__(self, net: Net) -> None:
        self._net = net
        self._world = net.world
        self._revision = 1
        self._compacted = 0
        self._now: dict[bytes, pb.KeyValue] = {}
        self._history: list[pb.WatchEvent] = []
        self._leases: dict[int, _Lease] = {}
        self._lease_ids = itertools.count(1)
        self._watching: list[tuple[pb.WatchCreateRequest, Callable[[object], None]]] = []
        net.listen(ETCD, Host("etcd"), self._receive)

    def _receive(self, sender: Host, message: object, answer: Callable[[object], None]) -> None:
        path, request = message  # type: ignore[misc]
        if path == wire.WATCH.path:
            self._watch(request, answer)
            return
        answers = {
            wire.RANGE.path: self._range, wire.TXN.path: self._txn,
            wire.COMPACT.path: self._compact, wire.LEASE_GRANT.path: self._grant,
            wire.LEASE_REVOKE.path: self._revoke, wire.LEASE_KEEP_ALIVE.path: self._keep_alive,
            wire.STATUS.path: lambda _: pb.StatusOfMemberResponse(),
        }  # fmt: skip
        try:
            answer(answers[path](request))
        except RpcError as error:
            answer(error)

    def _header(self) -> pb.EtcdHeader:
        return pb.EtcdHeader(revision=self._revision)

    # --- reads ----------------------------------------------------------------------------------

    def _range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        store = self._at(request.revision)
        if request.range_end:
            keys = sorted(key for key in store if request.key <= key < request.range_end)
        else:
            keys = [request.key] if request.key in store else []
        some = keys[: request.limit] if request.limit else keys
        found = [store[key] for key in some]
        if request.keys_only:
            found = [pb.KeyValue(key=kv.key, mod_revision=kv.mod_revision) for kv in found]
        more = len(some) < len(keys)
        return pb.RangeResponse(header=self._header(), kvs=found, more=more, count=len(keys))

    def _at(self, revision: int) -> dict[bytes, pb.KeyValue]:
        if revision in (0, self._revision):
            return self._now
        if revision < self._compacted:
            raise RpcError(grpc.StatusCode.OUT_OF_RANGE, "required revision has been compacted")
        store: dict[bytes, pb.KeyValue] = {}
        for event in self._history:
            if event.kv.mod_revision > revision:
                break
            if event.type == _DELETE:
                store.pop(event.kv.key, None)
            else:
                store[event.kv.key] = event.kv
        return store

    def _watch(self, request: pb.WatchCreateRequest, answer: Callable[[object], None]) -> None:
        """Answered once: with what happened since, or as soon as something does."""
        if request.start_revision <= self._compacted:
            answer(pb.WatchResponse(canceled=True, compact_revision=self._compacted))
            return
        events = [each for each in self._history if self._concerns(request, each)]
        if events:
            answer(pb.WatchResponse(header=self._header(), events=events))
        else:
            self._watching.append((request, answer))

    @staticmethod
    def _concerns(request: pb.WatchCreateRequest, event: pb.WatchEvent) -> bool:
        inside = request.key <= event.kv.key < request.range_end
        return inside and event.kv.mod_revision >= request.start_revision

    # --- writes ---------------------------------------------------------------------------------

    def _txn(self, request: pb.TxnRequest) -> pb.TxnResponse:
        holds = all(map(self._holds, request.compare))
        chosen = request.success if holds else request.failure
        events: list[pb.WatchEvent] = []
        responses = [self._carry_out(each, events) for each in chosen]
        self._publish(events)
        return pb.TxnResponse(header=self._header(), succeeded=holds, responses=responses)

    def _holds(self, compare: pb.Compare) -> bool:
        assert compare.result == 0, "only equality is asked for"
        kv = self._now.get(compare.key)
        if compare.WhichOneof("target_union") == "create_revision":
            return (kv.create_revision if kv else 0) == compare.create_revision
        assert compare.WhichOneof("target_union") == "mod_revision"
        return (kv.mod_revision if kv else 0) == compare.mod_revision

    def _carry_out(self, op: pb.RequestOp, events: list[pb.WatchEvent]) -> pb.ResponseOp:
        kind = op.WhichOneof("request")
        if kind == "request_range":
            return pb.ResponseOp(response_range=self._range(op.request_range))
        revision = self._revision + 1
        if kind == "request_put":
            wish = op.request_put
            if wish.lease and wish.lease not in self._leases:
                raise RpcError(grpc.StatusCode.NOT_FOUND, "requested lease not found")
            old = self._now.get(wish.key)
            kv = pb.KeyValue(
                key=wish.key, value=wish.value, lease=wish.lease, mod_revision=revision,
                create_revision=old.create_revision if old else revision,
            )  # fmt: skip
            if wish.lease:
                self._leases[wish.lease].keys.add(wish.key)
            events.append(pb.WatchEvent(kv=kv))
            return pb.ResponseOp(response_put=pb.PutResponse())
        span = op.request_delete_range
        keys = sorted(key for key in self._now if span.key <= key < span.range_end)
        events += [self._end_of(key, revision) for key in keys]
        deleted = pb.DeleteRangeResponse(deleted=len(keys))
        return pb.ResponseOp(response_delete_range=deleted)

    @staticmethod
    def _end_of(key: bytes, revision: int) -> pb.WatchEvent:
        return pb.WatchEvent(type=_DELETE, kv=pb.KeyValue(key=key, mod_revision=revision))

    def _publish(self, events: list[pb.WatchEvent]) -> None:
        """All of one revision."""
        if not events:
            return
        self._revision += 1
        self._history += events
        for event in events:
            if event.type == _DELETE:
                self._now.pop(event.kv.key, None)
            else:
                self._now[event.kv.key] = event.kv
        waiting, self._watching = self._watching, []
        for request, answer in waiting:
            self._watch(request, answer)

    def _compact(self, request: pb.CompactionRequest) -> pb.CompactionResponse:
        self._compacted = max(self._compacted, request.revision)
        return pb.CompactionResponse(header=self._header())

    # --- leases ---------------------------------------------------------------------------------

    def _grant(self, request: pb.LeaseGrantRequest) -> pb.LeaseGrantResponse:
        number, ttl_ms = next(self._lease_ids), request.ttl_seconds * 1000
        self._leases[number] = _Lease(self._world.now_ms + ttl_ms, ttl_ms)
        self._world.after(ttl_ms, lambda: self._look_at(number))
        return pb.LeaseGrantResponse(id=number, ttl_seconds=request.ttl_seconds)

    def _keep_alive(self, request: pb.LeaseKeepAliveRequest) -> pb.LeaseKeepAliveResponse:
        lease = self._leases.get(request.id)
        if lease is None:
            return pb.LeaseKeepAliveResponse(id=request.id)
        lease.until_ms = self._world.now_ms + lease.ttl_ms
        return pb.LeaseKeepAliveResponse(id=request.id, ttl_seconds=lease.ttl_ms // 1000)

    def _revoke(self, request: pb.LeaseRevokeRequest) -> pb.LeaseRevokeResponse:
        lease = self._leases.pop(request.id, None)
        if lease is not None:
            gone = sorted(
                key for key in lease.keys
                if key in self._now and self._now[key].lease == request.id
            )  # fmt: skip
            self._publish([self._end_of(key, self._revision + 1) for key in gone])
        return pb.LeaseRevokeResponse(header=self._header())

    def _look_at(self, number: int) -> None:
        """A lease may have ended."""
        lease = self._leases.get(number)
        if lease is None:
            return
        left_ms = lease.until_ms - self._world.now_ms
        if left_ms > 0:
            self._world.after(left_ms, lambda: self._look_at(number))
        else:
            self._world.note("a leader's lease has ended")
            self._revoke(pb.LeaseRevokeRequest(id=number))


# --- gRPC's face of it ----------------------------------------------------------------------------


class Channel:
    """Stands in for that of `mooncake_py.master.etcd`."""

    def __init__(self, net: Net) -> None:
        self._net = net

    def unary_unary(self, path: str, **_: object) -> Callable[..., Any]:
        def call(request: Any, timeout: float, metadata: object = None) -> Any:
            return _answer(self._net.call(ETCD, (path, request), timeout * 1000, None))

        return call

    def stream_stream(self, path: str, **_: object) -> Callable[..., Any]:
        if path == wire.LEASE_KEEP_ALIVE.path:
            return lambda requests, timeout, metadata: _Once(self._net, path, requests, timeout)
        return lambda requests, metadata: _Watching(self._net, requests)

    def close(self) -> None: ...


def _answer(found: Any) -> Any:
    if found is None:
        raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded")
    if found is RESET:
        raise RpcError(grpc.StatusCode.UNAVAILABLE, "connection reset")
    if isinstance(found, RpcError):
        raise found
    return found


class _Once:
    """A stream of one request and its answer."""

    def __init__(self, net: Net, path: str, requests: Iterator[Any], timeout: float) -> None:
        self._net, self._path, self._requests, self._timeout = net, path, requests, timeout

    def __iter__(self) -> Iterator[Any]:
        message = (self._path, next(self._requests))
        yield _answer(self._net.call(ETCD, message, self._timeout * 1000, None))

    def cancel(self) -> None: ...


class _Watching:
    """A stream of what happens, and of signs of life."""

    def __init__(self, net: Net, requests: Iterator[pb.WatchRequest | None]) -> None:
        self._net = net
        self._found: deque[pb.WatchResponse] = deque()
        self._over = False
        self._waiting: tuple[Fiber, int] | None = None
        create = next(requests)
        assert create is not None
        host = net.scheduler.me().host
        net.scheduler.start(host, lambda: self._follow(create.create_request))
        net.scheduler.start(host, lambda: self._give_signs(requests))

    def _follow(self, create: pb.WatchCreateRequest) -> None:
        wish = pb.WatchCreateRequest()
        wish.CopyFrom(create)
        while not self._over:
            message = (wire.WATCH.path, pb.WatchCreateRequest.FromString(wish.SerializeToString()))
            response = _answer(self._net.call(ETCD, message, None, None))
            self._arrived(response)
            if response.canceled:
                return
            wish.start_revision = response.events[-1].kv.mod_revision + 1

    def _give_signs(self, requests: Iterator[pb.WatchRequest | None]) -> None:
        for _ in requests:
            message = (wire.STATUS.path, pb.StatusOfMemberRequest())
            _answer(self._net.call(ETCD, message, None, None))
            self._arrived(pb.WatchResponse())

    def _arrived(self, response: pb.WatchResponse) -> None:
        self._found.append(response)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._net.scheduler.wake(*waiting)

    def __iter__(self) -> Iterator[pb.WatchResponse]:
        while True:
            while self._found:
                yield self._found.popleft()
            if self._over:
                return
            fiber = self._net.scheduler.me()
            self._waiting = (fiber, fiber.ticket)
            self._net.scheduler.park(None)

    def cancel(self) -> None:
        self._over = True
        self._wake()


# --- whether a master's process is there --------------------------------------------------------


class Sockets:
    """Stands in for the module `socket` where a follower watches the leader's process."""

    socket = object  # a type, for annotations

    def __init__(self, net: Net) -> None:
        self._net = net

    def create_connection(self, address: tuple[str, int], timeout: float) -> _Connection:
        text = f"{address[0]}:{address[1]}"
        found = self._net.call(text, "hello", timeout * 1000, None)
        if found is None:
            raise TimeoutError
        if found is RESET:
            raise ConnectionRefusedError
        assert isinstance(found, Host)
        return _Connection(self._net, found)


class _Connection:
    def __init__(self, net: Net, life: Host) -> None:
        self._net, self._life = net, life
        self._mine = net.scheduler.me().host

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None: ...

    def setblocking(self, _: bool) -> None: ...

    def recv(self, _: int) -> bytes:
        if self._life.alive or self._net.is_cut(self._mine.name, self._life.name):
            raise BlockingIOError
        return b""


class Poll:
    """Stands in for `select.poll`."""

    def __init__(self, net: Net) -> None:
        self._net = net

    def register(self, *_: object) -> None: ...

    def poll(self, ms: int) -> None:
        self._net.scheduler.park(ms)
