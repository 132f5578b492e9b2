"""etcd for tests: members as children of the test, on ports and in a folder of its own."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest

from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.errors import MooncakeError
from mooncake_py.master.etcd import EtcdAddress, EtcdClient

REASON = "etcd is not installed (apt install etcd-server)"
needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason=REASON)

START_MS = 30_000


def free_ports(count: int) -> list[int]:
    """Different ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


class EtcdCluster:
    """`count` members. A member can be killed, started again, frozen and thawed by its number."""

    def __init__(
        self,
        folder: Path,
        count: int = 1,
        *,
        tls: bool = False,
        hosts: Sequence[str] = (),
        wrap: Callable[[int], list[str]] = lambda number: [],
    ) -> None:
        """hosts: address of each member, this host's without. wrap: what stands before the command
        line of a member."""
        self.folder = folder
        self._wrap = wrap
        self._scheme = "https" if tls else "http"
        self._options: tuple[str, ...] = ()
        ports = free_ports(2 * count)
        hosts = hosts or ["127.0.0.1"] * count
        self.members = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=False)]
        self._peers = [
            f"http://{host}:{port}" for host, port in zip(hosts, ports[count:], strict=True)
        ]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if tls:
            self._make_certificate()
        for number in range(count):
            self.start(number)
        self.wait()

    def address(self, prefix: str = "test", who: str = "") -> str:
        if self._scheme == "http":
            return f"etcd://{who}{','.join(self.members)}/{prefix}"
        files = f"ca={self.folder}/cert.pem&cert={self.folder}/cert.pem&key={self.folder}/key.pem"
        return f"etcds://{who}{','.join(self.members)}/{prefix}?{files}"

    def _make_certificate(self) -> None:
        """One that signs itself, for the members and for their clients, who must show it, too."""
        cert, key = f"{self.folder}/cert.pem", f"{self.folder}/key.pem"
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
        command += f" -subj /CN=etcd -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
        subprocess.run(command.split(), check=True, capture_output=True)
        self._options = (
            f"--cert-file={cert}", f"--key-file={key}", f"--trusted-ca-file={cert}",
            "--client-cert-auth",
        )  # fmt: skip

    def client(self, prefix: str = "test") -> EtcdClient:
        return EtcdClient(EtcdAddress.parse(self.address(prefix)), SystemClock())

    def start(self, number: int) -> None:
        url = f"{self._scheme}://{self.members[number]}"
        peers = ",".join(f"m{n}={peer}" for n, peer in enumerate(self._peers))
        command = [
            *self._wrap(number), shutil.which("etcd") or "etcd",
            f"--name=m{number}", f"--data-dir={self.folder}/m{number}",
            f"--listen-client-urls={url}", f"--advertise-client-urls={url}",
            f"--listen-peer-urls={self._peers[number]}",
            f"--initial-advertise-peer-urls={self._peers[number]}",
            f"--initial-cluster={peers}", "--log-level=error", *self._options,
        ]  # fmt: skip
        with (self.folder / f"m{number}.log").open("ab") as output:
            self._processes[number] = subprocess.Popen(command, stdout=output, stderr=output)

    def wait(self) -> None:
        """Until a linearizable read is answered."""
        clock = SystemClock()
        deadline = Deadline(START_MS, clock)
        while True:
            try:
                client = self.client()
                try:
                    client.get(b"/", min(2_000, max(1, deadline.left_ms())))
                    return
                finally:
                    client.close()
            except MooncakeError:  # also: its certificate is not written yet
                if deadline.passed():
                    raise
                threading.Event().wait(0.05)

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes.pop(number).wait()

    def signal(self, number: int, which: signal.Signals) -> None:
        self._processes[number].send_signal(which)

    def freeze(self, number: int) -> None:
        self.signal(number, signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        self.signal(number, signal.SIGCONT)

    def raft_leader(self) -> int:
        """The number of the member that leads etcd itself."""
        for number, member in enumerate(self.members):
            client = EtcdClient(EtcdAddress.parse(f"etcd://{member}/x"), SystemClock())
            with closing(client), suppress(MooncakeError):
                status = client.status(2_000)
                if status.leader == status.header.member_id:
                    return number
        raise AssertionError("no member leads")

    def close(self) -> None:
        for number in list(self._processes):
            self.kill(number)

    def __enter__(self) -> EtcdCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
