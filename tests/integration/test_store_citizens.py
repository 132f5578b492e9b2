"""A client in processes that end, fork and are interrupted as Python programs are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from daemons import send, wait_until

from mooncake_py.ops.cluster import Cluster, ClusterOptions

MIB = 1 << 20

OPEN = """
import os, signal, sys, threading, time
from mooncake_py import StoreClient
store = StoreClient(sys.argv[1], transports=(sys.argv[2],))
name = f"citizen/{os.getpid()}"
store.put(name, bytes(1 << 20))
"""

FORGETFUL = """
memory = store.alloc(1 << 20)
registered = store.register(bytearray(1 << 20))
view = store.get_view(name)
session = store.session([name])
writing = store.session(["never"], sizes=[100])
result = store.get(name)
assert len(result) == 1 << 20
print("done")
"""

BUSY = """
started = threading.Barrier(5)
def work():
    store.get(name)
    started.wait(20)
    while True:
        store.get(name)
        store.exists(name)
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
started.wait(20)
print("done")
"""

RAISING = """
view = store.get_view(name)
print("done", flush=True)
raise SystemExit(3)
"""

TERMINATED = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
thread = threading.Thread(target=lambda: [store.get(name) for _ in range(100)], daemon=True)
thread.start()
print("done", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""

DAEMON = """
import traceback
read_end, write_end = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() > 0:
        os._exit(0)
    try:
        said = "no error"
        try:
            store.get(name)
        except Exception as error:
            said = type(error).__name__
        with StoreClient(sys.argv[1], transports=(sys.argv[2],)) as own:
            own.put(name + "/daemon", b"by the daemon")
            said += f" {len(own.get(name))}"
    except BaseException:
        said = traceback.format_exc()
    os.write(write_end, said.encode())
    os._exit(0)
os.close(write_end)
os.wait()
print(os.read(read_end, 10_000).decode())
assert len(store.get(name)) == 1 << 20
assert store.get(name + "/daemon") == b"by the daemon"
"""

TRACKED = """
import multiprocessing
store.get(name)
store.alloc(1 << 20)
process = multiprocessing.get_context("spawn").Process(target=print, args=("spawned",))
process.start()
process.join(60)
print(process.exitcode)
"""


def run(cluster: Cluster, transport: str, script: str) -> tuple[int, str, str]:
    arguments = [sys.executable, "-c", OPEN + script, cluster.address, transport]
    done = subprocess.run(
        arguments, check=False, timeout=90, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), "PYTHONFAULTHANDLER": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout.strip(), done.stderr.strip()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("script", "code"),
    [(FORGETFUL, 0), (BUSY, 0), (RAISING, 3), (TERMINATED, 5)],
    ids=["everything open", "live threads", "an exit", "SIGTERM"],
)
def test_a_process_that_ends_without_close_ends_at_once_and_in_silence(
    cluster: Cluster, transport: str, script: str, code: int
) -> None:
    assert run(cluster, transport, script) == (code, "done", "")


def test_a72_a_daemonised_process_opens_its_own_client_and_its_parent_goes_on(
    cluster: Cluster,
) -> None:
    said = run(cluster, "shm", DAEMON)
    assert said == (0, f"UsageError {MIB}", "")


def test_no_resource_tracker_meddles_with_shared_memory(cluster: Cluster) -> None:
    before = set(os.listdir("/dev/shm"))
    assert run(cluster, "shm", TRACKED) == (0, "spawned\n0", "")
    assert {each for each in set(os.listdir("/dev/shm")) - before if "mooncake" in each} == set()


# What a call waits for: a node that is silent, or a master.
INTERRUPTED = """
fired = []
signal.signal(signal.SIGUSR1, lambda *_: fired.append(store.alloc(4096).nbytes))
calls = {
    "get": lambda: store.get(name, into=bytearray(1 << 20), timeout_ms=60_000),
    "put": lambda: store.put(name + "/other", bytes(1 << 20), timeout_ms=60_000),
    "put again": lambda: store.put(name + "/again", bytes(5), timeout_ms=60_000),
    "exists": lambda: store.exists(name, timeout_ms=60_000),
}
for i in range(20):  # so that there are reservations for the next one
    store.put(name + f"/{i}", bytes(5))
print("done", flush=True)
for line in sys.stdin:
    begun = time.monotonic()
    print("began", flush=True)
    try:
        print(calls[line.strip()](), flush=True)
    except KeyboardInterrupt:
        print("interrupted", len(fired), time.monotonic() - begun < 30, flush=True)
print(len(store.get(name)))
"""


def sleeps(pid: int) -> bool:
    """Does its main thread wait for something?"""
    status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    return status.rsplit(")", 1)[1].split()[0] == "S"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_interrupt_ends_a_call_that_waits_for_a_node_or_master_that_is_silent(
    transport: str,
) -> None:
    """A signal whose handler raises nothing, and even uses the client, ends nothing."""
    with Cluster(ClusterOptions(node_count=1, segment_bytes=16 * MIB)) as cluster:
        arguments = [sys.executable, "-c", OPEN + INTERRUPTED, cluster.address, transport]
        with subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"
            (node,) = cluster.nodes
            waits = {"put": node, "put again": node, "exists": cluster.master}
            if transport == "tcp":
                waits["get"] = node  # elsewhere it is mapped
            for handled, (verb, silent) in enumerate(waits.items(), start=1):
                send(silent, signal.SIGSTOP)
                try:
                    process.stdin.write(verb + "\n")
                    process.stdin.flush()
                    assert process.stdout.readline() == "began\n"
                    wait_until(lambda: sleeps(process.pid))
                    process.send_signal(signal.SIGUSR1)
                    with pytest.raises(subprocess.TimeoutExpired):
                        process.wait(0.3)
                    process.send_signal(signal.SIGINT)
                    assert process.stdout.readline() == f"interrupted {handled} True\n", verb
                finally:
                    send(silent, signal.SIGCONT)
            process.stdin.close()
            assert process.stdout.readline() == f"{MIB}\n"
            assert process.wait(60) == 0
