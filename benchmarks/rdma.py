"""Our reads and writes over RDMA beside perftest's, between the same two ports, in the same minute.

python -m benchmarks.rdma NEAR FAR [PART ...]    ports by device name; with perftest installed
                                                 parts: latency 1 16 two (all of them)

Latency: one 4 KiB operation after the other. perftest's clock is a register, ours may be a system
call, so ours is looked at once in 20 operations; the median of those. Writes are compared with
ib_write_bw that keeps one in flight: ib_write_lat is two processes that both spin, which on one
processor is 10 ms a message. Bandwidth: 1 and 16 MiB, several in flight, all of the same bytes as
perftest does it; two rails beside two perftests at once, one a direction.
A word to a process that waits: half a ping-pong over TCP, which our messages travel by, beside half
of ib_send_lat with events, which is how a WRITE with immediate would be received.

The far side is a process of its own in all. They take turns: a row is the median of each side's
turns, and of the ratios of neighbouring turns the median, the least and the largest, because other
work changes the speed of both within a second; then each side's best turn, which other work
disturbed least, and their ratio. Both sides' memory
begins on a page, as perftest's does: a packet that lies across two pages is copied in two pieces.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from mmap import mmap

from mooncake_py._native.memory import address_of
from mooncake_py.transfer import EngineOptions, Peer, Rdma, TransferEngine, make_slices
from mooncake_py.transfer.slices import OP_READ, OP_WRITE

KIB, MIB = 1 << 10, 1 << 20
AREA = 32 * MIB
PAIRS = 10  # turns of each side
PARTS = ["latency", "1", "16", "two"]
TRIES = 5  # perftest measures the rate of its clock first, which now and then goes wrong: all is 0
STUCK_S = 20  # four that spin on one processor may be at odds for good
MS = 20_000
LATENCY_RUNS, OPS_A_RUN, LATENCY_BYTES = 50, 20, 4 * KIB
OPS = {"read": OP_READ, "write": OP_WRITE}
IN_FLIGHT_BYTES = 16 * MIB
BYTES_A_TURN = 256 * MIB
WORD_BYTES = 64
PORT = 18_777


def far(device: str) -> None:
    """The passive side, until its input ends."""
    options = EngineOptions(
        "127.0.0.1:0", transports=("rdma",), rdma=Rdma(devices=tuple(device.split("+")))
    )
    with TransferEngine(options) as engine:
        region = engine.register(mmap(-1, AREA), access="read_write")
        print(json.dumps([engine.address, region.id]), flush=True)
        sys.stdin.read()


class Ours:
    """An engine here, joined with one in another process."""

    def __init__(self, near: str, far_device: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rdma", "--far", far_device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        address, self._region = json.loads(self._process.stdout.readline())
        rdma = Rdma(devices=tuple(near.split("+")))
        self._engine = TransferEngine(EngineOptions(transports=("rdma",), rdma=rdma))
        self._memory = mmap(-1, AREA)  # begins on a page
        self._own = self._engine.register(self._memory)
        self._peer: Peer = self._engine.open(address, timeout_ms=MS)
        self._seconds("read", AREA, 1)  # the rails come up

    def close(self) -> None:
        self._engine.close()
        self._process.communicate("")

    def _seconds(self, verb: str, nbytes: int, count: int, runs: int = 1, each: int = 1) -> float:
        """Of one batch of `count`, the median of `runs`; the clock is read once in `each`."""
        slices = make_slices(count)
        slices["op"], slices["region"], slices["length"] = OPS[verb], self._region, nbytes
        slices["local"] = address_of(self._memory)[0]
        act = self._engine.read if verb == "read" else self._engine.write
        took = []
        for _ in range(runs):
            began = time.perf_counter()
            for _ in range(each):
                act(self._peer, slices, timeout_ms=MS)
            took.append((time.perf_counter() - began) / each)
        return statistics.median(took)

    def latency_us(self, verb: str, count: int = 1) -> float:
        """count 0: a call that moves nothing, what Python and the way into the engine cost."""
        return self._seconds(verb, LATENCY_BYTES, count, LATENCY_RUNS, OPS_A_RUN) * 1e6

    def bandwidth(self, verb: str, nbytes: int) -> float:
        """Bytes a second."""
        count = BYTES_A_TURN // nbytes
        return nbytes * count / self._seconds(verb, nbytes, count)


class Perftest:
    """One of perftest's programs, both sides of it. `row()` is its line of figures."""

    def __init__(self, program: str, ports: tuple[str, str], nbytes: int, *more: str) -> None:
        global PORT
        PORT += 1
        self._nbytes = nbytes
        common = ["-F", "-s", str(nbytes), "-p", str(PORT), "-x", "1", *more]
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self._server = subprocess.Popen([program, "-d", ports[1], *common], **quiet)
        self._command = [program, "-d", ports[0], *common, "127.0.0.1"]
        self._client: subprocess.Popen | None = None
        self._quiet = quiet

    def start(self) -> None:
        time.sleep(0.3)  # it does not say when it listens
        self._client = subprocess.Popen(self._command, **self._quiet)

    def row(self) -> list[float]:
        try:
            for _ in range(50):
                if self._client is None:
                    self.start()
                assert self._client is not None
                text, _ = self._client.communicate(timeout=STUCK_S)
                if self._client.returncode == 0:
                    break
                self._client = None
        except subprocess.TimeoutExpired:
            self._client.kill()
            return [0.0] * 5
        finally:
            self._server.kill()
            self._server.communicate()
        pattern = re.compile(rf"\s*{self._nbytes}\s")
        return [
            float(word)
            for line in text.splitlines()
            if pattern.match(line)
            for word in line.split()
        ]


