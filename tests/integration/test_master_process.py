"""`mooncake-master` as a process: start, health, stop, restart, and everything that goes wrong."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.errors import MasterUnavailable, MooncakeError
from mooncake_py.master.client import MasterClient
from mooncake_py.master.commands import Heartbeat, Mount
from mooncake_py.ops.child import Child
from mooncake_py.transfer import TransferEngine
from tests.conformance.master_battery import SEGMENT_BYTES, T, stored

# Nodes here do not heartbeat by themselves.
PATIENT = ("--set", "suspect_ms=60s", "--set", "dead_ms=120s")
START_MS = 30_000
Start = Callable[..., tuple[Child, dict[str, str]]]


@pytest.fixture(params=["grpc", "lane"])
def engine(request: pytest.FixtureRequest) -> Iterator[TransferEngine | None]:
    """What decides the door of a client."""
    if request.param == "grpc":
        yield None
        return
    with TransferEngine() as opened:
        yield opened


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(*arguments)` runs a master and gives it with the fields of its ready line."""
    children: list[Child] = []

    def run(*arguments: str, listen: str = "127.0.0.1:0") -> tuple[Child, dict[str, str]]:
        options = ["--listen", listen, *PATIENT, *arguments]
        name = f"master-{len(children)}"
        child = Child(name, "mooncake_py.master.server", options, tmp_path)
        children.append(child)
        line = child.line(START_MS)
        assert line is not None, child.complaint()
        assert line.startswith("mooncake-master ready ")
        return child, dict(field.split("=", 1) for field in line.split()[2:])

    yield run
    for child in children:
        child.kill()


def refused(*arguments: str) -> tuple[int, str]:
    """Exit code and the whole of stderr of a master that does not start."""
    command = [sys.executable, "-m", "mooncake_py.master.server", *PATIENT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr


def until(condition: Callable[[], Any], timeout_ms: int = T) -> None:
    """Wait for a state of another process."""
    deadline = Deadline(timeout_ms, SystemClock())
    waiter = select.poll()
    while not condition():
        assert not deadline.passed(), "it did not come to pass in time"
        waiter.poll(10)


def elapsed_ms(work: Callable[[], object]) -> int:
    clock = SystemClock()
    begun = clock.now_ms()
    work()
    return clock.now_ms() - begun


def health_of(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="mooncake.v1.Master")
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status)


def mounted(client: MasterClient, segment_id: int = 0) -> int:
    node = Mount("node-a", 1, "10.0.0.1:700", 3, SEGMENT_BYTES, "host", segment_id)
    return client.mount(node, timeout_ms=T).segment_id


# --- start and stop -----------------------------------------------------------------------------


def test_f30_ready_line_health_and_a_clean_stop(start: Start, tmp_path: Path) -> None:
    child, fields = start("--metadata", str(tmp_path), "--lane-listen", "off")
    assert fields["metadata"] == str(tmp_path / "master.db")
    assert fields["lane"] == "off"
    assert health_of(fields["grpc"]) == health_pb2.HealthCheckResponse.SERVING
    assert child.stop(T) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a31_signals_stop_with_exit_0(start: Start, number: signal.Signals) -> None:
    child, fields = start("--metadata", "memory")
    client = MasterClient(fields["grpc"])
    client.connect(timeout_ms=T)
    os.kill(child.pid, number)
    until(lambda: child.exit_code() is not None)
    assert child.exit_code() == 0
    client.close()


def test_a31_a_second_signal_exits_at_once(start: Start) -> None:
    """Both arrive together, so the second comes before the stop can have ended."""
    child, _ = start("--metadata", "memory")
    os.kill(child.pid, signal.SIGSTOP)
    os.kill(child.pid, signal.SIGINT)
    os.kill(child.pid, signal.SIGTERM)
    os.kill(child.pid, signal.SIGCONT)
    until(lambda: child.exit_code() is not None)
    assert child.exit_code() == 128 + signal.SIGTERM


