"""The `mooncake` command: answers for people and for programs, and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_py.ops.cluster import Cluster

OK, FAILURE, USAGE, ABSENT = 0, 1, 2, 3


def mooncake(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "mooncake_py.ops.cli", *words]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=False)


@pytest.fixture
def at(cluster: Cluster) -> tuple[str, str]:
    return ("--master", cluster.address)


def test_put_and_get_carry_any_bytes(at: tuple[str, str], tmp_path: Path) -> None:
    value = bytes(range(256)) * 1000
    done = mooncake("put", "cli/a", "--json", *at, stdin=value)
    assert (done.returncode, json.loads(done.stdout)) == (OK, {"key": "cli/a", "nbytes": 256_000})
    assert mooncake("get", "cli/a", *at).stdout == value
    target = tmp_path / "value"
    assert mooncake("get", "cli/a", "--output", str(target), *at).returncode == OK
    assert target.read_bytes() == value
    assert mooncake("put", "cli/b", str(target), *at).returncode == OK
    assert mooncake("get", "cli/b", *at).stdout == value


def test_a_second_put_fails_and_says_why(at: tuple[str, str]) -> None:
    assert mooncake("put", "cli/twice", *at, stdin=b"1").returncode == OK
    done = mooncake("put", "cli/twice", *at, stdin=b"2")
    assert done.returncode == FAILURE
    assert done.stderr.startswith(b"mooncake: ")
    assert b"Remedy: " in done.stderr
    assert mooncake("get", "cli/twice", *at).stdout == b"1"


def test_absent_objects_have_an_exit_code_of_their_own(at: tuple[str, str]) -> None:
    done = mooncake("get", "cli/absent", *at)
    assert (done.returncode, done.stdout) == (ABSENT, b"")
    assert b"cli/absent" in done.stderr
    mooncake("put", "cli/present", *at, stdin=b"x")
    done = mooncake("exists", "cli/present", "cli/absent", "--json", *at)
    assert done.returncode == ABSENT
    assert json.loads(done.stdout) == {"cli/present": True, "cli/absent": False}
    assert mooncake("exists", "cli/present", *at).returncode == OK


def test_ls_and_rm(at: tuple[str, str]) -> None:
    for key in ("cli/ls/1", "cli/ls/2"):
        mooncake("put", key, *at, stdin=b"four")
    rows = [
        json.loads(line)
        for line in mooncake("ls", "cli/ls/", "--json", *at).stdout.split(b"\n")
        if line
    ]
    assert rows == [{"key": f"cli/ls/{i}", "nbytes": 4, "replicas": 1} for i in (1, 2)]
    assert b"cli/ls/1" in mooncake("ls", "cli/ls/", *at).stdout
    done = mooncake("rm", "cli/ls/1", "cli/ls/2", "cli/ls/3", "--json", *at)
    assert (done.returncode, json.loads(done.stdout)) == (OK, {"gone": 3, "kept": {}})
    assert mooncake("ls", "cli/ls/", *at).stdout == b""


def test_rm_of_what_is_being_read_keeps_it_unless_forced(at: tuple[str, str]) -> None:
    mooncake("put", "cli/read", *at, stdin=b"x")
    mooncake("get", "cli/read", *at)
    done = mooncake("rm", "cli/read", "--json", *at)
    assert done.returncode == FAILURE
    assert list(json.loads(done.stdout)["kept"]) == ["cli/read"]
    assert mooncake("rm", "cli/read", "--force", *at).returncode == OK


def test_status_shows_nodes_and_space(at: tuple[str, str]) -> None:
    mooncake("put", "cli/status", *at, stdin=b"x" * 1000)
    figures = json.loads(mooncake("status", "--json", *at).stdout)
    assert figures["objects"] >= 1
    assert figures["used_bytes"] > 1000
    assert [node["name"] for node in figures["nodes"]] == ["node-0", "node-1"]
    assert all(node["state"] == "alive" for node in figures["nodes"])
    text = mooncake("status", *at).stdout.decode()
    assert "node-0 at 127.0.0.1:" in text
    assert "counter   put_ends" in text


@pytest.mark.parametrize(
    "words", [["get", "k"], ["put", "k"], ["exists", "k"], ["rm", "k"], ["ls"], ["status"]]
)
def test_without_a_master_there_is_one_line(words: list[str]) -> None:
    done = mooncake(*words, "--master", "127.0.0.1:1", "--timeout-ms", "300")
    assert done.returncode == FAILURE
    assert done.stdout == b""
    assert done.stderr.startswith(b"mooncake: ")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("words", [["nonsense"], ["put"], ["ls", "--master", "x"]])
def test_wrong_usage_is_exit_code_2(words: list[str]) -> None:
    done = mooncake(*words)
    assert done.returncode == USAGE
    assert b"Traceback" not in done.stderr


def test_the_doctor_finds_this_machine_fit() -> None:
    done = mooncake("doctor", "--json")
    assert done.returncode == OK
    parts = {found["part"]: found["ok"] for found in json.loads(done.stdout)}
    assert parts["native core"]
    assert parts["shared memory"]
