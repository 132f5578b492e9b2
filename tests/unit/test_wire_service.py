"""What the dispatcher makes of bytes: hostile ones, versions, secrets. No process, no network."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_py import errors
from mooncake_py.master import commands as c
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.service import UNSEAL_BYTES_PER_BEAT, Cluster, Service
from mooncake_py.model import EXTENT_ROW, FAILED_ROW, PROTOCOL_MAJOR, RELEASE
from mooncake_py.wire import answers, lane
from mooncake_py.wire.lane import METHODS, Method
from mooncake_py.wire.rows import EXTENT
from mooncake_py.wire.v1 import master_pb2 as pb

NOW = 1_000_000
CLUSTER = Cluster("cluster", b"s" * 32, 7, 250)
NODE = c.Mount("node", 1, "10.0.0.1:7", 3, 1 << 26, "host")


@pytest.fixture
def service() -> Service:
    return Service(Catalog(), CLUSTER)


def ask(service: Service, method: Method, request: Any) -> Any:
    payload = request if isinstance(request, bytes) else request.SerializeToString()
    answer = service.handle(method, payload, NOW)
    reply = answers.parse(method, answer.payload)
    assert reply.outcome.code == answer.code
    return reply


@settings(max_examples=300, deadline=None)
@given(method=st.sampled_from(METHODS), payload=st.binary(max_size=200))
def test_no_bytes_from_a_stranger_are_a_defect(method: Method, payload: bytes) -> None:
    """Random bytes often parse as some message: protobuf is lenient. Whatever they say, the answer
    is a reply, and never "internal error"."""
    reply = ask(Service(Catalog(), CLUSTER), method, payload)
    assert reply.outcome.code != errors.InternalError.code
    assert reply.outcome.term == 7


@pytest.mark.parametrize(
    ("method", "request_", "word"),
    [
        (lane.EXISTS, pb.ExistsRequest(keys=[b"k"] * 4_097), "4097 keys"),
        (lane.EXISTS, pb.ExistsRequest(keys=[b"k", b""]), "empty"),
        (lane.LOCATE, pb.LocateRequest(keys=[b"k" * 4_097]), "longer than 4096"),
        (lane.EXISTS, pb.ExistsRequest(tenant="ü" * 65), "longer than 128"),
        (lane.PUT_START, pb.PutStartRequest(keys=[b"k"]), "0 lengths for 1 keys"),
        (lane.PUT_START, pb.PutStartRequest(keys=[b"k"], lengths=[1 << 41]), "longer than"),
        (
            lane.PUT_START,
            pb.PutStartRequest(keys=[b"k", b"l"], lengths=[1, 1], group=[1]),
            "1 groups for 2 keys",
        ),
        (lane.PUT_END, pb.PutEndRequest(keys=[b"k"]), "0 generations"),
        (lane.PUT_END, pb.PutEndRequest(failed=b"x"), "whole number of rows"),
        (lane.PUT_END, pb.PutEndRequest(failed=FAILED_ROW.pack(0, 0, 1)), "outside the batch"),
        (lane.REMOVE, pb.RemoveRequest(keys=[b"k"], all=True), "`all`"),
        (lane.REMOVE, pb.RemoveRequest(prefix=b"k"), "needs `all`"),
        (lane.REPORT, pb.ReportRequest(keys=[b"k"], generations=[1]), "segment_ids"),
        (
            lane.MOUNT,
            pb.MountRequest(protocol_major=PROTOCOL_MAJOR, node="n", address="a:1", nbytes=1),
            "incarnation",
        ),
        (lane.EXISTS, b"\xff\xff\xff", "not a ExistsRequest"),
    ],
)
def test_a06_limits_are_told_before_anything_changes(
    service: Service, method: Method, request_: Any, word: str
) -> None:
    reply = ask(service, method, request_)
    assert reply.outcome.code == errors.UsageError.code
    assert word in reply.outcome.cause


@pytest.mark.parametrize("method", [lane.CONNECT, lane.MOUNT])
def test_a29_another_protocol_is_refused_naming_both(service: Service, method: Method) -> None:
    request = method.request(protocol_major=PROTOCOL_MAJOR + 1, protocol_minor=3)
    reply = ask(service, method, request)
    assert reply.outcome.code == errors.VersionMismatch.code
    assert f"{PROTOCOL_MAJOR + 1}.3" in reply.outcome.cause
    assert f"{PROTOCOL_MAJOR}.0" in reply.outcome.cause
    assert RELEASE in reply.outcome.cause
    assert service.version_refusals == 1


def test_a29_a_later_minor_version_is_welcome(service: Service) -> None:
    request = pb.ConnectRequest(protocol_major=PROTOCOL_MAJOR, protocol_minor=99)
    assert ask(service, lane.CONNECT, request).outcome.code == 0


def test_secrets_are_the_same_after_a_restart_and_differ_between_segments() -> None:
    one, two = Service(Catalog(), CLUSTER), Service(Catalog(), CLUSTER)
    assert one.grant_secret(1) == two.grant_secret(1)
    assert one.grant_secret(1) != one.grant_secret(2)
    other = Service(Catalog(), Cluster("cluster", b"t" * 32, 7, 250))
    assert one.grant_secret(1) != other.grant_secret(1)


def test_a_defect_is_an_answer_with_its_evidence(service: Service) -> None:
    class Broken(Catalog):
        def apply(self, command: c.Command, now_ms: int) -> c.Applied:
            raise ZeroDivisionError("the evidence")

    reply = ask(Service(Broken(), CLUSTER), lane.EXISTS, pb.ExistsRequest(keys=[b"k"]))
    assert reply.outcome.code == errors.InternalError.code
    assert "ZeroDivisionError: the evidence" in reply.outcome.cause


def test_many_extents_are_unsealed_in_pieces(service: Service) -> None:
    """More rows than one heartbeat's reply should carry are spread over several, each once."""
    segment_id = ask(service, lane.MOUNT, answers.mount_request(NODE, "")).segment_id
    page = UNSEAL_BYTES_PER_BEAT // EXTENT_ROW.size
    count = page + 10
    for at in range(0, count, 2_053):
        keys = [b"%d" % i for i in range(at, min(at + 2_053, count))]
        put = pb.PutStartRequest(keys=keys, lengths=[1] * len(keys))
        generations = ask(service, lane.PUT_START, put).generations
        ask(service, lane.PUT_END, pb.PutEndRequest(keys=keys, generations=generations))
        ask(service, lane.REMOVE, pb.RemoveRequest(keys=keys))
    beat = pb.HeartbeatRequest(node="node", incarnation=1, segment_id=segment_id)
    replies = [ask(service, lane.HEARTBEAT, beat) for _ in range(3)]
    sizes = [len(reply.unseal) // EXTENT_ROW.size for reply in replies]
    assert sizes[0] <= page < sum(sizes) == count
    assert sizes[2] == 0
    seen = {int(r["generation"]) for reply in replies for r in answers.beat(reply).unseal}
    assert len(seen) == count
    assert answers.beat(replies[0]).unseal.dtype == EXTENT


def test_every_method_has_its_own_number_and_path() -> None:
    assert len({method.number for method in METHODS}) == len(METHODS) == 22
    assert len({method.path for method in METHODS}) == len(METHODS)
    numbers = {name: number for name, number in vars(pb).items() if name.startswith("LANE_")}
    assert {method.number for method in METHODS} == set(numbers.values()) - {0}
