"""Why an object found no room: the true cause, and whether waiting is of use."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_py.clock import Clock, Deadline, SystemClock
from mooncake_py.errors import OK, MasterUnavailable, OutOfSpace
from mooncake_py.master.commands import SegmentInfo
from mooncake_py.model import DEFAULT_POLICY, ReplicaPolicy
from mooncake_py.store.buffers import source_pieces
from mooncake_py.store.put import PutJob
from mooncake_py.store.put_again import PersistentWriter, put_outcome
from mooncake_py.store.room import FULL, GRACE_MS, Reason, reason

MIB = 1 << 20
STRICT = ReplicaPolicy(replica_count=2, strict=True)


def segment(node: str, nbytes: int = 64 * MIB, state: str = "alive", disk: int = 0) -> SegmentInfo:
    return SegmentInfo(1, node, 1, "127.0.0.1:1", 1, nbytes, "host", 0, state, "", disk)


@pytest.mark.parametrize(
    ("segments", "nbytes", "policy", "cause", "hopeless"),
    [
        ([], 1, DEFAULT_POLICY, "no node is mounted", True),
        ([segment("a", disk=7)], 1, DEFAULT_POLICY, "no node is mounted", True),
        ([segment("a", state="suspect")], 1, DEFAULT_POLICY, r"now \(1 suspect\)", False),
        ([segment("a", state="draining")], 1, DEFAULT_POLICY, r"now \(1 draining\)", True),
        ([segment("a"), segment("b")], 200 * MIB, DEFAULT_POLICY, "larger than all memory", True),
        (
            [segment("a"), segment("b", 256 * MIB, "away")],
            200 * MIB,
            DEFAULT_POLICY,
            "larger than all memory",
            False,
        ),
        ([segment("a")], 1, STRICT, "2 replicas .* strictly, and 1 node is alive", True),
        ([segment("a"), segment("b", state="returning")], 1, STRICT, "1 node is alive", False),
        ([segment("a"), segment("b", MIB)], 2 * MIB, STRICT, "need 2 nodes of", True),
        ([segment("a"), segment("b")], 2 * MIB, STRICT, "no space", False),
        ([segment("a")], 64 * MIB - 64, DEFAULT_POLICY, "no space", False),
    ],
)
def test_c07_no_room_has_its_true_cause(
    segments: list[SegmentInfo], nbytes: int, policy: ReplicaPolicy, cause: str, hopeless: bool
) -> None:
    why = reason(segments, nbytes, policy)
    error = put_outcome(OutOfSpace.code, "key", nbytes, "default", why)
    assert isinstance(error, OutOfSpace)
    assert "Remedy: " in str(error)
    with pytest.raises(OutOfSpace, match=cause):
        raise error
    assert why.hopeless is hopeless


def test_other_outcomes_are_what_they_were() -> None:
    assert put_outcome(OK, "key", 1, "default", Reason("none", hopeless=True)) is None
    unknown = put_outcome(OutOfSpace.code, "key", 1, "default", None)
    assert FULL.cause in str(unknown)


class Steps(SystemClock):
    """Runs away: half a second a look."""

    def __init__(self) -> None:
        self._at_ms = 1_000_000

    def now_ms(self) -> int:
        self._at_ms += 500
        return self._at_ms


class Writer:
    """Finds room for "late" at the fourth attempt."""

    def __init__(self) -> None:
        self.written: list[list[bytes]] = []

    def write(self, job: PutJob) -> list[int]:
        self.written.append(list(job.keys))
        late = len(self.written) >= 4
        return [OK if key == b"late" and late else OutOfSpace.code for key in job.keys]


class Interrupted(Writer):
    """Stores "early" at once; the master is gone at the second attempt."""

    def write(self, job: PutJob) -> list[int]:
        codes = super().write(job)
        if len(self.written) == 2:
            raise MasterUnavailable("it is gone")
        return [OK if key == b"early" else code for key, code in zip(job.keys, codes, strict=True)]


def attempt(
    keys: list[bytes], status: Any, groups: tuple[int, ...] = (), kind: type[Writer] = Writer
) -> tuple[Any, Writer]:
    writer: Any = kind()
    master: Any = SimpleNamespace(status=status)
    clock: Clock = Steps()
    values = [b"value"] * len(keys)
    sizes = [1 * MIB if key == b"late" else 200 * MIB for key in keys]
    until = Deadline(12 * GRACE_MS, clock)
    job = PutJob("default", keys, source_pieces(values), sizes, DEFAULT_POLICY, until, groups)
    return PersistentWriter(writer, master, threading.Event(), clock).write(job), writer


def one_node(timeout_ms: int) -> Any:
    return SimpleNamespace(segments=[segment("a")])


def silent(timeout_ms: int) -> Any:
    raise MasterUnavailable("no answer")


def test_what_may_find_room_is_tried_until_it_does() -> None:
    (codes, _), writer = attempt([b"late"], one_node)
    assert codes == [OK]
    assert len(writer.written) == 4


def test_c07_what_cannot_fit_is_given_up_early_and_nothing_else_is() -> None:
    (codes, reasons), writer = attempt([b"large"], one_node)
    assert codes == [OutOfSpace.code]
    assert "larger than all memory" in reasons[0].cause
    given_up = len(writer.written)
    (codes, reasons), writer = attempt([b"large"], silent)
    assert (codes, reasons) == ([OutOfSpace.code], {})
    assert len(writer.written) > 2 * given_up, "nobody said that it is hopeless"
    (codes, _), _ = attempt([b"late", b"large"], one_node)
    assert codes == [OK, OutOfSpace.code]


def test_a03_a_master_that_goes_between_two_attempts_changes_nothing_for_what_is_stored() -> None:
    (codes, _), _ = attempt([b"early", b"late"], one_node, kind=Interrupted)
    assert codes == [OK, MasterUnavailable.code]
    with pytest.raises(MasterUnavailable):
        attempt([b"late"], one_node, kind=Interrupted)


def test_a_group_is_given_up_whole() -> None:
    (codes, _), writer = attempt([b"early", b"large"], one_node, (1, 1))
    assert codes == [OutOfSpace.code] * 2
    assert all(keys == [b"early", b"large"] for keys in writer.written)
