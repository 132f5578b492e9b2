"""The error tree: every failure a user can meet, its wire code, and whether trying again can help.

    MooncakeError
      UsageError            the caller is wrong (also a ValueError)
      ObjectError           ObjectNotFound, ObjectExists, ObjectLeased
      CapacityError         OutOfSpace, QuotaExceeded, Backpressure
      TransferError         PeerUnreachable, TransferTimeout, ChecksumMismatch, LeaseExpired,
                            AccessRefused, TransferCancelled
      ClusterError          MasterUnavailable, NotLeader, NodeDraining, VersionMismatch
      InternalError         our bug; carries the evidence

Codes are part of the protocol: they travel in replies, one byte a key, and are never re-used.
The native core returns them negated. Callers catch classes and never compare numbers.
"""

from __future__ import annotations

from typing import ClassVar

OK = 0


class MooncakeError(Exception):
    """Root of the tree.

    `str(error)` reads "cause [context]. Remedy: what to do". `context` holds what the layer that
    decided knew (key, node, sizes ...). `retryable` says whether the same call may succeed later
    with nothing changed by the caller.
    """

    code: ClassVar[int] = 50
    retryable: ClassVar[bool] = False
    remedy: ClassVar[str] = ""

    def __init__(self, cause: str, *, remedy: str | None = None, **context: object) -> None:
        super().__init__(cause)
        self.cause = cause
        self.context = context
        self.advice = type(self).remedy if remedy is None else remedy

    def __str__(self) -> str:
        text = self.cause
        if self.context:
            text += " [" + ", ".join(f"{k}={v!r}" for k, v in self.context.items()) + "]"
        if self.advice:
            text = text.rstrip(".") + ". Remedy: " + self.advice
        return text


class UsageError(MooncakeError, ValueError):
    """The call cannot be right whatever the cluster does: wrong type, size, name or limit."""

    code = 1
    remedy = "correct the call; nothing was moved or changed"


class ObjectError(MooncakeError):
    """About one object under one key."""


class ObjectNotFound(ObjectError, KeyError):
    """No complete object under this key: never put, removed, evicted, or its nodes are gone."""

    code = 10
    remedy = "treat it as a miss: recompute and put it again"

    __str__ = MooncakeError.__str__  # KeyError would print the repr of the cause


class ObjectExists(ObjectError):
    """The key holds an object, or another writer's grant for it is still running."""

    code = 11
    remedy = "objects are immutable and the first writer wins: treat it as stored, or remove first"


class ObjectLeased(ObjectError):
    """A reader still holds the object."""

    code = 12
    retryable = True
    remedy = "wait for the lease to end, or remove with force=True"


class CapacityError(MooncakeError):
    """The cluster, a tenant's quota or a queue is full."""


class OutOfSpace(CapacityError):
    """No extent of this size is free and nothing could be evicted."""

    code = 20
    retryable = True
    remedy = "add a node or a larger segment, or let pins and leases end"


class QuotaExceeded(CapacityError):
    code = 21
    remedy = "remove objects of this tenant or raise its quota"


class Backpressure(CapacityError):
    """A bounded queue is full: the peer is slower than its callers."""

    code = 22
    retryable = True
    remedy = "try again after a short wait, with fewer calls in flight"


class TransferError(MooncakeError):
    """Bytes did not arrive."""


class PeerUnreachable(TransferError):
    code = 30
    retryable = True
    remedy = "check that the peer runs and that its advertised address is reachable from here"


class TransferTimeout(TransferError):
    code = 31
    retryable = True
    remedy = "check the peer's load, or give the call a longer timeout_ms"


class ChecksumMismatch(TransferError):
    """The bytes that arrived are not the bytes that were sealed; they were not handed out."""

    code = 32
    remedy = "the object is dropped and read from another replica; look at that node's memory"


class LeaseExpired(TransferError):
    """A grant or a placement is older than what is in memory now."""

    code = 33
    retryable = True
    remedy = "start the operation again; a new placement is fetched"


class AccessRefused(TransferError):
    """The peer knows no such region, or the range or direction is outside what it offered."""

    code = 34
    remedy = "register the memory with the access you need and use offsets inside it"


class TransferCancelled(TransferError):
    code = 35
    remedy = "the batch was cancelled, or its engine, peer or region was closed meanwhile"


class ClusterError(MooncakeError):
    """About the processes of the cluster, not about one object."""


class MasterUnavailable(ClusterError):
    code = 40
    retryable = True
    remedy = "start mooncake-master, or check its address and the network between"


class NotLeader(ClusterError):
    code = 41
    retryable = True
    remedy = "ask the leader named in the error"


class NodeDraining(ClusterError):
    code = 42
    retryable = True
    remedy = "the node is leaving; the next placement uses another one"


class VersionMismatch(ClusterError):
    code = 43
    remedy = "run the same release of mooncake_py on both sides"


class InternalError(MooncakeError):
    """A broken promise of ours. Please report it with this text."""

    code = 50
    remedy = "please report this with the text above"


def _leaves(cls: type[MooncakeError]) -> list[type[MooncakeError]]:
    below = [leaf for sub in cls.__subclasses__() for leaf in _leaves(sub)]
    return below if "code" not in cls.__dict__ or cls is MooncakeError else [cls, *below]


BY_CODE: dict[int, type[MooncakeError]] = {leaf.code: leaf for leaf in _leaves(MooncakeError)}


def error_of(code: int, cause: str, **context: object) -> MooncakeError:
    """The error for a wire code (or a negated native status). Unknown codes are InternalError."""
    cls = BY_CODE.get(abs(code))
    if cls is None:
        return InternalError(f"unknown status code {code}: {cause}", remedy=None, **context)
    return cls(cause, remedy=None, **context)
