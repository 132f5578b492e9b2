"""The whole verb set under random use, against the reference, with invariants after every step."""

from __future__ import annotations

from catalog_model import Driver, check_invariants, picture
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from reference import Reference

from mooncake_py.errors import ObjectNotFound, QuotaExceeded, TransferTimeout
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import (
    CopyObjects,
    Drain,
    Exists,
    Heartbeat,
    List,
    Listed,
    Locate,
    Mount,
    Mounted,
    Pin,
    PutEnd,
    PutStart,
    Refused,
    Remove,
    Report,
    SetQuota,
    TaskList,
    Tasks,
    Tick,
    Unmount,
)
from mooncake_py.master.membership import GONE
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.tenant import POLICIES
from mooncake_py.model import ReplicaPolicy

KEYS = [b"k%02d" % i for i in range(12)]
NODES = ("a", "b", "c")
SETTINGS = CatalogSettings(
    tick_ms=10, grant_ttl_ms=100, grant_margin_ms=40, lease_ms=50, lease_max_ms=300, spare_ms=30,
    heartbeat_ms=10, suspect_ms=40, dead_ms=200, doubt_ms=60, reclaim_max=2,
    generation_block=1 << 13, objects_max=1 << 12,
)  # fmt: skip

keys_of = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5)
lengths = st.sampled_from([0, 1, 64, 400, 1000, 4000])
random64 = st.integers(0, 2**64 - 1)


