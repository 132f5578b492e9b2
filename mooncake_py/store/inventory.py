"""What this node holds, told to a master that asks for it after a mount (design/recovery.md).

    tell      sealed extents of generations the master does not know of, with names, page by page
    compare   pages of what the master believes to be here: mark those that are, answer the others;
              then name what carries no mark, and unseal what of that has ended

A thread of its own, so that heartbeats never wait behind it; pages are small, and
between two pages of the comparison it waits as long as the last one took, so that the master is
busy with it half of the time at most.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace

import numpy as np

from mooncake_py import errors
from mooncake_py._native.segment import OwnedSegment
from mooncake_py.clock import stopwatch_ns
from mooncake_py.errors import MooncakeError
from mooncake_py.master.client import MasterClient
from mooncake_py.wire.inventory import Inventoried, Page
from mooncake_py.wire.rows import GENERATIONS

log = logging.getLogger(__name__)

_CALL_MS = 3_000
_RETRY_S = 0.25
_PAUSE_MAX_S = 0.5
_LOOK_S = 0.5  # how soon the thread notices by itself that there is something to do
Ranges = np.ndarray  # GENERATIONS


@dataclass(frozen=True, slots=True)
class Job:
    """One mount's inventory. `page`: who we are, in an empty page."""

    page: Page
    unrecorded: Ranges
    first_generation: int


@dataclass(slots=True)
class _Counts:
    told: int = 0
    absent: int = 0
    unsealed: int = 0


class Teller:
    """`start` and `close` for the node's life; `ask` after a mount, from any thread: the newest
    one replaces any before it."""

    def __init__(self, segment: OwnedSegment, master: MasterClient) -> None:
        self._segment = segment
        self._master = master
        self._changed = threading.Condition()
        self._job: Job | None = None
        self._closing = threading.Event()
        self._mark = 0
        self._thread = threading.Thread(target=self._run, name="mooncake-inventory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, job: Job) -> None:
        with self._changed:
            self._job = job
            self._changed.notify()

    def close(self) -> None:
        self._closing.set()
        with self._changed:
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._changed:
                self._changed.wait_for(
                    lambda: self._job is not None or self._closing.is_set(), _LOOK_S
                )
                job = self._job
            if job is not None:
                self._do(job)

    def _do(self, job: Job) -> None:
        counts = _Counts()
        try:
            self._tell(job, counts)
            self._compare(job, counts)
            self._done(job)
            log.info(
                "the master knows what this node holds: %d objects told, %d replicas it was "
                "missing, %d ended ones unsealed", counts.told, counts.absent, counts.unsealed,
            )  # fmt: skip
        except errors.ObjectNotFound:
            self._done(job)  # not mounted there any more: the next mount asks again
        except MooncakeError as error:
            log.warning("the inventory is told again: %s", error)
            self._closing.wait(_RETRY_S)
        except Exception:
            log.exception("the inventory met a defect")
            self._done(job)

    def _done(self, job: Job) -> None:
        with self._changed:
            if self._job is job:
                self._job = None

    def _goes_on(self, job: Job) -> bool:
        return self._job is job and not self._closing.is_set()

    def _tell(self, job: Job, counts: _Counts) -> None:
        self._name_all(job, job.unrecorded, 0, counts)
        if self._goes_on(job):
            self._send(replace(job.page, recorded=True), counts)

    def _name_all(self, job: Job, ranges: Ranges, mark: int, counts: _Counts) -> None:
        offset: int | None = 0 if len(ranges) else None
        while offset is not None and self._goes_on(job):
            found = self._segment.named(ranges, offset, mark)
            offset = found.following
            if len(found.rows):
                counts.told += 0 if mark else len(found.rows)
                page = replace(
                    job.page,
                    rows=found.rows.tobytes(),
                    names=found.names,
                    name_ends=found.ends.tobytes(),
                )
                self._send(page, counts)

    def _compare(self, job: Job, counts: _Counts) -> None:
        self._mark += 1
        page = replace(job.page, compare=True)
        more = True
        while more and self._goes_on(job):
            began_ns = stopwatch_ns()
            answer = self._send(page, counts)
            absent = self._segment.mark(answer.believed, self._mark)
            counts.absent += len(absent)
            page = replace(page, cursor=answer.cursor, absent=absent.tobytes())
            more = answer.more
            took_s = (stopwatch_ns() - began_ns) / 1e9
            if more:
                self._closing.wait(min(took_s, _PAUSE_MAX_S))
        if page.absent and self._goes_on(job):
            self._send(replace(page, compare=False), counts)
        rest = np.array([(1, job.first_generation)], dtype=GENERATIONS)
        self._name_all(job, rest, self._mark, counts)

    def _send(self, page: Page, counts: _Counts) -> Inventoried:
        answer = self._master.inventory(page, timeout_ms=_CALL_MS)
        if len(answer.unseal):
            self._segment.unseal(answer.unseal)
            counts.unsealed += len(answer.unseal)
        return answer
