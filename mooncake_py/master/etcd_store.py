"""The metadata store on etcd (design/metadata-etcd.md): identity, placement log, snapshots.

    PREFIX/cluster                 identity and secret, made once
    PREFIX/term                    number of the last term
    PREFIX/leader                  who leads; hangs on its lease
    PREFIX/log/SEQUENCE/CHUNK      records of one append, from SEQUENCE on (chunks.py)
    PREFIX/snapshot/SEQUENCE/CHUNK the catalog with all records up to SEQUENCE

Rules:
* Every write is a transaction that compares the leader's key (`Session.fence`), so nothing of a
  former leader arrives after a new one began; a new leader reads after it began.
* The last chunk to be written is number 0; without it nothing of an append counts.
* An append whose outcome is not known is settled by the next one, which must begin with the
  same records: they are there already, or they are written again.
* After a snapshot, what only the ones before the last two needed is deleted, and etcd is asked to
  forget revisions that were already old at the snapshot before: watchers that follow closely are
  not disturbed.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mooncake_py.clock import Clock, Deadline, SystemClock
from mooncake_py.errors import InternalError, MasterUnavailable, MooncakeError, NotLeader
from mooncake_py.master import chunks
from mooncake_py.master.election import LeaseTimes
from mooncake_py.master.etcd import EtcdAddress, EtcdClient, Unclear, prefix_end
from mooncake_py.master.etcd_session import Campaign, Session, absent, get, put
from mooncake_py.master.metadata import Loaded
from mooncake_py.wire.etcd import pb

log = logging.getLogger(__name__)

LAYOUT = 1
LEASE_MS = 3_000
CALL_MS = 1_500  # an append, or one step of anything longer
SNAPSHOTS_KEPT = 2
_PAGE_BYTES = 8 << 20
_PAGE_KEYS = 1_024


@dataclass(frozen=True, slots=True)
class Identity:
    cluster_id: str
    secret: bytes
    born_ms: int = 0  # when it was made


@dataclass(frozen=True, slots=True)
class Entry:
    """One append as it was read: records from `first` on, `lost` of them damaged."""

    first: int
    records: list[bytes]
    lost: int

    @property
    def last(self) -> int:
        return self.first + len(self.records) + self.lost - 1


class EtcdLog:
    """Reading, for leaders and followers alike. Thread-safe."""

    def __init__(self, client: EtcdClient, prefix: str, revision: int = 0) -> None:
        self._client = client
        self._revision = revision
        self.prefix = prefix
        self.log_prefix = f"{prefix}log/".encode()
        self.snapshot_prefix = f"{prefix}snapshot/".encode()

    def at(self, revision: int) -> EtcdLog:
        """The same as it was at a revision. Compacted: that is gone."""
        return EtcdLog(self._client, self.prefix, revision)

    def key(self, kind: bytes, sequence: int, chunk: int | None = None) -> bytes:
        """`kind`: one of the two prefixes. Without a chunk: where the sequence's keys begin."""
        return kind + (b"%016x/" % sequence if chunk is None else b"%016x/%04x" % (sequence, chunk))

    @staticmethod
    def position(key: bytes) -> tuple[int, int] | None:
        """Sequence and chunk of a key; None: somebody else's."""
        try:
            _, sequence, chunk = key.rsplit(b"/", 2)
            return int(sequence, 16), int(chunk, 16)
        except ValueError:
            return None

    def identity(self) -> Identity:
        """The cluster's, made by whoever asks first."""
        key = f"{self.prefix}cluster".encode()
        fresh = {
            "layout": LAYOUT, "cluster_id": uuid.uuid4().hex, "secret": secrets.token_hex(32),
            "born_ms": self._client.clock.now_ms(),
        }  # fmt: skip
        value = json.dumps(fresh).encode()
        with suppress(Unclear):  # what is there now says it
            self._client.txn([absent(key)], [put(key, value)], timeout_ms=CALL_MS)
        kv, _ = self._client.get(key, CALL_MS)
        if kv is None:
            raise MasterUnavailable(f"{key.decode()} has vanished from etcd")
        found = json.loads(kv.value)
        if found["layout"] != LAYOUT:
            raise MasterUnavailable(
                f"the metadata at {self.prefix} of etcd has layout {found['layout']}, this release "
                f"writes {LAYOUT}",
                remedy="use the release that wrote it, or another prefix",
            )
        secret, born_ms = bytes.fromhex(found["secret"]), int(found.get("born_ms", 0))
        return Identity(found["cluster_id"], secret, born_ms)

    def newest_snapshot(self) -> tuple[bytes | None, int, int]:
        """The newest undamaged snapshot, its sequence, and how many damaged ones were met."""
        corrupt = 0
        for sequence in sorted(self.snapshots(), reverse=True):
            start = self.key(self.snapshot_prefix, sequence)
            values: dict[int, bytes] = {}
            for kv in self._pages(start, prefix_end(start)):
                place = self.position(kv.key)
                if place is not None:
                    values[place[1]] = kv.value
            snapshot = chunks.join_snapshot(values)
            if snapshot is not None:
                return snapshot, sequence, corrupt
            corrupt += 1
        return None, 0, corrupt

    def snapshots(self) -> list[int]:
        """Sequences of snapshots that were completed, damaged or not."""
        request = pb.RangeRequest(
            key=self.snapshot_prefix,
            range_end=prefix_end(self.snapshot_prefix),
            revision=self._revision,
            keys_only=True,
        )
        found = (self.position(kv.key) for kv in self._client.range(request, CALL_MS).kvs)
        return [place[0] for place in found if place is not None and place[1] == 0]

    def entries(self, after: int) -> Iterator[Entry]:
        """Appends behind a sequence number, as they are now."""
        start = self.key(self.log_prefix, after + 1)
        current, values = -1, dict[int, bytes]()
        for kv in self._pages(start, prefix_end(self.log_prefix)):
            place = self.position(kv.key)
            if place is None:
                continue
            if place[0] != current:
                yield from entry_of(current, values)
                current, values = place[0], {}
            values[place[1]] = kv.value
        yield from entry_of(current, values)

    def _pages(self, start: bytes, end: bytes) -> Iterator[pb.KeyValue]:
        limit = 16
        while True:
            request = pb.RangeRequest(
                key=start, range_end=end, limit=limit, revision=self._revision
            )
            reply = self._client.range(request, 2 * CALL_MS)
            yield from reply.kvs
            if not reply.more:
                return
            start = reply.kvs[-1].key + b"\0"
            nbytes = max(1, sum(len(kv.value) for kv in reply.kvs)) / len(reply.kvs)
            limit = int(min(_PAGE_KEYS, max(8, _PAGE_BYTES / nbytes)))