def figure(column: int, *makers: Callable[[], Perftest]) -> float:
    """The sum of one column of tests that run at once."""
    for _ in range(TRIES):
        tests = [make() for make in makers]
        for test in tests:
            test.start()
        figures = [test.row()[column] for test in tests]
        if all(figures):
            return sum(figures)
    raise RuntimeError(f"perftest gave no figure in {TRIES} tries")


def their_latency_us(verb: str, ports: tuple[str, str]) -> float:
    runs = str(LATENCY_RUNS * OPS_A_RUN)
    if verb == "read":
        return figure(4, lambda: Perftest("ib_read_lat", ports, LATENCY_BYTES, "-n", runs))
    one = ("-n", runs, "-t", "1", "-Q", "1")
    rate = figure(3, lambda: Perftest("ib_write_bw", ports, LATENCY_BYTES, *one))
    return LATENCY_BYTES / (rate * MIB) * 1e6


def echo(port: int) -> None:
    """The other side of `word_us`."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := sock.recv(WORD_BYTES):
            sock.send(data)


def word_us() -> float:
    """One way from a process that waits to another, by TCP: what our messages travel by."""
    took = []
    with socket.create_server(("127.0.0.1", 0)) as near:
        port = str(near.getsockname()[1])
        other = subprocess.Popen([sys.executable, "-m", "benchmarks.rdma", "--echo", port])
        with near.accept()[0] as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(LATENCY_RUNS):
                began = time.perf_counter()
                for _ in range(OPS_A_RUN):
                    sock.send(bytes(WORD_BYTES))
                    sock.recv(WORD_BYTES)
                took.append((time.perf_counter() - began) / OPS_A_RUN / 2)
        other.wait()
    return statistics.median(took) * 1e6


def their_word_us(ports: tuple[str, str]) -> float:
    """A WRITE with immediate is received as a SEND is, by a side that sleeps until it comes."""
    runs = str(LATENCY_RUNS * OPS_A_RUN)
    return figure(4, lambda: Perftest("ib_send_lat", ports, WORD_BYTES, "-n", runs, "-e"))


def their_bandwidth(verb: str, nbytes: int, *pairs: tuple[str, str]) -> float:
    count, flying = BYTES_A_TURN // nbytes, max(2, IN_FLIGHT_BYTES // nbytes)
    more = ("-n", str(count), "-t", str(flying), "-Q", "1")
    makers = [lambda pair=pair: Perftest(f"ib_{verb}_bw", pair, nbytes, *more) for pair in pairs]
    return figure(3, *makers) * MIB


def in_turns(
    name: str,
    best: Callable[[Iterable[float]], float],
    ours: Callable[[], float],
    theirs: Callable[[], float],
) -> None:
    """A row of the table."""
    has_perftest = shutil.which("ib_read_bw") is not None
    turns = [(ours(), theirs() if has_perftest else 0.0) for _ in range(PAIRS)]
    mine, other = zip(*turns, strict=True)
    row = f"{name:24}{statistics.median(mine):12.1f}{statistics.median(other):12.1f}"
    if has_perftest:
        ratios = [a / b for a, b in turns]
        row += f"{statistics.median(ratios):8.2f}{min(ratios):8.2f}{max(ratios):7.2f}"
        row += f"{best(mine):10.1f}{best(other):9.1f}{best(mine) / best(other):7.2f}"
    print(row, flush=True)


def compare(near: str, far_device: str, parts: list[str]) -> None:
    pair = (near, far_device)
    heads = f"{'':24}{'ours':>12}{'perftest':>12}{'ratio':>8}{'least':>8}{'most':>7}"
    print(f"{heads}{'best':>10}{'theirs':>9}{'ratio':>7}")
    ours = Ours(near, far_device)
    try:
        if "latency" in parts:
            latencies(ours, pair)
        sizes = [size for size in (1, 16) if f"{size}" in parts]
        for verb, nbytes in [(verb, size * MIB) for verb in OPS for size in sizes]:
            in_turns(
                f"{verb} {nbytes // MIB} MiB, MB/s",
                max,
                lambda verb=verb, nbytes=nbytes: ours.bandwidth(verb, nbytes) / 1e6,
                lambda verb=verb, nbytes=nbytes: their_bandwidth(verb, nbytes, pair) / 1e6,
            )
    finally:
        ours.close()
    if "two" in parts:
        two_rails(pair)


def latencies(ours: Ours, pair: tuple[str, str]) -> None:
    print(f"{'a call without slices':24}{ours.latency_us('read', 0):12.1f}")
    for verb in OPS:
        in_turns(
            f"{verb} 4 KiB, us",
            min,
            lambda verb=verb: ours.latency_us(verb),
            lambda verb=verb: their_latency_us(verb, pair),
        )
    in_turns("a word by tcp | send, us", min, word_us, lambda: their_word_us(pair))


def two_rails(pair: tuple[str, str]) -> None:
    both = Ours("+".join(pair), "+".join(pair[::-1]))
    try:
        for verb in OPS:
            in_turns(
                f"{verb} 16 MiB, 2 rails",
                max,
                lambda verb=verb: both.bandwidth(verb, 16 * MIB) / 1e6,
                lambda verb=verb: their_bandwidth(verb, 16 * MIB, pair, pair[::-1]) / 1e6,
            )
    finally:
        both.close()


if __name__ == "__main__":
    if sys.argv[1] == "--far":
        far(sys.argv[2])
    elif sys.argv[1] == "--echo":
        echo(int(sys.argv[2]))
    else:
        compare(sys.argv[1], sys.argv[2], sys.argv[3:] or PARTS)
