"""The benchmarks run, small, so that they do not rot; and judge as they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import baseline, engine, engine_cells, fairness, metadata
from benchmarks.clients import Crowd
from benchmarks.plan import (
    CACHES,
    EFFORTS,
    GRPC,
    MEMORY,
    OUR_TCP,
    OURS,
    SHM,
    TCP,
    UP_DUMMY,
    UP_TCP,
    Case,
    bars,
)
from benchmarks.report import as_dict
from benchmarks.run import Timing, takes_part

ROOT = Path(__file__).resolve().parents[2]


def run(module: str, *arguments: str) -> None:
    """Without upstream, also where there is one."""
    environment = {k: v for k, v in os.environ.items() if k != "MOONCAKE_BENCH_UPSTREAM"}
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def run_benchmarks(json_file: Path, *arguments: str) -> None:
    run("benchmarks", "--size", "tiny", "--json", str(json_file), *arguments)


def test_the_limits_of_the_machine_are_measured(tmp_path: Path) -> None:
    run_benchmarks(tmp_path / "found.json", "limits")
    found = json.loads((tmp_path / "found.json").read_text())
    measured = {(row["case"], row["contender"]) for row in found["timings"] if row["p50_us"] > 0}
    expected = {
        (str(case), name)
        for case in EFFORTS["tiny"].cases
        for name in (MEMORY, TCP, GRPC)
        if takes_part(name, case)
    }
    assert measured == expected
    assert found["bars"] == []


def test_our_own_client_is_measured_over_both_transports(tmp_path: Path) -> None:
    picture = tmp_path / "found.svg"
    run_benchmarks(tmp_path / "found.json", "--picture", str(picture))
    found = json.loads((tmp_path / "found.json").read_text())
    drawn = ElementTree.fromstring(picture.read_text())
    titles = [each.text or "" for each in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert len([each for each in titles if each.startswith(SHM)]) == len(EFFORTS["tiny"].cases)
    for name in CACHES:
        here = any(row["contender"] == name for row in found["timings"])
        assert here or any(f"{name} skipped" in note for note in found["notes"])
    assert {row["kind"] for row in found["crowds"]} == {"processes", "threads"}
    assert all(row["cpu_us_per_call"] >= 0 for row in found["timings"])
    ours = {(r["case"], r["contender"]) for r in found["timings"] if r["contender"] in OURS}
    assert ours == {(str(case), name) for case in EFFORTS["tiny"].cases for name in OURS}
    assert all(row["times_limit"] > 0 for row in found["timings"] if row["contender"] == OUR_TCP)
    assert any("upstream skipped" in note for note in found["notes"])


def test_an_interpreter_without_upstream_is_a_note_and_no_failure(tmp_path: Path) -> None:
    from benchmarks.upstream import find  # noqa: PLC0415

    python, note = find(str(tmp_path / "no-python"))
    assert python is None
    assert "does not run" in note
    python, note = find(sys.executable)
    assert python is None
    assert "cannot import it" in note


def timing(case: Case, contender: str, *us: float) -> Timing:
    return Timing(case, contender, [round(value * 1000) for value in us])


def test_percentiles_and_rates_are_those_of_the_samples() -> None:
    found = timing(Case("get", 1 << 20), SHM, *range(1, 101))
    assert found.p50_us == 51
    assert found.percentile_us(0.99) == 100
    assert found.gb_per_s == pytest.approx((1 << 20) / 51e3)


@pytest.mark.parametrize(("ours", "met"), [(105.0, True), (106.0, False)])
def test_bars_compare_medians_of_one_run(ours: float, met: bool) -> None:
    case = Case("get", 16 << 20)
    found = as_dict(
        [timing(case, SHM, ours), timing(case, UP_DUMMY, 100.0), timing(case, UP_TCP, 1000.0)], []
    )
    verdicts = {tuple(row["against"].split()): row["met"] for row in found["bars"]}
    assert verdicts == {("upstream", "dummy"): met, ("upstream", "tcp"): True}


@pytest.mark.parametrize(("together", "met"), [(1.19, False), (1.21, True)])
def test_many_clients_are_held_against_one(together: float, met: bool) -> None:
    case = Case("get", 1 << 20)
    crowds = [
        Crowd(SHM, case, kind, clients, rate, 0.0)
        for kind, clients, rate in (
            ("processes", 1, 1.0), ("processes", 8, together), ("threads", 8, 9.0),
        )
    ]  # fmt: skip
    (row,) = as_dict([], [], crowds)["bars"]
    assert (row["bar"], row["met"]) == ("P7", met)


def figures(shm_us: float, limit_us: float, **machine: Any) -> dict[str, Any]:
    timings = [
        Timing(Case("get", 1 << 20), SHM, [round(shm_us * 1000)]),
        Timing(Case("get", 1 << 20), MEMORY, [round(limit_us * 1000)]),
    ]
    made = as_dict(timings, [])
    made["machine"] |= machine
    return json.loads(json.dumps(made))


@pytest.mark.parametrize(
    ("shm_us", "limit_us", "slower"),
    [(100.0, 50.0, False), (120.0, 50.0, False), (200.0, 100.0, False), (200.0, 50.0, True)],
)
def test_f61_slower_is_what_the_machine_does_not_explain(
    shm_us: float, limit_us: float, slower: bool
) -> None:
    before, now = figures(100.0, 50.0), figures(shm_us, limit_us)
    (row,) = baseline.compared(now, before)
    assert (row["slower"], row["contender"]) == (slower, SHM)
    assert baseline.other_machine(now, before) == ""
    assert "cores" in baseline.other_machine(now, figures(100.0, 50.0, cores=99))


def test_f61_figures_are_written_and_compared_with(tmp_path: Path) -> None:
    first = tmp_path / "first.json"
    words = ("--size", "tiny", "--only", "^get 4", "--json")
    run("benchmarks", *words, str(first))
    made = json.loads(first.read_text())
    row = next(each for each in made["timings"] if each["contender"] == SHM)
    assert 0 < row["p50_us"] <= row["p99_us"] <= row["p999_us"]
    assert made["machine"]["cores"] == os.cpu_count()
    for each in made["timings"]:  # nothing is a thousand times quicker; so both of ours are slower
        each["p50_us"] /= 1000
        each.pop("times_limit", None)
    first.write_text(json.dumps(made))
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words[:4], "--baseline", str(first)],
        cwd=ROOT, capture_output=True, timeout=120, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stdout.count("slower") >= 2
    first.write_text('{"timings": 3}')
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--baseline", str(first)],
        cwd=ROOT, capture_output=True, timeout=120, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "Remedy: name what --json wrote" in ended.stderr


def test_every_bar_is_about_a_case_that_is_run() -> None:
    cases = {(c.verb, c.nbytes, c.count) for c in EFFORTS["small"].cases}
    assert {(b.case.verb, b.case.nbytes, b.case.count) for b in bars()} <= cases
    assert {bar.name for bar in bars()} == {f"P{n}" for n in range(1, 7)}


def test_a_failure_is_told_and_leaves_no_figures() -> None:
    failed = Timing(Case("put", 4096), SHM, failure="ours shm: OutOfSpace")
    (row,) = as_dict([failed], [])["timings"]
    assert row["failure"] == "ours shm: OutOfSpace"
    assert "p50_us" not in row


def test_engines_are_measured_against_the_limits_and_what_was_cut_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    kinds = {"memcpy", "socket", "shm", "tcp"}
    before = engine_cells.Figures(out, resume=False)
    first = engine.cases(0.01, full=False, largest_mib=1)[0]
    for kind in kinds:
        one = {"p50_us": 12_345.0, "bytes_per_s": 1.0, "cpu_s": 1.0, "moved": 1.0}
        before.add(first, kind, one)
    given = ("--seconds", "0.01", "--out", str(out), "--largest-mib", "1", "--resume")
    run("benchmarks.engine", *given)
    rows = json.loads(out.read_text())
    assert rows[0] == before.rows[0], "what was there is not measured again"
    assert {row["threads"] for row in rows} == {1, 4}
    for row in rows:
        assert set(row["found"]) == kinds
        assert all(one["p50_us"] > 0 and one["cpu_s_per_gb"] >= 0 for one in row["found"].values())


def test_no_round_begins_when_the_minutes_are_over(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    before = engine_cells.Figures(out, resume=False)
    case = engine.cases(0.01, full=True, largest_mib=64)[-1]
    one = {"p50_us": 5.0, "bytes_per_s": 1.0, "cpu_s": 1.0, "moved": 1.0}
    before.add(case, "tcp", one)
    run("benchmarks.engine", "--full", "--minutes", "0", "--out", str(out), "--resume")
    assert [row["found"].keys() for row in json.loads(out.read_text())] == [{"tcp"}]


def test_an_engine_that_fails_or_hangs_costs_only_its_own_round(tmp_path: Path) -> None:
    case: dict[str, Any] = {
        "op": "read", "nbytes": 4096, "count": 1, "threads": 1, "seconds": 0.001,
    }  # fmt: skip
    figures = engine_cells.Figures(tmp_path / "found.json", resume=False)
    broken = engine_cells.Contender("upstream", sys.executable)  # which has no such module
    with pytest.raises(engine_cells.Failed, match="upstream: it ended"):
        broken.run(case)
    figures.fail(case, "upstream", "it ended")
    limit = engine_cells.Contender("memcpy", sys.executable)
    try:
        figures.add(case, "memcpy", limit.run(case))
    finally:
        limit.close()
    kinds = ["upstream", "memcpy"]
    assert list(engine_cells.turns([case], kinds, figures, 1)) == []
    assert [kind for _, kind in engine_cells.turns([case], kinds, figures, 2)] == kinds
    (row,) = json.loads((tmp_path / "found.json").read_text())
    assert (list(row["found"]), row["failed"]) == (["memcpy"], {"upstream": ["it ended"]})
    assert engine.judged(case, row["found"]) == [], "what failed has no bar"


def test_the_best_round_counts_and_the_mean_of_the_cpu_time() -> None:
    case: dict[str, Any] = {"op": "read", "nbytes": 4096, "count": 1, "threads": 1}
    figures = engine_cells.Figures(None, resume=False)
    for p50_us, rate, cpu_s in ((9.0, 1.0, 0.5), (5.0, 3.0, 0.1)):
        one = {"p50_us": p50_us, "bytes_per_s": rate, "cpu_s": cpu_s, "moved": 1e9}
        figures.add(case, "tcp", one)
    found = figures.row(case)["found"]["tcp"]
    assert found == {"p50_us": 5.0, "bytes_per_s": 3.0, "cpu_s_per_gb": pytest.approx(0.3)}


def test_bars_of_engines_say_what_was_missed() -> None:
    def found(shm: float, tcp: float) -> engine_cells.Found:
        speeds = {"memcpy": 10.0, "socket": 5.0, "shm": shm, "tcp": tcp, "upstream": 1.0}
        return {k: {"bytes_per_s": v, "p50_us": 100 / v} for k, v in speeds.items()}

    case = {"op": "read", "nbytes": 1 << 20, "count": 1, "threads": 1}
    assert engine.judged(case, found(9.0, 4.0)) == [
        "shm/memcpy >= 0.9: 0.90", "tcp/socket >= 0.8: 0.80", "tcp/upstream <= 0.6: 0.25",
    ]  # fmt: skip
    assert all(bar.endswith("MISSED") for bar in engine.judged(case, found(8.0, 1.5)))
    case["threads"] = 4
    assert engine.judged(case, found(8.0, 4.2), found(9.0, 4.0)) == [
        "shm 4t/1t >= 1: 0.89 MISSED", "tcp 4t/1t >= 1: 1.05",
    ]  # fmt: skip
    slower = {**found(8.0, 3.0), "memcpy": {"bytes_per_s": 9.0, "p50_us": 11.0}}
    assert engine.judged(case, slower, found(9.0, 4.0)) == [
        "shm 4t/1t >= 1 or memcpy's 0.90: 0.89", "tcp 4t/1t >= 1: 0.75 MISSED",
    ], "where bare copies by as many threads lose, no engine can gain"  # fmt: skip


def test_the_masters_calls_are_measured_over_both_doors_and_judged(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    run("benchmarks.metadata", "--objects", "1200", "--rounds", "2", "--json", str(found))
    told = json.loads(found.read_text())
    measured = {
        (row["contender"], row["verb"], row["objects"], row["batch"]) for row in told["rows"]
    }
    assert len(measured) == 2 * len(metadata.VERBS) * 2 * 3, "doors, verbs, sizes, batches"
    assert {row["bar"] for row in told["bars"]} == {"P8", "P11"}, "P6 needs upstream"


def test_the_bars_of_the_masters_calls_are_judged_as_they_are_written() -> None:
    def row(contender: str, objects: int, us: float) -> metadata.Row:
        return metadata.Row(contender, "exists", objects, 1, us, us, us)

    ours, theirs = metadata.LANE, metadata.UPSTREAM
    rows = [row(ours, 10, 5.0), row(ours, 1000, 6.5), row(theirs, 10, 5.0), row(theirs, 1000, 7.0)]
    judged = metadata.judge(rows, {ours: 240.0})
    by_bar: dict[str, list[bool]] = {}
    for each in judged:
        by_bar.setdefault(each["bar"], []).append(each["met"])
    assert by_bar == {"P6": [True, True], "P8": [True], "P11": [False, False]}


def test_the_bench_of_fairness_measures_every_call_beside_every_crowd() -> None:
    rows = fairness.measure(objects=3_000, callers=3, seconds=0.1)
    beside = {str(row["beside"]) for row in rows}
    assert len(beside) == 2 + 4
    assert {row["call"] for row in rows} == {"heartbeat", "exists", "locate", "exists of 20,000"}
    assert all(0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] for row in rows)  # type: ignore[operator]
