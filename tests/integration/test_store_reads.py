"""The reduced form of `python -m benchmarks.reads`: no read path ever brings a wrong byte."""

from __future__ import annotations

from pathlib import Path

from benchmarks.reads import World, disk_numbers, run, with_disk
from mooncake_py.ops.cluster import Cluster, ClusterOptions


def test_f09_a07_no_read_path_brings_a_wrong_byte_under_constant_eviction() -> None:
    with Cluster(ClusterOptions(node_count=2, segment_bytes=12 << 20)) as cluster:
        report = run(cluster, 8_000, minutes=1)
    assert report.wrong == []
    assert report.puts > 0
    for path in ("single", "into", "batch", "range", "view", "session"):
        for transport in ("shm", "tcp"):
            assert report.outcomes[f"{path} {transport}", "right"] > 0, path


def test_f09_a07_no_read_path_brings_a_wrong_byte_from_a_disk(tmp_path: Path) -> None:
    options = with_disk(ClusterOptions(segment_bytes=12 << 20), str(tmp_path))
    with Cluster(options) as cluster:
        report = run(cluster, 3_000, minutes=1)
        numbers = disk_numbers(cluster)
    assert report.wrong == []
    assert numbers["disk_offloads"] > 0
    assert numbers["disk_cold_objects"] > 0, "what memory has no room for was on the disk alone"
    for transport in ("shm", "tcp"):
        assert report.outcomes[f"batch {transport}", "right"] > 0


def test_the_judge_of_reads_sees_what_is_wrong() -> None:
    world = World(8, seed=1)
    world.begun[3], world.ended[3] = 4, 1
    good = world.value(3, 4)
    assert world.fault(3, good, 1) == ""
    assert world.fault(3, good, 4) != "", "its removal was acknowledged before"
    assert world.fault(3, world.value(3, 5), 1) != "", "never put"
    assert world.fault(2, good, 0) != ""
    assert world.fault(3, good[:-1], 1) != ""
    assert world.fault(3, good[:-1] + bytes([good[-1] ^ 1]), 1) != ""
    mixed = world.value(3, 4)[:50] + world.value(3, 3)[50:]
    assert world.fault(3, mixed, 1) != ""
    assert world.part_fault(3, 20, good[20:60], 1) == ""
    assert world.part_fault(3, 20, good[21:61], 1) != ""
