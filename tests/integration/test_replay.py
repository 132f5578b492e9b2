"""The main job from end to end, with real processes: figures, failures, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Marked, shared_memory_names, wait_until

from mooncake_py.ops.replay import ReplayOptions, replay
from mooncake_py.ops.report import Report, as_dict
from mooncake_py.ops.trace import read_trace

KIB, MIB = 1 << 10, 1 << 20
TRACES = os.environ.get("MOONCAKE_TRACES", "")


def trace_file() -> Path | None:
    """The published conversation trace where it is at hand; else the replay makes one."""
    path = Path(TRACES) / "conversation_trace.jsonl"
    return path if TRACES and path.exists() else None


def hits_with_room_for_all(prompts: list[tuple[int, ...]]) -> int:
    """Nothing is ever evicted, so the cache is the set of all pages seen."""
    seen: set[int] = set()
    hits = 0
    for prompt in prompts:
        for page in prompt:
            if page not in seen:
                break
            hits += 1
        seen.update(prompt)
    return hits


@pytest.fixture(scope="module")
def roomy() -> tuple[ReplayOptions, Report]:
    """2,000 requests, and a cluster in which every page has room."""
    options = ReplayOptions(
        trace=trace_file(), requests_max=2000, page_bytes=2 * KIB, capacity_bytes=256 * MIB
    )
    return options, replay(options)


@pytest.mark.timeout(300)
def test_f70_hit_rate_equals_the_model(roomy: tuple[ReplayOptions, Report]) -> None:
    options, report = roomy
    _, requests = options.load()
    prompts = [request.hash_ids for request in requests]
    assert report.requests == len(prompts) == 2000
    assert report.pages == sum(map(len, prompts))
    assert report.hit_pages == hits_with_room_for_all(prompts)
    assert report.written[0].failures == report.written[1].failures == {}


def test_f01_every_byte_is_right_in_the_other_process(roomy: tuple[ReplayOptions, Report]) -> None:
    options, report = roomy
    assert report.wrong_bytes == 0
    assert [tally.transport for tally in report.written + report.read] == ["shm", "tcp"] * 2
    for reader in report.read:
        assert reader.pages == reader.hit_pages > 1000
        assert reader.got_bytes == reader.hit_pages * options.page_bytes


def test_f02_the_master_sees_no_payload(roomy: tuple[ReplayOptions, Report]) -> None:
    """Pages are as small here as their metadata can bear; at 256 KiB the share is 1/128 of this."""
    options, report = roomy
    assert report.master_bytes > 0
    per_page = report.master_bytes / (report.payload_bytes / options.page_bytes)
    assert per_page < 0.01 * 256 * KIB


def test_a_small_cache_comes_close_to_an_ideal_lru_of_its_size() -> None:
    options = ReplayOptions(
        trace=trace_file(), requests_max=600, page_bytes=16 * KIB, capacity_bytes=24 * MIB
    )
    report = replay(options)
    assert report.counters["evictions"] > 0
    assert report.wrong_bytes == 0
    assert report.ideal.lru_hits <= report.ideal.clairvoyant_hits
    assert report.hit_pages <= report.ideal.clairvoyant_hits
    assert report.hit_rate == pytest.approx(report.ideal.lru_hits / report.pages, abs=0.05)


def nodes_of_this_process() -> list[int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, command in commands.items() if b"mooncake_py.store.node" in command]


def test_a_node_killed_during_the_replay_costs_hits_and_nothing_else() -> None:
    killed: list[int] = []

    def progress(process: str, done: int, total: int) -> None:
        if process == "writer" and done > total // 4 and not killed:
            killed.append(nodes_of_this_process()[0])
            os.kill(killed[0], signal.SIGKILL)

    options = ReplayOptions(requests_max=1500, page_bytes=64 * KIB, capacity_bytes=1024 * MIB)
    report = replay(options, progress)
    assert killed
    assert report.wrong_bytes == 0
    assert report.requests == 1500
    _, requests = options.load()
    whole = hits_with_room_for_all([request.hash_ids for request in requests])
    assert 0 < report.hit_pages < whole
    assert report.notes in ([f"node-{i} ended with signal 9"] for i in range(2))


# --- the command, and what it leaves behind -------------------------------------------------------


@pytest.fixture
def marked() -> Iterator[Marked]:
    marked = Marked()
    yield marked
    for pid in marked.pids():  # only after a failed test
        os.kill(pid, signal.SIGKILL)


def start(marked: Marked, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mooncake_py.ops.cli", "bench", "replay", *arguments],
        env=marked.environment(TMPDIR=str(folder), COLUMNS="140"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SMALL = ("--requests", "120", "--page-bytes", "64KiB", "--capacity", "256MiB")
LONG = ("--requests", "6000", "--page-bytes", "256KiB", "--capacity", "256MiB")


def test_the_command_shows_a_table_and_leaves_nothing(marked: Marked, tmp_path: Path) -> None:
    before = shared_memory_names()
    figures_file, folder = tmp_path / "figures.json", tmp_path / "tmp"
    folder.mkdir()
    with start(marked, folder, *SMALL, "--json", str(figures_file)) as command:
        table, complaints = command.communicate(timeout=100)
    assert command.returncode == 0, complaints
    figures = json.loads(figures_file.read_text())
    assert figures["wrong_bytes"] == 0
    assert figures["hit_rate"] == figures["ideal_lru_hit_rate"] > 0.5
    for words in ("writer, shm", "writer, tcp", "reader, shm", "reader, tcp", "wrong bytes"):
        assert words in table
    assert f"{figures['hit_rate']:.2%}" in table
    assert list(folder.iterdir()) == []
    assert marked.pids() == []
    assert shared_memory_names() <= before


@pytest.mark.parametrize(
    ("ending", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_an_interrupted_command_leaves_nothing(
    marked: Marked, tmp_path: Path, ending: signal.Signals, code: int
) -> None:
    before = shared_memory_names()
    with start(marked, tmp_path, *LONG) as command:
        wait_until(lambda: marked.pids("mooncake_py.ops.worker"), "the writer works")
        assert len(marked.pids("mooncake_py.store.node")) == 2
        command.send_signal(ending)
        _, complaints = command.communicate(timeout=60)
    assert command.returncode == code
    assert "Traceback" not in complaints
    wait_until(lambda: marked.pids() == [], "all processes are gone")
    wait_until(lambda: list(tmp_path.iterdir()) == [], "the folder is gone")
    assert shared_memory_names() <= before


@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ("mooncake_py.master.server", "the writer gave up"),
        ("mooncake_py.store.node", "no node is left"),
    ],
)
def test_without_a_master_or_any_node_the_replay_ends_and_says_so(
    marked: Marked, tmp_path: Path, victim: str, words: str
) -> None:
    with start(marked, tmp_path, *LONG, "--nodes", "1") as command:
        wait_until(lambda: marked.pids("mooncake_py.ops.worker"), "the writer works")
        for pid in marked.pids(victim):
            os.kill(pid, signal.SIGKILL)
        _, complaints = command.communicate(timeout=60)
    assert command.returncode == 1
    assert words in complaints
    assert "Traceback" not in complaints
    wait_until(lambda: marked.pids() == [], "all processes are gone")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trace", "absent.jsonl"], "absent.jsonl: No such file"),
        (["--page-bytes", "12"], "a page of 12 bytes cannot be made"),
        (["--page-bytes", "lots"], "lots"),
        (["--requests", "0"], "at least one request"),
        (["--capacity", "1KiB"], "below one page a node"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    marked: Marked, tmp_path: Path, arguments: list[str], words: str
) -> None:
    with start(marked, tmp_path, *arguments) as command:
        _, complaints = command.communicate(timeout=60)
    assert command.returncode == 2
    assert words in complaints
    assert "Traceback" not in complaints


def test_a_malformed_trace_is_refused_by_file_and_line(marked: Marked, tmp_path: Path) -> None:
    trace = tmp_path / "bad.jsonl"
    good = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}'
    trace.write_text(f"{good}\n{{}}\n")
    with start(marked, tmp_path, "--trace", str(trace)) as command:
        _, complaints = command.communicate(timeout=60)
    assert command.returncode == 2
    assert f"{trace}:2: 'timestamp'" in complaints


@pytest.mark.skipif(trace_file() is None, reason="MOONCAKE_TRACES names no folder of traces")
def test_the_published_trace_is_read_as_it_is() -> None:
    path = trace_file()
    assert path is not None
    requests = read_trace(path)
    assert len(requests) == 12_031
    assert sum(len(request.hash_ids) for request in requests) == 288_500


def test_figures_can_be_written_as_json(roomy: tuple[ReplayOptions, Report]) -> None:
    assert json.loads(json.dumps(as_dict(roomy[1])))["requests"] == 2000
