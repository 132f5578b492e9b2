"""The node: offers memory, pulls puts into it, serves reads of it, tells the master it lives.

Threads, and who may be slow:
* the engine's progress thread serves one-sided reads; no Python runs for a read;
* `pull_threads` threads take pull requests, natively (a long copy occupies one of them);
* one heartbeat thread with its own channel to the master, which data work cannot starve;
* one thread carries out tasks of the master (`tasks.py`), over a channel of its own.

Life: engine and memory -> mount -> ready -> (SIGTERM) draining -> unmount -> gone. While it drains,
the master has other nodes copy what is here, for `drain_ms` at most; reads go on. The memory is an
anonymous memfd, and whatever ends the process, the kernel frees it; or a file, which outlives the
process with all objects, so nothing is drained (`segment_file.py`).
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from mooncake_py import errors
from mooncake_py._native.segment import OwnedSegment
from mooncake_py.clock import Clock, Deadline, SystemClock
from mooncake_py.config import NodeSettings, join_address, listen_remedy, split_address
from mooncake_py.errors import MooncakeError
from mooncake_py.master.client import MasterClient
from mooncake_py.master.commands import Drain, DrainInfo, Heartbeat, Mount, Unmount
from mooncake_py.store.disk import DiskTier
from mooncake_py.store.health import HealthDoor
from mooncake_py.store.holds import HoldHandler
from mooncake_py.store.host import host_id
from mooncake_py.store.inventory import Job, Teller
from mooncake_py.store.master_time import MasterTime
from mooncake_py.store.pull import Mounted, PullHandler
from mooncake_py.store.segment_file import Identity, SegmentFile
from mooncake_py.store.tasks import Holder, TaskRunner
from mooncake_py.transfer import Memory, Message, TransferEngine, options_for
from mooncake_py.wire.inventory import Page
from mooncake_py.wire.node import HOLD_KIND, UNSEAL_KIND, HoldReply, unseal_rows
from mooncake_py.wire.rows import EXTENT, REPLICA

log = logging.getLogger(__name__)

OFF = "off"
AUTO = "auto"
_RECEIVE_MS = 500  # how soon an idle pull thread notices that the node is closing
_MASTER_CALL_MS = 2_000
BEATS_OF_PATIENCE = 4  # with a silent master, in heartbeats; then another one is asked
_TEND_S = 5.0
_DRAIN_LOOK_S = 0.05  # between two questions how far the draining is
_QUIET_MS = 1_000  # of waiting for the master at start; then that is said
_NAME_WAIT_MS = 3_000  # for a name that is taken
_MOUNT_AGAIN_S = 0.25


class Node:
    """A running node. `start` mounts and returns when ready; `stop` drains and unmounts.

    Raises from start: OutOfSpace (too little memory), UsageError (address in use, name taken),
    MasterUnavailable, VersionMismatch. Thread-safe; stop may be called twice.
    """

    def __init__(self, settings: NodeSettings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._closing = threading.Event()
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self._incarnation = secrets.randbits(63) | 1
        self._master_time = MasterTime(self._clock)
        self._heartbeat_ms = 500
        self._answered = False
        self._cluster_id, self._term = "", 0  # where it was mounted last
        self._stack = ExitStack()
        with ExitStack() as starting:
            self._open(starting)
            self._stack = starting.pop_all()

    def _open(self, stack: ExitStack) -> None:
        """Take memory and ports, in this order; on failure everything is given back."""
        settings = self._settings
        options = options_for(
            settings.transport_names(), listen=settings.listen, advertise=settings.advertise
        )
        try:
            self._engine = TransferEngine(options)
        except errors.UsageError as error:
            if "RDMA" in error.cause:
                raise errors.UsageError(
                    f"--transports {settings.transports}: {error.cause}",
                    remedy="mend what is named (mooncake doctor), or allow tcp as well",
                ) from None
            ours = os.strerror(errno.EADDRNOTAVAIL) not in error.cause
            raise errors.UsageError(
                f"--listen {settings.listen}: {error.cause}",
                remedy=listen_remedy("--listen", 0 if ours else errno.EADDRNOTAVAIL),
            ) from None
        stack.callback(self._engine.close)
        port = self._engine.address.rpartition(":")[2]
        began_ms = self._clock.now_ms()
        self._file = self._open_file(stack)
        former_name = self._file.identity.node if self._file else ""
        self.name = settings.name or former_name or f"{socket.gethostname()}:{port}"
        self._memory = self._file.memory if self._file else self._open_memory(stack)
        self._segment = OwnedSegment(self._memory.base, self._memory.nbytes)
        stack.callback(self._segment.close)
        if self._file is not None:
            self._adopt(self._file)
        self._region = self._engine.register(self._memory, access="read")
        stack.callback(self._region.close)
        self._say_how_long(self._clock.now_ms() - began_ms)
        self._pulls = PullHandler(self._engine, self._segment, self._master_time)
        stack.callback(self._pulls.close)
        self._holds = HoldHandler(self._engine, self._segment)
        self._master = self._connect()
        stack.callback(self._master.close)
        self._task_master = self._connect()
        stack.callback(self._task_master.close)
        holder = Holder(
            self.name, self._incarnation, self._engine, self._segment, self._master_time,
            lambda: self._pulls.mounted,
        )  # fmt: skip
        self._tasks = TaskRunner(holder, self._task_master)
        stack.callback(self._tasks.close)
        self._teller = Teller(self._segment, self._master)
        stack.callback(self._teller.close)
        self.disk: DiskTier | None = None
        if settings.disk:
            self.disk = DiskTier(
                settings, self.name, self._engine, (self._memory, self._segment),
                self._segment_id, self._master_time, self._clock,
            )  # fmt: skip
            stack.callback(self.disk.stop)
        self.health = OFF
        if settings.health_listen != OFF:
            door = HealthDoor(self._health_address(), self.healthy)
            stack.callback(door.close)
            self.health = door.address

    def _open_file(self, stack: ExitStack) -> SegmentFile | None:
        if not self._settings.segment_file:
            return None
        file = SegmentFile(self._settings.segment_file, self._settings.segment_bytes)
        stack.callback(file.close)
        return file

    def _open_memory(self, stack: ExitStack) -> Memory:
        memory = Memory(
            self._settings.segment_bytes, name=f"mooncake-{self.name}", sole_writer=True
        )
        stack.callback(memory.close)
        return memory

    def _say_how_long(self, took_ms: int) -> None:
        gib = self._memory.nbytes / (1 << 30)
        log.info(
            "%.1f GiB of memory are mapped and registered, after %d ms (%.1f GiB a second)",
            gib, took_ms, gib / max(1, took_ms) * 1e3,
        )  # fmt: skip

    def _adopt(self, file: SegmentFile) -> None:
        """What a former process left in the file is ours from now on."""
        began_ms = self._clock.now_ms()
        adopted = file.adopt(self._segment)
        self._cluster_id, self._term = file.identity.cluster_id, file.identity.term
        if file.former is not None:
            log.info(
                "adopted %d extents of a former process in %d ms; %d had ended, %d were damaged",
                adopted.kept, self._clock.now_ms() - began_ms, adopted.torn, adopted.damaged,
            )  # fmt: skip

    def _tend_file(self) -> None:
        assert self._file is not None
        while not self._closing.wait(_TEND_S):
            try:
                self._file.tend(self._segment)
            except (MooncakeError, OSError) as error:
                log.warning("the journal of the segment is not written anew: %s", error)

    def _connect(self) -> MasterClient:
        find_ms = self._settings.start_ms
        return MasterClient(self._settings.master, role="node", clock=self._clock, find_ms=find_ms)

    def _segment_id(self) -> int:
        mounted = self._pulls.mounted
        return mounted.segment_id if mounted else 0

    def _health_address(self) -> str:
        if self._settings.health_listen != AUTO:
            return self._settings.health_listen
        host, _ = split_address(self._settings.listen)
        return join_address(host, 0)

    @property
    def address(self) -> str:
        """Engine address that peers open."""
        return self._engine.address

    @property
    def segment_bytes(self) -> int:
        return self._memory.nbytes

    def start(self) -> None:
        """Raises what keeps this node from serving; it is stopped then."""
        try:
            self._reach_master()
            self._mount_first()
            if self.disk is not None:
                self.disk.start(self._incarnation)
        except BaseException:
            self.stop()
            raise
        for index in range(self._settings.pull_threads):
            self._spawn(self._serve_pulls, f"mooncake-pull-{index}")
        self._spawn(self._heartbeats, "mooncake-heartbeat")
        self._spawn(lambda: self._tasks.run(self._closing), "mooncake-tasks")
        if self._file is not None:
            self._spawn(self._tend_file, "mooncake-journal")
        self._teller.start()

    def stop(self, drain_ms: int | None = None) -> None:
        """Take nothing new, let others copy what is here for as long as `drain_ms` (None: the
        setting), let running pulls end, tell the master, release everything. Twice is fine: a start
        that fails has stopped already."""
        if self._stopped:
            return
        self._stopped = True
        self._pulls.drain()
        stays = self._file is not None  # and so does what is in it: nothing is to be moved
        running = self._threads and self._pulls.mounted is not None
        if running and not stays and not self._closing.is_set():
            longest_ms = self._settings.drain_ms if drain_ms is None else drain_ms
            self._empty(Deadline(longest_ms, self._clock))
        self._closing.set()
        for thread in self._threads:
            thread.join()
        if self.disk is not None:
            self.disk.stop()
        mounted, self._pulls.mounted = self._pulls.mounted, None
        if mounted is not None:
            leave = Unmount(self.name, self._incarnation, mounted.segment_id, returns=stays)
            try:
                self._master.unmount(leave, timeout_ms=_MASTER_CALL_MS)
            except MooncakeError as error:
                log.warning("the master was not told that this node leaves: %s", error)
        self._stack.close()

    def _empty(self, deadline: Deadline) -> None:
        """Have everything moved to other nodes, as far as there is room and time; say what was."""
        info: DrainInfo | None = None
        try:
            while not deadline.passed():
                info = self._task_master.drain(
                    Drain(self.name), timeout_ms=max(1, min(_MASTER_CALL_MS, deadline.left_ms()))
                )
                if info.state != "running":
                    break
                self._closing.wait(_DRAIN_LOOK_S)
        except MooncakeError as error:
            log.warning("the master does not help to drain: %s", error)
        if info is not None:
            done = info.state == "done"
            why = "" if done else {"stuck": ": no place elsewhere"}.get(info.state, ": out of time")
            log.log(
                logging.INFO if done else logging.WARNING,
                "drained: moved=%d moved_bytes=%d had_replicas=%d ended=%d left=%d left_bytes=%d%s",
                info.moved, info.moved_bytes, info.dropped, info.ended, info.left, info.left_bytes,
                why,
            )  # fmt: skip

    def healthy(self) -> bool:
        """Mounted, and the last heartbeat was answered."""
        return self._answered and self._pulls.mounted is not None and not self._closing.is_set()

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # --- master ---

    def _reach_master(self) -> None:
        """Whoever started this node reads soon what it waits for."""
        quiet_ms = min(_QUIET_MS, self._settings.start_ms)
        try:
            self._master.connect(timeout_ms=quiet_ms)
        except (errors.MasterUnavailable, errors.NotLeader) as error:
            left_ms = self._settings.start_ms - quiet_ms
            if not left_ms:
                raise
            log.warning(
                "waiting for the master at %s, %d s at most: %s",
                self._settings.master, left_ms // 1_000, error.cause,
            )  # fmt: skip
            self._master.connect(timeout_ms=left_ms)

    def _mount_first(self) -> None:
        """The masters may just be choosing a leader. And the name may still be that of a node
        which died a moment ago: its master gives it away once that one is suspect."""
        starting = Deadline(self._settings.start_ms, self._clock)
        naming: Deadline | None = None  # since the name was first refused
        while True:
            try:
                return self._mount(max(1, starting.left_ms()))
            except errors.UsageError:
                naming = naming or Deadline(_NAME_WAIT_MS, self._clock)
                if naming.passed():
                    raise
            except MooncakeError as error:
                over = starting.passed() or self._closing.is_set()  # stopped while it starts
                if over or not error.retryable:
                    raise
            self._closing.wait(_MOUNT_AGAIN_S)

    def _mount(self, timeout_ms: int) -> None:
        mounted, file = self._pulls.mounted, self._file
        former = file.identity.segment_id if file else 0
        before = mounted.segment_id if mounted else former
        asked_at_ms = self._clock.now_ms()
        mount = self._master.mount(
            Mount(
                self.name,
                self._incarnation,
                self._engine.address,
                self._region.id,
                self._memory.nbytes,
                host_id(),
                segment_id=before,
                domain=self._settings.domain,
                recovers=True,
                warm=mounted is None and before > 0,
                keeps=file is not None,
                former_term=self._term,
            ),
            self._cluster_id,
            timeout_ms=timeout_ms,
        )
        if before and before != mount.segment_id:
            # That master has never seen our objects, and its generations may be older than ours.
            log.warning("the master gave a new segment id: objects held here are dropped")
            self._pulls.mounted = None
            self._drop_all()
        self._learn_time(mount.master_now_ms, asked_at_ms)
        self._heartbeat_ms = mount.heartbeat_ms
        self._cluster_id, self._term = mount.cluster_id, mount.term
        if file is not None:
            self._remember(
                file,
                Identity(
                    self._memory.nbytes, self.name, mount.cluster_id, mount.term, mount.segment_id
                ),
            )
        self._pulls.mounted = Mounted(mount.segment_id, mount.grant_secret, mount.name_secret)
        self._answered = True
        if mount.recover:
            page = Page(
                self.name, self._incarnation, mount.segment_id,
                first_generation=mount.first_generation,
            )  # fmt: skip
            self._teller.ask(Job(page, mount.unrecorded, mount.first_generation))

    def _remember(self, file: SegmentFile, identity: Identity) -> None:
        try:
            file.remember(identity)
        except OSError:
            self._pulls.mounted = None  # a mount that is not written down is made again
            raise

    def _learn_time(self, master_now_ms: int, asked_at_ms: int) -> None:
        self._master_time.learnt(master_now_ms, asked_at_ms)
        self._pulls.follow_time()

    def _drop_all(self) -> None:
        while len(rows := self._segment.inventory()):
            self._segment.unseal(rows)

    def _heartbeats(self) -> None:
        while not self._closing.wait(self._heartbeat_ms / 1000):
            self._holds.sweep()
            try:
                self._heartbeat()
            except MooncakeError as error:
                if self._answered:
                    log.warning("heartbeat not answered: %s", error)
                self._answered = False
            except Exception:  # such as a full disk under the segment's files; it beats on
                log.exception("a heartbeat failed in a way it must not")
                self._answered = False
            else:
                if not self._answered:
                    log.info("heartbeats are answered again")
                self._answered = True

    def _heartbeat(self) -> None:
        mounted = self._pulls.mounted
        if mounted is None:
            self._mount(_MASTER_CALL_MS)
            return
        asked_at_ms = self._clock.now_ms()
        beat = self._master.heartbeat(
            Heartbeat(
                self.name,
                self._incarnation,
                mounted.segment_id,
                draining=self._pulls.draining,
                used_bytes=self._segment.stats().extent_nbytes,
            ),
            timeout_ms=min(_MASTER_CALL_MS, BEATS_OF_PATIENCE * self._heartbeat_ms),
        )
        if not beat.known:
            log.info("the master does not know this node any more: mounting again")
            self._mount(_MASTER_CALL_MS)
            return
        self._learn_time(beat.master_now_ms, asked_at_ms)
        if len(beat.unseal):
            self._segment.unseal(beat.unseal)
        if beat.tasks_waiting:
            self._tasks.nudge()

    # --- clients ---

    def _answer(self, message: Message) -> bytes:
        if message.kind == HOLD_KIND:
            return self._holds.serve(message, self._segment_id()).encode()
        if message.kind == UNSEAL_KIND:
            return self._unseal(message.payload)
        cause = f"this node knows no message kind {message.kind}"
        return HoldReply(code=errors.VersionMismatch.code, cause=cause).encode()

    def _unseal(self, payload: bytes) -> bytes:
        mounted = self._pulls.mounted
        try:
            if mounted is None:
                raise errors.NodeDraining("this node is not mounted")
            raw = unseal_rows(payload, mounted.segment_id, mounted.grant_secret)
        except MooncakeError as error:
            return HoldReply(code=error.code, cause=error.cause).encode()
        replicas = np.frombuffer(raw, REPLICA)
        rows = np.zeros(len(replicas), dtype=EXTENT)
        for name in ("offset", "generation"):
            rows[name] = replicas[name]
        self._segment.unseal(rows)
        return HoldReply().encode()

    def _serve_pulls(self) -> None:
        while not self._closing.is_set():
            try:
                message = self._pulls.serve(_RECEIVE_MS)
                if message is None:
                    continue
                if self.disk is not None and self.disk.takes(message):
                    self.disk.serve(message)  # replies by itself, later
                    continue
                message.reply(self._answer(message))
            except errors.TransferError as error:
                log.info("a reply was not delivered: %s", error)  # that client is gone
            except Exception:
                log.exception("a pull failed in a way it must not; the node goes on")
