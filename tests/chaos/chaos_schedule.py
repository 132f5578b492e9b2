"""What goes wrong when, from a seed. Pure.

A step hurts one *group* (nodes, masters, etcd, clients, network, clocks, disk) for a while; a group
is hurt by one step at a time and rests a little between two, so that at most one of three nodes and
a minority of etcd are away at once, while a leader may well die in the middle of a partition. A few
steps go further on purpose: all of a single etcd, or all masters.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

CALM_MS = 1_500  # before the first step
# All times of a run are so many times as long, and calls as rare: for a machine on which the
# processes of a cluster get so much less of a processor, which alone breaks promises about time.
SLOW = max(1, int(os.environ.get("MOONCAKE_CHAOS_SLOW", "1")))
LEADER, STANDBY = "leader", "standby"


@dataclass(frozen=True, slots=True)
class Shape:
    """The cluster of one round."""

    name: str
    etcd_count: int  # 0: one master on an embedded database
    master_count: int = 2
    node_count: int = 3
    client_count: int = 3
    network: bool = False  # every process on a host of its own
    clocks: bool = False  # libfaketime is there
    fills: bool = False  # the embedded database is on a small file system of its own
    segment_mib: int = 64
    streams: bool = False  # the nodes fill up, so objects are evicted
    disk_mib: int = 0  # each node has a disk tier of this size; 0: none
    ports: tuple[str, ...] = ()  # of RDMA, that nodes and clients use in turn, and nothing else
    calls_per_second: float = 40  # of each thread of a client, at the usual times


@dataclass(frozen=True, slots=True)
class Step:
    """`victims`: names of processes, or LEADER and STANDBY, that are looked up when it happens."""

    at_ms: int
    kind: str
    victims: tuple[str, ...]
    for_ms: int
    detail: int = 0

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        what = f"{self.kind}{detail} {' '.join(self.victims)}"
        return f"{self.at_ms / 1000:6.1f} s {what}, {self.for_ms} ms"


Maker = Callable[[random.Random, Shape], tuple[str, tuple[str, ...], int, int]]


def _node(chance: random.Random, shape: Shape) -> str:
    return f"n{chance.randrange(shape.node_count)}"


def _client(chance: random.Random, shape: Shape) -> str:
    return f"c{chance.randrange(shape.client_count)}"


def _etcd(chance: random.Random, shape: Shape) -> str:
    return f"e{chance.randrange(shape.etcd_count)}"


def _a_while(chance: random.Random) -> int:
    """Mostly shorter than what makes a node dead, sometimes longer."""
    return chance.choice((300, 800, 1_500, 2_500, 6_000))


def _kill_node(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    return "kill", (_node(chance, shape),), chance.choice((100, 1_000, 3_000)), 0


def _stop_node(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    return "stop", (_node(chance, shape),), _a_while(chance), 0


def _flip(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    return "flip", (_node(chance, shape),), 100, chance.randrange(1 << 16)


def _kill_master(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    who = chance.choice((LEADER, LEADER, STANDBY)) if shape.master_count > 1 else LEADER
    return "kill", (who,), chance.choice((100, 1_500, 4_000)), 0


def _kill_masters(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    return "kill", tuple(f"m{n}" for n in range(shape.master_count)), 500, 0


def _stop_master(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    return "stop", (LEADER,), chance.choice((500, 2_000, 5_000, 6_500)), 0


def _kill_etcd(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    return "kill", (_etcd(chance, shape),), chance.choice((500, 2_500, 5_000)), 0


def _stop_etcd(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    return "stop", (_etcd(chance, shape),), chance.choice((500, 2_500, 5_000)), 0


def _stop_majority(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    """Of etcd: nothing can be written, however many are left."""
    victims = chance.sample(range(shape.etcd_count), shape.etcd_count // 2 + 1)
    return (
        "stop",
        tuple(f"e{number}" for number in sorted(victims)),
        chance.choice((1_500, 4_000)),
        0,
    )


def _kill_client(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    return "kill", (_client(chance, shape),), 200, 0


def _stop_client(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    return "stop", (_client(chance, shape),), chance.choice((500, 3_000, 7_000)), 0


def _trap_client(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    """Stopped between put start and pull (1), or between pull and put end (2)."""
    victims = (_client(chance, shape),)
    return "trap", victims, chance.choice((2_000, 7_000)), chance.choice((1, 2))


def _pair(chance: random.Random, shape: Shape) -> tuple[str, ...]:
    """Two sides of a cut or delay; "masters" and "etcd" stand for all of them."""
    node, client = _node(chance, shape), _client(chance, shape)
    pairs = [(node, "masters"), (client, node), (client, "masters"), (node, "all")]
    if shape.etcd_count:
        pairs += [(LEADER, "etcd"), (LEADER, "all"), (STANDBY, "etcd")]
    return chance.choice(pairs)


def _cut(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    return "cut", _pair(chance, shape), _a_while(chance), int(chance.random() < 0.25)


def _delay(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    return "delay", _pair(chance, shape), 2_500, chance.choice((5, 40, 150))


def _jump(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    """A wall clock is set, and set right again. Seconds."""
    who = chance.choice((LEADER, STANDBY, _node(chance, shape), _client(chance, shape)))
    return "jump", (who,), 4_000, chance.choice((-86_400, -30, -2, 2, 30, 86_400))


def _fill(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    """The master's disk has no room left."""
    return "fill", ("m0",), chance.choice((1_000, 3_000)), 0


def _wipe(chance: random.Random, shape: Shape) -> tuple[str, tuple[str, ...], int, int]:
    """The master is killed and its database deleted."""
    return "wipe", ("m0",), chance.choice((100, 1_000)), 0


def _groups(shape: Shape) -> dict[str, Sequence[Maker]]:
    groups: dict[str, Sequence[Maker]] = {
        "nodes": (_kill_node, _kill_node, _stop_node, _stop_node, _flip),
        "masters": (_kill_master,) * 4 + (_stop_master,) * 2 + (_kill_masters,),
        "clients": (_kill_client, _stop_client, _trap_client, _trap_client),
    }
    if shape.etcd_count:
        groups["etcd"] = (_kill_etcd, _stop_etcd, _stop_majority)
    else:
        groups["masters"] = (_kill_master, _kill_master, _wipe)
    if shape.fills:
        groups["disk"] = (_fill,)
    if shape.network:
        groups["network"] = (_cut, _cut, _delay)
    if shape.clocks:
        groups["clocks"] = (_jump,)
    return groups


def schedule(seed: int, shape: Shape, length_ms: int) -> list[Step]:
    """Steps in the order of their times; all are over by `length_ms`."""
    chance = random.Random(f"{seed}/{shape.name}")
    groups = _groups(shape)
    rested_at = dict.fromkeys(groups, 0)
    steps: list[Step] = []
    at_ms = CALM_MS
    while at_ms < length_ms:
        group = chance.choice(sorted(groups))
        kind, victims, for_ms, detail = chance.choice(groups[group])(chance, shape)
        if rested_at[group] <= at_ms and at_ms + for_ms <= length_ms:
            steps.append(Step(at_ms, kind, victims, for_ms, detail))
            rested_at[group] = at_ms + for_ms + 2_000
            at_ms += chance.randrange(300, 2_500)
        else:
            at_ms += 100
    return steps


def slowly(steps: Sequence[Step]) -> list[Step]:
    return [replace(step, at_ms=SLOW * step.at_ms, for_ms=SLOW * step.for_ms) for step in steps]
