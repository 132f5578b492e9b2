"""Groups under random use: one answer, one fate, whatever befalls a member."""

from __future__ import annotations

from catalog_model import Driver, check_invariants, picture
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake_py.errors import OK
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import Mount, Mounted, PutEnd, Unmount
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.shadow import Shadow
from mooncake_py.model import Group

SETTINGS = CatalogSettings(
    tick_ms=10, grant_ttl_ms=100, grant_margin_ms=40, lease_ms=50, lease_max_ms=300,
    heartbeat_ms=10, suspect_ms=40, dead_ms=200, objects_max=1 << 12, generation_block=1 << 13,
)  # fmt: skip
SIZES = st.sampled_from([0, 100, 700])


class GroupMachine(RuleBasedStateMachine):
    """Every group has keys of its own, so that what `exists` says is about this group alone."""

    @initialize()
    def begin(self) -> None:
        self.driver = Driver(SETTINGS)
        self.segments = {node: self.driver.mount(node, 8192) for node in ("a", "b")}
        self.incarnations = dict.fromkeys(self.segments, 1)
        self.groups: list[tuple[list[bytes], list[int]]] = []  # keys, generations
        self.committed: set[bytes] = set()
        self.fillers = self.term = 0
        self.pages: list[list[tuple[bytes, bool]]] = [[] for _ in range(3)]  # (key, it follows)
        self.seen: list[set[bytes]] = [set() for _ in self.pages]

    @rule(count=st.integers(2, 4), length=SIZES, pinned=st.booleans(), whole=st.booleans())
    def put(self, count: int, length: int, pinned: bool, whole: bool) -> None:
        keys = [b"%d/%d" % (len(self.groups), i) for i in range(count)]
        options = {"soft_pin_ms": 120} if pinned else {}
        granted = self.driver.start(keys, length, groups=[5] * count, **options)
        assert len(set(granted.status)) == 1, "all of a group are granted, or none"
        if granted.status[0] == OK:
            self.groups.append((keys, list(granted.generations)))
            if whole:
                self.end(len(self.groups) - 1, range(count))

    def end(self, which: int, members: range) -> None:
        keys, generations = self.groups[which]
        names = [keys[i] for i in members]
        status = self.driver.end(names, [generations[i] for i in members])
        self.committed |= {key for key, code in zip(names, status, strict=True) if code == OK}

    @rule(page=st.integers(0, 2), length=SIZES, follows=st.booleans(), pinned=st.booleans())
    def put_in_page(self, page: int, length: int, follows: bool, pinned: bool) -> None:
        key = b"page%d/%d" % (page, len(self.pages[page]))
        options = {"soft_pin_ms": 120} if pinned else {}
        group = Group(f"{page}", follows).number("t")
        granted = self.driver.start([key], length, groups=[group], **options)
        if granted.status[0] == OK:
            self.pages[page].append((key, follows))
            self.driver.end([key], list(granted.generations))

    @precondition(lambda self: any(self.pages))
    @rule(data=st.data(), how=st.sampled_from(["remove", "force", "locate"]))
    def meet_one_of_a_page(self, data: st.DataObject, how: str) -> None:
        key, _ = data.draw(st.sampled_from([each for page in self.pages for each in page]))
        if how == "locate":
            self.driver.locate([key])
        else:
            self.driver.remove([key], force=how == "force")

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def finish_one(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.groups) - 1))
        at = data.draw(st.integers(0, len(self.groups[which][0]) - 1))
        self.end(which, range(at, at + 1))

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), how=st.sampled_from(["revoke", "remove", "force", "fail", "locate"]))
    def meet_one(self, data: st.DataObject, how: str) -> None:
        keys, generations = data.draw(st.sampled_from(self.groups))
        at = data.draw(st.integers(0, len(keys) - 1))
        if how == "revoke":
            self.driver.revoke([keys[at]], [generations[at]])
        elif how == "locate":
            found = self.driver.locate([keys[at]]).status[0] == OK
            assert found == bool(self.driver.exists([keys[at]])[0])
        elif how == "fail":
            lost = [(0, segment_id) for segment_id in self.segments.values()]
            self.driver.apply(PutEnd("t", [keys[at]], [generations[at]], lost))
        else:
            self.driver.remove([keys[at]], force=how == "force")

    @rule(length=st.sampled_from([1000, 3000]))
    def crowd_out(self, length: int) -> None:
        self.fillers += 1
        self.driver.put([b"filler%d" % self.fillers], length)

    @rule(node=st.sampled_from(["a", "b"]))
    def lose_and_replace(self, node: str) -> None:
        self.driver.apply(Unmount(node, self.incarnations[node], self.segments[node]))
        self.incarnations[node] += 1
        mount = Mount(node, self.incarnations[node], f"{node}:1", 1, 8192, node)
        reply = self.driver.apply(mount).reply
        assert isinstance(reply, Mounted)
        self.segments[node] = reply.segment_id

    @rule(ms=st.sampled_from([10, 60, 150]))
    def pass_time(self, ms: int) -> None:
        self.driver.pass_time(ms)
        for page, seen in zip(self.pages, self.seen, strict=True):
            present = self.driver.exists([key for key, _ in page])
            there = {key for (key, _), is_there in zip(page, present, strict=True) if is_there}
            leaders = {key for key, follows in page if not follows}
            if seen & leaders - there:
                assert not seen & there, "a page outlives what leads it"
            seen.clear()
            seen.update(there)

    @rule(followed=st.booleans())
    def restart(self, followed: bool) -> None:
        driver = self.driver
        again, shadow = Catalog(SETTINGS), Shadow(SETTINGS)
        again.restore(None, driver.log, driver.now_ms)
        shadow.feed(driver.log)
        other = Catalog(SETTINGS)
        assert other.take_over(shadow, driver.now_ms) is not None
        assert self.objects(other) == self.objects(again)
        assert picture(other)["grants"] == picture(again)["grants"]
        driver.catalog = other if followed else again
        self.term += 1
        driver.log += driver.catalog.begin_term(self.term, driver.now_ms)
        for node, segment_id in self.segments.items():
            mount = Mount(node, self.incarnations[node], f"{node}:1", 1, 8192, node, segment_id)
            driver.apply(mount)

    def objects(self, catalog: Catalog) -> dict[object, object]:
        """Soft pins that are over may be forgotten or not."""
        found = picture(catalog)["objects"]
        assert isinstance(found, dict)
        return {
            (*what[:4], what[4] * (what[4] > self.driver.now_ms), *what[5:]): where
            for what, where in found.items()
        }

    @invariant()
    def all_members_or_none(self) -> None:
        if not hasattr(self, "driver"):
            return
        check_invariants(self.driver.catalog)
        for keys, _ in self.groups:
            present = set(self.driver.exists(keys))
            assert len(present) == 1, "a part of a group is told to be there"
            if present == {1}:
                assert set(keys) <= self.committed, "visible before all were committed"


TestGroups = GroupMachine.TestCase
TestGroups.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None,
    suppress_health_check=list(HealthCheck), derandomize=True,
)  # fmt: skip
