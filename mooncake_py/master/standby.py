"""One master of several: follows the one that leads, and leads when it is chosen.

    follow: snapshot, log, then the watch ── key gone, or process gone ──▶ campaign
       ▲                                                                      │ won
       └──────────── term over, or this process stops ◀── reign ◀── rest of the log

Rules:
* The follower holds everything the log says, read once and kept up by a watch, so that taking over
  costs the end of the log and some counting (shadow.py).
* What a former leader wrote is read after the campaign was won: from then on it cannot write.
* While this master does not lead, every call is answered `NotLeader` with whom to ask. While it
  leads, the gate asks `Leadership` at every call (election.py).
* Metadata that was deleted is a new cluster: it is led from nothing, and nodes of the lost one
  bring their objects (recovery.py).
* A term that has ended is left as a whole: its catalog is thrown away and read again from etcd.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from select import POLLIN, poll

from mooncake_py.clock import Deadline
from mooncake_py.config import split_address
from mooncake_py.errors import MasterUnavailable, MooncakeError, NotLeader, UsageError
from mooncake_py.master import records
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.election import Stand, Suspicion
from mooncake_py.master.etcd import Compacted, Watch
from mooncake_py.master.etcd_session import Leader, Session, leader_of
from mooncake_py.master.etcd_store import (
    CALL_MS,
    Entry,
    EtcdLog,
    EtcdStore,
    Identity,
    entry_of,
)
from mooncake_py.master.inbox import Call
from mooncake_py.master.owner import Gate
from mooncake_py.master.reign import Claim, Reign, Setup
from mooncake_py.master.shadow import Shadow
from mooncake_py.wire.etcd import pb
from mooncake_py.wire.lane import HEARTBEAT, PUT_REVOKE, UNMOUNT, Method
from mooncake_py.wire.status import refusal

log = logging.getLogger(__name__)

WATCH_MS = 100  # between two looks at whether the leader's process is gone
MARK_BYTES = 1 << 20
MARKS_MAX = 1_000  # a log that is longer counts as this long
TOUCH_MS = 1_500  # since etcd answered last; then a follower is not healthy
RETRY_MS = 500  # after etcd failed
PROBE_MS = 200  # between two attempts to connect to the leader
_DELETE = 1


class Follower:
    """The log as far as it is known here. One thread."""

    def __init__(self, store: EtcdStore, shadow: Shadow) -> None:
        self._store = store
        self.shadow = shadow
        self.sequence = 0
        self._nbytes = 0  # of all records that were followed
        self._marks: list[tuple[int, int]] = [(0, 0)]  # sequence, bytes up to it; now and then
        self.leader: Leader | None = None
        self._unfinished: dict[int, dict[int, bytes]] = {}
        self._watch: Watch | None = None

    def load(self) -> None:
        """Read everything as it was at one moment, and watch from there."""
        holder, revision = self._store.client.get(self._store.leader_key, CALL_MS)
        self.leader = leader_of(holder)
        then = self._store.log.at(revision)
        snapshot, self.sequence, corrupt = then.newest_snapshot()
        self.shadow.feed(records.unpack(snapshot or b""))
        for entry in then.entries(self.sequence):
            corrupt += entry.first - self.sequence - 1
            self._apply(entry)
        if corrupt:
            log.error("%d damaged entries of the metadata store were left out", corrupt)
        self._watch = self._store.client.watch(self._store.followed, revision)

    def step(self, timeout_ms: int) -> None:
        """Apply what happened. Compacted: begin anew."""
        assert self._watch is not None, "load comes first"
        for event in self._watch.events(timeout_ms):
            if event.kv.key == self._store.leader_key:
                self.leader = None if event.type == _DELETE else leader_of(event.kv)
            elif event.type != _DELETE:
                self._take(event.kv)

    @property
    def heard_ms(self) -> int:
        """When etcd answered last."""
        return self._watch.heard_ms if self._watch is not None else 0

    def catch_up(self) -> None:
        """Read the rest of the log, once nobody else can write."""
        for entry in self._store.log.entries(self.sequence):
            if entry.first != self.sequence + 1:
                log.error("records %d to %d are missing", self.sequence + 1, entry.first - 1)
            self._apply(entry)

    def everything(self) -> tuple[bytes | None, list[bytes]]:
        """The newest snapshot and what came after it, read again."""
        snapshot, base, _ = self._store.log.newest_snapshot()
        return snapshot, [r for entry in self._store.log.entries(base) for r in entry.records]

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _take(self, kv: pb.KeyValue) -> None:
        place = EtcdLog.position(kv.key)
        if place is None:
            return
        first, chunk = place
        values = self._unfinished.setdefault(first, {})
        values[chunk] = kv.value
        if chunk == 0:
            self._unfinished.clear()  # anything else was given up by its leader
            for entry in entry_of(first, values):
                if entry.first > self.sequence + 1:
                    raise Compacted("the watch has left out a part of the log")
                if entry.last > self.sequence:
                    self._apply(entry)

    def _apply(self, entry: Entry) -> None:
        self.shadow.feed(entry.records)
        self.sequence = entry.last
        self._nbytes += sum(map(len, entry.records))
        if self._nbytes - self._marks[-1][1] >= MARK_BYTES:
            self._marks = [*self._marks[-MARKS_MAX:], (self.sequence, self._nbytes)]

    def log_nbytes(self) -> int:
        """About how much the log holds above the newest snapshot."""
        base = max(self._store.log.snapshots(), default=0)
        covered = [nbytes for sequence, nbytes in self._marks if sequence <= base]
        return self._nbytes - (covered[-1] if covered else self._marks[0][1])


class Probe:
    """A connection to the leader that says nothing, to notice the end of its process."""

    def __init__(self, suspicion: Suspicion, now_ms: Callable[[], int]) -> None:
        self._suspicion = suspicion
        self._now_ms = now_ms
        self._address = ""
        self._gone = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mooncake-probe", daemon=True)
        self._thread.start()

    def watch(self, address: str) -> None:
        """From now on this one; "": none."""
        if address != self._address:
            self._address = address
            self._gone.clear()

    def presume_gone(self, address: str) -> None:
        """The address is our own now, so whoever led under it has ended."""
        self._suspicion.connected(address)
        if self._suspicion.refused(address, self._now_ms()):
            self._gone.set()

    def gone(self) -> bool:
        """The process at the address is gone; told once."""
        told = self._gone.is_set()
        self._gone.clear()
        return told

    def close(self) -> None:
        self._stop.set()
        self._thread.join(1)

    def _run(self) -> None:
        while not self._stop.is_set():
            address = self._address
            if not address:
                self._stop.wait(PROBE_MS / 1000)
                continue
            try:
                with socket.create_connection(split_address(address), 1.0) as connection:
                    self._suspicion.connected(address)
                    self._stay(connection, address)
            except ConnectionRefusedError:
                if self._suspicion.refused(address, self._now_ms()):
                    self._gone.set()
                self._stop.wait(PROBE_MS / 1000)
            except (OSError, MooncakeError):
                self._stop.wait(PROBE_MS / 1000)

    def _stay(self, connection: socket.socket, address: str) -> None:
        """Until it breaks, or is not wanted any more."""
        waiter = poll()
        waiter.register(connection, POLLIN)
        connection.setblocking(False)
        while not self._stop.is_set() and self._address == address:
            try:
                if not connection.recv(4096):
                    return
            except BlockingIOError:
                waiter.poll(PROBE_MS)
            except ConnectionError:
                return


def open_store(setup: Setup) -> EtcdStore:
    settings = setup.settings
    return EtcdStore(settings.metadata, lease_ms=settings.leader_lease_ms, clock=setup.clock)


def wait_for_store(setup: Setup) -> Identity:
    """The cluster's identity, once etcd answers: after a power failure masters and etcd start
    together. Before a port is taken, so that who looks for a leader is not kept waiting by one that
    cannot know it.

    Raises MasterUnavailable after `start_ms`."""
    deadline = Deadline(setup.settings.start_ms, setup.clock)
    waited = False
    store = open_store(setup)
    try:
        while True:
            try:
                return store.log.identity()
            except MasterUnavailable as error:
                if deadline.passed():
                    raise
                if not waited:
                    log.warning("waiting for the metadata store: %s", error)
                waited = True
            threading.Event().wait(RETRY_MS / 1000)
    finally:
        store.close()


class Contender:
    """What calls of such a process are handed to. `start` begins; `close` stops and resigns."""

    def __init__(
        self, setup: Setup, port: int, identity: Identity, say: Callable[[str], None]
    ) -> None:
        host = setup.listen.host
        if not setup.settings.advertise and host in ("0.0.0.0", "::"):
            raise UsageError(
                "--listen names all hosts, and others must find this one",
                remedy="give --advertise the host under which they reach it",
            )
        self._setup = setup
        self._say = say
        self._address = setup.reached_by(host, port)
        settings = setup.settings
        self._store = open_store(setup)
        self.metadata = self._store.describe()
        self._identity = identity
        self._campaign = self._store.campaign(self._address)
        self._suspicion = Suspicion(settings.leader_lease_ms)
        self._probe = Probe(self._suspicion, setup.clock.now_ms)
        self._reign: Reign | None = None
        self._follower: Follower | None = None  # while it follows, and knows all
        self._leader = ""
        self._term = 0
        self._session: Session | None = None
        self._in_touch = False
        self._heard_ms = 0  # when etcd answered last
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mooncake-contender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, call: Call) -> None:
        reign = self._reign
        if reign is not None:
            reign.submit(call)
        else:
            call.reply(refusal(call.method, self._not_leader(), self._term))

    def healthy(self) -> bool:
        """It is in touch with etcd, and leads and can, or follows."""
        reign, session = self._reign, self._session
        now_ms = self._setup.clock.now_ms()
        if reign is not None and session is not None:
            return session.in_touch(now_ms) and reign.healthy()
        return self._in_touch and now_ms - self._heard_ms < TOUCH_MS

    def catalog_numbers(self) -> dict[str, float]:
        reign = self._reign
        if reign is not None:
            return {"leading": 1, **reign.catalog_numbers()}
        return {"leading": 0, **self._would_serve()}

    def _would_serve(self) -> dict[str, float]:
        """What this master knows while another one leads: objects, and records of the log."""
        follower = self._follower
        if follower is None:
            return {}
        known = len(follower.shadow.state.table)
        return {"followed_objects": known, "followed_records": follower.sequence}

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(3 * self._setup.settings.stop_ms / 1000)
        self._probe.close()
        self._store.close()

    def _not_leader(self, text: str = "this master follows") -> NotLeader:
        leader = self._leader
        return NotLeader(text, leader=leader) if leader else NotLeader(text)

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            follower = Follower(self._store, Shadow(self._setup.catalog))
            try:
                self._identity = self._store.log.identity()
                follower.load()
                self._in_touch, self._heard_ms = True, self._setup.clock.now_ms()
                self._follower = follower
                session = self._follow(follower)
                if session is not None:
                    self._lead(session, follower)
            except Compacted as error:
                log.info("reading everything again: %s", error)
            except MooncakeError as error:
                self._in_touch = False
                log.warning("following failed: %s", error)
                self._stop.wait(RETRY_MS / 1000)
            except Exception:
                log.exception("the contender thread met a defect")
                self._stop.wait(RETRY_MS / 1000)
            finally:
                self._follower = None
                follower.close()

    def _follow(self, follower: Follower) -> Session | None:
        """A won term, or None when this process stops."""
        known: Leader | None = None
        while not self._stop.is_set():
            leader = follower.leader
            if leader is not None and leader != known:
                self._meet(leader)
                known = leader
            gone = leader is not None and leader.address and self._probe.gone()
            if leader is None or gone:
                if gone:
                    log.warning(
                        "the leader's process at %s is gone", leader.address if leader else ""
                    )
                won = self._campaign.run(leader, 2 * CALL_MS)
                if isinstance(won, Session):
                    if gone:
                        self._suspicion.deposed(self._setup.clock.now_ms())
                    return won
                follower.leader = won if won.revision else None
            follower.step(WATCH_MS)
            self._heard_ms = follower.heard_ms
        return None

    def _meet(self, leader: Leader) -> None:
        own = leader.address == self._address  # of a former life of this address
        self._leader = "" if own else leader.address
        self._term = max(self._term, leader.term)
        self._probe.watch("" if own else leader.address)
        if own:
            self._probe.presume_gone(leader.address)
        self._say(f"follows leader={leader.address or 'unknown'} term={leader.term}")

    def _lead(self, session: Session, follower: Follower) -> None:
        self._probe.watch("")
        store = self._store.borrowed()
        store.lead(session, follower.sequence)
        try:
            self._check_identity()
            follower.catch_up()
            store.lead(session, follower.sequence)
            catalog = Catalog(self._setup.catalog)
            report = catalog.take_over(follower.shadow, self._setup.clock.now_ms())
            if report is None:
                log.error("records contradict each other; reading all of them again")
                snapshot, log_records = follower.everything()
                report = catalog.restore(snapshot, log_records, self._setup.clock.now_ms())
            first_records = catalog.begin_term(
                session.term,
                self._setup.clock.now_ms(),
                self._identity.born_ms + self._setup.catalog.recovery_ms,
                durable_puts=True,
            )
            claim = Claim(
                self._identity.cluster_id,
                self._identity.secret,
                session.term,
                store,
                follower.sequence,
                follower.log_nbytes(),
                self._gate_of(session, catalog),
                durable_puts=True,
                first_records=first_records,
            )
            reign = Reign(self._setup, catalog, claim)
        except BaseException:
            store.close()  # gives the lease back: somebody else may have more luck
            raise
        self._leader, self._term = "", session.term
        self._session, self._reign = session, reign
        log.info("leading in term %d: %s", session.term, report)
        self._say(f"leads term={session.term} lane={reign.lane}")
        try:
            session.wait_for_end(self._stop)
        finally:
            self._leader = session.successor
            self._reign = None
            reign.close()

    def _check_identity(self) -> None:
        """Somebody may have deleted everything that this master had followed. Then it is nobody's
        log, and the nodes say what there is."""
        now = self._store.log.identity()
        if now != self._identity:
            raise MasterUnavailable("the metadata in etcd is another cluster's than before")

    def _gate_of(self, session: Session, catalog: Catalog) -> Gate:
        clock = self._setup.clock

        def gate(method: Method, now_ms: int) -> MooncakeError | None:
            stand = session.stand(clock.now_ms())
            if stand is Stand.LEADING:
                return None
            if stand is Stand.OUTAGE:
                if method.changes or method in (HEARTBEAT, PUT_REVOKE, UNMOUNT):
                    return NotLeader("etcd cannot be reached; reads go on")
                if not catalog.has_followers(now_ms):
                    return NotLeader("neither etcd nor most nodes are there: another may lead")
                return None
            if stand is Stand.ENDED and session.successor:
                return NotLeader("another master leads", leader=session.successor)
            return NotLeader(f"term {session.term} is over, or cannot be proven to last")

        return gate
