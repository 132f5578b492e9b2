"""The `mooncake` command: answers for people and for programs, and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mooncake_py.ops.cli import cli
from mooncake_py.ops.cluster import Cluster
from mooncake_py.ops.status import ClusterStatus, NodeStatus

OK, FAILURE, USAGE, ABSENT = 0, 1, 2, 3


def mooncake(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "mooncake_py.ops.cli", *words]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=False)


def said(*words: str, stdin: bytes = b"") -> str:
    """What the command prints, or the exception that ends it; in this process, which is quick."""
    done = CliRunner().invoke(cli, words, input=stdin)
    return done.stdout if done.exception is None else type(done.exception).__name__


@pytest.fixture
def at(cluster: Cluster) -> tuple[str, str]:
    return ("--master", cluster.address)


def test_put_and_get_carry_any_bytes(at: tuple[str, str], tmp_path: Path) -> None:
    value = bytes(range(256)) * 1000
    done = mooncake("put", "cli/a", "--json", *at, stdin=value)
    assert (done.returncode, json.loads(done.stdout)) == (OK, {"key": "cli/a", "nbytes": 256_000})
    assert mooncake("get", "cli/a", *at).stdout == value
    target = tmp_path / "value"
    assert mooncake("get", "cli/a", str(target), *at).returncode == OK
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


def test_f47_locate_says_where_an_object_is_and_how_it_is_read(at: tuple[str, str]) -> None:
    mooncake("put", "cli/where", *at, stdin=b"four")
    done = mooncake("locate", "cli/where", "--json", *at)
    assert done.returncode == OK
    found = json.loads(done.stdout)
    (replica,) = found["replicas"]
    assert (found["nbytes"], found["outcome"], found["used"]) == (4, "readable", 0)
    assert replica["way"] == "mapped"
    text = mooncake("locate", "cli/where", *at).stdout.decode()
    assert f"read {replica['node']} 127.0.0.1:" in text
    assert "by mapped" in text
    absent = mooncake("locate", "cli/nowhere", *at)
    assert absent.returncode == ABSENT
    assert b"'cli/nowhere': no replica" in absent.stdout


# What is no answer of one value: bytes, tables while they fill, and a group of commands.
NO_JSON = {"get", "bench"}


def test_f47_every_command_answers_in_json_if_asked_and_explains_itself() -> None:
    for name, command in cli.commands.items():
        options = {word for each in command.params for word in each.opts}
        assert ("--json" in options) != (name in NO_JSON), name
        assert command.help, name


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
    told = {"gone": 3, "absent": ["cli/ls/3"], "kept": {}}
    assert (done.returncode, json.loads(done.stdout)) == (OK, told)
    assert said("rm", "cli/ls/3", *at) == "0 removed\nwas not there: cli/ls/3\n"
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
    assert " of 64.0 MiB (" in text
    assert "counter   put_ends" in text
    assert "counter   node_losses" not in text, "it is zero"
    everything = said("status", "--all", *at)
    assert "counter   node_losses 0 (objects that ended because" in everything
    assert not any(node["disk"] for node in figures["nodes"])
    disk = NodeStatus("a", "alive", "a:1", 1 << 20, 4 << 20, disk=True)
    (_, _, line) = ClusterStatus(0, 0, 0, [disk], {}).lines()
    assert line == "node      a (disk) at a:1: alive, 1.0 MiB of 4.0 MiB (25.0%)"


def test_tenants_have_keys_and_quotas_of_their_own(at: tuple[str, str]) -> None:
    of_b = ("--tenant", "b", *at)
    assert said("quota", "b", "--keys", "1", "--bytes", "1MiB", *at) == (
        "b: 0 keys, 0 B; quota 1.0 MiB, 1 keys, reject\n"
    )
    assert said("put", "cli/t/1", *of_b, stdin=b"of b") == "cli/t/1: 4 B\n"
    assert said("get", "cli/t/1", *of_b) == "of b"
    assert said("get", "cli/t/1", *at) == "ObjectNotFound"
    assert said("exists", "cli/t/1", *of_b) == "cli/t/1: present\n"
    assert "cli/t/1" in said("ls", "cli/t/", *of_b)
    assert not said("ls", "cli/t/", *at)
    assert said("put", "cli/t/2", *of_b, stdin=b"x") == "QuotaExceeded"
    (shown,) = json.loads(said("quota", "b", "--json", *at))
    assert (shown["keys"], shown["keys_max"], shown["policy"]) == (1, 1, "reject")
    assert said("quota", "b", "--remove", *at).endswith("; no quota\n")
    assert said("rm", "cli/t/1", "--force", *of_b) == "1 removed\n"
    assert "nobody is not among the " in said("quota", "nobody", *at)
    for wrong in (["b", "--policy", "borrow"], ["b", "--keys", "1", "--remove"], ["--keys", "1"]):
        assert said("quota", *wrong, *at) == "UsageError"


def test_keys_cannot_command_the_terminal(at: tuple[str, str]) -> None:
    key = "cli/ctl/\x1b[2J\n\u00e9"
    said("put", key, *at, stdin=b"x")
    assert said("ls", "cli/ctl/", *at).endswith("  cli/ctl/\\x1b[2J\\n\u00e9\n")
    assert json.loads(said("ls", "cli/ctl/", "--json", *at))["key"] == key


def test_an_output_that_cannot_be_written_is_one_line(at: tuple[str, str]) -> None:
    said("put", "cli/full", *at, stdin=b"x" * 100_000)
    done = mooncake("get", "cli/full", "/dev/full", *at)
    assert (done.returncode, done.stderr.count(b"\n")) == (FAILURE, 1)
    assert done.stderr.startswith(b"mooncake: /dev/full: No space left on device. Remedy: ")
    for words in (["get", "cli/full"], ["ls", "cli/"]):
        command = [sys.executable, "-m", "mooncake_py.ops.cli", *words, *at]
        with Path("/dev/full").open("wb") as full:
            lost = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
        assert (lost.returncode, lost.stderr.count(b"\n")) == (FAILURE, 1), lost.stderr
        assert b"No space left on device. Remedy: " in lost.stderr


def test_a_node_that_is_not_there_is_no_miss_of_a_cache(at: tuple[str, str]) -> None:
    for words in (["drain", "nope"], ["copy", "k", "--to", "nope"]):
        error = CliRunner().invoke(cli, [*words, *at]).exception
        assert str(error).endswith(". Remedy: mooncake status lists the nodes")


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
