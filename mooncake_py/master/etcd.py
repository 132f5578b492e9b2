"""The one file that knows etcd: addresses, calls, leases, watches; no idea of what is stored.

Rules:
* Every call has one deadline for all that happens below it. Members are tried one after the other
  within it, the last good one first; one that is dead, frozen or cut off costs `MEMBER_MS` and is
  left aside for a while. A member that cannot reach the others answers nothing, or an error: it is
  treated the same.
* A transaction that may have arrived is not sent again: `Unclear` is raised, and whoever wrote it
  looks at what is there (`txn`'s compares make that possible). All other calls may be repeated.
* A watch asks for a sign of life when nothing happens; a member that gives none is left, and the
  watch goes on at another one behind the last event that was seen. When that is compacted away,
  `Compacted` is raised: the watcher reads everything again.
* Tokens of user and password are fetched when needed and again when they have expired.

Every failure is `MasterUnavailable` or a subclass. Thread-safe; a `Watch` is for one thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qs, unquote

import grpc

from mooncake_py.clock import Clock, Deadline
from mooncake_py.config import join_address, split_address
from mooncake_py.errors import MasterUnavailable, UsageError
from mooncake_py.wire import etcd as wire
from mooncake_py.wire.etcd import EtcdCall, pb

log = logging.getLogger(__name__)

PORT = 2379
MEMBER_MS = 750  # how long one member may keep a call waiting while there are others
ASIDE_MS = 2_000  # until a member that failed is tried before the others again
SIGN_MS = 500  # between two requests for a sign of life on a silent watch
QUIET_MS = 10_000  # a watch that finds no member says so this seldom
SILENT_MS = 2_000  # a watch without any is moved to another member

_CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]


class Unclear(MasterUnavailable):
    """A transaction was sent and its outcome is not known."""


class Compacted(MasterUnavailable):
    """The revision that was asked for is compacted away."""


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """`etcd://[user:password@]host[:port][,host[:port]...][/prefix]`, or `etcds://` for TLS, with
    `?ca=FILE&cert=FILE&key=FILE` (each optional: the system's authorities, no client certificate).
    """

    members: tuple[str, ...]
    prefix: str  # begins and ends with a slash
    user: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    files: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def matches(text: str) -> bool:
        return text.startswith(("etcd://", "etcds://"))

    @classmethod
    def parse(cls, text: str) -> EtcdAddress:
        """UsageError: not of this form."""
        scheme, _, rest = text.partition("://")
        rest, _, query = rest.partition("?")
        who, at, rest = rest.rpartition("@")
        hosts, _, prefix = rest.partition("/")
        user, _, password = who.partition(":")
        files = {name: values[-1] for name, values in parse_qs(query).items()}
        members = tuple(_member(host) for host in hosts.replace(";", ",").split(","))
        unknown = files.keys() - {"ca", "cert", "key"}
        if scheme not in ("etcd", "etcds") or unknown or (files and scheme == "etcd"):
            raise UsageError(
                "this is no address of etcd",
                remedy="write etcd://h1:2379,h2,h3/prefix, or etcds://...?ca=FILE&cert=FILE&key=FILE",
            )
        if at and not (user and password):
            raise UsageError("the address of etcd needs user:password before the @, or neither")
        name = prefix.strip("/") or "mooncake"
        return cls(
            members, f"/{name}/", unquote(user), unquote(password), scheme == "etcds",
            tuple(sorted(files.items())),
        )  # fmt: skip

    def __str__(self) -> str:
        scheme = "etcds" if self.tls else "etcd"
        return f"{scheme}://{','.join(self.members)}{self.prefix.rstrip('/')}"


def _member(text: str) -> str:
    bare = text.strip()
    if not bare:
        raise UsageError("the address of etcd names a member without a host")
    if bare.endswith("]") or ":" not in bare:
        bare = f"{bare}:{PORT}"
    return join_address(*split_address(bare))


def prefix_end(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin with `prefix` (which must not end in 0xff)."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


@dataclass(slots=True)
class _Member:
    address: str
    channel: grpc.Channel
    unary: dict[str, Callable[..., Any]] = field(default_factory=dict)
    aside_until_ms: int = 0


class EtcdClient:
    """Calls of an etcd cluster. Nothing is connected before the first call."""

    def __init__(self, address: EtcdAddress, clock: Clock) -> None:
        self._address = address
        self.clock = clock
        credentials = _credentials(address)
        self._members = [_Member(m, _channel(m, credentials)) for m in address.members]
        self._current = 0
        self._token = ""
        self._lock = threading.Lock()
        self._closed = False

    # --- calls ----------------------------------------------------------------------------------

    def range(self, request: pb.RangeRequest, timeout_ms: int) -> pb.RangeResponse:
        """Compacted: the request names a revision that is gone."""
        return cast(pb.RangeResponse, self._call(wire.RANGE, request, timeout_ms))

    def get(self, key: bytes, timeout_ms: int) -> tuple[pb.KeyValue | None, int]:
        """What is under the key, and the store's revision."""
        reply = self.range(pb.RangeRequest(key=key), timeout_ms)
        return (reply.kvs[0] if reply.kvs else None), reply.header.revision

    def txn(
        self,
        compares: Sequence[pb.Compare],
        then: Sequence[pb.RequestOp],
        otherwise: Sequence[pb.RequestOp] = (),
        *,
        timeout_ms: int,
    ) -> pb.TxnResponse:
        """Unclear: it was sent, and no answer came."""
        request = pb.TxnRequest(compare=compares, success=then, failure=otherwise)
        return cast(pb.TxnResponse, self._call(wire.TXN, request, timeout_ms))

    def compact(self, revision: int, timeout_ms: int) -> None:
        try:
            self._call(wire.COMPACT, pb.CompactionRequest(revision=revision), timeout_ms)
        except Compacted:
            return  # somebody else did

    def lease_grant(self, ttl_seconds: int, timeout_ms: int) -> int:
        """A new lease. An answer that is lost leaves one behind, which ends by itself."""
        request = pb.LeaseGrantRequest(ttl_seconds=ttl_seconds)
        reply = cast(pb.LeaseGrantResponse, self._call(wire.LEASE_GRANT, request, timeout_ms))
        return reply.id

    def lease_revoke(self, lease: int, timeout_ms: int) -> None:
        self._call(wire.LEASE_REVOKE, pb.LeaseRevokeRequest(id=lease), timeout_ms)

    def lease_keep_alive(self, lease: int, timeout_ms: int) -> int:
        """Seconds that the lease lasts from when etcd answered; 0: it has ended."""
        request = pb.LeaseKeepAliveRequest(id=lease)
        reply = self._call(wire.LEASE_KEEP_ALIVE, request, timeout_ms)
        return int(cast(pb.LeaseKeepAliveResponse, reply).ttl_seconds)

    def status(self, timeout_ms: int) -> pb.StatusOfMemberResponse:
        """Sizes and leader as one member sees them."""
        reply = self._call(wire.STATUS, pb.StatusOfMemberRequest(), timeout_ms)
        return cast(pb.StatusOfMemberResponse, reply)

    def watch(self, prefix: bytes, after_revision: int) -> Watch:
        """Events of keys that begin with `prefix`, beginning behind a revision."""
        return Watch(self, prefix, after_revision)

    def close(self) -> None:
        """Running calls of other threads end as MasterUnavailable. Harmless twice."""
        self._closed = True
        for member in self._members:
            member.channel.close()

    # --- one call -------------------------------------------------------------------------------

    def _call(self, call: EtcdCall, request: Any, timeout_ms: int) -> Any:
        deadline = Deadline(timeout_ms, self.clock)
        failure: MasterUnavailable | None = None
        while not self._closed:
            for member in self._in_order():
                left_ms = deadline.left_ms()
                if left_ms == 0:
                    raise failure or self._unavailable(call, f"no answer in {timeout_ms} ms")
                wait_ms = min(left_ms, MEMBER_MS) if len(self._members) > 1 else left_ms
                try:
                    reply = self._attempt(member, call, request, wait_ms)
                except grpc.RpcError as error:
                    failure = self._judge(member, call, error)
                else:
                    self._current = self._members.index(member)
                    member.aside_until_ms = 0
                    return reply
            self._pause(min(50, deadline.left_ms()))
        raise self._unavailable(call, "this client is closed")

    def _attempt(self, member: _Member, call: EtcdCall, request: Any, timeout_ms: int) -> Any:
        metadata = self._metadata(member, timeout_ms) if call is not wire.AUTHENTICATE else None
        seconds = timeout_ms / 1000
        try:
            if call is wire.LEASE_KEEP_ALIVE:
                stream = self._stream(member, call)(
                    iter([request]), timeout=seconds, metadata=metadata
                )
                try:
                    return next(iter(stream))
                finally:
                    stream.cancel()
            unary = member.unary.get(call.path)
            if unary is None:
                unary = member.unary[call.path] = member.channel.unary_unary(
                    call.path,
                    request_serializer=call.request.SerializeToString,
                    response_deserializer=call.reply.FromString,
                )
            return unary(request, timeout=seconds, metadata=metadata)
        except (ValueError, StopIteration):  # closed by another thread; or no answer on a stream
            raise self._unavailable(call, "the connection was closed") from None

    @staticmethod
    def _stream(member: _Member, call: EtcdCall) -> Callable[..., Any]:
        return cast(
            Callable[..., Any],
            member.channel.stream_stream(
                call.path,
                request_serializer=call.request.SerializeToString,
                response_deserializer=call.reply.FromString,
            ),
        )

    def _metadata(self, member: _Member, timeout_ms: int) -> tuple[tuple[str, str], ...] | None:
        if not self._address.user:
            return None
        with self._lock:
            token = self._token
        if not token:
            request = pb.AuthenticateRequest(
                name=self._address.user, password=self._address.password
            )
            token = self._attempt(member, wire.AUTHENTICATE, request, timeout_ms).token
            with self._lock:
                self._token = token
        return (("token", token),)

    def _judge(self, member: _Member, call: EtcdCall, error: Any) -> MasterUnavailable:
        """What a failed attempt means: raised when trying elsewhere cannot help, else returned."""
        code, details = error.code(), error.details() or ""
        kind = grpc.StatusCode
        if "compacted" in details:
            raise Compacted(f"{self._address}: {details}") from None
        if code == kind.UNAUTHENTICATED or "invalid auth token" in details:
            self._token = ""
            return self._unavailable(call, details)
        if code not in (
            kind.UNAVAILABLE, kind.DEADLINE_EXCEEDED, kind.CANCELLED, kind.INTERNAL, kind.UNKNOWN
        ):  # fmt: skip
            raise self._unavailable(call, details) from None
        member.aside_until_ms = self.clock.now_ms() + ASIDE_MS
        log.debug("etcd member %s: %s", member.address, details)
        if not call.repeatable and not _never_sent(code, details):
            raise Unclear(f"{call.name} of {self._address}: {details}") from None
        return self._unavailable(call, details)

    def _in_order(self) -> list[_Member]:
        """The last good one first; those that failed lately last."""
        now_ms = self.clock.now_ms()
        turned = self._members[self._current :] + self._members[: self._current]
        return sorted(turned, key=lambda member: max(0, member.aside_until_ms - now_ms))

    def _pause(self, ms: int) -> None:
        threading.Event().wait(ms / 1000)

    def _unavailable(self, call: EtcdCall, cause: str) -> MasterUnavailable:
        return MasterUnavailable(
            f"etcd at {self._address}: {call.name}: {cause}",
            remedy="look at the etcd cluster; a running master goes on by itself once it answers, "
            "one that ended is to be started again",
        )


class Watch:
    """Events behind a revision, in order, none left out. One thread; `close` from any."""

    def __init__(self, client: EtcdClient, prefix: bytes, after_revision: int) -> None:
        self._client = client
        self._prefix = prefix
        self.revision = after_revision  # everything up to it was given
        self.heard_ms = client.clock.now_ms()  # when a member answered last
        self._stream: _Stream | None = None
        self._quiet_until_ms = 0
        self._closed = False

    def events(self, timeout_ms: int) -> list[pb.WatchEvent]:
        """What happened; empty when nothing did within the time. Compacted: read all again."""
        deadline = Deadline(timeout_ms, self._client.clock)
        while not self._closed:
            stream = self._stream
            if stream is None:
                stream = self._stream = self._open()
            response = stream.next(min(deadline.left_ms(), SIGN_MS))
            if response is not None:
                self.heard_ms = self._client.clock.now_ms()
            if response is None and not stream.lost():
                if deadline.passed():
                    return []
                continue
            if response is None or response.canceled:
                self._leave(stream, response)
                if deadline.passed():
                    return []
                self._client._pause(min(50, deadline.left_ms()))
                continue
            found = list(response.events)
            if found:
                self.revision = max(self.revision, found[-1].kv.mod_revision)
                return found
        return []

    def close(self) -> None:
        self._closed = True
        if self._stream is not None:
            self._stream.cancel()

    def _open(self) -> _Stream:
        client = self._client
        member = client._in_order()[0]
        create = pb.WatchCreateRequest(
            key=self._prefix, range_end=prefix_end(self._prefix), start_revision=self.revision + 1
        )
        return _Stream(client, member, pb.WatchRequest(create_request=create))

    def _leave(self, stream: _Stream, response: Any) -> None:
        stream.cancel()
        self._stream = None
        if response is not None and response.compact_revision:
            raise Compacted(f"{self._prefix!r} is compacted up to {response.compact_revision}")
        now_ms = self._client.clock.now_ms()
        stream.member.aside_until_ms = now_ms + ASIDE_MS
        why = response.cancel_reason if response is not None else stream.why
        level = logging.INFO if now_ms >= self._quiet_until_ms else logging.DEBUG
        self._quiet_until_ms = now_ms + QUIET_MS
        log.log(level, "the watch leaves etcd member %s: %s", stream.member.address, why)


class _Stream:
    """One watch stream at one member; its answers come through a queue, so that waiting for them
    has a deadline."""

    def __init__(self, client: EtcdClient, member: _Member, create: pb.WatchRequest) -> None:
        self.member = member
        self.why = "silent"
        self.clock = client.clock
        self._requests: queue.SimpleQueue[pb.WatchRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(create)
        self._heard_ms = self.clock.now_ms()
        self._call: Any = None
        self._ended = False
        self._thread = threading.Thread(
            target=self._pump, args=(client,), name="mooncake-etcd-watch", daemon=True
        )
        self._thread.start()

    def next(self, timeout_ms: int) -> Any:
        """The next answer; None: none in this time."""
        try:
            response = self._answers.get(block=timeout_ms > 0, timeout=timeout_ms / 1000)
        except queue.Empty:
            if timeout_ms > 0:
                self._requests.put(pb.WatchRequest(progress_request=pb.WatchProgressRequest()))
            return None
        if response is not None:
            self._heard_ms = self.clock.now_ms()
        return response

    def lost(self) -> bool:
        return self._ended or self.clock.now_ms() - self._heard_ms > SILENT_MS

    def cancel(self) -> None:
        self._requests.put(None)
        if self._call is not None:
            self._call.cancel()

    def _pump(self, client: EtcdClient) -> None:
        try:
            token = client._metadata(self.member, MEMBER_MS) or ()
            metadata = (("hasleader", "true"), *token)
            requests: Iterator[pb.WatchRequest] = iter(self._requests.get, None)
            self._call = client._stream(self.member, wire.WATCH)(requests, metadata=metadata)
            for response in self._call:
                self._answers.put(response)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                client._token = ""
            self.why = error.details() or error.code().name.lower()
        except (ValueError, MasterUnavailable) as error:  # the channel was closed
            self.why = str(error)
        finally:
            self._ended = True
            self._answers.put(None)


def _never_sent(code: grpc.StatusCode, details: str) -> bool:
    """gRPC's words for a connection that was not made: nothing has left this process."""
    return code == grpc.StatusCode.UNAVAILABLE and details.startswith("failed to connect")


def _credentials(address: EtcdAddress) -> grpc.ChannelCredentials | None:
    if not address.tls:
        return None
    contents: dict[str, bytes] = {}
    for name, path in address.files:
        try:
            with open(path, "rb") as file:
                contents[name] = file.read()
        except OSError as error:
            raise UsageError(f"{name}={path}: {error.strerror}") from None
    return grpc.ssl_channel_credentials(
        contents.get("ca"), contents.get("key"), contents.get("cert")
    )


def _channel(member: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(member, options=_CHANNEL_OPTIONS)
    return grpc.secure_channel(member, credentials, options=_CHANNEL_OPTIONS)