class CatalogMachine(RuleBasedStateMachine):
    catalog_settings = SETTINGS

    @initialize(nbytes=st.sampled_from([2048, 8192]))
    def begin(self, nbytes: int) -> None:
        self.driver = Driver(self.catalog_settings)
        self.reference = Reference(self.driver)
        self.nbytes = nbytes
        self.incarnations = dict.fromkeys(NODES, 1)
        self.segments: dict[str, int] = {}
        self.silent: set[str] = set()
        self.puts: list[tuple[bytes, int]] = []  # every generation ever granted, with its key
        self.snapshot: tuple[bytes, int] | None = None
        for node in NODES[:2]:
            self.mount(node, False)

    # --- nodes -----------------------------------------------------------------------------------

    @rule(node=st.sampled_from(NODES), restarted=st.booleans())
    def mount(self, node: str, restarted: bool) -> None:
        driver = self.driver
        if restarted:
            self.incarnations[node] += 1
        incarnation = self.incarnations[node]
        known = self.segments.get(node, 0)
        command = Mount(
            node, incarnation, f"{node}:1", 1, self.nbytes, node, 0 if restarted else known
        )
        applied = driver.apply(command)
        assert isinstance(applied.reply, Mounted)
        assert applied.durable_first
        self.reference.learn(applied)
        if restarted or known in self.reference.gone:
            assert applied.reply.segment_id > max(self.segments.values(), default=0)
        self.segments[node] = applied.reply.segment_id
        self.reference.untold.discard(applied.reply.segment_id)
        self.silent.discard(node)

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def impostor(self, data: st.DataObject) -> None:
        """Another process under a living name is refused and changes nothing."""
        node = data.draw(st.sampled_from(sorted(self.segments)))
        segment = self.driver.catalog.state.members.by_id.get(self.segments[node])
        if segment is None or not segment.readable:
            return
        if self.driver.now_ms - segment.seen_ms >= SETTINGS.suspect_ms:
            return
        applied = self.driver.apply(Mount(node, 999, "elsewhere:1", 1, self.nbytes, node))
        assert isinstance(applied.reply, Refused)
        assert not applied.records

    @rule(node=st.sampled_from(NODES))
    def fall_silent(self, node: str) -> None:
        self.silent.add(node)

    @rule(node=st.sampled_from(NODES), draining=st.booleans())
    def beat(self, node: str, draining: bool) -> None:
        if node not in self.segments:
            return
        self.silent.discard(node)
        segment_id = self.segments[node]
        segment = self.driver.catalog.state.members.by_id.get(segment_id)
        command = Heartbeat(node, self.incarnations[node], segment_id, draining)
        reply = self.driver.apply(command).reply
        unknown = segment is None or segment.state in (GONE, "returning")
        assert isinstance(reply, Refused) == unknown

    @rule(node=st.sampled_from(NODES))
    def unmount(self, node: str) -> None:
        if node in self.segments:
            command = Unmount(node, self.incarnations[node], self.segments[node])
            self.reference.learn(self.driver.apply(command))

    # --- copies ----------------------------------------------------------------------------------

    @rule(node=st.sampled_from(NODES), cancel=st.booleans())
    def drain(self, node: str, cancel: bool) -> None:
        self.reference.learn(self.driver.apply(Drain(node, cancel)))

    @rule(keys=keys_of, to=st.sampled_from(NODES), source=st.sampled_from(["", *NODES]))
    def copy(self, keys: list[bytes], to: str, source: str) -> None:
        applied = self.driver.apply(CopyObjects("t", keys, to, source))
        self.reference.learn(applied)

    @rule(node=st.sampled_from(NODES), code=st.sampled_from([0, 0, 0, 33]))
    def work(self, node: str, code: int) -> None:
        """The node fetches tasks, and reports them."""
        if node not in self.segments:
            return
        who = (node, self.incarnations[node], self.segments[node])
        applied = self.driver.apply(Tasks(*who, (), 3))
        self.reference.learn(applied)
        if isinstance(applied.reply, TaskList):
            for task in applied.reply.copies:
                self.reference.handed(who[2], task)
            done = [(task.generation, code) for task in applied.reply.copies]
            self.reference.learn(self.driver.apply(Tasks(*who, done)))

    # --- puts ------------------------------------------------------------------------------------

    @rule(
        keys=keys_of,
        length=lengths,
        replicas=st.integers(1, 3),
        strict=st.booleans(),
        pin=st.sampled_from(["", "", "", "hard_pin", "soft_pin_ms", "ttl_ms"]),
        random=random64,
        upsert=st.booleans(),
    )
    def start(  # noqa: PLR0913, PLR0917  (one a choice of the put)
        self,
        keys: list[bytes],
        length: int,
        replicas: int,
        strict: bool,
        pin: str,
        random: int,
        upsert: bool = False,
    ) -> None:
        options = {"hard_pin": True} if pin == "hard_pin" else {pin: 120} if pin else {}
        policy = ReplicaPolicy(replicas, strict, **options)  # type: ignore[arg-type]
        count = len(keys)
        command = PutStart(
            "t", keys, [length] * count, bytes(16 * count), policy, "a", (), random, upsert
        )
        applied = self.driver.apply(command)
        self.reference.started(
            keys, length, applied, replica_count=replicas, strict=strict, upsert=upsert, **options
        )
        granted = applied.reply
        self.puts += [
            (key, generation)
            for key, generation in zip(keys, granted.generations, strict=True)
            if generation
        ]

    @rule(keys_max=st.sampled_from([0, 2, 6]), policy=st.sampled_from(POLICIES))
    def limit(self, keys_max: int, policy: str) -> None:
        """A quota takes nothing away by itself."""
        before = len(self.reference.objects)
        applied = self.driver.apply(SetQuota("t", 0, keys_max, policy))
        assert applied.durable_first
        assert len(self.driver.catalog.state.table) >= before
        self.reference.keys_max, self.reference.quota_policy = keys_max, policy

    @precondition(lambda self: self.puts)
    @rule(data=st.data(), failed=st.sets(st.sampled_from(NODES)), recent=st.booleans())
    def finish(self, data: st.DataObject, failed: set[str], recent: bool) -> None:
        """A commit, maybe late, maybe the second one, maybe of replicas that failed."""
        choice = self.puts[-4:] if recent else self.puts
        key, generation = data.draw(st.sampled_from(choice))
        ids = {self.segments[node] for node in failed if node in self.segments}
        if len(failed) < 2:
            ids = set()
        pairs = [(0, each) for each in sorted(ids)]
        applied = self.driver.apply(PutEnd("t", [key], [generation], pairs))
        self.reference.ended(key, generation, ids, applied.reply.status[0])
        self.reference.learn(applied)

    @rule(keys=keys_of, length=lengths, random=random64)
    def put(self, keys: list[bytes], length: int, random: int) -> None:
        before = len(self.puts)
        self.start(keys, length, 1, False, "", random)
        fresh = self.puts[before:]
        applied = self.driver.apply(PutEnd("t", [k for k, _ in fresh], [g for _, g in fresh]))
        for (key, generation), code in zip(fresh, applied.reply.status, strict=True):
            self.reference.ended(key, generation, set(), code)

    @precondition(lambda self: self.puts)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        key, generation = data.draw(st.sampled_from(self.puts))
        self.driver.revoke([key], [generation])
        begun = self.reference.grants.get(key)
        if begun is not None and begun.generation == generation:
            del self.reference.grants[key]

    # --- reads -----------------------------------------------------------------------------------

    def readable(self) -> set[int]:
        return {each.segment_id for each in self.driver.catalog.state.members if each.readable}

    @rule(keys=keys_of, lease_ms=st.sampled_from([0, 20, 200]))
    def locate(self, keys: list[bytes], lease_ms: int) -> None:
        if self.driver.catalog.state.doubts:
            return  # `report` looks at these
        applied = self.driver.apply(Locate("t", keys, False, lease_ms))
        self.reference.located(keys, applied.reply, self.readable())

    @rule(keys=keys_of, code=st.sampled_from([30, 31, 32, 33]), data=st.data())
    def report(self, keys: list[bytes], code: int, data: st.DataObject) -> None:
        key = keys[0]
        kept = self.reference.objects.get(key)
        if kept is None or self.driver.catalog.state.table.copied:
            return  # copies have generations of their own: test_catalog_copies.py
        segment_id = data.draw(st.sampled_from(sorted(kept.segments)))
        stale = data.draw(st.booleans())
        generation = kept.generation - stale
        segment = self.driver.catalog.state.members.by_id[segment_id]
        heard_ms = self.driver.now_ms - segment.seen_ms
        believed = code != TransferTimeout.code or heard_ms > 2 * SETTINGS.heartbeat_ms
        already = (kept.generation, segment.index) in self.driver.catalog.state.doubts
        applied = self.driver.apply(Report("t", [key], [generation], [segment_id], [code]))
        if stale:
            assert not applied.records
        elif code in (32, 33):
            kept.segments.discard(segment_id)
            if not kept.segments:
                self.reference.objects.pop(key)
        else:
            located = self.driver.locate([key])
            if believed or already or not segment.readable:
                assert segment_id not in located.segment_ids
            elif not kept.ttl_until or kept.ttl_until > self.driver.now_ms:
                assert segment_id in located.segment_ids, (
                    "late for one reader is no miss for others"
                )
            if located.status[0] == 0:
                kept.leased_until = self.driver.now_ms + located.lease_ms

    @rule(keys=keys_of, force=st.booleans())
    def remove(self, keys: list[bytes], force: bool) -> None:
        keys = list(dict.fromkeys(keys))
        applied = self.driver.apply(Remove("t", keys, force))
        for key, code in zip(keys, applied.reply.status, strict=True):
            kept = self.reference.objects.get(key)
            stays = kept is not None and not force and not kept.evictable(self.driver.now_ms)
            assert code == (12 if stays else 0)
        self.reference.learn(applied)
        assert applied.durable_first
        gone = [key for key in keys if key not in self.reference.objects]
        assert not any(self.driver.exists(gone))

    @rule(keys=keys_of, soft_pin_ms=st.sampled_from([0, 60, 300]), hard=st.booleans())
    def pin(self, keys: list[bytes], soft_pin_ms: int, hard: bool) -> None:
        """What is pinned hard from now on is not evicted; what is not any more may be."""
        applied = self.driver.apply(Pin("t", keys, 0 if hard else soft_pin_ms, hard))
        self.reference.learn(applied)
        for key, code in zip(keys, applied.reply.status, strict=True):
            kept = self.reference.objects.get(key)
            assert (code == ObjectNotFound.code) == (kept is None)
            assert code in (0, ObjectNotFound.code, QuotaExceeded.code)
            if code == 0 and kept is not None:
                kept.hard_pin = hard
                kept.soft_pin_until = 0 if hard else self.driver.now_ms + soft_pin_ms

    @rule(prefix=st.sampled_from([b"", b"k0", b"k01", b"x"]), force=st.booleans())
    def remove_all(self, prefix: bytes, force: bool) -> None:
        objects = self.reference.objects
        stays = {
            key
            for key, kept in objects.items()
            if not key.startswith(prefix) or not (force or kept.evictable(self.driver.now_ms))
        }
        before = len(objects)
        applied = self.driver.apply(Remove("t", (), force, True, prefix))
        self.reference.learn(applied)
        hidden = applied.reply.removed - (before - len(objects))  # of lost nodes, not yet forgotten
        assert hidden >= 0
        assert set(objects) == stays

    @rule(prefix=st.sampled_from([b"", b"k0"]), limit=st.integers(1, 4))
    def list_pages(self, prefix: bytes, limit: int) -> None:
        found: list[bytes] = []
        while True:
            after = found[-1] if found else b""
            page = self.driver.apply(List("t", prefix, after, limit)).reply
            assert isinstance(page, Listed)
            assert len(page.keys) <= limit
            found += page.keys
            if not page.more:
                break
        assert found == sorted(found)
        wanted = {key for key in self.reference.objects if key.startswith(prefix)}
        assert wanted <= set(found)

    # --- time and restarts -----------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 10, 45, 150]))
    def pass_time(self, ms: int) -> None:
        driver = self.driver
        end = driver.now_ms + ms
        while driver.now_ms < end:
            driver.now_ms = min(end, driver.now_ms + SETTINGS.tick_ms)
            for node, segment_id in self.segments.items():
                if node not in self.silent:
                    driver.apply(Heartbeat(node, self.incarnations[node], segment_id))
            self.reference.learn(driver.apply(Tick()), evicting=True)

    @rule()
    def take_snapshot(self) -> None:
        self.snapshot = (self.driver.catalog.snapshot(self.driver.now_ms), len(self.driver.log))

    @rule(from_snapshot=st.booleans())
    def restart(self, from_snapshot: bool) -> None:
        driver = self.driver
        driver.catalog.apply(Tick(0), driver.now_ms)
        before = picture(driver.catalog)
        snapshot, position = self.snapshot or (b"", 0) if from_snapshot else (b"", 0)
        fresh = Catalog(self.catalog_settings)
        report = fresh.restore(snapshot, driver.log[position:], driver.now_ms)
        assert report.damaged_records == report.unknown_records == 0
        assert report.extents_overlapping == 0
        assert picture(fresh) == before
        driver.catalog = fresh
        self.reference.untold = set(fresh.state.members.by_id)
        limit = driver.now_ms + SETTINGS.lease_ms
        for kept in self.reference.objects.values():
            kept.leased_until = limit
        live = {kept.generation for kept in self.reference.objects.values()}
        self.reference.promises = [
            each
            for each in self.reference.promises
            if each.generation not in live or each.until_ms <= limit
        ]

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "driver"):
            check_invariants(self.driver.catalog)

    @invariant()
    def exists_says_what_the_reference_says(self) -> None:
        if not hasattr(self, "driver") or self.driver.catalog.state.doubts:
            return
        readable, now_ms = self.readable(), self.driver.now_ms
        for key, present in zip(KEYS, self.driver.exists(KEYS), strict=True):
            kept = self.reference.objects.get(key)
            wanted = (
                kept is not None
                and bool(kept.segments & readable)
                and not (kept.ttl_until and kept.ttl_until <= now_ms)
            )
            assert bool(present) == wanted, key


EXAMPLES = 60

TestCatalog = CatalogMachine.TestCase
TestCatalog.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=50, deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),  # explaining takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip


def test_f05_a_million_probes_do_not_change_what_is_evicted() -> None:
    driver = Driver()
    driver.mount("a", 64 * 1024)
    driver.put([b"old", b"young"], 16_000)
    for _ in range(1000):
        driver.apply(Exists("t", [b"old"] * 1000))
    for i in range(3):
        assert driver.put([b"new%d" % i], 16_000) == [0]
    assert driver.exists([b"old", b"young"])[0] == 0
