"""The obvious reference of the catalog: dictionaries without space or speed, and what follows.

It does not predict where things go or what is evicted. It is told by the records, and judges:
was this allowed? And it keeps the promises that were given to readers and writers, as ranges of a
segment that nobody else may be granted before their time."""

from __future__ import annotations

from dataclasses import dataclass

from catalog_model import Driver, grant_rows, place_rows

from mooncake_py.master import records
from mooncake_py.master.commands import Applied, CopyTask, Granted, Located
from mooncake_py.model import extent_bytes


@dataclass
class Kept:
    """A complete object."""

    generation: int
    length: int
    segments: set[int]
    leased_until: int = 0
    hard_pin: bool = False
    soft_pin_until: int = 0
    ttl_until: int = 0
    stored_ms: int = 0

    def evictable(self, now_ms: int) -> bool:
        return not self.hard_pin and self.leased_until <= now_ms

    def spared(self, now_ms: int, spare_ms: int) -> bool:
        """May it stay although it could go: just stored, or wanted again, while others are read?"""
        return self.stored_ms > now_ms - spare_ms

    def wanted_again(self, now_ms: int) -> None:
        """Somebody wanted to put what is there: it counts as new, unless it is protected anyway."""
        if self.evictable(now_ms) and self.soft_pin_until <= now_ms:
            self.stored_ms = now_ms


@dataclass
class Begun:
    """A running grant."""

    generation: int
    length: int
    segments: set[int]
    expires_ms: int
    hard_pin: bool = False
    soft_pin_ms: int = 0
    ttl_ms: int = 0


@dataclass(frozen=True)
class Promise:
    until_ms: int
    segment_id: int
    start: int
    end: int
    generation: int


