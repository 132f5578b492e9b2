"""What became of a key in a call, and the errors that say so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mooncake_py import errors
from mooncake_py.errors import MooncakeError, ObjectNotFound, UsageError, error_of

PutOutcome: TypeAlias = MooncakeError | None

REMOVE_CAUSES = {errors.ObjectLeased.code: "a reader's lease or a pin holds the object"}
PIN_CAUSES = {
    errors.ObjectNotFound.code: "there is no object under the key",
    errors.QuotaExceeded.code: "that much may not be pinned, by this tenant or by all together",
    errors.OutOfSpace.code: "the object lies on a disk alone, and a soft pin is of memory",
}
COPY_CAUSE = "the object is not there yet, or cannot be"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as `list` shows it."""

    key: str
    nbytes: int
    replicas: int


class PutOutcomes(list[PutOutcome]):
    """What became of each key of a put, in order: None, or why it was not stored. `replicas[i]`: on
    how many nodes the put has stored key i, 0 if it has not; without `strict` that may be fewer
    than the policy asked for."""

    def __init__(self, outcomes: Iterable[PutOutcome], replicas: Sequence[int]) -> None:
        super().__init__(outcomes)
        self.replicas = replicas


def plain_outcomes(
    codes: Sequence[int], causes: dict[int, str] | str, keys: Sequence[str]
) -> list[PutOutcome]:
    """None, or the error with its cause (by code, or one for all); of calls that only the master
    answers."""
    known = causes if isinstance(causes, dict) else dict.fromkeys(codes, causes)
    return [
        error_of(code, known.get(code, "it was refused"), key=key) if code else None
        for code, key in zip(codes, keys, strict=True)
    ]


GetOutcome: TypeAlias = bytes | int | MooncakeError

_UNREADABLE = frozenset(
    error.code for error in (errors.LeaseExpired, errors.PeerUnreachable, errors.AccessRefused)
)


def put_error(code: int, key: str, nbytes: int, tenant: str) -> MooncakeError:
    """Why an object of `nbytes` bytes was not stored."""
    cause = {
        errors.ObjectExists.code: "the key holds an object, or another writer is storing one",
    }.get(code, "the object was not stored")
    return error_of(code, cause, key=key, nbytes=nbytes, tenant=tenant)


def get_error(
    code: int, key: str, nbytes: int, tenant: str, *, room: int | None = None
) -> MooncakeError:
    """What a read that failed on every replica means to the caller. nbytes: the object's length, 0
    if it is not known; room: bytes of the caller's target, None without one."""
    if code == errors.ObjectNotFound.code:
        cause = "there is no object under the key"
        return ObjectNotFound(cause, key=key, tenant=tenant)
    if code == errors.UsageError.code:
        what = "the range" if room is None else f"the target of {room} bytes, or the range,"
        return UsageError(
            f"{what} does not fit the object of {nbytes} bytes",
            remedy="pass a target at least as large as what is read, and a range inside the "
            "object; nothing was written",
            key=key,
        )
    if code in _UNREADABLE:
        cause = "the object was placed but can be read from no node any more"
        return ObjectNotFound(cause, key=key, nbytes=nbytes)
    cause = {
        errors.ChecksumMismatch.code: "the object's bytes are damaged on every replica",
        errors.TransferTimeout.code: "the object did not arrive within the deadline",
    }.get(code, "the object could not be read")
    return error_of(code, cause, key=key, nbytes=nbytes)
