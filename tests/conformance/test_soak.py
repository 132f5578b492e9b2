"""A soak in short: everything at once while peers are stopped, killed, cut, and worse.

All choices follow from one seed, which a failure prints; SOAK_SECONDS (default 6) and SOAK_SEED
make it a long one. It ends with no thread stuck, no wrong byte behind a right checksum, and
descriptors, threads and mappings at the level where they began.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
from transport_far import COMMAND, ECHO, pattern
from transport_pair import MS, start_far

from mooncake_py._native.memory import crc32c
from mooncake_py.errors import MooncakeError
from mooncake_py.transfer import FLAG_CRC, EngineOptions, Faults, TransferEngine, make_slices

SECONDS = float(os.environ.get("SOAK_SECONDS", "6"))
SEED = int(os.environ.get("SOAK_SEED", "20261129"))
REGION_BYTES = 4 << 20
PATIENCE_MS = 400
WORKERS = 4
FAULTS = {"loss_ppm": 2000, "corrupt_ppm": 2000, "cut_ppm": 300, "delay_us": 300}


class Soak:
    def __init__(self, transport: str, seed: int) -> None:
        self.dice = random.Random(seed)
        faults = Faults(seed=seed, **FAULTS) if transport == "fake" else None
        self.options = EngineOptions(listen="127.0.0.1:0", transports=(transport,))
        near = EngineOptions(listen="127.0.0.1:0", transports=(transport,), faults=faults)
        self.near = TransferEngine(near)
        self.process: Any = None
        self.address = ""
        self.expected = pattern(REGION_BYTES, 7)
        self.end = time.monotonic() + SECONDS
        self.wrong: list[str] = []
        self.good = 0
        self.lock = threading.Lock()
        self.start_far()

    def start_far(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.process = start_far(self.options)
        self.address = self.process.stdout.readline().strip()

    def going(self) -> bool:
        return time.monotonic() < self.end

    def work(self, number: int) -> None:
        """Any failure is fine but silence and wrong bytes."""
        dice = random.Random(number)
        target = np.zeros(REGION_BYTES, np.uint8)
        while self.going():
            try:
                peer = self.near.open(self.address, timeout_ms=PATIENCE_MS)
                command = {"do": "register", "kind": dice.choice(["memfd", "heap"])}
                command |= {"sizes": [REGION_BYTES], "seed": 7, "access": "read"}
                answer = peer.request(COMMAND, str(command).replace("'", '"').encode(),
                                      timeout_ms=MS // 5)  # fmt: skip
                region = int(answer.decode().split("[")[1].split(",")[0])
                for _ in range(dice.randrange(1, 40)):
                    self.one(dice, peer, region, target)
            except (MooncakeError, IndexError):
                continue

    def one(self, dice: random.Random, peer: Any, region: int, target: np.ndarray) -> None:
        offset, length = dice.randrange(REGION_BYTES), dice.choice([1, 100, 4096, 70_000, 1 << 20])
        length = min(length, REGION_BYTES - offset)
        slices = make_slices(1)
        slices["op"], slices["region"], slices["flags"] = 1, region, FLAG_CRC
        slices["remote_offset"], slices["length"] = offset, length
        slices["local"] = target.ctypes.data
        kind = dice.randrange(4)
        if kind == 0:
            text = os.urandom(dice.randrange(2000))
            if peer.request(ECHO, text, timeout_ms=PATIENCE_MS) != text:
                self.wrong.append("a reply of somebody else")
            return
        if kind == 1:
            with self.near.submit(peer, slices, timeout_ms=PATIENCE_MS) as batch:
                if dice.random() < 0.5:
                    batch.cancel()
            target[:length] = 0xEE
            self.near.register(np.zeros(100, np.uint8)).close()
            if not (target[:length] == 0xEE).all():
                self.wrong.append("written after the batch was closed")
            return
        self.near.read(peer, slices, timeout_ms=PATIENCE_MS)
        right = crc32c(self.expected[offset : offset + length])
        if slices["crc"][0] == right and crc32c(target[:length]) != right:
            self.wrong.append("a right checksum of wrong bytes")
        elif slices["crc"][0] == right:
            with self.lock:
                self.good += 1

    def disturb(self) -> None:
        pause = threading.Event()
        while self.going():
            pause.wait(self.dice.uniform(0.05, 0.4))
            trouble = self.dice.randrange(5)
            if trouble <= 1:  # stands still, shorter or longer than anybody waits
                os.kill(self.process.pid, signal.SIGSTOP)
                pause.wait(self.dice.choice([0.02, 0.6]))
                os.kill(self.process.pid, signal.SIGCONT)
            elif trouble == 2:
                self.start_far()
            elif trouble == 3:
                for peer in self.near.describe()["peers"]:
                    self.near.peer(peer["id"]).close()
            else:
                strangers_knock(self.near.address, self.dice)

    def close(self) -> None:
        self.near.close()
        self.process.kill()
        self.process.communicate()


def strangers_knock(address: str, dice: random.Random) -> None:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=1) as sock:
        sock.send(dice.randbytes(dice.randrange(1, 300)))


def level() -> tuple[int, int, int]:
    """Descriptors, threads, mappings of memfds."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mapped


@pytest.mark.parametrize("transport", ["shm", "tcp", "fake"])
def test_a40_a_soak_leaves_nothing_stuck_wrong_or_behind(transport: str) -> None:
    Soak(transport, SEED).close()
    before = level()
    soak = Soak(transport, SEED)
    threads = [threading.Thread(target=soak.work, args=(SEED + n,)) for n in range(WORKERS)]
    threads.append(threading.Thread(target=soak.disturb))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 30)
    stuck = [thread.name for thread in threads if thread.is_alive()]
    soak.close()
    assert (stuck, soak.wrong) == ([], []), f"SOAK_SEED={SEED}"
    assert soak.good > 0
    threads.clear()  # with them goes the engine, which holds a few descriptors until then
    del soak, thread
    assert level() == before, f"SOAK_SEED={SEED}"
