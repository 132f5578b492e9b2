"""How a process reaches the master: connecting, both doors, following the leader. `MasterLink`.

Rules:
* Every call ends within its `timeout_ms`, whatever the master does. No answer in that time and no
  connection are both `MasterUnavailable`.
* The first call connects (versions are compared there) and so does the first one after the master
  was lost. A call that finds no master waits `RECONNECT_MS` at most for one to come back;
  `connect` alone waits all of its time.
* With an engine and a master that offers one, calls take the hot lane and fall back to gRPC when
  the lane breaks. A call that may have arrived is sent again only if that cannot mislead
  (`Method.repeatable`). What an engine may use for bytes does not bind the lane: where that leaves
  no way to a master, which has no RDMA device to offer, the lane gets an engine of its own.
* Of several masters the one that leads is found and followed: one that follows names it, one that
  is not there, or silent for `ASK_MS`, is left for the next, or for whom etcd names.
* Answers of an older term than one seen before are refused: a master that was replaced.

Thread-safe. The calls themselves are in `client.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
import numpy as np

from mooncake_py.clock import Clock, Deadline, SystemClock
from mooncake_py.config import join_address
from mooncake_py.errors import (
    Backpressure,
    MasterUnavailable,
    MooncakeError,
    NotLeader,
    TransferError,
    TransferTimeout,
    VersionMismatch,
)
from mooncake_py.master.route import Route, Stop
from mooncake_py.model import KEY_MAX_BYTES, PROTOCOL_MAJOR, RELEASE
from mooncake_py.wire import answers, lane
from mooncake_py.wire.answers import (
    ClusterInfo,
)
from mooncake_py.wire.lane import Method

if TYPE_CHECKING:  # a client without an engine does not load the native core
    from mooncake_py.master.leader import LeaderFinder
    from mooncake_py.transfer import Peer, TransferEngine

log = logging.getLogger(__name__)

FIND_MS = 10_000  # how long one who knows etcd alone waits for a leader
RECONNECT_MS = 1_000  # how long a call waits for a master that is not there
LANE_OPEN_MS = 1_000
LANE_RETRY_MS = 5_000  # until a lane that could not be opened is tried again
CONNECT_MS = 700  # how long one of several may take to be connected; less than `suspect_ms`
ASK_MS = 4_000  # how long one of several masters may keep a call waiting: a lease and more
TURN_MS = 20  # between two masters that are asked
TURN_MAX_MS = 160  # likewise, when none knows a leader
PART_BYTES = 8 << 20  # of keys in one message; half of the least limit a master may have

T = TypeVar("T")


class MasterLink:
    """The connection of one process to its master, whoever that is just now.

    `address`: `HOST:PORT` of the gRPC API, of several masters with commas between, or the address
    of the etcd that they share (`etcd://h1,h2/prefix`), which is asked who leads, for `find_ms` at
    most. `role` is what the master calls this process in its messages. No master is connected
    before the first call. Raises UsageError for a bad address, MasterUnavailable when nobody leads;
    calls raise `MasterUnavailable`, `Backpressure`, `VersionMismatch`, `NotLeader`, `UsageError`.
    """

    def __init__(
        self,
        address: str,
        *,
        engine: TransferEngine | None = None,
        role: str = "client",
        clock: Clock | None = None,
        find_ms: int = FIND_MS,
    ) -> None:
        self._clock = clock or SystemClock()
        self._finder: LeaderFinder | None = None
        self._route = self._find_route(address, find_ms)
        self.address = address
        self._engine = engine
        self._lane_engine: TransferEngine | None = None  # ours, if the given one has no way there
        self._role = role
        self._connecting = threading.Lock()
        self._info: ClusterInfo | None = None
        self._cluster_id, self._term = "", 0
        self._peer: Peer | None = None
        self._lane_retry_ms = 0
        self._closed = False
        self._pause = threading.Event()  # never set: to wait a little

    def _find_route(self, address: str, find_ms: int) -> Route:
        if not address.startswith(("etcd://", "etcds://")):
            return Route(address)
        from mooncake_py.master.leader import LeaderFinder  # noqa: PLC0415  (few name etcd)

        self._finder = LeaderFinder(address, self._clock)
        try:
            return Route(self._finder.wait(find_ms), self._finder.find)
        except BaseException:
            self._finder.close()
            raise

    def connect(self, *, timeout_ms: int) -> ClusterInfo:
        """Compare versions and learn the master's limits; waits for a master to come up."""
        deadline = Deadline(timeout_ms, self._clock)
        return self._follow(lambda: self._connect(deadline, timeout_ms), deadline, timeout_ms)

    def close(self) -> None:
        """Running calls of other threads end as MasterUnavailable. Harmless twice."""
        self._closed = True
        self._drop_lane(self._peer)
        self._route.close()
        if self._finder is not None:
            self._finder.close()
        with self._connecting:
            if self._lane_engine is not None:
                self._lane_engine.close()

    # --- one call -------------------------------------------------------------------------------

    def _call(self, method: Method, request: Any, deadline: Deadline, *, check: bool = True) -> Any:
        payload = request.SerializeToString()
        reply = self._follow(lambda: self._ask(method, payload, deadline), deadline, RECONNECT_MS)
        if check:
            answers.check(method, reply)
        return reply

    def _follow(self, attempt: Callable[[], T], deadline: Deadline, patience_ms: int) -> T:
        """Go to the leader for as long as the one that is asked says that it is not. Nothing was
        done then, so any call may be made again."""
        patience = Deadline(min(patience_ms, deadline.left_ms()), self._clock)
        pause_ms = TURN_MS
        while True:
            stop = self._route.current
            try:
                return attempt()
            except NotLeader as error:
                hint = str(error.context.get("leader", ""))
                if not self._turn(stop, hint) or patience.passed():
                    raise
            self._pause.wait((TURN_MS if hint else pause_ms) / 1000)
            pause_ms = pause_ms if hint else min(2 * pause_ms, TURN_MAX_MS)

    def _turn(self, stop: Stop, hint: str = "") -> bool:
        """False: there is no other master to go to."""
        turned = self._route.turn(stop, hint)
        if turned:
            self._info = None
            self._drop_lane(self._peer)
        return turned

    def _ask(self, method: Method, payload: bytes, deadline: Deadline) -> Any:
        self._ready(deadline)
        return self._judged(method, self._send(method, payload, deadline), deadline)

    def _judged(self, method: Method, raw: bytes, deadline: Deadline) -> Any:
        """The reply, if it is one of a leader that is still the one."""
        reply = answers.parse(method, raw)
        answers.check_leader(method, reply)
        term = answers.term_of(reply)
        if term < self._term:
            self._info = None
            self._connect(deadline, RECONNECT_MS)  # raises unless it is another cluster
        elif term > self._term:
            self._term = term
        return reply

    def _send(self, method: Method, payload: bytes, deadline: Deadline) -> bytes:
        if not method.repeatable:
            self._renew_lane(deadline)
        peer, stop = self._peer, self._route.current
        if peer is None:
            return self._over_grpc(method, payload, deadline, RECONNECT_MS)
        try:
            return peer.request(method.number, payload, timeout_ms=self._ask_ms(deadline))
        except TransferTimeout:
            self._turn(stop)
            raise self._silent(method, stop) from None
        except TransferError as error:
            self._info = None
            self._drop_lane(peer)
            if not method.repeatable:
                raise MasterUnavailable(
                    f"{method.name}: the lane to the master broke during the call", why=str(error)
                ) from error
        return self._over_grpc(method, payload, deadline, RECONNECT_MS)

    def _ask_ms(self, deadline: Deadline) -> int:
        """How long one master may keep a call waiting: while there are others, not all of it."""
        left_ms = deadline.left_ms()
        return min(left_ms, ASK_MS) if self._route.several else left_ms

    def _over_grpc(
        self, method: Method, payload: bytes, deadline: Deadline, patience_ms: int
    ) -> bytes:
        """Ask the current master; one that is not there is waited for, or left for the next."""
        patience = Deadline(min(patience_ms, deadline.left_ms()), self._clock)
        absent: MooncakeError | None = None
        try:
            while True:
                stop = self._route.current
                left_ms = self._ask_ms(deadline)
                brief = method is lane.CONNECT and self._route.several
                if brief:
                    left_ms = min(left_ms, CONNECT_MS)
                if self._closed:
                    raise self._closing()
                if left_ms == 0:
                    raise absent or self._silent(method, stop)
                wait = absent is not None and not self._route.several
                if wait:
                    left_ms = max(1, patience.left_ms())
                try:
                    call = stop.unary[method.number]
                    return cast(bytes, call(payload, timeout=left_ms / 1000, wait_for_ready=wait))
                except grpc.RpcError as error:
                    code = error.code()
                    gone = code == grpc.StatusCode.UNAVAILABLE
                    late = code == grpc.StatusCode.DEADLINE_EXCEEDED
                    if absent is None or not (wait and late):
                        absent = self._error_of(method, error, stop)
                    if gone or late:
                        self._turn(stop)
                    sent_once = method.repeatable or _never_sent(error)
                    again = (gone and sent_once) or (late and brief)
                    if not again or patience.passed():
                        raise absent from None
                except ValueError:  # the channel was closed by another thread
                    raise self._closing() from None
                if self._route.several:
                    self._pause.wait(TURN_MS / 1000)
        finally:
            del absent  # else it and this frame would hold each other, and all callers' buffers

    def _error_of(self, method: Method, error: Any, stop: Stop) -> MooncakeError:
        """What a failure of gRPC itself (not of the master) means."""
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return self._silent(method, stop)
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return VersionMismatch(f"the server at {stop.address} has no call {method.name}")
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Backpressure(f"{method.name}: {details}")
        if code == grpc.StatusCode.CANCELLED and self._closed:
            return self._closing()
        return MasterUnavailable(
            f"{method.name}: no master at {stop.address}", why=details or code.name.lower()
        )

    @staticmethod
    def _silent(method: Method, stop: Stop) -> MasterUnavailable:
        return MasterUnavailable(
            f"{method.name}: no answer from the master at {stop.address} in time"
        )

    @staticmethod
    def _closing() -> MasterUnavailable:
        return MasterUnavailable("this client is closed", remedy="open another one")

    # --- connecting -----------------------------------------------------------------------------

    def _ready(self, deadline: Deadline) -> None:
        lane_due = self._lane_retry_ms and self._clock.now_ms() >= self._lane_retry_ms
        if self._info is None or lane_due:
            self._connect(deadline, RECONNECT_MS)

    def _connect(self, deadline: Deadline, patience_ms: int) -> ClusterInfo:
        """Ask the master who it is, over gRPC, and open the lane it offers."""
        if not self._connecting.acquire(timeout=deadline.left_ms() / 1000):
            raise self._silent(lane.CONNECT, self._route.current)
        try:
            stop = self._route.current
            request = answers.connect_request(RELEASE, self._role).SerializeToString()
            raw = self._over_grpc(lane.CONNECT, request, deadline, patience_ms)
            reply = answers.parse(lane.CONNECT, raw)
            answers.check(lane.CONNECT, reply, master=stop.address)
            if reply.protocol_major != PROTOCOL_MAJOR:
                raise VersionMismatch(
                    f"this {self._role} speaks protocol {PROTOCOL_MAJOR}, the master at "
                    f"{stop.address} {reply.protocol_major} (release {reply.release})"
                )
            info = answers.cluster(reply)
            self._learn(info, deadline)
            return info
        finally:
            self._connecting.release()

    def _learn(self, info: ClusterInfo, deadline: Deadline) -> None:
        if info.cluster_id == self._cluster_id and info.term < self._term:
            where = self._route.current.address
            raise NotLeader(f"the master at {where} is of term {info.term}, not {self._term}")
        self._cluster_id, self._term = info.cluster_id, info.term
        if self._engine is not None and info.lane_address and self._peer is None:
            self._open_lane(self._engine, info.lane_address, deadline)
        self._info = info

    def _open_lane(self, engine: TransferEngine, address: str, deadline: Deadline) -> None:
        if address.startswith(":"):  # any host of the master: the one that answers here
            address = join_address(self._route.current.host, int(address[1:]))
        try:
            timeout_ms = min(LANE_OPEN_MS, deadline.left_ms())
            self._peer = self._for_lane(engine).open(address, timeout_ms=timeout_ms)
            self._lane_retry_ms = 0
        except MooncakeError as error:
            log.warning("calls go over gRPC: the master's lane cannot be opened: %s", error)
            self._lane_retry_ms = self._clock.now_ms() + LANE_RETRY_MS

    def _for_lane(self, engine: TransferEngine) -> TransferEngine:
        """Under `_connecting`."""
        if not {"local", "shm", "tcp"}.isdisjoint(engine.options.transports):
            return engine
        if self._closed:
            raise self._closing()
        if self._lane_engine is None:
            from mooncake_py.transfer import EngineOptions  # noqa: PLC0415  (see TYPE_CHECKING)

            self._lane_engine = type(engine)(EngineOptions(transports=("shm", "tcp")))
        return self._lane_engine

    def _renew_lane(self, deadline: Deadline) -> None:
        """Before a call that is sent once only: a lane known to be gone is replaced."""
        peer = self._peer
        if peer is None:
            return
        try:
            _ = peer.transport
        except TransferError:
            self._drop_lane(peer)
            self._connect(deadline, RECONNECT_MS)

    def _drop_lane(self, peer: Peer | None) -> None:
        if peer is not None and self._peer is peer:
            self._peer = None
            peer.close()

    def _parts(self, keys: Sequence[bytes], deadline: Deadline) -> Iterator[tuple[int, int]]:
        """(start, stop) of what fits one message; at least one, so that errors show."""
        if self._info is None:
            self._follow(lambda: self._ready(deadline), deadline, RECONNECT_MS)
        info = self._info
        count_max = info.batch_max_keys if info else len(keys)
        if len(keys) <= min(count_max, PART_BYTES // KEY_MAX_BYTES):
            yield 0, len(keys)
            return
        start = 0
        ends = np.cumsum([len(key) for key in keys])
        while start < len(keys):
            before = int(ends[start - 1]) if start else 0
            fits = int(np.searchsorted(ends, before + PART_BYTES, "right"))
            stop = max(start + 1, min(start + count_max, fits))
            yield start, min(stop, len(keys))
            start = stop


def _never_sent(error: Any) -> bool:
    """gRPC's words for a connection that was not made: nothing has left this process."""
    return str(error.details() or "").startswith("failed to connect")