class Reference:
    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.objects: dict[bytes, Kept] = {}
        self.grants: dict[bytes, Begun] = {}
        self.promises: list[Promise] = []
        self.generations: set[int] = set()
        self.committed: set[int] = set()
        self.gone: set[int] = set()
        self.untold: set[int] = set()  # segments that have not mounted with this master
        self.keys_max, self.quota_policy = 0, "reject"

    @property
    def now(self) -> int:
        return self.driver.now_ms

    def runs(self, begun: Begun) -> bool:
        """Its time is not over, or does not count: a node may hold what a former master granted."""
        return begun.expires_ms > self.now or bool(begun.segments & (self.untold - self.gone))

    # --- promises ---------------------------------------------------------------------------------

    def promise(self, until_ms: int, rows: list[tuple[int, int, int, int, int]]) -> None:
        for _, segment_id, offset, length, generation in rows:
            end = offset + extent_bytes(length)
            self.promises.append(Promise(until_ms, segment_id, offset, end, generation))

    def judge_grants(self, rows: list[tuple[int, int, int, int, int]]) -> None:
        """New extents must not touch what was promised to others."""
        running = [each for each in self.promises if each.until_ms > self.now]
        self.promises = running
        for _, segment_id, offset, length, generation in rows:
            end = offset + extent_bytes(length)
            for other in running:
                assert (
                    other.segment_id != segment_id
                    or other.generation == generation
                    or end <= other.start
                    or other.end <= offset
                ), f"extent {offset}..{end} of generation {generation} breaks {other}"

    # --- what happened ---------------------------------------------------------------------------

    def learn(self, applied: Applied, evicting: bool = False) -> None:
        """Take in drops and lost segments; `evicting`: complete objects may only have gone because
        they could be evicted."""
        found = [records.decode(data) for data in applied.records]
        for record in found:
            if isinstance(record, records.Gone):
                self.lose_segment(record.segment_id)
            elif isinstance(record, records.Copies):
                for generation, _, segment_id, _ in record.rows:
                    self._of(generation).segments.add(segment_id)
            elif isinstance(record, records.Lost):
                for generation, segment_id in record.pairs:
                    self._of(generation).segments.discard(segment_id)
        for record in found:
            if isinstance(record, records.Drops):
                for generation in record.generations:
                    self._drop(generation, evicting)

    def _of(self, generation: int) -> Kept:
        """The object of this generation; one that nobody keeps, if there is none."""
        for kept in self.objects.values():
            if kept.generation == generation:
                return kept
        return Kept(generation, 0, set())

    def handed(self, segment_id: int, task: CopyTask) -> None:
        """A node may write there until the task's end."""
        row = (0, segment_id, task.offset, task.length, task.generation)
        self.judge_grants([row])
        self.promise(task.expires_ms, [row])

    def _drop(self, generation: int, evicting: bool) -> None:
        for key, kept in list(self.objects.items()):
            if kept.generation == generation:
                if evicting and kept.segments - self.gone and not self._ended(kept):
                    assert kept.evictable(self.now), f"{key!r} was protected and is gone"
                del self.objects[key]
        for key, begun in list(self.grants.items()):
            if begun.generation == generation:
                assert not evicting or begun.expires_ms <= self.now or not begun.segments
                del self.grants[key]

    def _ended(self, kept: Kept) -> bool:
        return bool(kept.ttl_until) and kept.ttl_until <= self.now

    def lose_segment(self, segment_id: int) -> None:
        self.gone.add(segment_id)
        for key, kept in list(self.objects.items()):
            kept.segments.discard(segment_id)
            if not kept.segments:
                del self.objects[key]
        for key, begun in list(self.grants.items()):
            begun.segments.discard(segment_id)
            if not begun.segments:
                del self.grants[key]

    # --- verbs -----------------------------------------------------------------------------------

    def started(self, keys: list[bytes], length: int, applied: Applied, **policy: int) -> None:
        """Judge a put start, by what was there before and what it says it dropped."""
        before = {
            key: kept.generation
            for key, kept in self.objects.items()
            if not self._ended(kept) and not policy.get("upsert")
        }
        before |= {key: begun.generation for key, begun in self.grants.items() if self.runs(begun)}
        self.learn(applied, evicting=True)
        dropped = {
            generation
            for data in applied.records
            if isinstance(record := records.decode(data), records.Drops)
            for generation in record.generations
        }
        granted = applied.reply
        assert isinstance(granted, Granted)
        rows = grant_rows(granted)
        self.judge_grants(rows)
        seen: set[bytes] = set()
        for i, key in enumerate(keys):
            code, generation = granted.status[i], granted.generations[i]
            if code == 11:
                assert key in before or key in seen, f"{key!r} does not exist"
                if key not in seen and key in self.objects:
                    self.objects[key].wanted_again(self.now)
                continue
            assert key not in seen, f"{key!r} was granted twice"
            assert before.get(key, 0) in (0, *dropped), f"{key!r} exists"
            if code == 0:
                seen.add(key)
                assert generation > max(self.generations, default=0), "generation used again"
                self.generations.add(generation)
                self._begin(
                    key, generation, length, {row[1] for row in rows if row[0] == i}, policy
                )
            elif code == 21:
                assert policy.get("hard_pin") or policy.get("soft_pin_ms") or self.keys_max
            else:
                assert code == 20
                self._judge_full(length, policy)
        if seen and self.keys_max and self.quota_policy != "borrow":
            assert len(self.objects) + len(self.grants) <= self.keys_max, "beyond the quota"
        settings = self.driver.settings
        self.promise(self.now + settings.grant_ttl_ms + settings.grant_margin_ms, rows)

    def _begin(
        self, key: bytes, generation: int, length: int, segments: set[int], policy: dict[str, int]
    ) -> None:
        wanted = policy.get("replica_count", 1)
        assert 1 <= len(segments) <= wanted
        assert len(segments) == wanted or not policy.get("strict")
        self.grants[key] = Begun(
            generation,
            length,
            segments,
            self.now + self.driver.settings.grant_ttl_ms,
            bool(policy.get("hard_pin")),
            policy.get("soft_pin_ms", 0),
            policy.get("ttl_ms", 0),
        )

    def _judge_full(self, length: int, policy: dict[str, int]) -> None:
        spare_ms = self.driver.settings.spare_ms
        left = [
            key
            for key, kept in self.objects.items()
            if kept.evictable(self.now)
            and not kept.spared(self.now, spare_ms)
            and self._placeable(kept.segments)
        ]
        strict = policy.get("strict") and policy.get("replica_count", 1) > 1
        assert strict or not left or not self._fits(length), f"full although {left} could go"

    def _placeable(self, segments: set[int]) -> bool:
        return any(
            each.segment_id in segments for each in self.driver.catalog.state.members.placeable
        )

    def _fits(self, length: int) -> bool:
        return any(
            each.nbytes >= extent_bytes(length)
            for each in self.driver.catalog.state.members.placeable
        )

    def ended(self, key: bytes, generation: int, failed: set[int], code: int) -> None:
        begun = self.grants.get(key)
        if begun is not None and begun.generation == generation and self.runs(begun):
            del self.grants[key]
            left = begun.segments - failed
            self.promises = [
                each
                for each in self.promises
                if each.generation != generation or each.segment_id not in left
            ]
            assert (code == 0) == bool(left)
            if left:
                self.committed.add(generation)
                self.objects[key] = Kept(
                    generation,
                    begun.length,
                    left,
                    0,
                    begun.hard_pin,
                    self.now + begun.soft_pin_ms if begun.soft_pin_ms else 0,
                    self.now + begun.ttl_ms if begun.ttl_ms else 0,
                    self.now,
                )
            return
        kept = self.objects.get(key)
        if kept is not None and kept.generation == generation:
            assert code == 0, "a second commit of the same put"
        assert code != 0 or generation in self.committed
        if begun is not None and begun.generation == generation:
            del self.grants[key]  # expired, and the commit noticed it

    def located(self, keys: list[bytes], located: Located, readable: set[int]) -> None:
        rows = place_rows(located)
        for i, key in enumerate(keys):
            own = [row for row in rows if row[0] == i]
            kept = self.objects.get(key)
            if kept is None or self._ended(kept) or not kept.segments & readable:
                assert located.status[i] == 10, f"{key!r} was located"
                assert not own
                continue
            assert located.status[i] == 0, f"{key!r} was not located"
            assert {row[1] for row in own} == kept.segments & readable
            assert {row[3:] for row in own} == {(kept.length, kept.generation)}
            kept.leased_until = max(kept.leased_until, self.now + located.lease_ms)
            self.promise(self.now + located.lease_ms, own)
