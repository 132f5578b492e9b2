"""What tests ask a running cluster: its counters, and conditions that come true in time."""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from collections.abc import Callable
from contextlib import closing

from processes import states_of
from prometheus_client.parser import text_string_to_metric_families

from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.master.client import MasterClient
from mooncake_py.master.commands import StatusInfo
from mooncake_py.ops.cluster import Cluster, Daemon


def wait_until(condition: Callable[[], bool], timeout_ms: int = 15_000) -> None:
    deadline = Deadline(timeout_ms, SystemClock())
    pause = threading.Event()
    while not condition():
        assert not deadline.passed(), "the condition did not come true in time"
        pause.wait(0.02)


def metric(cluster: Cluster, name: str, **labels: str) -> float:
    url = f"http://{cluster.master.fields['metrics']}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        text = answer.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def status(cluster: Cluster) -> StatusInfo:
    with closing(MasterClient(cluster.address)) as master:
        return master.status(timeout_ms=5_000)


def send(daemon: Daemon, number: signal.Signals) -> None:
    """SIGSTOP stops one thread after the other: this returns when the last one has stopped."""
    os.kill(daemon.child.pid, number)
    if number == signal.SIGSTOP:
        wait_until(lambda: states_of(daemon.child.pid) == {"T"})


def calls(cluster: Cluster, method: str) -> float:
    return metric(cluster, "mooncake_master_calls_total", method=method)
