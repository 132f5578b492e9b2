"""Hosts of their own for the processes of a run: network namespaces behind a router that can cut.

    host n0 ── veth ──┐                     each host 10.77.N.2, its side of the router 10.77.N.1
    host m0 ── veth ──┤ router (this
    host c0 ── veth ──┘ process's own namespace)

* A *cut* from one host to another is a routing rule that drops packets in silence, as a broken
  switch does: connections stay open and hear nothing. Directions are separate.
* A *delay* sends the packets of a pair through a TUN device into this process, which holds each for
  its time and puts it back. That needs no `netem`, which many kernels lack.

Needs the right to make network namespaces: root, or a user namespace in which this process is root
(`inside()` says how `__main__` gets there). Everything ends with the processes that live in it.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path

from mooncake_py.clock import Deadline, SystemClock
from mooncake_py.ops import leash

PREFIX = "10.77"
_TUN = "chaos0"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 1, 0x1000
_TABLE = 77
_MAX_BYTES = 65_536
_RULE = ("ip", "rule")


def why_not() -> str:
    """Why there can be no hosts here; empty when there can be."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (apt install iproute2 util-linux)"
    if _unshare() is None:
        return "this user may make no network namespace (be root, or allow user namespaces)"
    return ""


def _unshare() -> list[str] | None:
    """The command line that gives a process a network and mounts of its own."""
    for options in (["--net", "--mount"], ["--user", "--map-root-user", "--net", "--mount"]):
        command = ["unshare", *options, "--"]
        if subprocess.run([*command, "true"], check=False, capture_output=True).returncode == 0:
            return command
    return None


def inside(*command: str) -> list[str]:
    """`command`, in a network namespace of its own."""
    wrapped = _unshare()
    assert wrapped is not None, why_not()
    return [*wrapped, *command]


class Network:
    """The router. Make it in a process that runs `inside`, from its main thread."""

    def __init__(self, seed: int = 0) -> None:
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers: dict[str, int] = {}
        self._cuts: set[tuple[str, str]] = set()
        for name in ("ip_forward", "conf/all/forwarding"):
            Path(f"/proc/sys/net/ipv4/{name}").write_text("1")
        for name in ("all", "default"):
            Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter").write_text("0")
        self._delayer = _Delayer(seed)

    def add(self, host: str) -> None:
        number = self._numbers[host] = len(self._numbers) + 1
        holder = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", leash.__file__, str(os.getpid())),
                *(shutil.which("unshare") or "", "--net", shutil.which("sleep") or "", "infinity"),
            ]
        )
        self._holders[host] = holder
        _wait_for_namespace(holder.pid)
        here, there = f"{PREFIX}.{number}.1", self.ip(host)
        link = f"v{number}"
        _run(
            "ip",
            "link",
            "add",
            link,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(holder.pid),
        )
        _run("ip", "addr", "add", f"{here}/30", "dev", link)
        _run("ip", "link", "set", link, "up")
        within = ("nsenter", "-t", str(holder.pid), "-n")
        _run(*within, "ip", "link", "set", "lo", "up")
        _run(*within, "ip", "addr", "add", f"{there}/30", "dev", "eth0")
        _run(*within, "ip", "link", "set", "eth0", "up")
        _run(*within, "ip", "route", "add", "default", "via", here)

    def ip(self, host: str) -> str:
        return f"{PREFIX}.{self._numbers[host]}.2"

    def namespace(self, host: str) -> str:
        """For setns."""
        return f"/proc/{self._holders[host].pid}/ns/net"

    @property
    def hosts(self) -> list[str]:
        return list(self._numbers)

    def cut(self, a: str, b: str, *, one_way: bool = False) -> None:
        """From now on nothing passes from a to b, nor back unless `one_way`."""
        for pair in ((a, b),) if one_way else ((a, b), (b, a)):
            if pair not in self._cuts:
                _run(*_RULE, "add", *self._pair(pair), "priority", "100", "blackhole")
                self._cuts.add(pair)

    def heal(self, a: str, b: str) -> None:
        for pair in ((a, b), (b, a)):
            if pair in self._cuts:
                _run(*_RULE, "del", *self._pair(pair), "priority", "100", "blackhole")
                self._cuts.discard(pair)

    def delay(self, a: str, b: str, ms: int) -> None:
        """Packets between the two take `ms` longer each way, give or take half of it."""
        for pair in ((a, b), (b, a)):
            self._delayer.delays[self.ip(pair[0]), self.ip(pair[1])] = ms
            via = f"v{self._numbers[pair[0]]}"
            rule = (*self._pair(pair), "iif", via, "priority", "200", "lookup", str(_TABLE))
            _run(*_RULE, "add", *rule)

    def undelay(self, a: str, b: str) -> None:
        for pair in ((a, b), (b, a)):
            via = f"v{self._numbers[pair[0]]}"
            rule = (*self._pair(pair), "iif", via, "priority", "200", "lookup", str(_TABLE))
            _run(*_RULE, "del", *rule)

    def _pair(self, pair: tuple[str, str]) -> tuple[str, ...]:
        return ("from", self.ip(pair[0]), "to", self.ip(pair[1]))

    def close(self) -> None:
        self._delayer.close()
        for holder in self._holders.values():
            holder.kill()
            holder.wait()


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _wait_for_namespace(pid: int) -> None:
    own = os.readlink("/proc/self/ns/net")
    deadline = Deadline(10_000, SystemClock())
    while os.readlink(f"/proc/{pid}/ns/net") == own:
        assert not deadline.passed(), "unshare --net made no namespace"
        select.poll().poll(2)


class _Delayer:
    """Packets that come out of the TUN device go back in later."""

    def __init__(self, seed: int) -> None:
        self.delays: dict[tuple[str, str], int] = {}
        self._random = random.Random(seed)
        self._tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", _TUN.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(self._tun, _TUNSETIFF, request)
        _run("ip", "link", "set", _TUN, "up", "mtu", "9000", "txqueuelen", "10000")
        _run("ip", "route", "add", "default", "dev", _TUN, "table", str(_TABLE))
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._run, name="delays", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        clock = SystemClock()
        waiting: list[tuple[int, int, bytes]] = []
        numbers = count()
        poll = select.poll()
        poll.register(self._tun, select.POLLIN)
        poll.register(self._stop, select.POLLIN | select.POLLHUP)
        while True:
            left_ms = None if not waiting else max(0, waiting[0][0] - clock.now_ms())
            ready = dict(poll.poll(left_ms))
            if self._stop in ready:
                return
            now_ms = clock.now_ms()
            if self._tun in ready:
                packet = os.read(self._tun, _MAX_BYTES)
                due_ms = now_ms + self._delay_of(packet)
                heapq.heappush(waiting, (due_ms, next(numbers), packet))
            while waiting and waiting[0][0] <= now_ms:
                os.write(self._tun, heapq.heappop(waiting)[2])

    def _delay_of(self, packet: bytes) -> int:
        if packet[0] >> 4 != 4:
            return 0
        source, target = (".".join(map(str, packet[at : at + 4])) for at in (12, 16))
        ms = self.delays.get((source, target), 0)
        return ms // 2 + self._random.randrange(ms + 1)

    def close(self) -> None:
        os.close(self._stopped)
        self._thread.join()
        os.close(self._stop)
        os.close(self._tun)
