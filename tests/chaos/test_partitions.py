"""One thing breaks, and what is promised then holds: networks, clocks, memory. Each scenario runs
in a process with a network of its own (`chaos_scenarios.py`). The longer ones are left to the
checks (`MOONCAKE_CHAOS_LONG=1`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chaos_inside import faketime
from chaos_network import inside, why_not
from etcd_cluster import needs_etcd

ROOT = Path(__file__).parents[2]

pytestmark = [needs_etcd, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]

long = pytest.mark.skipif(
    os.environ.get("MOONCAKE_CHAOS_LONG") != "1", reason="MOONCAKE_CHAOS_LONG is not 1"
)


def play(scenario: str, folder: Path) -> None:
    module = "tests.chaos.chaos_scenarios"
    command = inside(sys.executable, "-m", module, scenario, str(folder))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    logs = "".join(
        f"--- {path.name}\n{path.read_text()[-1_500:]}" for path in sorted(folder.glob("*.stderr"))
    )
    assert done.returncode == 0, done.stderr[-3_000:] + (logs if done.returncode else "")


def test_f14_f28_a_client_that_cannot_reach_a_node_reads_the_other_replica(tmp_path: Path) -> None:
    play("client_cut_from_node", tmp_path)


@long
def test_a22_f15_f16_a_node_that_cannot_reach_the_masters_is_left_alone_and_comes_back(
    tmp_path: Path,
) -> None:
    play("node_cut_from_masters", tmp_path)


def test_f12_a27_a_leader_cut_off_from_etcd_accepts_nothing_and_hides_nothing(
    tmp_path: Path,
) -> None:
    play("leader_cut_from_etcd", tmp_path)


@long
def test_f12_a26_a_leader_cut_off_from_everybody_is_replaced(tmp_path: Path) -> None:
    play("leader_cut_from_everybody", tmp_path)


@long
def test_a28_masters_and_nodes_that_start_before_etcd_wait_for_it(tmp_path: Path) -> None:
    play("starts_without_etcd_and_leader", tmp_path)


def test_f62_a20_nobody_is_forgotten_in_an_outage_of_etcd_with_a_frozen_standby(
    tmp_path: Path,
) -> None:
    play("outage_while_a_standby_is_frozen", tmp_path)


def test_f43_a_damaged_byte_is_never_handed_out(tmp_path: Path) -> None:
    play("damaged_byte", tmp_path)


@long
@pytest.mark.skipif(not faketime(), reason="libfaketime is not installed")
def test_wrong_wall_clocks_change_nothing(tmp_path: Path) -> None:
    play("clocks_that_are_wrong", tmp_path)


@long
def test_machines_that_were_started_at_other_times_agree(tmp_path: Path) -> None:
    unshare = ["unshare", "--time", "--fork", "--boottime=100", "true"]
    if subprocess.run(unshare, capture_output=True, check=False).returncode:
        pytest.skip("this user may make no time namespace")
    play("machine_clocks_that_differ", tmp_path)
