"""The disk tier of a node (design/disk-tier.md): its parts, and its conversation with the master.

    disk_files.py     the folder           disk_reads.py    fetches of clients
    disk_staging.py   what clients read    disk_copies.py   offloads and promotions

One thread asks the master for work and tells it what was done, on a connection of its own, so that
neither heartbeats nor puts wait for it. It never touches a file: deletions have a thread, too. The
list of what is here goes to the master page by page, at once after every mount and slowly ever
after; so whatever got lost on the way is put right. A master that has lost its records is told
first what the objects are (disk_telling.py); until then it deletes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict

import numpy as np

from mooncake_py._native.segment import OwnedSegment
from mooncake_py.clock import Clock, Deadline
from mooncake_py.config import NodeSettings
from mooncake_py.errors import Backpressure, MooncakeError, UsageError
from mooncake_py.master.client import MasterClient
from mooncake_py.master.commands import Mount, Unmount
from mooncake_py.master.disk_commands import DiskWork
from mooncake_py.store.disk_copies import CopyTask, DiskCopier
from mooncake_py.store.disk_files import DiskFiles
from mooncake_py.store.disk_index import DiskObject
from mooncake_py.store.disk_reads import DiskReader
from mooncake_py.store.disk_staging import Staging
from mooncake_py.store.disk_telling import DiskTeller
from mooncake_py.store.host import host_id
from mooncake_py.store.master_time import MasterTime
from mooncake_py.transfer import Memory, Message, TransferEngine
from mooncake_py.wire.disks import DiskOrders
from mooncake_py.wire.inventory import Page
from mooncake_py.wire.node import FETCH_KIND, UNSEAL_KIND, HoldReply, unseal_rows
from mooncake_py.wire.rows import REPLICA

log = logging.getLogger(__name__)

CALL_MS = 2_000
BUSY_S = 0.005  # between two questions while there is work
IDLE_S = 0.05
FAILED_S = 0.5  # after a question that was not answered
AUDIT_PAGE = 16_384
AUDIT_REST_MS = 600_000  # from the end of one list to the next
AUDIT_STEP_MS = 1_000  # between its pages; none after a mount
TELL_MS = 1_000  # between two reports of numbers
DONE_MAX = 4_096  # in one call
WANTED_MAX = 256
_NAME_WAIT_MS = 3_000
_NAME_AGAIN_S = 0.25


class DiskTier:
    """One folder behind one node's memory. `start` mounts it; `serve` is for message threads.

    owned: memory and segment of the node. segment_id: of that segment, 0 while it is not mounted.
    Raises UsageError: the folder cannot be used. OutOfSpace: too little memory for staging.
    """

    def __init__(  # noqa: PLR0913, PLR0917  (they are the node's parts)
        self,
        settings: NodeSettings,
        name: str,
        engine: TransferEngine,
        owned: tuple[Memory, OwnedSegment],
        segment_id: Callable[[], int],
        master_time: MasterTime,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._name = name
        self._engine = engine
        self._clock = clock
        self._incarnation = 0
        self._disk_segment_id = 0
        self._lock = threading.Lock()
        self._done: deque[tuple[int, int]] = deque()
        self._wanted: dict[int, DiskObject] = {}
        self._drops: deque[int] = deque()
        self._waiting: deque[Message] = deque()  # for the deletions queued before them
        self._secret = b""
        self._bell = threading.Event()
        self._trash = threading.Event()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._audit_after = 0
        self._audit_fast = True
        self._audit_due_ms = 0
        self._tell_due_ms = 0
        self._deleted = 0
        self._delete_failures = 0
        self._stack = ExitStack()
        with ExitStack() as opening:
            self._files = DiskFiles(settings.disk, settings.disk_size_bytes)
            opening.callback(self._files.close)
            self._staging = Staging(
                engine, settings.staging_bytes(), f"mooncake-{name}-staging", clock
            )
            opening.callback(self._staging.close)
            self._master = MasterClient(settings.master, role="node", clock=clock)
            opening.callback(self._master.close)
            self._teller = DiskTeller(self._files, self._master, self._drops.extend)
            self._copier = DiskCopier(self._files, owned, segment_id, master_time, self._task_done)
            opening.callback(self._copier.stop)
            self._reader = DiskReader(
                self._files, self._staging, clock, self._lost, self._want_promotion
            )
            opening.callback(self._reader.stop)
            self._stack = opening.pop_all()

    @property
    def files(self) -> DiskFiles:
        return self._files

    def start(self, incarnation: int) -> None:
        """Mount, then serve. Raises UsageError (another node has this disk), MasterUnavailable."""
        self._incarnation = incarnation
        self._master.connect(timeout_ms=self._settings.start_ms)
        patience = Deadline(_NAME_WAIT_MS, self._clock)
        starting = Deadline(self._settings.start_ms, self._clock)
        while True:
            try:
                self._mount(self._settings.start_ms)
                break
            except UsageError:
                if patience.passed():
                    raise
            except Backpressure:  # a greater term is begun first
                if starting.passed():
                    raise
            self._closing.wait(_NAME_AGAIN_S)
        self._reader.start(self._settings.disk_threads)
        for target, name in ((self._ask, "master"), (self._delete, "delete")):
            thread = threading.Thread(target=target, name=f"mooncake-disk-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def takes(self, message: Message) -> bool:
        """Is it for the disk?"""
        if message.kind == UNSEAL_KIND:
            return message.payload[:8] == self._disk_segment_id.to_bytes(8, "little")
        return message.kind == FETCH_KIND

    def serve(self, message: Message) -> None:
        """Answer, now or later. Raises TransferError: its sender is gone."""
        if message.kind == FETCH_KIND:
            self._reader.serve(message, self._disk_segment_id)
            return
        try:
            rows = unseal_rows(message.payload, self._disk_segment_id, self._secret)
        except MooncakeError as error:
            message.reply(HoldReply(code=error.code, cause=error.cause).encode())
            return
        self._drops.extend(np.frombuffer(rows, REPLICA)["generation"].tolist())
        self._waiting.append(message)  # told once they are deleted
        self._trash.set()

    def stop(self) -> None:
        """Twice is fine."""
        self._closing.set()
        self._bell.set()
        self._trash.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._disk_segment_id:
            leave = Unmount(self._name, self._incarnation, self._disk_segment_id)
            self._disk_segment_id = 0
            try:
                self._master.unmount(leave, timeout_ms=CALL_MS)
            except MooncakeError as error:
                log.warning("the master was not told that this disk leaves: %s", error)
        self._staging.stop()
        self._stack.close()

    # --- from other threads ---------------------------------------------------------------------

    def _task_done(self, task: int, code: int) -> None:
        self._done.append((task, code))
        self._bell.set()

    def _lost(self, generation: int) -> None:
        """Its bytes are damaged or not here: it is served to nobody any more."""
        self._drops.append(generation)
        self._trash.set()

    def _want_promotion(self, found: DiskObject) -> None:
        with self._lock:
            if len(self._wanted) < WANTED_MAX:
                self._wanted[found.generation] = found
        self._bell.set()

    # --- deletions ------------------------------------------------------------------------------

    def _delete(self) -> None:
        while not self._closing.is_set():
            self._trash.wait(FAILED_S)
            self._trash.clear()
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            generations = [self._drops.popleft() for _ in range(len(self._drops))]
            for generation in generations:
                self._reader.forget(generation)
            try:
                self._deleted += self._files.delete(generations)
            except (MooncakeError, OSError) as error:
                # The row may still be there: the master asks again when it is listed again.
                self._delete_failures += 1
                log.warning("objects of the disk tier could not be deleted: %s", error)
                continue
            for message in waiting:
                with suppress(MooncakeError):  # the master did not wait
                    message.reply(HoldReply().encode())

    # --- the master -----------------------------------------------------------------------------

    def _mount(self, timeout_ms: int) -> None:
        cluster_id, term = self._files.former()
        mounted = self._master.mount(
            Mount(
                self._name,
                self._incarnation,
                self._engine.address,
                self._staging.region_id,
                self._files.nbytes_max,
                host_id(),
                recovers=True,
                former_term=term,
                disk_id=self._files.disk_id,
            ),
            cluster_id,
            timeout_ms=timeout_ms,
        )
        try:
            self._files.remember(mounted.cluster_id, mounted.term)
        except (MooncakeError, OSError) as error:
            log.warning(
                "the disk tier could not write down its cluster (%s): if that one loses its "
                "metadata before this disk is mounted again, what is on it is dropped", error,
            )  # fmt: skip
        self._disk_segment_id, self._secret = mounted.segment_id, mounted.grant_secret
        self._audit_after, self._audit_fast, self._audit_due_ms = 0, True, 0
        page = Page(
            self._name, self._incarnation, mounted.segment_id,
            first_generation=mounted.first_generation,
        )  # fmt: skip
        self._teller.begin(page, mounted.unrecorded if mounted.recover else None)

    def _ask(self) -> None:
        pause_s = 0.0
        failed = False
        while not self._closing.is_set():
            self._bell.wait(pause_s)
            self._bell.clear()
            try:
                pause_s = self._round()
                failed = False
            except MooncakeError as error:
                if not failed:
                    log.warning("the disk tier has no answer from the master: %s", error)
                failed, pause_s = True, FAILED_S
                self._closing.wait(FAILED_S)
            except Exception:
                log.exception("the disk tier met a defect; it goes on")
                self._closing.wait(FAILED_S)

    def _round(self) -> float:
        """One question and its answer; how long to wait for the next one."""
        if self._teller.step():
            self._trash.set()
            return 0.0
        done = [self._done[at] for at in range(min(len(self._done), DONE_MAX))]
        with self._lock:
            wanted = list(self._wanted.values())
        now_ms = self._clock.now_ms()
        page = self._page(now_ms)
        tell = now_ms >= self._tell_due_ms
        command = DiskWork(
            self._name,
            self._incarnation,
            self._disk_segment_id,
            self._files.usable_bytes(),
            done,
            [each.tenant for each in wanted],
            [each.key for each in wanted],
            [each.generation for each in wanted],
            page is not None,
            () if page is None else page.tolist(),
            self._audit_after,
            page is not None and len(page) < AUDIT_PAGE,
            self._numbers() if tell else {},
        )
        orders = self._master.disk_work(command, timeout_ms=CALL_MS)
        if not orders.known:
            log.info("the master does not know this disk any more: mounting again")
            self._mount(CALL_MS)
            return 0.0
        for _ in done:
            self._done.popleft()
        with self._lock:
            for each in wanted:
                self._wanted.pop(each.generation, None)
        if tell:
            self._tell_due_ms = now_ms + TELL_MS
        if page is not None:
            self._turn_page(page, now_ms)
        self._carry_out(orders)
        if orders.more or self._done or (self._audit_fast and page is not None):
            return 0.0
        return BUSY_S if self._copier.waiting else IDLE_S

    def _page(self, now_ms: int) -> np.ndarray | None:
        """The next page of the list, if it is due."""
        if now_ms < self._audit_due_ms:
            return None
        try:
            return self._files.page(self._audit_after, AUDIT_PAGE)
        except OSError as error:
            log.warning("the disk tier cannot be listed: %s", error)
            self._audit_due_ms = now_ms + AUDIT_STEP_MS
            return None

    def _turn_page(self, page: np.ndarray, now_ms: int) -> None:
        if len(page) < AUDIT_PAGE:
            self._audit_after, self._audit_fast = 0, False
            self._audit_due_ms = now_ms + AUDIT_REST_MS
        else:
            self._audit_after = int(page[-1])
            self._audit_due_ms = 0 if self._audit_fast else now_ms + AUDIT_STEP_MS

    def _carry_out(self, orders: DiskOrders) -> None:
        drops = orders.drops.tolist()
        if drops:
            self._drops.extend(drops)
            self._trash.set()
        named = zip(orders.offloads.tolist(), orders.tenants, orders.keys, strict=True)
        self._copier.offload([CopyTask(*row, *name) for row, *name in named])
        self._copier.promote([CopyTask(*row) for row in orders.promotions.tolist()])

    def _numbers(self) -> dict[str, float]:
        numbers: dict[str, float] = {
            **asdict(self._reader.counters),
            **asdict(self._copier.counters),
            "objects": self._files.count,
            "bytes": self._files.used_bytes,
            "usable_bytes": self._files.usable_bytes(),
            "staging_bytes": self._staging.used_bytes,
            "waiting_reads": self._reader.waiting,
            "waiting_copies": self._copier.waiting,
            "deleted": self._deleted,
            "delete_failures": self._delete_failures,
            "swept": self._files.swept_count,
            "lost": self._files.lost_count,
        }
        return numbers