@pytest.mark.parametrize("listen", ["localhost:0", "[::1]:0", "127.0.0.1:0", "0.0.0.0:0"])
def test_a84_names_ipv4_and_ipv6_are_listened_on(start: Start, listen: str) -> None:
    if "::1" in listen and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    _, fields = start("--metadata", "memory", listen=listen)
    address = fields["grpc"].replace("0.0.0.0", "127.0.0.1")
    client = MasterClient(address)
    assert client.connect(timeout_ms=T).cluster_id
    mounted(client)
    stored(client, "", [b"a"])
    client.close()


def test_a24_a_port_in_use_is_one_line_and_exit_1(start: Start) -> None:
    _, fields = start("--metadata", "memory", "--metrics", "127.0.0.1:0")
    taken_ports = {"--listen": "grpc", "--lane-listen": "lane", "--metrics": "metrics"}
    for option, field in taken_ports.items():
        taken = fields[field]
        other = () if option == "--listen" else ("--listen", "127.0.0.1:0")
        code, text = refused(*other, option, taken, "--metadata", "memory")
        assert (code, text.count("\n")) == (1, 1), text
        assert taken in text
        assert "in use" in text.lower()
        assert "Remedy" in text
    assert health_of(fields["grpc"]) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("--listen", "nowhere"), 2, "HOST:PORT"),
        (("--listen", "127.0.0.1:99999"), 2, "HOST:PORT"),
        (("--listen", "::1:50051"), 2, "[HOST]:PORT"),
        (("--listen", "no-such-host.invalid:1"), 2, "no-such-host.invalid"),
        (("--listen", "192.0.2.1:50051"), 1, "192.0.2.1"),
        (("--listen", "127.0.0.1:0", "--metadata", "/proc/nothing/here"), 1, "/proc/nothing"),
        (("--set", "lease_ms=soon"), 2, "lease_ms"),
        (("--set", "leese_ms=5"), 2, "leese_ms"),
        (("--set", "dead_ms=100"), 2, "dead_ms"),
        (("--set", "tick_ms"), 2, "tick_ms"),
    ],
)
def test_c06_a_start_that_cannot_work_is_one_line(
    arguments: tuple[str, ...], code: int, word: str
) -> None:
    got, text = refused(*arguments)
    assert (got, text.count("\n")) == (code, 1), text
    assert text.startswith("mooncake-master: ")
    assert word in text


def test_a24_two_masters_on_one_database_are_refused(start: Start, tmp_path: Path) -> None:
    child, fields = start("--metadata", str(tmp_path))
    code, text = refused("--listen", "127.0.0.1:0", "--metadata", str(tmp_path))
    assert (code, text.count("\n")) == (1, 1), text
    assert str(child.pid) in text
    assert health_of(fields["grpc"]) == health_pb2.HealthCheckResponse.SERVING


def test_unknown_environment_variables_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER_LISTN", "127.0.0.1:1")
    code, text = refused("--listen", "127.0.0.1:0")
    assert code == 2
    assert "MOONCAKE_MASTER_LISTN" in text


# --- restart ------------------------------------------------------------------------------------


def test_a25_c01_a_restarted_master_serves_what_it_had(
    start: Start, tmp_path: Path, engine: TransferEngine | None
) -> None:
    child, fields = start("--metadata", str(tmp_path))
    client = MasterClient(fields["grpc"], engine=engine)
    first = client.connect(timeout_ms=T)
    segment_id = mounted(client)
    keys = [b"key-%d" % i for i in range(1_000)]
    stored(client, "t", keys)
    client.remove("t", keys[:100], force=True, timeout_ms=T)
    before = client.locate("t", keys, timeout_ms=T)
    assert child.stop(T) == 0

    again, _ = start("--metadata", str(tmp_path), listen=fields["grpc"])
    assert not client.heartbeat(Heartbeat("node-a", 1, segment_id), timeout_ms=T).known
    assert mounted(client, segment_id) == segment_id
    assert client.heartbeat(Heartbeat("node-a", 1, segment_id), timeout_ms=T).known
    after = client.locate("t", keys, timeout_ms=T)
    assert (after.status == before.status).all()
    assert (after.rows == before.rows).all()
    second = client.connect(timeout_ms=T)
    assert second.cluster_id == first.cluster_id
    assert second.term > first.term
    grants = client.put_start("t", [b"new"], [1], timeout_ms=T)
    assert grants.generations[0] > before.rows["generation"].max()
    client.close()
    assert again.stop(T) == 0


