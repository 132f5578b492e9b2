"""The life of an object as a table. The catalog acts by it, and the picture in
`design/lifecycle.md` is drawn from it.

One *attempt* (one generation of a key) is in one of these states. A key may have two attempts at
once: a complete one and, during an upsert, its successor in writing.

* `absent`: no extent belongs to the attempt.
* `writing`: granted; extents are reserved, nobody but the nodes that pull touches them.
* `complete`: committed; readers are given its placements.
* `resting`: ended; nobody is given its placements, but its extents are not used again until the
  promise that was given (lease of readers, grant of the writer) has run out.

Whatever ends an attempt goes through `end(state, event)`, which says how long its extents rest,
whether the nodes must unseal them, and whether the caller must wait for the durable record.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    ABSENT = "absent"
    WRITING = "writing"
    COMPLETE = "complete"
    RESTING = "resting"


class Event(Enum):
    PUT_START = "put start"
    PUT_END = "put end"
    PUT_REVOKE = "put revoke"
    GRANT_EXPIRED = "grant expired"
    ALL_REPLICAS_FAILED = "all replicas failed"
    REMOVE = "remove"
    EVICT = "evict"
    TTL_ENDED = "ttl ended"
    REPLACED = "successor committed"
    DAMAGED = "last replica reported damaged"
    NODE_LOST = "last node lost"
    GROUP_LOST = "another member of its group ended"
    PROMISE_ENDED = "promise ended"


class Promise(Enum):
    """How long extents of an ended attempt rest."""

    NONE = "not at all"
    GRANT = "until the grant's expiry plus margin"
    LEASE = "until the last lease ends"


class Unseal(Enum):
    """When nodes are told, so that the bytes cannot be adopted again (recovery.py)."""

    NO = "no"
    AT_ONCE = "at once"
    WITH_PROMISE = "when the promise ends"


@dataclass(frozen=True, slots=True)
class Transition:
    state: State
    event: Event
    guard: str  # for people; the code that raises the event has checked it
    next: State
    effect: str
    promise: Promise = Promise.NONE
    unseal: Unseal = Unseal.NO
    durable: bool = False  # the answer waits for the record
    counter: str = ""


_S, _E, _U = State, Event, Unseal

TABLE: tuple[Transition, ...] = (
    Transition(
        _S.ABSENT, _E.PUT_START, "space found, by eviction if need be", _S.WRITING,
        "extents reserved, new generation", counter="put_starts",
    ),
    Transition(
        _S.WRITING, _E.PUT_END, "names the generation, before expiry, a replica is sealed",
        _S.COMPLETE, "visible", counter="put_ends",
    ),
    Transition(
        _S.WRITING, _E.PUT_REVOKE, "names the generation", _S.RESTING, "",
        Promise.GRANT, unseal=_U.AT_ONCE, counter="put_revokes",
    ),
    Transition(
        _S.WRITING, _E.GRANT_EXPIRED, "", _S.RESTING, "counted as reclaimed",
        Promise.GRANT, unseal=_U.AT_ONCE, counter="grants_reclaimed",
    ),
    Transition(
        _S.WRITING, _E.ALL_REPLICAS_FAILED, "put end names every replica as failed", _S.RESTING,
        "writer is told", Promise.GRANT, unseal=_U.AT_ONCE, counter="put_failures",
    ),
    Transition(
        _S.WRITING, _E.REMOVE, "", _S.RESTING, "the commit will be refused",
        Promise.GRANT, unseal=_U.AT_ONCE, durable=True, counter="removes",
    ),
    Transition(
        _S.WRITING, _E.NODE_LOST, "", _S.ABSENT, "the commit will be refused",
        counter="node_losses",
    ),
    Transition(
        _S.COMPLETE, _E.REMOVE, "no lease and no hard pin, or force", _S.RESTING,
        "nodes unseal, acknowledged once durable",
        Promise.LEASE, unseal=_U.AT_ONCE, durable=True, counter="removes",
    ),
    Transition(
        _S.COMPLETE, _E.EVICT, "no lease, not pinned (soft pins last)", _S.RESTING, "",
        Promise.LEASE, unseal=_U.AT_ONCE, counter="evictions",
    ),
    Transition(
        _S.COMPLETE, _E.TTL_ENDED, "", _S.RESTING, "readers with a lease go on",
        Promise.LEASE, unseal=_U.WITH_PROMISE, counter="ttl_ends",
    ),
    Transition(
        _S.COMPLETE, _E.REPLACED, "by an upsert", _S.RESTING, "readers with a lease go on",
        Promise.LEASE, unseal=_U.WITH_PROMISE, counter="replacements",
    ),
    Transition(
        _S.COMPLETE, _E.DAMAGED, "a reader named generation and replica", _S.RESTING,
        "nodes unseal", Promise.LEASE, unseal=_U.AT_ONCE, counter="damages",
    ),
    Transition(
        _S.COMPLETE, _E.NODE_LOST, "", _S.ABSENT, "", counter="node_losses",
    ),
    Transition(
        _S.WRITING, _E.GROUP_LOST, "", _S.RESTING, "the commit will be refused",
        Promise.GRANT, unseal=_U.AT_ONCE, counter="group_losses",
    ),
    Transition(
        _S.COMPLETE, _E.GROUP_LOST, "", _S.RESTING, "", Promise.LEASE, unseal=_U.WITH_PROMISE,
        counter="group_losses",
    ),
    Transition(
        _S.RESTING, _E.PROMISE_ENDED, "", _S.ABSENT, "extents are free", counter="",
    ),
)  # fmt: skip

_BY_CAUSE = {(each.state, each.event): each for each in TABLE}


def end(state: State, event: Event) -> Transition:
    """What happens when this event ends an attempt in this state. KeyError: it cannot."""
    return _BY_CAUSE[state, event]


def mermaid() -> str:
    """The table as a state diagram in the language that code forges draw."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.ABSENT.value}"]
    for each in TABLE:
        label = each.event.value + (f" [{each.guard}]" if each.guard else "")
        if each.effect:
            label += f" / {each.effect}"
        lines.append(f"    {each.state.value} --> {each.next.value}: {label.replace(':', ' ')}")
    return "\n".join(lines) + "\n"


def promises() -> str:
    """The rows that end an attempt, as a table for people."""
    rows = ["| state | event | extents rest | nodes unseal | answer waits for the record |"]
    rows.append("|---|---|---|---|---|")
    for each in TABLE:
        if each.next in (State.RESTING, State.ABSENT) and each.state is not State.RESTING:
            rows.append(
                f"| {each.state.value} | {each.event.value} | {each.promise.value} "
                f"| {each.unseal.value} | {'yes' if each.durable else 'no'} |"
            )
    return "\n".join(rows) + "\n"


# Whatever the catalog counts: what the table names, and more.
COUNTERS = (
    *(each.counter for each in TABLE if each.counter),
    "put_keys",
    "locate_hits",
    "locate_misses",
    "grants_reclaimed_bytes",
    "mounts",
    "suspects",
    "segments_lost",
    "reports_wrong_bytes",
    "reports_unreached",
)
