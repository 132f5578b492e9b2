"""A client in the model: put is start, pull, end; get is locate, read, next replica; and it makes
every mistake that a network and a scheduler can make it make."""

from __future__ import annotations

from dataclasses import dataclass

from catalog_model import grant_rows, place_rows
from sim_history import History
from sim_master import Answer
from sim_node import Bytes, Pull, Read
from sim_world import Call, Script, Sleep, World

from mooncake_py.errors import PeerUnreachable
from mooncake_py.master.commands import (
    Command,
    CopyObjects,
    Drain,
    Exists,
    Granted,
    List,
    Locate,
    Located,
    Pin,
    PutEnd,
    PutRevoke,
    PutStart,
    Remove,
    Report,
    SetQuota,
    Statuses,
)
from mooncake_py.master.tenant import POLICIES
from mooncake_py.model import EXTENT_ROW, PART_ROW, ReplicaPolicy

_CALL_MS = 200


@dataclass(frozen=True)
class Placement:
    """Where a reader was sent, and until when that was promised to hold."""

    key: bytes
    node: str
    segment_id: int
    place: Read
    until_ms: int
    lives: int  # of the master


class Client:
    def __init__(self, world: World, name: str, keys: list[bytes], history: History) -> None:
        self.world = world
        self.name = name
        self.keys = keys
        self.history = history
        self.up = True
        self.placements: list[Placement] = []
        world.start(name, self._live(), lambda: self.up)

    def _live(self) -> Script:
        random = self.world.random
        while True:
            dice = random.random()
            if dice < 0.40:
                yield from self._put()
            elif dice < 0.70:
                yield from self._get()
            elif dice < 0.85:
                yield from self._read_again()
            elif dice < 0.94:
                yield from self._remove()
            elif dice < 0.95:
                yield from self._limit()
            elif dice < 0.97:
                yield from self._operate()
            elif dice < 0.98:
                yield from self._pin()
            else:
                yield from self._look()
            yield Sleep(random.randrange(1, 25))

    def _ask(self, command: Command, tries: int = 3) -> Script:
        """The answer, asking again when none comes: the master may have heard all of them."""
        for _ in range(tries):
            answer = yield Call("master", command, _CALL_MS)
            if isinstance(answer, Answer):
                return answer  # type: ignore[return-value]
        return None

    def _some_keys(self, most: int) -> list[bytes]:
        count = self.world.random.randrange(1, most + 1)
        return [self.world.random.choice(self.keys) for _ in range(count)]

    # --- put ------------------------------------------------------------------------------------

    def _put(self) -> Script:
        random = self.world.random
        keys = self._some_keys(4)
        policy = ReplicaPolicy(
            replica_count=random.choice([1, 1, 2, 3]),
            strict=random.random() < 0.2,
            soft_pin_ms=random.choice([0, 0, 0, 500]),
            hard_pin=random.random() < 0.03,
            ttl_ms=random.choice([0, 0, 0, 700]),
            expires_with=random.choice(self.keys).decode() if random.random() < 0.1 else "",
        )
        lengths = [random.choice([0, 100, 700, 2000, 3000]) for _ in keys]
        start = PutStart(
            "t",
            keys,
            lengths,
            bytes(16 * len(keys)),
            policy,
            "",
            [random.choice([1, 2]) for _ in keys] if random.random() < 0.3 else (),
            random.getrandbits(64),
            random.random() < 0.2,
        )
        answer = yield from self._ask(start)
        if not isinstance(answer, Answer) or not isinstance(answer.reply, Granted):
            return
        granted = answer.reply
        if random.random() < 0.05:
            return  # forgets what it was doing
        if random.random() < 0.1:
            # is stopped, and goes on as if nothing had happened; often just before the expiry
            yield Sleep(random.choice([random.randrange(2_000), random.randrange(500, 610)]))
        patience_ms = random.choice([_CALL_MS, _CALL_MS, 3])  # gives up while nodes still pull
        failed: list[tuple[int, int]] = []
        for entry, segment_id in enumerate(granted.segment_ids):
            rows = granted.rows[entry]
            indices = [row[0] for row in EXTENT_ROW.iter_unpack(rows)]
            pull = Pull(
                segment_id,
                answer.secrets[entry],
                rows,
                tuple(keys[i] for i in indices),
                random.choice([1, 1, 5, 20, 100]),  # shorter than the margin
            )
            statuses = yield Call(answer.nodes[entry], pull, patience_ms)
            if not isinstance(statuses, tuple):
                statuses = (30,) * len(indices)
            failed += [(i, segment_id) for i, code in zip(indices, statuses, strict=True) if code]
        yield from self._finish(keys, granted, failed)

    def _finish(self, keys: list[bytes], granted: Granted, failed: list[tuple[int, int]]) -> Script:
        going = [i for i, code in enumerate(granted.status) if code == 0]
        if not going:
            return
        names = [keys[i] for i in going]
        generations = [granted.generations[i] for i in going]
        whole = len({i for i, _ in failed}) < len(going)
        if not whole and self.world.chance(0.5):
            yield from self._ask(PutRevoke("t", names, generations))
            return
        position = {i: at for at, i in enumerate(going)}
        lost = [(position[i], segment_id) for i, segment_id in failed]
        assert {row[0] for row in grant_rows(granted)} == set(going)
        yield from self._ask(PutEnd("t", names, generations, lost))

    # --- get ------------------------------------------------------------------------------------

    def _get(self) -> Script:
        random = self.world.random
        keys = self._some_keys(5)
        floors = {key: self.history.floors.get(key, 0) for key in keys}
        lives, asked_ms = self.history.lives, self.world.now_ms
        wish = random.choice([0, 0, 900])
        answer = yield Call("master", Locate("t", keys, random.random() < 0.3, wish), _CALL_MS)
        if not isinstance(answer, Answer) or not isinstance(answer.reply, Located):
            return
        located = answer.reply
        nodes = dict(zip(located.segment_ids, answer.nodes, strict=True))
        until_ms = asked_ms + located.lease_ms
        rows = place_rows(located)
        yield from self._get_parts(keys, located, nodes, until_ms, floors)
        for i in range(len(located.status)):
            for _, segment_id, offset, length, generation in [r for r in rows if r[0] == i]:
                place = Read(offset, length, generation, segment_id)
                where = Placement(keys[i], nodes[segment_id], segment_id, place, until_ms, lives)
                self.placements.append(where)
                good = yield from self._read(where, floors[keys[i]])
                if good:
                    break
        del self.placements[:-8]

    def _get_parts(
        self,
        keys: list[bytes],
        located: Located,
        nodes: dict[int, str],
        until_ms: int,
        floors: dict[bytes, int],
    ) -> Script:
        """Parts of striped objects: all there, one behind the other, each of the right object."""
        lives = self.history.lives
        ends: dict[int, int] = {}
        for i, entry, offset, length, generation, start in PART_ROW.iter_unpack(located.parts):
            assert start == ends.get(i, 0) or start + length == ends[i], "a hole between parts"
            ends[i] = start + length
            segment_id = located.segment_ids[entry]
            place = Read(offset, length, generation, segment_id)
            where = Placement(keys[i], nodes[segment_id], segment_id, place, until_ms, lives)
            if (yield from self._read(where, floors[keys[i]])):
                self.history.count("good reads of parts")

    def _read_again(self) -> Script:
        """With a placement from before, under its lease or long after."""
        if self.placements:
            yield from self._read(self.world.random.choice(self.placements), 0)

    def _read(self, where: Placement, floor: int) -> Script:
        found = yield Call(where.node, where.place, _CALL_MS)
        generation = where.place.generation
        if isinstance(found, Bytes) and not found.code:
            self.history.judge_read(where.key, found.generation, floor)
            return True  # type: ignore[return-value]
        code = PeerUnreachable.code
        if isinstance(found, Bytes):
            code = found.code
            leased = self.world.now_ms < where.until_ms
            self.history.judge_stale(generation, where.segment_id, where.lives, leased)
        yield from self._ask(Report("t", [where.key], [generation], [where.segment_id], [code]), 1)
        return False  # type: ignore[return-value]

    # --- the rest -------------------------------------------------------------------------------

    def _remove(self) -> Script:
        if self.world.chance(0.1):
            yield from self._remove_all()
        else:
            yield from self._ask(Remove("t", self._some_keys(2), self.world.chance(0.3)))

    def _remove_all(self) -> Script:
        """Call by call, while others put and the master may become another one."""
        floor = max(self.history.keys, default=0) + 1
        cursor = b""
        for _ in range(30):
            answer = yield from self._ask(Remove("t", (), True, True, b"k", b"", cursor))
            if not isinstance(answer, Answer) or not isinstance(answer.reply, Statuses):
                return
            cursor = answer.reply.cursor
            if not cursor:
                self.history.all_removed(floor)
                return

    def _limit(self) -> Script:
        """The tenant's quota changes, also to less than it holds."""
        random = self.world.random
        quota = SetQuota(
            "t", random.choice([0, 2_000, 8_000]), random.choice([0, 2, 5]),
            random.choice(POLICIES), random.random() < 0.5,
        )  # fmt: skip
        yield from self._ask(quota)

    def _pin(self) -> Script:
        random = self.world.random
        hard = random.random() < 0.2
        wish = Pin("t", self._some_keys(3), 0 if hard else random.choice([0, 300, 900]), hard)
        yield from self._ask(wish)

    def _operate(self) -> Script:
        """Drains begin and are called off; objects are copied and moved."""
        random = self.world.random
        names = [f"n{i}" for i in range(4)]
        if self.world.chance(0.4):
            yield from self._ask(Drain(random.choice(names), random.random() < 0.6), 1)
            return
        wish = CopyObjects(
            "t", self._some_keys(3), random.choice(names), random.choice(["", *names])
        )
        yield from self._ask(wish, 1)

    def _look(self) -> Script:
        if self.world.chance(0.5):
            yield from self._ask(Exists("t", self._some_keys(6)), 1)
        else:
            yield from self._ask(List("t", b"", self.world.random.choice(self.keys), 3), 1)
