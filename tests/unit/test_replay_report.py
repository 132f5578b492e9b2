"""Figures of a replay, for people and for programs."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from mooncake_py.ops.report import Ideal, Report, as_dict, render
from mooncake_py.ops.session import Tally
from mooncake_py.ops.sizes import size_text

MIB = 1 << 20


def tally(**changes: object) -> Tally:
    fields = {
        "transport": "shm",
        "requests": 10,
        "pages": 100,
        "hit_pages": 40,
        "got_bytes": 40 * MIB,
        "put_bytes": 60 * MIB,
        "latency_ns": {
            "exists": [1_000_000] * 10,
            "get": [2_000_000] * 9 + [20_000_000],
            "put": [10_000_000] * 10,
        },
    }
    return Tally(**(fields | changes))


@pytest.fixture
def report() -> Report:
    return Report(
        source="some trace",
        page_bytes=MIB,
        capacity_bytes=100 * MIB,
        node_count=2,
        ideal=Ideal(100, 42, 50),
        written=[tally(), tally(transport="tcp", hit_pages=20)],
        read=[tally(put_bytes=0, pages=50)],
        counters={"grpc_received_bytes": 100.0, "lane_sent_bytes": 50.0, "evictions": 7.0},
    )


def shown(report: Report) -> str:
    text = io.StringIO()
    Console(file=text, width=140).print(render(report))
    return text.getvalue()


def test_the_hit_rate_is_the_writers(report: Report) -> None:
    assert report.hit_rate == 60 / 200
    assert report.requests == 20
    assert report.payload_bytes == (40 + 60) * MIB * 2 + 40 * MIB


def test_json_holds_every_figure(report: Report) -> None:
    figures = json.loads(json.dumps(as_dict(report)))
    assert figures["hit_rate"] == 0.3
    assert figures["ideal_lru_hit_rate"] == 0.21
    assert figures["ideal_clairvoyant_hit_rate"] == 0.25
    assert figures["master_bytes"] == 150
    assert figures["evicted_objects"] == 7
    assert figures["problems"] == []
    first, second, third = figures["sessions"]
    assert (first["process"], second["transport"], third["process"]) == ("writer", "tcp", "reader")
    assert first["operations"]["get"]["p50_ms"] == 2.0
    assert first["operations"]["get"]["p99_ms"] > 10
    assert first["operations"]["put"]["gb_per_s"] == pytest.approx(60 * MIB / 100e6)
    assert third["operations"]["put"]["gb_per_s"] is None


def test_the_table_says_what_a_person_wants_to_know(report: Report) -> None:
    text = shown(report)
    for words in (
        "20 of some trace", "30.00% (60 of 200)", "an ideal LRU of 100 pages", "21.00%", "25.00%",
        "writer, shm", "reader, shm", "150 B (0.000%)", "wrong bytes",
    ):  # fmt: skip
        assert words in text
    assert "FAILED" not in text


def test_wrong_bytes_are_a_failure_that_is_shown(report: Report) -> None:
    report.read[0].wrong_bytes = 3
    assert report.problems() == ["3 wrong bytes were read"]
    assert "FAILED: 3 wrong bytes were read" in shown(report)


def test_payload_through_the_master_is_a_failure(report: Report) -> None:
    report.counters["grpc_sent_bytes"] = 0.02 * report.payload_bytes
    assert "passed the master" in report.problems()[0]


def test_failures_and_casualties_are_named(report: Report) -> None:
    report.written[0].failures = {"get PeerUnreachable": 3}
    report.written[1].failures = {"get PeerUnreachable": 4}
    report.notes = ["node-1 ended with signal 9"]
    assert "counted as misses: 7 x get PeerUnreachable" in shown(report)
    assert "node-1 ended with signal 9" in shown(report)
    assert report.problems() == []


def test_a_report_of_nothing_can_be_shown() -> None:
    empty = Report("nothing", MIB, MIB, 1, Ideal(1, 0, 0), written=[Tally()], read=[])
    assert empty.hit_rate == 0
    assert "0 of nothing" in shown(empty)
    assert as_dict(empty)["hit_rate"] == 0


def test_sizes_are_written() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 1 << 20, 3 << 30)] == [
        "0 B", "1023 B", "1.5 KiB", "1.0 MiB", "3.00 GiB",
    ]  # fmt: skip
