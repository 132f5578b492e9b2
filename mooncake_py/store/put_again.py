"""Puts that found no room, or whose node was lost, are tried again until their deadline; earlier
ended are those for which there cannot be room (`room.py`), which is also what they say then."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mooncake_py import errors
from mooncake_py.clock import Clock, Deadline
from mooncake_py.errors import MooncakeError, OutOfSpace
from mooncake_py.master.client import MasterClient
from mooncake_py.store.outcomes import PutOutcome, put_error
from mooncake_py.store.put import BatchWriter, PutJob
from mooncake_py.store.room import FULL, GRACE_MS, Reason, RoomView, reason

_FIRST_MS = 5  # eviction on the master takes about a tick; doubled up to the limit
_LAST_MS = 200
_AGAIN = frozenset(
    error.code  # of a key: what another placement, a little later, can cure
    for error in (
        errors.OutOfSpace,
        errors.Backpressure,
        errors.PeerUnreachable,
        errors.NodeDraining,
        errors.LeaseExpired,
    )
)


class PersistentWriter:
    """Writes batches until they are stored, cannot be, or their time is over. Thread-safe.

    closing: set when the client is being closed; waiting ends then.
    """

    def __init__(
        self, writer: BatchWriter, master: MasterClient, closing: threading.Event, clock: Clock
    ) -> None:
        self._writer = writer
        self._closing = closing
        self._clock = clock
        self._room = RoomView(master, clock)

    def write(self, job: PutJob) -> tuple[list[int], dict[int, Reason]]:
        """One code a key, in order, and by index why there was no room. Raises only when the batch
        as a whole cannot be served."""
        codes = self._writer.write(job)
        if not any(codes):
            return codes, {}
        wait_ms, grace = _FIRST_MS, Deadline(GRACE_MS, self._clock)
        reasons: dict[int, Reason] = {}
        while todo := [i for i, code in enumerate(codes) if code in _AGAIN]:
            reasons = self._reasons(job, codes, todo)
            if grace.passed() and _all_hopeless(job.groups, todo, reasons):
                break
            if job.deadline.left_ms() <= wait_ms or self._closing.wait(wait_ms / 1000):
                break
            wait_ms = min(2 * wait_ms, _LAST_MS)
            part = job.select(todo)
            try:
                for i, code in zip(todo, self._writer.write(part), strict=True):
                    codes[i] = code
            except MooncakeError as error:  # of another attempt: the others keep their outcomes
                if len(todo) == len(codes):
                    raise
                for i in todo:
                    codes[i] = error.code
            finally:
                part.pieces.release()
        return codes, reasons

    def _reasons(self, job: PutJob, codes: Sequence[int], todo: Sequence[int]) -> dict[int, Reason]:
        """Of those that found no room, as far as anybody knows."""
        full = [i for i in todo if codes[i] == OutOfSpace.code]
        segments = self._room.segments(job.deadline) if full else None
        if segments is None:
            return {}
        return {i: reason(segments, job.sizes[i], job.policy) for i in full}


def _all_hopeless(groups: Sequence[int], todo: Sequence[int], reasons: dict[int, Reason]) -> bool:
    """All at once or none: a group whose one member cannot be stored must not be stored without
    it, so nothing is taken out of what is tried again."""
    hopeless = {i for i in todo if i in reasons and reasons[i].hopeless}
    lost = {groups[i] for i in hopeless if groups[i]} if groups else set()
    return all(i in hopeless or (groups and groups[i] in lost) for i in todo)


def put_outcome(code: int, key: str, nbytes: int, tenant: str, why: Reason | None) -> PutOutcome:
    """None, or the error that says why an object of `nbytes` bytes was not stored."""
    if code == errors.OK:
        return None
    if code != OutOfSpace.code:
        return put_error(code, key, nbytes, tenant)
    why = why or FULL
    error: MooncakeError = OutOfSpace(
        why.cause, remedy=why.remedy, key=key, nbytes=nbytes, tenant=tenant
    )
    return error
