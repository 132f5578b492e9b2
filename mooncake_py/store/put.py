"""A batch put: PutStart, one pull per node, PutEnd. The node copies; this side only says where.

Small values ride in the pull message; larger ones are offered as one gather region that the node
reads by the best transport, and that is withdrawn before the call returns, so that afterwards
nobody reads the caller's memory any more. Whatever happens to one key never touches the others:
a key ends committed, or revoked with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mooncake_py import errors
from mooncake_py.clock import Deadline
from mooncake_py.errors import InternalError, MooncakeError
from mooncake_py.master.client import Grants, MasterClient, NodeGrant
from mooncake_py.model import ReplicaPolicy
from mooncake_py.store.buffers import Span, view_of
from mooncake_py.store.segments import SegmentDirectory
from mooncake_py.transfer import Region, TransferEngine
from mooncake_py.wire.node import PULL_KIND, PullReply, PullRequest

INLINE_VALUE_MAX_BYTES = 16 << 10  # below, copying into the message costs less than a region
_REVOKE_MS = 50  # a put that ran out of time still tries this long to give its space back
INLINE_BATCH_MAX_BYTES = 64 << 10  # a batch with more is read by the node instead


Codes = npt.NDArray[np.int64]


def _keys_of(part: NodeGrant) -> Codes:
    """Index in the batch of each row's key."""
    return part.key_base + part.table()["key_index"].astype(np.int64)


@dataclass(frozen=True, slots=True)
class PutJob:
    """One batch: values lie in `spans`, one a key."""

    tenant: str
    keys: Sequence[bytes]
    spans: Sequence[Span]
    policy: ReplicaPolicy
    deadline: Deadline


@dataclass(slots=True)
class _Sources:
    """Where a node finds value i: at `offsets[i]` of a region, or of the inline bytes."""

    offsets: npt.NDArray[np.uint64]
    region: int = 0
    inline: bytes = b""


@dataclass(slots=True)
class _Sealed:
    """What the nodes answered: how many replicas of each key are sealed, and which are not."""

    counts: Codes
    failed: list[tuple[int, int]] = field(default_factory=list)
    reasons: dict[int, int] = field(default_factory=dict)


class BatchWriter:
    """Writes batches of spans. Stateless between calls, so any thread may use it."""

    def __init__(
        self,
        engine: TransferEngine,
        directory: SegmentDirectory,
        master: MasterClient,
        nodes: Executor,
        host_id: str,
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._master = master
        self._nodes = nodes
        self._host_id = host_id

    def write(self, job: PutJob) -> list[int]:
        """One code a key, in order. Raises only when the batch as a whole cannot be served."""
        grants = self._master.put_start(
            job.tenant,
            job.keys,
            [span.nbytes for span in job.spans],
            policy=job.policy,
            host_id=self._host_id,
            timeout_ms=job.deadline.left_ms(),
        )
        codes: list[int] = grants.status.tolist()
        if errors.OK in codes:
            sealed = self._pull_all(grants, job)
            self._finish(job, grants, sealed, codes)
        return codes

    # --- the nodes' part ---

    def _pull_all(self, grants: Grants, job: PutJob) -> _Sealed:
        sealed = _Sealed(np.zeros(len(job.keys), dtype=np.int64))
        parts = grants.grants
        with _Offer(self._engine, job.spans) as sources:
            if len(parts) == 1:
                outcomes = [self._pull(parts[0], sources, job.deadline)]
            else:
                futures = [
                    self._nodes.submit(self._pull, part, sources, job.deadline) for part in parts
                ]
                outcomes = [future.result() for future in futures]
        for part, statuses in zip(parts, outcomes, strict=True):
            keys = _keys_of(part)
            good = statuses == errors.OK
            np.add.at(sealed.counts, keys[good], 1)
            for key, code in zip(keys[~good].tolist(), statuses[~good].tolist(), strict=True):
                sealed.failed.append((key, part.segment.segment_id))
                sealed.reasons[key] = code
        return sealed

    def _pull(self, part: NodeGrant, sources: _Sources, deadline: Deadline) -> Codes:
        """One code a row of this part. Never raises for what the node or network does."""
        segment = part.segment
        keys = _keys_of(part)
        codes = np.zeros(len(keys), dtype=np.int64)
        reach = None
        try:
            reach = self._directory.reach(segment, deadline)
            request = PullRequest(
                segment_id=segment.segment_id,
                rows=part.rows,
                mac=part.mac,
                region=sources.region,
                sources=sources.offsets[keys].tobytes(),
                inline_values=sources.inline,
                timeout_ms=deadline.left_ms(),
            )
            answer = reach.peer.request(PULL_KIND, request.encode(), timeout_ms=deadline.left_ms())
            reply = PullReply.decode(answer)
        except MooncakeError as error:
            if reach is not None and isinstance(error, errors.PeerUnreachable):
                self._directory.forget(reach)
            codes[:] = error.code
            return codes
        if reply.code != errors.OK:
            codes[:] = reply.code
        elif len(reply.status) != len(keys):
            codes[:] = InternalError.code
        else:
            codes[:] = np.frombuffer(reply.status, dtype=np.uint8)
        return codes

    # --- the master's part ---

    def _finish(self, job: PutJob, grants: Grants, sealed: _Sealed, codes: list[int]) -> None:
        """Commit keys with a sealed replica, revoke the others; `codes` changes in place."""
        granted = [i for i, code in enumerate(codes) if code == errors.OK]
        commit = [i for i in granted if sealed.counts[i] > 0]
        revoke = [i for i in granted if sealed.counts[i] == 0]
        for i in revoke:
            codes[i] = sealed.reasons.get(i, InternalError.code)
        if commit:
            place = {key: n for n, key in enumerate(commit)}
            statuses = self._master.put_end(
                job.tenant,
                [job.keys[i] for i in commit],
                [int(grants.generations[i]) for i in commit],
                failed=[(place[key], seg) for key, seg in sealed.failed if key in place],
                timeout_ms=job.deadline.left_ms(),
            )
            for i, code in zip(commit, statuses.tolist(), strict=True):
                codes[i] = code
        if revoke:
            self._revoke(job, grants, revoke)

    def _revoke(self, job: PutJob, grants: Grants, revoke: Sequence[int]) -> None:
        try:
            self._master.put_revoke(
                job.tenant,
                [job.keys[i] for i in revoke],
                [int(grants.generations[i]) for i in revoke],
                timeout_ms=max(_REVOKE_MS, job.deadline.left_ms()),
            )
        except MooncakeError:
            return  # the grants end by themselves at their expiry


class _Offer:
    """Makes the values of one call readable for the nodes, for the time of the call."""

    def __init__(self, engine: TransferEngine, spans: Sequence[Span]) -> None:
        self._engine = engine
        self._spans = spans
        self._region: Region | None = None

    def __enter__(self) -> _Sources:
        sizes = np.fromiter((s.nbytes for s in self._spans), dtype="<u8", count=len(self._spans))
        offsets = np.zeros(len(sizes), dtype="<u8")
        np.cumsum(sizes[:-1], out=offsets[1:])
        if int(sizes.sum()) <= INLINE_BATCH_MAX_BYTES and sizes.max() <= INLINE_VALUE_MAX_BYTES:
            return _Sources(offsets, inline=b"".join(view_of(s) for s in self._spans))
        pieces = [view_of(s) for s in self._spans if s.nbytes]
        self._region = self._engine.register(pieces, access="read")
        return _Sources(offsets, region=self._region.id)

    def __exit__(self, *_: object) -> None:
        if self._region is not None:
            self._region.close()
