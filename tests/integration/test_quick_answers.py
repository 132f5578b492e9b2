"""Quick answers of the hot lane against the catalog, which gRPC asks: nobody sees a difference."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import grpc
import pytest

from mooncake_py import errors
from mooncake_py.clock import SystemClock
from mooncake_py.config import MasterSettings
from mooncake_py.master import commands as c
from mooncake_py.master.client import MasterClient
from mooncake_py.master.process import Master
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.transfer import TransferEngine
from mooncake_py.wire import lane
from mooncake_py.wire.v1 import master_pb2 as pb

T = 5_000
OK, EXISTS, EXPIRED = errors.OK, errors.ObjectExists.code, errors.LeaseExpired.code
# No node here heartbeats by itself.
PATIENT = CatalogSettings(suspect_ms=60_000, dead_ms=120_000, events_max=1_000, step_max=500)


@dataclass
class Doors:
    """One master asked both ways."""

    quick: MasterClient  # over the lane
    slow: MasterClient  # over gRPC
    raw: grpc.Channel
    peer: object
    mounted: int

    def quick_count(self) -> int:
        return int(self.slow.status(timeout_ms=T).counters["quick_answers_total"])

    def reserve(self, count: int, tenant: str = "t") -> list[int]:
        runs, _ = self.quick.reserve(tenant, 1_000, count, timeout_ms=T)
        return [each for run in runs for each in run.generations()]

    def commit(self, keys: list[bytes], generations: list[int], tenant: str = "t") -> list[int]:
        ended = self.quick.put_end(tenant, keys, generations, reserved=True, timeout_ms=T)
        return list(ended.tolist())

    def agree(self, keys: list[bytes], tenant: str = "t") -> list[int]:
        """Which of these exist, by both doors."""
        slow = self.slow.exists(tenant, keys, timeout_ms=T).tolist()
        assert self.quick.exists(tenant, keys, timeout_ms=T).tolist() == slow
        prefix = self.slow.exists(tenant, keys, prefix=True, timeout_ms=T).tolist()
        assert self.quick.exists(tenant, keys, prefix=True, timeout_ms=T).tolist() == prefix
        return list(slow)


@contextmanager
def doors_of(settings: CatalogSettings = PATIENT) -> Iterator[Doors]:
    with ExitStack() as stack:
        master = Master(
            MasterSettings(listen="127.0.0.1:0", metadata="memory"), settings, SystemClock()
        )
        stack.callback(master.close)
        engine = stack.enter_context(TransferEngine())
        quick = MasterClient(master.grpc, engine=engine, role="test")
        slow = MasterClient(master.grpc, role="test")
        stack.callback(quick.close)
        stack.callback(slow.close)
        quick.connect(timeout_ms=T)
        node = c.Mount("node", 7, "127.0.0.1:1", 1, 256 << 20, "host")
        mounted = slow.mount(node, timeout_ms=T)
        channel = stack.enter_context(grpc.insecure_channel(master.grpc))
        yield Doors(
            quick, slow, channel, engine.open(master.lane, timeout_ms=T), mounted.segment_id
        )


@pytest.fixture
def doors() -> Iterator[Doors]:
    with doors_of() as found:
        yield found


def test_f04_a_promised_commit_is_seen_by_whoever_asks_next(doors: Doors) -> None:
    for number in range(100):
        key = b"k%d" % number
        assert doors.commit([key], doors.reserve(1)) == [OK]
        assert doors.slow.exists("t", [key], timeout_ms=T).tolist() == [1], "by the other door"
        assert doors.agree([key, b"none"]) == [1, 0]
    placed = doors.slow.locate("t", [b"k%d" % each for each in range(100)], timeout_ms=T)
    assert not placed.status.any()
    assert doors.slow.status(timeout_ms=T).objects == 100
    assert doors.quick_count() >= 100 + 2 * 100, "commits, and exists of both kinds"


def test_f07_no_quick_commit_takes_a_key_that_is_taken_or_being_written(doors: Doors) -> None:
    first, second, third, fourth = doors.reserve(4)
    assert doors.commit([b"a"], [first]) == [OK]
    assert doors.commit([b"a"], [second]) == [EXISTS]
    assert doors.commit([b"a"], [first]) == [OK], "the same commit once more"
    granted = doors.quick.put_start("t", [b"b"], [1_000], timeout_ms=T)
    assert doors.commit([b"b"], [third]) == [EXISTS], "another writer is storing it"
    assert doors.commit([b"c"], [third]) == [EXPIRED], "it ended with that"
    assert doors.quick.put_end("t", [b"b"], granted.generations.tolist(), timeout_ms=T) == [OK]
    assert doors.commit([b"d"], [fourth], tenant="other") == [EXPIRED], "another tenant's"
    assert doors.commit([b"d"], [fourth]) == [OK]
    assert doors.agree([b"a", b"b", b"c", b"d"]) == [1, 1, 0, 1]


def test_f04_of_a_commit_with_a_key_or_generation_twice_one_is_stored(doors: Doors) -> None:
    first, second, third, fourth = doors.reserve(4)
    assert sorted(doors.commit([b"x", b"x"], [first, second])) == [OK, EXISTS]
    codes = doors.commit([b"y", b"z"], [third, third])
    assert codes[0] == OK
    assert codes[1] != OK
    assert doors.commit([b"z"], [fourth]) == [OK]
    assert doors.agree([b"x", b"y", b"z"]) == [1, 1, 1]


def test_f04_both_doors_agree_whatever_happens_in_between(doors: Doors) -> None:
    seed = int(os.environ.get("QUICK_SEED", "3"))
    random_ = random.Random(seed)
    keys = [b"key/%d" % each for each in range(40)]
    held = doors.reserve(32)
    for _ in range(400):
        some = random_.sample(keys, random_.randint(1, 6))
        what = random_.choice(["commit", "commit", "put", "revoke", "remove", "gone", "reserve"])
        if what == "commit" and len(held) >= len(some):
            doors.commit(some, [held.pop() for _ in some])
        elif what == "put":
            grants = doors.quick.put_start("t", some, [500] * len(some), timeout_ms=T)
            mine = [i for i, code in enumerate(grants.status.tolist()) if code == OK]
            names, own = [some[i] for i in mine], [int(grants.generations[i]) for i in mine]
            doors.agree(keys)
            if mine and random_.random() < 0.7:
                doors.quick.put_end("t", names, own, timeout_ms=T)
            elif mine:
                doors.quick.put_revoke("t", names, own, timeout_ms=T)
        elif what == "revoke" and held:
            mine = held.pop()
            name = b"\xff" + mine.to_bytes(8, "little")
            doors.slow.put_revoke("t", [name], [mine], timeout_ms=T)
            assert doors.commit([b"never"], [mine]) == [EXPIRED]
        elif what == "remove":
            doors.slow.remove("t", some, force=True, timeout_ms=T)
        elif what == "gone":
            doors.slow.remove_all("t", some[0], force=True, timeout_ms=T)
        elif what == "reserve":
            held += doors.reserve(8)
        doors.agree(keys)
    found = [key for key, there in zip(keys, doors.agree(keys), strict=True) if there]
    listed = doors.slow.list("t", b"key/", timeout_ms=T).keys
    assert sorted(listed) == sorted(found), f"QUICK_SEED={seed}"


def test_f04_objects_that_end_by_themselves_are_not_answered_from_the_mirror(doors: Doors) -> None:
    from mooncake_py.model import ReplicaPolicy  # noqa: PLC0415

    brief = ReplicaPolicy(ttl_ms=30)
    granted = doors.quick.put_start("t", [b"brief"], [10], brief, timeout_ms=T)
    doors.quick.put_end("t", [b"brief"], granted.generations.tolist(), timeout_ms=T)
    clock = SystemClock()
    until = clock.now_ms() + T
    while doors.quick.exists("t", [b"brief"], timeout_ms=T).tolist() == [1]:
        assert clock.now_ms() < until, "it outlived its TTL"
    assert doors.agree([b"brief"]) == [0]


def test_f04_nothing_is_promised_for_a_segment_that_left(doors: Doors) -> None:
    generation = doors.reserve(1)
    assert generation
    doors.slow.unmount(c.Unmount("node", 7, doors.mounted), timeout_ms=T)
    assert doors.commit([b"late"], generation) == [EXPIRED]
    assert doors.agree([b"late"]) == [0]


def _mutated(random_: random.Random, payload: bytes) -> bytes:
    data = bytearray(payload)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(data) + 1)
        match random_.randrange(4):
            case 0 if data:
                data[at % len(data)] = random_.randrange(256)
            case 1:
                data[at:at] = random_.randbytes(random_.randint(1, 5))
            case 2:
                del data[at : at + random_.randint(1, 8)]
            case _:
                data = data[:at] + data
    return bytes(data)


@pytest.mark.parametrize("method", [lane.EXISTS, lane.PUT_END], ids=["Exists", "PutEnd"])
def test_a74_strange_bytes_get_the_same_answer_by_both_doors(
    doors: Doors, method: lane.Method
) -> None:
    """A commit that is good changes something, so those have generations that nobody holds."""
    random_ = random.Random(5)
    doors.commit([b"there"], doors.reserve(1))
    good = (
        pb.ExistsRequest(tenant="t", keys=[b"there", b"not", b"x" * 300], prefix=True)
        if method is lane.EXISTS
        else pb.PutEndRequest(
            tenant="t", keys=[b"a", b"b"], generations=[1 << 62, 9], reserved=True
        )
    ).SerializeToString()
    ask = doors.raw.unary_unary(method.path)
    for number in range(1_000):
        payload = _mutated(random_, good) if number else good
        quick = doors.peer.request(method.number, payload, timeout_ms=T)  # type: ignore[attr-defined]
        if number % 5 == 0 or number < 50:
            assert quick == ask(payload, timeout=5), payload
    assert doors.agree([b"there", b"not"]) == [1, 0]
