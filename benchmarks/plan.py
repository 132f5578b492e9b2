"""What is measured: cases, contenders, effort, and the bars to be held against upstream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20

# Contenders. The first three are limits, the next two are ours.
MEMORY, TCP, GRPC = "memcpy", "tcp stream", "grpc"
SHM, OUR_TCP = "ours shm", "ours tcp"
UP_TCP, UP_LOCAL, UP_DUMMY = "upstream tcp", "upstream local", "upstream dummy"
REDIS, MEMCACHED = "redis", "memcached"
LIMITS = (MEMORY, TCP, GRPC)
OURS = (SHM, OUR_TCP)
UPSTREAM = (UP_TCP, UP_LOCAL, UP_DUMMY)
CACHES = (REDIS, MEMCACHED)
LIMIT_OF = {SHM: MEMORY, OUR_TCP: TCP}

P7_GAIN = 1.2  # eight client processes against one
CROWD_CASES = (("get", MIB, 1), ("get", 64 * KIB, 128), ("put", MIB, 1))

SETS_BYTES = 256 * MIB  # objects that a get goes round in, so that it does not read what is hot
SETS_MAX = 8


@dataclass(frozen=True, slots=True)
class Case:
    """One operation: `count` objects of `nbytes` each in one call (`exists`: count keys)."""

    verb: str  # put, get, exists
    nbytes: int
    count: int = 1

    @property
    def total_bytes(self) -> int:
        return 0 if self.verb == "exists" else self.nbytes * self.count

    @property
    def sets(self) -> int:
        return max(1, min(SETS_MAX, SETS_BYTES // max(1, self.nbytes * self.count)))

    def __str__(self) -> str:
        if self.verb == "exists":
            return f"exists {self.count}"
        batch = f"{self.count} x " if self.count > 1 else ""
        unit = f"{self.nbytes // MIB} MiB" if self.nbytes >= MIB else f"{self.nbytes // KIB} KiB"
        return f"{self.verb} {batch}{unit}"


@dataclass(frozen=True, slots=True)
class Effort:
    """`rounds` turns for each contender, together about `budget_ms` a case and contender."""

    cases: Sequence[Case]
    rounds: int
    budget_ms: int
    segment_bytes: int
    crowd_cases: int = len(CROWD_CASES)  # so many of them


def _cases(sizes: Sequence[int], batches: Sequence[tuple[int, int]], keys: Sequence[int]) -> list:
    shapes = [(nbytes, 1) for nbytes in sizes] + [(nbytes, count) for count, nbytes in batches]
    return [
        *(Case(verb, nbytes, count) for verb in ("get", "put") for nbytes, count in shapes),
        *(Case("exists", 64, count) for count in keys),
    ]


_SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
_BATCHES = ((128, 4 * KIB), (128, 64 * KIB), (128, MIB))
EFFORTS = {
    "tiny": Effort(_cases((4 * KIB, MIB), ((8, 4 * KIB),), (1, 16)), 1, 1, 64 * MIB, 1),
    "small": Effort(_cases(_SIZES, _BATCHES, (1, 128, 1024)), 5, 120, 1024 * MIB),
    "full": Effort(_cases(_SIZES, _BATCHES, (1, 128, 1024)), 15, 1200, 1024 * MIB),
}


@dataclass(frozen=True, slots=True)
class Bar:
    """Our p50 over theirs must not exceed `ratio`. `against` several: the best of them."""

    name: str
    ours: str
    against: Sequence[str]
    case: Case
    ratio: float


def bars() -> list[Bar]:
    large = (MIB, 16 * MIB, 64 * MIB)
    found = []
    for verb in ("get", "put"):
        for nbytes in large:
            case = Case(verb, nbytes)
            found += [Bar("P1", SHM, (UP_TCP,), case, 0.25)]
            found += [Bar("P1", SHM, (UP_DUMMY,), case, 1.05)]
    for nbytes in (4 * KIB, 64 * KIB):
        get, put = Case("get", nbytes, 128), Case("put", nbytes, 128)
        peers = (*UPSTREAM, *CACHES)
        found += [Bar("P2", SHM, (UP_TCP,), get, 0.10), Bar("P2", SHM, peers, get, 1.0)]
        found += [Bar("P3", SHM, (UP_TCP,), put, 0.20), Bar("P3", SHM, (UP_LOCAL,), put, 1.0)]
    for case, ratio in (
        (Case("get", MIB), 0.6),
        (Case("get", 64 * MIB), 0.6),
        (Case("get", 4 * KIB, 128), 0.15),
        (Case("get", 64 * KIB, 128), 0.5),
    ):
        found.append(Bar("P4", OUR_TCP, (UP_TCP,), case, ratio))
    found.append(Bar("P5", SHM, (UP_TCP,), Case("get", 4 * KIB), 0.6))
    found.append(Bar("P5", SHM, (UP_TCP,), Case("put", 4 * KIB), 0.8))
    for count in (1, 128, 1024):
        found.append(Bar("P6", SHM, (UP_TCP,), Case("exists", 64, count), 1.0))
    return found
