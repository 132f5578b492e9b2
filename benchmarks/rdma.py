"""Our reads and writes over RDMA beside perftest's, between the same two ports, in the same minute.

python -m benchmarks.rdma NEAR FAR    ports by device name; with perftest's programs installed

Latency: one 4 KiB operation after the other, median. Bandwidth: 1 and 16 MiB, several in flight, as
perftest does it. The far side is a process of its own in both. The two take turns, three times, and
each one's best is taken: on one processor the scheduler adds what it likes.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import time

import numpy as np

from mooncake_py._native.memory import address_of
from mooncake_py.transfer import EngineOptions, Peer, Rdma, TransferEngine, make_slices
from mooncake_py.transfer.slices import OP_READ, OP_WRITE

KIB, MIB = 1 << 10, 1 << 20
AREA = 32 * MIB
ROUNDS = 3
MS = 20_000
LATENCY_RUNS, LATENCY_BYTES = 500, 4 * KIB
OPS = {"read": OP_READ, "write": OP_WRITE}
IN_FLIGHT_BYTES = 16 * MIB


def far(device: str) -> None:
    """The passive side, until its input ends."""
    options = EngineOptions(
        "127.0.0.1:0", transports=("rdma",), rdma=Rdma(devices=tuple(device.split("+")))
    )
    with TransferEngine(options) as engine:
        region = engine.register(np.zeros(AREA, np.uint8), access="read_write")
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
        self._memory = np.zeros(AREA, np.uint8)
        self._own = self._engine.register(self._memory)
        self._peer: Peer = self._engine.open(address, timeout_ms=MS)
        self._act("read", AREA, 1)  # the rails come up

    def close(self) -> None:
        self._engine.close()
        self._process.communicate("")

    def _act(self, verb: str, nbytes: int, count: int, runs: int = 1) -> list[float]:
        """Seconds of each run."""
        slices = make_slices(count)
        places = (np.arange(count, dtype=np.uint64) * np.uint64(nbytes)) % np.uint64(AREA)
        slices["op"], slices["region"], slices["length"] = OPS[verb], self._region, nbytes
        slices["remote_offset"] = places
        slices["local"] = places + np.uint64(address_of(self._memory)[0])
        act = self._engine.read if verb == "read" else self._engine.write
        took = []
        for _ in range(runs):
            began = time.perf_counter()
            act(self._peer, slices, timeout_ms=MS)
            took.append(time.perf_counter() - began)
        return took

    def latency_us(self, verb: str) -> float:
        return statistics.median(self._act(verb, LATENCY_BYTES, 1, LATENCY_RUNS)) * 1e6

    def empty_us(self) -> float:
        """A call that moves nothing: what Python and the way into the engine cost."""
        return statistics.median(self._act("read", LATENCY_BYTES, 0, LATENCY_RUNS)) * 1e6

    def bandwidth(self, verb: str, nbytes: int) -> float:
        """Bytes a second."""
        count = max(4, 64 * MIB // nbytes)
        return nbytes * count / self._act(verb, nbytes, count)[0]


def perftest(verb: str, what: str, near: str, far_device: str, nbytes: int) -> float:
    """ib_{verb}_{what}: the typical latency in microseconds, or bytes a second."""
    program = f"ib_{verb}_{what}"
    count = LATENCY_RUNS if what == "lat" else max(5, 64 * MIB // nbytes)
    common = ["-F", "-s", str(nbytes), "-n", str(count), "-p", "18777", "-x", "1"]
    if what == "bw":
        common += ["-t", str(max(2, IN_FLIGHT_BYTES // nbytes)), "-Q", "1"]
    server = subprocess.Popen(
        [program, "-d", far_device, *common], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        for _ in range(50):
            time.sleep(0.1)  # it says nothing when it listens
            done = subprocess.run(
                [program, "-d", near, *common, "127.0.0.1"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            if done.returncode == 0:
                break
    finally:
        server.kill()
        server.communicate()
    row = next(
        line.split() for line in done.stdout.splitlines() if re.match(rf"\s*{nbytes}\s", line)
    )
    return float(row[4]) if what == "lat" else float(row[3]) * MIB


def compare(near: str, far_device: str) -> None:
    has_perftest = shutil.which("ib_read_bw") is not None
    ours = Ours(near, far_device)
    print(f"{'':24}{'ours':>12}{'perftest':>12}{'ratio':>8}")
    try:
        print(f"{'a call without slices':24}{ours.empty_us():12.1f}")
        for verb in OPS:
            mine = theirs = 0.0
            for _ in range(ROUNDS):
                value = ours.latency_us(verb)
                mine = min(mine or value, value)
                if has_perftest:
                    value = perftest(verb, "lat", near, far_device, LATENCY_BYTES)
                    theirs = min(theirs or value, value)
            print(f"{verb + ' 4 KiB, us':24}{mine:12.1f}{theirs:12.1f}{mine / (theirs or 1):8.2f}")
        for verb in OPS:
            for nbytes in (MIB, 16 * MIB):
                mine = theirs = 0.0
                for _ in range(ROUNDS):
                    mine = max(mine, ours.bandwidth(verb, nbytes))
                    if has_perftest:
                        theirs = max(theirs, perftest(verb, "bw", near, far_device, nbytes))
                name = f"{verb} {nbytes // MIB} MiB, MB/s"
                print(f"{name:24}{mine / 1e6:12.0f}{theirs / 1e6:12.0f}{mine / (theirs or 1):8.2f}")
    finally:
        ours.close()
    both = Ours(f"{near}+{far_device}", f"{far_device}+{near}")
    try:
        for verb in OPS:
            best = max(both.bandwidth(verb, 16 * MIB) for _ in range(ROUNDS))
            print(f"{verb + ' 16 MiB, 2 rails':24}{best / 1e6:12.0f}")
    finally:
        both.close()


if __name__ == "__main__":
    if sys.argv[1] == "--far":
        far(sys.argv[2])
    else:
        compare(sys.argv[1], sys.argv[2])
