"""A batch put: PutStart, one pull per node, PutEnd. The node copies; this side only says where.
With reservations at hand (`reservations.py`) there is no PutStart.

What a node is told about the values' memory is decided in `store/sources.py`. Whatever happens to
one key never touches the others: a key ends committed, or revoked with the reason. Only keys of a
group end together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from mooncake_py import errors
from mooncake_py._native.check import failure
from mooncake_py._native.puts import Sent, put_reserved
from mooncake_py.clock import Deadline
from mooncake_py.errors import InternalError, MooncakeError
from mooncake_py.master.client import Grants, MasterClient, NodeGrant, Reservations
from mooncake_py.master.stripes import part_key
from mooncake_py.model import DEFAULT_POLICY, ReplicaPolicy
from mooncake_py.store.buffers import Pieces
from mooncake_py.store.regions import RegionBook
from mooncake_py.store.reservations import ReservationPool
from mooncake_py.store.segments import Reach, SegmentDirectory
from mooncake_py.store.sources import Sources, sources_of
from mooncake_py.store.stripes import parts_of
from mooncake_py.transfer import TransferEngine
from mooncake_py.wire.lane import PUT_END
from mooncake_py.wire.node import (
    PULL_KIND,
    PULLED_HEAD_BYTES,
    PullReply,
    PullRequest,
    pull_names,
)

_REVOKE_MS = 50  # a put that ran out of time still tries this long to give its space back

_SETTLED = frozenset((errors.OK, errors.ObjectExists.code))

Codes = npt.NDArray[np.int64]


@dataclass(slots=True)  # as if frozen, which would cost a small put 2 µs
class PutJob:
    """One batch: value i is what `pieces` says of it, `sizes[i]` bytes. Never changed."""

    tenant: str
    keys: Sequence[bytes]
    pieces: Pieces
    sizes: Sequence[int]
    policy: ReplicaPolicy
    deadline: Deadline
    groups: Sequence[int] = ()  # per key, equal and above 0 = one fate; or empty
    upsert: bool = False  # what a key holds is replaced by the commit
    # Key -> generations of attempts that were sealed, and whose commits came to nothing so far.
    uncommitted: dict[bytes, set[int]] = field(default_factory=dict)
    # Key -> how many replicas were sealed, where the policy asks for several.
    replicas: dict[bytes, int] = field(default_factory=dict)

    def select(self, which: Sequence[int]) -> PutJob:
        """The same for some of the keys."""
        return PutJob(
            self.tenant,
            [self.keys[i] for i in which],
            self.pieces.select(which),
            [self.sizes[i] for i in which],
            self.policy,
            self.deadline,
            [self.groups[i] for i in which] if self.groups else (),
            self.upsert,
            self.uncommitted,
            self.replicas,
        )

    def replica_counts(self, codes: Sequence[int]) -> list[int]:
        """On how many nodes each key was stored, whose put ended with these codes."""
        known = self.replicas
        if not known and not any(codes):
            return [1] * len(codes)
        return [
            0 if code else known.get(key, 1) for key, code in zip(self.keys, codes, strict=True)
        ]


@dataclass(slots=True)
class _Part:
    """What one node was asked for, and one code a row of it."""

    grant: NodeGrant
    keys: Codes  # index in the batch of each row's key
    codes: Codes


def _sealed_counts(job: PutJob, grants: Grants, parts: Sequence[_Part]) -> dict[bytes, int]:
    """How many nodes have sealed each key. Replicas carry the key's generation; of an object in
    parts, each of which is somewhere once, only the first does."""
    sealed: Counter[int] = Counter()
    for part in parts:
        own = part.grant.table()["generation"] == grants.generations[part.keys]
        sealed.update(part.keys[own & (part.codes == errors.OK)].tolist())
    return {job.keys[key]: count for key, count in sealed.items()}


def _with_deadlines(job: PutJob, grants: Grants) -> PutJob:
    """As the nodes are told it: with the deadlines of the other object, so that they last although
    every record of the master is lost."""
    if grants.inherited_ms is None:
        return job
    soft_pin_ms, ttl_ms = grants.inherited_ms
    policy = replace(job.policy, expires_with="", soft_pin_ms=soft_pin_ms, ttl_ms=ttl_ms)
    return replace(job, policy=policy)


def _one_fate(groups: Sequence[int], codes: list[int]) -> None:
    """What has befallen one key of a group has befallen all of it. One that exists already is in
    no group, and therefore changes nothing."""
    if not groups or not any(codes):
        return
    failed: dict[int, int] = {}
    for group, code in zip(groups, codes, strict=True):
        if group and code not in (errors.OK, errors.ObjectExists.code):
            failed.setdefault(group, code)
    for i, group in enumerate(groups):
        if codes[i] == errors.OK:
            codes[i] = failed.get(group, errors.OK)


def _pull_parts(
    grant: NodeGrant,
    sources: Sources,
    keys: Codes,
    parts: dict[int, tuple[int, int]],
    names: list[bytes],
) -> tuple[bytes, bytes]:
    """Where the bytes of rows are, some of which are parts of their values; these get the names of
    parts."""
    table = grant.table()
    found = [parts.get(each, (0, 0)) for each in table["generation"].tolist()]
    for row, (_, number) in enumerate(found):
        if number:
            names[row] = part_key(names[row], number)
    starts = np.array([start for start, _ in found], dtype=np.uint64)
    return sources.of(keys, starts, table["length"].astype(np.uint64))


def _reserved_pull(
    run: Reservations, start: int, sources: Sources, job: PutJob, timeout_ms: int
) -> bytes:
    """The pull of a run for the keys from `start` on."""
    stop = start + run.row_count
    offsets, pieces = sources.of(slice(start, stop))
    return PullRequest(
        segment_id=run.segment.segment_id,
        rows=run.rows,
        mac=b"",
        region=sources.region,
        sources=offsets,
        inline_values=sources.inline,
        timeout_ms=timeout_ms,
        pieces=pieces,
        row_macs=run.macs,
        names=pull_names(job.tenant, job.keys[start:stop], job.policy),
    ).encode()


def _reserved_codes(answer: bytes, count: int) -> list[int]:
    if len(answer) == PULLED_HEAD_BYTES + count and not answer.strip(b"\0"):
        return [errors.OK] * count
    reply = PullReply.decode(answer)
    if reply.code != errors.OK or len(reply.status) != count:
        return [reply.code or InternalError.code] * count
    return list(reply.status)


class BatchWriter:
    """Writes batches. Stateless between calls, so any thread may use it."""

    def __init__(
        self,
        engine: TransferEngine,
        directory: SegmentDirectory,
        master: MasterClient,
        nodes: Executor,
        reservations: ReservationPool,
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._master = master
        self._nodes = nodes
        self._reservations = reservations
        self.regions = RegionBook(engine)

    def write(self, job: PutJob) -> list[int]:
        """One code a key, in order. Raises only when the batch as a whole cannot be served."""
        reserved = self._take_reservations(job)
        if reserved is None:
            return self._write_granted(job)
        codes = self._write_reserved(job, reserved)
        again = [i for i, code in enumerate(codes) if code not in _SETTLED]
        if again:
            self._reservations.clear()
            rest = job.select(again)
            try:
                for i, code in zip(again, self._write_granted(rest), strict=True):
                    codes[i] = code
            except MooncakeError as error:
                if len(again) == len(codes):
                    raise
                for i in again:
                    codes[i] = error.code
            finally:
                rest.pieces.release()
        return codes

    # --- with reservations ---

    def _take_reservations(self, job: PutJob) -> list[Reservations] | None:
        """For the plainest puts only: default policy, no groups, no upsert, one length, no key
        twice."""
        count, nbytes = len(job.keys), job.sizes[0]
        if job.groups or job.upsert:
            return None
        if job.policy is not DEFAULT_POLICY and job.policy != DEFAULT_POLICY:
            return None
        if count > 1 and (job.sizes.count(nbytes) != count or len(set(job.keys)) != count):
            return None
        return self._reservations.take(nbytes, count)

    def _write_reserved(self, job: PutJob, runs: Sequence[Reservations]) -> list[int]:
        """As `write`; codes that are not in _SETTLED mean that nothing was stored. The first run
        is for the first keys, and so on."""
        with sources_of(job.pieces, job.sizes, self.regions, self._engine, job.deadline) as sources:
            if len(runs) == 1:
                codes, ended = self._put_at_once(runs[0], sources, job)
                if ended:
                    return codes
            else:
                codes = self._pull_runs(runs, sources, job)
        keys, generations = job.keys, [each for run in runs for each in run.generations()]
        sealed = list(range(len(codes)))
        if any(codes):
            sealed = [i for i, code in enumerate(codes) if code == errors.OK]
            keys = [keys[i] for i in sealed]
            generations = [generations[i] for i in sealed]
        if keys:
            statuses = self._master.put_end(
                job.tenant, keys, generations, reserved=True, timeout_ms=job.deadline.left_ms()
            )
            for i, code, generation in zip(sealed, statuses.tolist(), generations, strict=True):
                codes[i] = code
                if code not in _SETTLED:
                    job.uncommitted.setdefault(job.keys[i], set()).add(generation)
        return codes

    def _put_at_once(
        self, run: Reservations, sources: Sources, job: PutJob
    ) -> tuple[list[int], bool]:
        """Pull and commit in one native call, where the master has a lane. (one code each, whether
        they are of the commit)."""
        lane = self._master.lane()
        if lane is not None and not lane.is_of(self._engine):
            lane = None  # an engine of its own (link.py): its peers have other numbers than ours
        commit = None
        if lane is not None:
            commit = self._master.put_end_payload(job.tenant, job.keys, run.generations())
        if lane is None or commit is None:
            return self._pull_reserved(run, 0, sources, job), False
        count, reach = run.row_count, None
        try:
            reach = self._directory.reach(run.segment, job.deadline)
            left_ms = job.deadline.left_ms()
            status, pulled, committed = put_reserved(
                self._engine.native,
                Sent(reach.peer.id, PULL_KIND, _reserved_pull(run, 0, sources, job, left_ms)),
                Sent(lane.id, PUT_END.number, commit),
                left_ms,
            )
            if pulled is None:
                raise failure(status, "put", peer=reach.peer.address)
            codes = _reserved_codes(pulled, count)
        except MooncakeError as error:
            return self._not_pulled(error, reach, count), False
        if committed is None:  # the ordinary call finds out why, and goes on from there
            return codes, False
        try:
            statuses = self._master.put_ended(committed, timeout_ms=job.deadline.left_ms())
        except errors.NotLeader:
            return codes, False
        return statuses.tolist(), True

    def _pull_runs(self, runs: Sequence[Reservations], sources: Sources, job: PutJob) -> list[int]:
        """Beside each other."""
        starts = [0, *accumulate(run.row_count for run in runs)]
        others = [
            self._nodes.submit(self._pull_reserved, run, start, sources, job)
            for run, start in zip(runs[1:], starts[1:], strict=False)
        ]
        codes = self._pull_reserved(runs[0], 0, sources, job)
        for other in others:
            codes += other.result()
        return codes

    def _pull_reserved(
        self, run: Reservations, start: int, sources: Sources, job: PutJob
    ) -> list[int]:
        """One code each. `start`: of the first key. Never raises for what node or network does."""
        count, reach = run.row_count, None
        try:
            reach = self._directory.reach(run.segment, job.deadline)
            left_ms = job.deadline.left_ms()
            request = _reserved_pull(run, start, sources, job, left_ms)
            answer = reach.peer.request(PULL_KIND, request, timeout_ms=left_ms)
            return _reserved_codes(answer, count)
        except MooncakeError as error:
            return self._not_pulled(error, reach, count)

    def _not_pulled(self, error: MooncakeError, reach: Reach | None, count: int) -> list[int]:
        if reach is not None and isinstance(error, errors.PeerUnreachable):
            self._directory.forget(reach)
        return [error.code] * count

    # --- with grants ---

    def _write_granted(self, job: PutJob) -> list[int]:
        grants = self._master.put_start(
            job.tenant,
            job.keys,
            job.sizes,
            policy=job.policy,
            host_id=self._reservations.host_id,
            groups=job.groups,
            upsert=job.upsert,
            timeout_ms=job.deadline.left_ms(),
        )
        codes: list[int] = grants.status.tolist()
        if errors.OK in codes:
            parts = self._pull_all(grants, _with_deadlines(job, grants))
            self._finish(job, grants, parts, codes)
        if job.uncommitted:
            self._recognise(job, codes)
        return codes

    def _recognise(self, job: PutJob, codes: list[int]) -> None:
        """Is what exists our own earlier attempt? A master that has just begun does not know the
        grants that the one before had not recorded; a moment later a node tells it what they
        became, and it is an object. `codes` changes in place."""
        met = [
            (i, generation)
            for i, code in enumerate(codes)
            if code == errors.ObjectExists.code
            for generation in sorted(job.uncommitted.get(job.keys[i], ()))
        ]
        if met:
            keys, generations = [job.keys[i] for i, _ in met], [each for _, each in met]
            statuses = self._commit(job, keys, generations, ())
            for (i, _), code in zip(met, statuses.tolist(), strict=True):
                if code == errors.OK:
                    codes[i] = errors.OK

    # --- the nodes' part ---

    def _pull_all(self, grants: Grants, job: PutJob) -> list[_Part]:
        parts = parts_of(grants)
        with sources_of(job.pieces, job.sizes, self.regions, self._engine, job.deadline) as sources:
            if len(grants.grants) == 1:
                return [self._pull(grants.grants[0], sources, job, parts)]
            futures = [
                self._nodes.submit(self._pull, grant, sources, job, parts)
                for grant in grants.grants[1:]
            ]
            first = self._pull(grants.grants[0], sources, job, parts)
            return [first, *(future.result() for future in futures)]

    def _pull(
        self, grant: NodeGrant, sources: Sources, job: PutJob, parts: dict[int, tuple[int, int]]
    ) -> _Part:
        """One code a row of this grant. Never raises for what the node or network does."""
        deadline = job.deadline
        keys = grant.table()["key_index"].astype(np.int64)
        if grant.key_base:
            keys += grant.key_base
        part = _Part(grant, keys, np.zeros(len(keys), dtype=np.int64))
        segment, reach = grant.segment, None
        try:
            reach = self._directory.reach(segment, deadline)
            names = [job.keys[i] for i in keys.tolist()]
            if parts:
                offsets, pieces = _pull_parts(grant, sources, keys, parts, names)
            else:
                offsets, pieces = sources.of(keys)
            request = PullRequest(
                segment_id=segment.segment_id,
                rows=grant.rows,
                mac=grant.mac,
                region=sources.region,
                sources=offsets,
                inline_values=sources.inline,
                timeout_ms=deadline.left_ms(),
                pieces=pieces,
                names=pull_names(job.tenant, names, job.policy),
            )
            answer = reach.peer.request(PULL_KIND, request.encode(), timeout_ms=deadline.left_ms())
            reply = PullReply.decode(answer)
        except MooncakeError as error:
            if reach is not None and isinstance(error, errors.PeerUnreachable):
                self._directory.forget(reach)
            part.codes[:] = error.code
            return part
        if reply.code != errors.OK:
            part.codes[:] = reply.code
        elif len(reply.status) != len(keys):
            part.codes[:] = InternalError.code
        else:
            part.codes[:] = np.frombuffer(reply.status, dtype=np.uint8)
        return part

    # --- the master's part ---

    def _finish(
        self, job: PutJob, grants: Grants, parts: Sequence[_Part], codes: list[int]
    ) -> None:
        """Commit keys with a sealed replica, revoke the others; `codes` changes in place."""
        generations: list[int] = grants.generations.tolist()
        if job.policy.replica_count > 1:
            job.replicas.update(_sealed_counts(job, grants, parts))
        if not any(codes) and not any(part.codes.any() for part in parts):
            codes[:] = self._commit(job, job.keys, generations, []).tolist()
            self._note_uncommitted(job, generations, range(len(codes)), codes)
            return
        sealed: set[int] = set()
        failed: list[tuple[int, int]] = []
        reasons: dict[int, int] = {}
        for part in parts:
            for key, code in zip(part.keys.tolist(), part.codes.tolist(), strict=True):
                if code == errors.OK:
                    sealed.add(key)
                else:
                    failed.append((key, part.grant.segment.segment_id))
                    reasons[key] = code
        granted = [i for i, code in enumerate(codes) if code == errors.OK]
        for i in granted:
            if i not in sealed:
                codes[i] = reasons.get(i, InternalError.code)
        _one_fate(job.groups, codes)
        commit = [i for i in granted if codes[i] == errors.OK]
        revoke = [i for i in granted if codes[i] != errors.OK]
        if commit:
            place = {key: n for n, key in enumerate(commit)}
            statuses = self._commit(
                job,
                [job.keys[i] for i in commit],
                [generations[i] for i in commit],
                [(place[key], segment) for key, segment in failed if key in place],
            )
            for i, code in zip(commit, statuses.tolist(), strict=True):
                codes[i] = code
            self._note_uncommitted(job, generations, commit, codes)
            _one_fate(job.groups, codes)
        if revoke:
            self._revoke(job, generations, revoke)

    @staticmethod
    def _note_uncommitted(
        job: PutJob, generations: Sequence[int], which: Iterable[int], codes: Sequence[int]
    ) -> None:
        if any(codes):
            for i in which:
                if codes[i] not in _SETTLED:
                    job.uncommitted.setdefault(job.keys[i], set()).add(generations[i])

    def _commit(
        self,
        job: PutJob,
        keys: Sequence[bytes],
        generations: Sequence[int],
        failed: Sequence[tuple[int, int]],
    ) -> npt.NDArray[np.uint8]:
        return self._master.put_end(
            job.tenant, keys, generations, failed=failed, timeout_ms=job.deadline.left_ms()
        )

    def _revoke(self, job: PutJob, generations: Sequence[int], revoke: Sequence[int]) -> None:
        try:
            self._master.put_revoke(
                job.tenant,
                [job.keys[i] for i in revoke],
                [generations[i] for i in revoke],
                timeout_ms=max(_REVOKE_MS, job.deadline.left_ms()),
            )
        except MooncakeError:
            return  # the grants end by themselves at their expiry