def test_removed_objects_stay_removed_after_a_kill(start: Start, tmp_path: Path) -> None:
    """A remove is answered once it is durable, so the kill right after it changes nothing."""
    child, fields = start("--metadata", str(tmp_path))
    client = MasterClient(fields["grpc"])
    segment_id = mounted(client)
    keys = [b"key-%d" % i for i in range(100)]
    stored(client, "", keys)
    client.remove("", keys[::2], force=True, timeout_ms=T)
    child.kill()
    start("--metadata", str(tmp_path), listen=fields["grpc"])
    mounted(client, segment_id)
    assert client.exists("", keys, timeout_ms=T).tolist() == [0, 1] * 50
    client.close()


def test_snapshots_are_taken_and_restored(start: Start, tmp_path: Path) -> None:
    small = ("--metadata", str(tmp_path), "--set", "snapshot_record_bytes=20k")
    child, fields = start(*small)
    client = MasterClient(fields["grpc"])
    segment_id = mounted(client)
    keys: list[bytes] = []
    while client.status(timeout_ms=T).counters["catalog_snapshots_total"] < 3:
        assert len(keys) < 50_000, "a snapshot is made in slices, but it is made"
        keys += [b"key-%d" % i for i in range(len(keys), len(keys) + 100)]
        stored(client, "", keys[-100:])
    child.stop(T)
    start(*small, listen=fields["grpc"])
    mounted(client, segment_id)
    assert client.exists("", keys, timeout_ms=T).all()
    client.close()


def test_a42_the_next_call_finds_a_restarted_master(
    start: Start, tmp_path: Path, engine: TransferEngine | None
) -> None:
    child, fields = start("--metadata", str(tmp_path))
    client = MasterClient(fields["grpc"], engine=engine)
    mounted(client)
    child.kill()
    with pytest.raises(MasterUnavailable):
        client.exists("", [b"a"], timeout_ms=500)
    start("--metadata", str(tmp_path), listen=fields["grpc"])
    assert client.exists("", [b"a"], timeout_ms=T).tolist() == [0]
    client.close()


def test_puts_go_on_over_the_lane_of_a_restarted_master(start: Start, tmp_path: Path) -> None:
    """A put may not be repeated blindly: a client that has seen its lane end asks anew first."""
    child, fields = start("--metadata", str(tmp_path))
    with TransferEngine() as engine:
        client = MasterClient(fields["grpc"], engine=engine)
        segment_id = mounted(client)
        child.kill()
        start("--metadata", str(tmp_path), listen=fields["grpc"])
        other = MasterClient(fields["grpc"])
        mounted(other, segment_id)
        other.close()
        stored(client, "", [b"a"])
        assert client.status(timeout_ms=T).counters["lane_received_bytes"] > 0
        client.close()


# --- stopped, full, killed ----------------------------------------------------------------------


def test_f28_calls_end_in_time_when_the_master_is_stopped(
    start: Start, engine: TransferEngine | None
) -> None:
    child, fields = start("--metadata", "memory")
    client = MasterClient(fields["grpc"], engine=engine)
    segment_id = mounted(client)
    os.kill(child.pid, signal.SIGSTOP)
    calls: list[Callable[[], object]] = [
        lambda: client.exists("", [b"a"], timeout_ms=300),
        lambda: client.locate("", [b"a"], timeout_ms=300),
        lambda: client.put_start("", [b"a"], [1], timeout_ms=300),
        lambda: client.put_end("", [b"a"], [1], timeout_ms=300),
        lambda: client.remove("", [b"a"], timeout_ms=300),
        lambda: client.status(timeout_ms=300),
        lambda: client.heartbeat(Heartbeat("node-a", 1, segment_id), timeout_ms=300),
        lambda: MasterClient(fields["grpc"]).connect(timeout_ms=300),
    ]
    for call in calls:

        def fails(call: Callable[[], object] = call) -> None:
            with pytest.raises(MasterUnavailable):
                call()

        assert elapsed_ms(fails) < 400
    os.kill(child.pid, signal.SIGCONT)
    assert client.exists("", [b"a"], timeout_ms=T).tolist() == [0]
    client.close()