def entry_of(first: int, values: dict[int, bytes]) -> Iterator[Entry]:
    """The append in these chunks, if it was completed."""
    batch = chunks.join_records(values)
    if batch is not None:
        yield Entry(first, batch.records, batch.lost)


class EtcdStore:
    """A `MetadataStore` at an address of etcd.

    `load` campaigns once: for stores used without standbys, like the embedded one. A standby that
    has won calls `lead` instead. Used by one thread at a time (its own snapshot thread aside).
    """

    def __init__(
        self,
        text: str,
        *,
        lease_ms: int = LEASE_MS,
        clock: Clock | None = None,
        client: EtcdClient | None = None,
        background: bool = False,
    ) -> None:
        self._text = text
        self.address = EtcdAddress.parse(text)
        self._clock = clock or SystemClock()
        self._owns_client = client is None
        self.client = client or EtcdClient(self.address, self._clock)
        self.leader_key = f"{self.address.prefix}leader".encode()
        self.followed = f"{self.address.prefix}l".encode()  # the leader's key, and the log
        self.log = EtcdLog(self.client, self.address.prefix)
        self.times = LeaseTimes(lease_ms)
        self._session: Session | None = None
        self._sequence = 0
        self._unsure: dict[int, int] = {}  # nonce of an append that may arrive -> its records
        self._compact_at = 0
        self._background = background
        self._snapshotter: threading.Thread | None = None

    def describe(self) -> str:
        return str(self.address)

    def borrowed(self) -> EtcdStore:
        """Another one with the same client, which stays open when it is closed. Its snapshots are
        written in the background, so that commits do not wait for them."""
        return EtcdStore(
            self._text,
            lease_ms=self.times.lease_ms,
            clock=self._clock,
            client=self.client,
            background=True,
        )

    def campaign(self, grpc: str) -> Campaign:
        return Campaign(self.client, self.address.prefix, grpc, self.times, self._clock)

    def load(self) -> Loaded:
        won = self.campaign("").run(None, 2 * CALL_MS)
        if not isinstance(won, Session):
            self.client.close()
            raise MasterUnavailable(
                f"{self.describe()} is in use by another master ({won.address or 'no address'})",
                remedy="stop that master, or use another prefix",
            )
        identity = self.log.identity()
        snapshot, base, corrupt = self.log.newest_snapshot()
        records: list[bytes] = []
        last = base
        for entry in self.log.entries(base):
            corrupt += entry.first - last - 1 + entry.lost
            records += entry.records
            last = entry.last
        self.lead(won, last)
        return Loaded(
            identity.cluster_id,
            identity.secret,
            won.term,
            snapshot,
            records,
            last,
            corrupt,
            identity.born_ms,
        )

    def lead(self, session: Session, sequence: int) -> None:
        """Write in this term, behind the record `sequence`: the last one that there is."""
        self._session = session
        self._sequence = sequence
        self._unsure.clear()
        self._compact_at = session.revision

    def append(self, records: Sequence[bytes]) -> int:
        """See `MetadataStore.append`. After a failure the next call must begin with the same
        records. NotLeader: the term is over."""
        session = self._leading()
        deadline = Deadline(CALL_MS, self._clock)
        rest = list(records)
        while True:
            if self._unsure:
                arrived = self._arrived(session, deadline)
                self._sequence += arrived
                rest = rest[arrived:]
            if not rest:
                return self._sequence
            try:
                self._write(session, rest, deadline)
            except Unclear:
                if deadline.passed():
                    raise
                continue
            self._sequence += len(rest)
            return self._sequence

    def raise_term(self, term: int) -> None:
        session = self._leading()
        key = f"{self.address.prefix}term".encode()
        kv, _ = self.client.get(key, CALL_MS)
        if kv is None or int(kv.value) < term:
            self._put(session, key, b"%d" % term)

    def write_snapshot(self, snapshot: bytes | bytearray, sequence: int) -> None:
        """See `MetadataStore.write_snapshot`. In the background: it is there before `close`
        returns; one that cannot be written is logged, and while one is being written another is
        left out, since the records say it all."""
        session = self._leading()
        if not self._background:
            self._write_snapshot(session, snapshot, sequence)
            return
        if self._snapshotter is not None and self._snapshotter.is_alive():
            log.warning("the snapshot before is still being written; this one is left out")
            return
        self._snapshotter = threading.Thread(
            target=self._try_snapshot,
            args=(session, snapshot, sequence),
            name="mooncake-snapshot",
            daemon=True,
        )
        self._snapshotter.start()

    def _try_snapshot(self, session: Session, snapshot: bytes | bytearray, sequence: int) -> None:
        try:
            self._write_snapshot(session, snapshot, sequence)
        except MooncakeError as error:
            log.warning("no snapshot of %d bytes was written: %s", len(snapshot), error)

    def _write_snapshot(self, session: Session, snapshot: bytes | bytearray, sequence: int) -> None:
        nonce = secrets.randbits(64)
        values = chunks.cut_snapshot(snapshot, nonce)
        first = next(values)
        for index, value in enumerate(values, 1):
            self._put(session, self.log.key(self.log.snapshot_prefix, sequence, index), value)
        self._put(session, self.log.key(self.log.snapshot_prefix, sequence, 0), first)
        self._truncate(session)

    def close(self) -> None:
        if self._snapshotter is not None:
            self._snapshotter.join(4 * CALL_MS / 1000)
        if self._session is not None:
            self._session.resign(CALL_MS)
            self._session = None
        if self._owns_client:
            self.client.close()

    # --- writing --------------------------------------------------------------------------------

    def _leading(self) -> Session:
        if self._session is None:
            raise MasterUnavailable(f"the metadata store {self.describe()} is not open")
        return self._session

    def _write(self, session: Session, records: list[bytes], deadline: Deadline) -> None:
        nonce = secrets.randbits(64)
        values = chunks.cut_records(records, nonce)
        if len(values) > chunks.COUNT_MAX:
            raise InternalError(f"an append of {len(values)} chunks")
        first = self._sequence + 1
        keys = [self.log.key(self.log.log_prefix, first, index) for index in range(len(values))]
        for key, value in zip(keys[:0:-1], values[:0:-1], strict=True):
            self._transact(session, [], [put(key, value)], CALL_MS)
        left_ms = max(1 if len(values) == 1 else CALL_MS, deadline.left_ms())
        self._unsure[nonce] = len(records)
        try:
            reply = self._transact(session, [absent(keys[0])], [put(keys[0], values[0])], left_ms)
        except Unclear:
            raise
        except MasterUnavailable:
            del self._unsure[nonce]
            raise
        if not reply.succeeded:
            raise Unclear(f"{self.describe()}: an earlier attempt to append {first} arrived late")
        self._unsure.clear()

    def _arrived(self, session: Session, deadline: Deadline) -> int:
        """How many records of appends without an answer are there. NotLeader: another's are."""
        key = self.log.key(self.log.log_prefix, self._sequence + 1, 0)
        reply = self.client.txn(
            [session.fence()], [get(key)], [session.look()], timeout_ms=max(1, deadline.left_ms())
        )
        kvs = reply.responses[0].response_range.kvs
        if not reply.succeeded:
            session.check(kvs)
        if not kvs:
            return 0
        chunk = chunks.read(kvs[0].value)
        if chunk is None or chunk.nonce not in self._unsure:
            raise NotLeader(f"term {session.term} is over: somebody else appended")
        count = self._unsure[chunk.nonce]
        self._unsure.clear()
        return count

    def _put(self, session: Session, key: bytes, value: bytes) -> None:
        """Again and again while the outcome is unclear: it is the same whoever was first."""
        deadline = Deadline(2 * CALL_MS, self._clock)
        while True:
            try:
                self._transact(session, [], [put(key, value)], max(1, deadline.left_ms()))
                return
            except Unclear:
                if deadline.passed():
                    raise

    def _transact(
        self,
        session: Session,
        compares: list[pb.Compare],
        then: list[pb.RequestOp],
        timeout_ms: int,
    ) -> pb.TxnResponse:
        """NotLeader: the fence does not hold. Not succeeded: one of `compares` does not."""
        reply = self.client.txn(
            [session.fence(), *compares], then, [session.look()], timeout_ms=timeout_ms
        )
        if not reply.succeeded:
            session.check(reply.responses[0].response_range.kvs)
        return reply

    def _truncate(self, session: Session) -> None:
        kept = sorted(self.log.snapshots(), reverse=True)[:SNAPSHOTS_KEPT]
        if len(kept) < SNAPSHOTS_KEPT:
            return
        oldest = kept[-1]
        ranges = [
            (self.log.snapshot_prefix, self.log.key(self.log.snapshot_prefix, oldest)),
            (self.log.log_prefix, self.log.key(self.log.log_prefix, oldest + 1)),
        ]
        deletes = [
            pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=start, range_end=end))
            for start, end in ranges
        ]
        reply = self._transact(session, [], deletes, 4 * CALL_MS)
        self.client.compact(self._compact_at, CALL_MS)
        self._compact_at = reply.header.revision
