"""The rest of the public verbs under random use, among all others (`test_catalog_stateful.py`):
reservations and their commits, removals by pattern, questions for a prefix, numbers for people, and
a mirror that lives on the events alone."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from reference import Kept
from test_catalog_stateful import KEYS, SETTINGS, CatalogMachine, keys_of, lengths, random64

from mooncake_py.errors import LeaseExpired, ObjectExists
from mooncake_py.master.commands import (
    EventPage,
    Events,
    Exists,
    Locate,
    Present,
    PutEnd,
    Remove,
    Reserve,
    Reserved,
    Status,
    Statuses,
    StatusInfo,
)
from mooncake_py.master.events import STORED
from mooncake_py.model import EXTENT_ROW

PATTERNS = [b"k0[0-3]", b"^k1", b"5$", b"(0|1)1", b"x", b"^k.*$"]


class VerbMachine(CatalogMachine):
    catalog_settings = replace(SETTINGS, events_max=1 << 10)

    def __init__(self) -> None:
        super().__init__()
        self.reserved: dict[int, tuple[int, int, int]] = {}  # generation: length, segment, expiry
        self.cancelled: set[int] = set()  # by a removal of everything
        self.reserved_until_ms = 0  # with what rests
        self.mirror: dict[bytes, int] = {}
        self.heard = 0

    # --- reservations ----------------------------------------------------------------------------

    @rule(length=lengths, count=st.integers(1, 3), random=random64)
    def reserve(self, length: int, count: int, random: int) -> None:
        driver, reference = self.driver, self.reference
        before = len(driver.catalog.state.table)
        applied = driver.apply(Reserve("t", length, count, "a", random))
        assert isinstance(applied.reply, Reserved)
        assert len(driver.catalog.state.table) == before, "reservations evict nothing"
        rows = [
            (0, segment_id, *fields)
            for segment_id, data in zip(applied.reply.segment_ids, applied.reply.rows, strict=True)
            for fields in EXTENT_ROW.iter_unpack(data)
        ]
        grants = [(0, each[1], each[4], each[5], each[6]) for each in rows]
        reference.judge_grants(grants)
        until_ms = driver.now_ms + SETTINGS.grant_ttl_ms
        self.reserved_until_ms = until_ms + SETTINGS.grant_margin_ms
        reference.promise(self.reserved_until_ms, grants)
        for _, segment_id, _, nbytes, generation in grants:
            assert generation > max(reference.generations, default=0)
            assert nbytes == length
            reference.generations.add(generation)
            self.reserved[generation] = (length, segment_id, until_ms)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def name_one(self, data: st.DataObject, key: bytes) -> None:
        """A commit of a reservation names its key, which may be taken; then it is used up."""
        driver, reference = self.driver, self.reference
        generation = data.draw(st.sampled_from(sorted(self.reserved)))
        length, segment_id, until_ms = self.reserved.pop(generation)
        applied = driver.apply(PutEnd("t", [key], [generation], reserved=True))
        assert isinstance(applied.reply, Statuses)
        reference.learn(applied)
        code = applied.reply.status[0]
        kept, begun = reference.objects.get(key), reference.grants.get(key)
        taken = kept is not None or (begun is not None and reference.runs(begun))
        over = until_ms <= driver.now_ms or generation in self.cancelled
        if over or segment_id in reference.gone:
            assert code == LeaseExpired.code
        elif taken:
            assert code == ObjectExists.code
            if kept is not None:
                kept.wanted_again(driver.now_ms)
        else:
            assert code == 0
            reference.grants.pop(key, None)
            reference.committed.add(generation)
            reference.promises = [p for p in reference.promises if p.generation != generation]
            reference.objects[key] = Kept(generation, length, {segment_id}, stored_ms=driver.now_ms)
        again = driver.apply(PutEnd("t", [key], [generation], reserved=True))
        assert isinstance(again.reply, Statuses)
        assert again.reply.status[0] == (0 if code == 0 else LeaseExpired.code)
        reference.learn(again)

    @rule(prefix=st.sampled_from([b"", b"k0", b"k01", b"x"]), force=st.booleans())
    def remove_all(self, prefix: bytes, force: bool) -> None:
        """Everything that was granted before is removed, reservations, too; they have no prefix."""
        super().remove_all(prefix, force)
        if not prefix:
            self.cancelled.update(self.reserved)

    @rule(from_snapshot=st.booleans())
    def restart(self, from_snapshot: bool) -> None:
        """No record tells of reservations, so those there are end first; a mirror begins anew."""
        while self.driver.now_ms < self.reserved_until_ms:
            self.pass_time(45)
        self.reserved.clear()
        super().restart(from_snapshot)
        self.heard = self.page(0).newest
        self.mirror = self.there()

    # --- questions -------------------------------------------------------------------------------

    @rule(keys=keys_of, locating=st.booleans())
    def ask_for_a_prefix(self, keys: list[bytes], locating: bool) -> None:
        if self.driver.catalog.state.doubts:
            return
        present = list(self.driver.exists(keys))
        wanted = [*present[: present.index(0)], 0] if 0 in present else present
        if not locating:
            reply = self.driver.apply(Exists("t", keys, prefix=True)).reply
            assert isinstance(reply, Present)
            assert list(reply.present) == wanted
            return
        located = self.driver.apply(Locate("t", keys, True)).reply
        assert [int(not code) for code in located.status] == wanted  # type: ignore[union-attr]
        self.reference.located(keys[: len(wanted)], located, self.readable())  # type: ignore[arg-type]

    @rule(pattern=st.sampled_from(PATTERNS), force=st.booleans())
    def remove_matching(self, pattern: bytes, force: bool) -> None:
        objects, now_ms = self.reference.objects, self.driver.now_ms
        stays = {
            key
            for key, kept in objects.items()
            if not re.search(pattern, key) or not (force or kept.evictable(now_ms))
        }
        cursor = b""
        while True:
            command = Remove("t", (), force, True, b"", pattern, cursor)
            applied = self.driver.apply(command)
            assert isinstance(applied.reply, Statuses)
            assert applied.durable_first
            self.reference.learn(applied)
            cursor = applied.reply.cursor
            if not cursor:
                break
        assert set(objects) == stays

    @rule()
    def look_at_the_numbers(self) -> None:
        info = self.driver.apply(Status()).reply
        assert isinstance(info, StatusInfo)
        state = self.driver.catalog.state
        assert info.objects == len(state.table)
        own = {each.name: each for each in info.tenants}.get("t")
        tenant = state.tenants.find("t")
        assert (own is None) == (tenant is None)
        if own is not None and tenant is not None:
            assert own.keys == len(tenant.complete) + len(tenant.writing)
            assert own.used_bytes == tenant.used_bytes  # which `check_invariants` adds up
            assert min(own.counters.values(), default=0) >= 0

    # --- events ----------------------------------------------------------------------------------

    def page(self, after: int) -> EventPage:
        reply = self.driver.apply(Events(after, 1 << 10)).reply
        assert isinstance(reply, EventPage)
        return reply

    def there(self) -> dict[bytes, int]:
        state = self.driver.catalog.state
        tenant = state.tenants.find("t")
        complete = tenant.complete if tenant is not None else {}
        return {key: state.table.generation[slot] for key, slot in complete.items()}

    @invariant()
    def f46_a_mirror_of_the_events_has_the_keys(self) -> None:
        if not hasattr(self, "driver"):
            return
        page = self.page(self.heard)
        assert not page.gap
        for event in page.events:
            assert event.sequence == self.heard + 1
            self.heard = event.sequence
            if event.what == STORED:
                self.mirror[event.key] = event.generation
            elif self.mirror.get(event.key) == event.generation:
                del self.mirror[event.key]
        assert self.mirror == self.there()


TestVerbs = VerbMachine.TestCase
TestVerbs.settings = settings(
    max_examples=30, stateful_step_count=50, deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