def test_a20_a_master_that_stood_still_does_not_blame_the_nodes(start: Start) -> None:
    child, fields = start("--set", "suspect_ms=500", "--set", "dead_ms=700", "--metadata", "memory")
    client = MasterClient(fields["grpc"])
    segment_id = mounted(client)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(MasterUnavailable):
        client.status(timeout_ms=1_500)
    os.kill(child.pid, signal.SIGCONT)
    assert client.heartbeat(Heartbeat("node-a", 1, segment_id), timeout_ms=T).known
    client.close()


def test_a_full_disk_is_said_and_healed(start: Start, tmp_path: Path) -> None:
    """The file may not grow: changes are refused with the store's words, reads go on, health turns
    bad, and all of it ends by itself once there is room."""
    child, fields = start("--metadata", str(tmp_path), "--set", "commit_retry_ms=50")
    client = MasterClient(fields["grpc"])
    segment_id = mounted(client)
    stored(client, "", [b"before"])
    wal = tmp_path / "master.db-wal"
    size = wal.stat().st_size
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def refused_change() -> bool:
        try:
            stored(client, "", [b"during-%d" % SystemClock().now_ms()])
        except MooncakeError as error:
            return isinstance(error, MasterUnavailable) and "metadata store" in str(error)
        return False

    until(refused_change)
    assert client.exists("", [b"before"], timeout_ms=T).tolist() == [1]
    assert client.heartbeat(Heartbeat("node-a", 1, segment_id), timeout_ms=T).known
    bad = health_pb2.HealthCheckResponse.NOT_SERVING
    until(lambda: health_of(fields["grpc"]) == bad)
    with pytest.raises(MasterUnavailable, match="metadata store"):
        client.remove("", [b"before"], force=True, timeout_ms=T)

    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, unlimited)
    until(lambda: health_of(fields["grpc"]) == health_pb2.HealthCheckResponse.SERVING)
    stored(client, "", [b"after"])
    assert child.stop(T) == 0
    start("--metadata", str(tmp_path), listen=fields["grpc"])
    mounted(client, segment_id)
    assert client.exists("", [b"before", b"after"], timeout_ms=T).tolist() == [1, 1]
    client.close()


def test_a43_garbage_and_half_calls_hurt_nobody(start: Start) -> None:
    """Strangers that talk nonsense to both doors, or begin and go silent, while others work."""
    _, fields = start("--metadata", "memory")
    strangers = []
    for door in ("grpc", "lane"):
        host, _, port = fields[door].rpartition(":")
        for opening in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(range(256)) * 64,
            b"PRI * HTTP/2.0\r\n",
        ):
            stranger = socket.create_connection((host, int(port)), timeout=5)
            stranger.sendall(opening)
            strangers.append(stranger)
    with TransferEngine() as opened:
        for door_engine in (None, opened):
            client = MasterClient(fields["grpc"], engine=door_engine)
            client.heartbeat(Heartbeat("node-a", 1, mounted(client)), timeout_ms=T)
            assert client.exists("", [b"a"], timeout_ms=T).tolist() == [0]
            client.close()
    for stranger in strangers:
        stranger.close()


# --- metrics ------------------------------------------------------------------------------------


def test_f29_metrics_parse_and_count_what_was_done(start: Start) -> None:
    _, fields = start("--metadata", "memory", "--metrics", "127.0.0.1:0")
    client = MasterClient(fields["grpc"])
    mounted(client)
    stored(client, "", [b"a", b"b", b"c"])
    for _ in range(7):
        client.exists("", [b"a"], timeout_ms=T)
    with urllib.request.urlopen(f"http://{fields['metrics']}/metrics", timeout=5) as page:
        families = {f.name: f for f in text_string_to_metric_families(page.read().decode())}
    calls = {
        sample.labels["method"]: sample.value
        for sample in families["mooncake_master_calls"].samples
        if sample.name.endswith("_total") and sample.labels["door"] == "grpc"
    }
    assert (calls["Exists"], calls["PutStart"], calls["PutEnd"], calls["Mount"]) == (7, 1, 1, 1)
    assert families["mooncake_master_objects"].samples[0].value == 3
    with urllib.request.urlopen(f"http://{fields['metrics']}/health", timeout=5) as page:
        assert page.status == 200
    client.close()
