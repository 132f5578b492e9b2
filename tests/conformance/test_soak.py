"""A soak in short: everything at once while peers are stopped, killed, cut, and worse.

All choices follow from one seed, which a failure prints; SOAK_SECONDS (default 6) and SOAK_SEED
make it a long one. After each trouble, but for some that follow at once, the engine has to move
right bytes again before the next: however long a busy machine takes for that, a stuck engine never
does. It ends with no thread stuck, no wrong byte behind a right checksum, and descriptors, threads
and mappings at the level where they began.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from soak_relay import Relay
from transport_far import COMMAND, ECHO, pattern
from transport_pair import MS, start_far

from mooncake_py._native.memory import crc32c
from mooncake_py.errors import MooncakeError
from mooncake_py.transfer import (
    FLAG_CRC,
    EngineOptions,
    Faults,
    Rdma,
    TransferEngine,
    make_slices,
)

SECONDS = float(os.environ.get("SOAK_SECONDS", "6"))
SEED = int(os.environ.get("SOAK_SEED", "20261129"))
REGION_BYTES = 4 << 20
PATIENCE_MS = 400  # doubled with each failure in a row: a busy machine needs longer
WORKERS = 4
RECOVERY_S = 60  # no machine is that busy
FAULTS = {"loss_ppm": 2000, "corrupt_ppm": 2000, "cut_ppm": 300, "delay_us": 300}
TROUBLES = ["stop", "long stop", "kill", "hang up", "strangers"]
ANY_PORTS = Rdma()
WIRE_TROUBLES = ["cut", "reset", "delay", "corrupt", "silence"]


class Soak:
    def __init__(self, transport: str, seed: int, near: Rdma, far: Rdma) -> None:
        """near, far: which ports each side uses where it is rdma."""
        self.dice = random.Random(seed)
        faults = Faults(seed=seed, **FAULTS) if transport == "fake" else None
        plain = EngineOptions(listen="127.0.0.1:0", transports=(transport,))
        self.options = replace(plain, rdma=far)
        self.near = TransferEngine(replace(plain, rdma=near, faults=faults))
        self.relay = None if transport == "shm" else Relay(self.dice)
        self.process: Any = None
        self.address = ""
        self.expected = pattern(REGION_BYTES, 7)
        self.end = time.monotonic() + SECONDS
        self.wrong: list[str] = []
        self.good = 0
        self.troubles: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.corrupted_s = 0.0
        self.peers: dict[int, Any] = {}  # of each worker
        self.changed = threading.Condition()
        self.pause = threading.Event()
        self.start_far()

    def start_far(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.process = start_far(self.options)
        self.address = self.process.stdout.readline().strip()
        if self.relay is not None:
            self.relay.aim(self.address)
            self.address = self.relay.address

    def going(self) -> bool:
        return not self.wrong and time.monotonic() < self.end

    def work(self, number: int) -> None:
        """Any failure is fine but silence and wrong bytes."""
        dice = random.Random(number)
        target = np.zeros(REGION_BYTES, np.uint8)
        in_a_row = 0
        while self.going():
            patience_ms = min(PATIENCE_MS << in_a_row, MS)
            try:
                region = self.meet(number, dice, patience_ms)
                for _ in range(dice.randrange(1, 40)):
                    self.one(dice, self.peers[number], region, target, patience_ms)
                    in_a_row = 0
                self.command(self.peers[number], patience_ms, do="deregister", region=region)
            except (MooncakeError, ValueError, LookupError) as error:
                in_a_row = min(in_a_row + 1, 8)
                self.failures[type(error).__name__] += 1
                if in_a_row > 1:  # the connection that all share may have fallen silent for good
                    self.hang_up()
                self.pause.wait(0.01)

    def meet(self, number: int, dice: random.Random, patience_ms: int) -> int:
        """A peer, and the id of a fresh region of it."""
        peer = self.near.open(self.address, timeout_ms=patience_ms)
        if former := self.peers.pop(number, None):
            former.close()
        self.peers[number] = peer
        memory = {"kind": dice.choice(["memfd", "heap"]), "sizes": [REGION_BYTES], "seed": 7}
        found = self.command(peer, 5 * patience_ms, do="register", access="read", **memory)
        return int(found[0])

    def command(self, peer: Any, patience_ms: int, **order: object) -> Any:
        payload = json.dumps(order).encode()
        answer = json.loads(peer.request(COMMAND, payload, timeout_ms=min(patience_ms, MS)))
        return answer["done"]

    def one(
        self, dice: random.Random, peer: Any, region: int, target: np.ndarray, patience_ms: int
    ) -> None:
        offset, length = dice.randrange(REGION_BYTES), dice.choice([1, 100, 4096, 70_000, 1 << 20])
        length = min(length, REGION_BYTES - offset)
        slices = make_slices(1)
        slices["op"], slices["region"], slices["flags"] = 1, region, FLAG_CRC
        slices["remote_offset"], slices["length"] = offset, length
        slices["local"] = target.ctypes.data
        kind = dice.randrange(4)
        if kind == 0:
            text = dice.randbytes(dice.randrange(2000))
            back = peer.request(ECHO, text, timeout_ms=patience_ms)
            if back != text and time.monotonic() - self.corrupted_s > 2 * MS / 1000:
                self.wrong.append("a reply of somebody else")
            return
        if kind == 1:
            with self.near.submit(peer, slices, timeout_ms=patience_ms) as batch:
                if dice.random() < 0.5:
                    batch.cancel()
            target[:length] = 0xEE
            self.near.register(np.zeros(100, np.uint8)).close()
            if not (target[:length] == 0xEE).all():
                self.wrong.append("written after the batch was closed")
            return
        self.near.read(peer, slices, timeout_ms=patience_ms)
        right = crc32c(self.expected[offset : offset + length])
        if slices["crc"][0] == right and crc32c(target[:length]) != right:
            self.wrong.append("a right checksum of wrong bytes")
        elif slices["crc"][0] == right:
            with self.changed:
                self.good += 1
                self.changed.notify_all()

    # ---- troubles

    def disturb(self) -> None:
        kinds: list[str] = []
        while self.going():
            self.pause.wait(self.dice.uniform(0.05, 0.4))
            if not kinds:  # each has its turn
                kinds = TROUBLES + (WIRE_TROUBLES if self.relay else [])
                self.dice.shuffle(kinds)
            trouble = kinds.pop()
            self.troubles[trouble] += 1
            self.make(trouble)
            if self.dice.random() < 0.7 and not self.recovers():
                self.wrong.append(f"nothing has worked for {RECOVERY_S} s after: {trouble}")
                faulthandler.dump_traceback()
                sys.stdout.write(f"{json.dumps(self.near.describe())}\n")
            if self.process.poll() is not None:
                self.wrong.append(f"the far program has ended after: {trouble}")
            if self.wrong:
                return

    def make(self, trouble: str) -> None:
        if trouble in ("stop", "long stop"):  # shorter or longer than anybody waits
            os.kill(self.process.pid, signal.SIGSTOP)
            self.pause.wait(0.02 if trouble == "stop" else 0.6)
            os.kill(self.process.pid, signal.SIGCONT)
        elif trouble == "kill":
            self.start_far()
        elif trouble == "hang up":
            self.hang_up()
        elif trouble == "strangers":
            strangers_knock(self.near.address, self.dice)
        elif self.relay is not None:
            if trouble == "corrupt":
                self.corrupted_s = time.monotonic()
            self.relay.harm(trouble)

    def hang_up(self) -> None:
        """The last handle that is closed closes the connection, whatever is on its way."""
        for peer in list(self.peers.values()):
            peer.close()

    def recovers(self) -> bool:
        """Right bytes arrive again. All that was on its way before may fail first. Once the time is
        over nobody works any more, and `last_word` decides."""
        left_s = max(0, self.end - time.monotonic())
        with self.changed:
            wanted = self.good + WORKERS + 1  # so many may have been read before the trouble
            found = self.changed.wait_for(lambda: self.good >= wanted, min(left_s, RECOVERY_S))
        return found or left_s < RECOVERY_S

    def last_word(self) -> None:
        """Nobody disturbs any more."""
        end = time.monotonic() + RECOVERY_S
        good, dice, target = self.good, random.Random(0), np.zeros(REGION_BYTES, np.uint8)
        while self.good == good and time.monotonic() < end:
            try:
                region = self.meet(-1, dice, MS)
                self.one(dice, self.peers[-1], region, target, MS)
            except (MooncakeError, ValueError, LookupError):
                self.hang_up()  # `fake` may have fallen silent for good
        if self.good == good:
            self.wrong.append("nothing works when nothing disturbs")

    def close(self) -> None:
        self.near.close()
        self.process.kill()
        self.process.communicate()
        if self.relay is not None:
            self.relay.close()

    def words(self) -> str:
        return (
            f"SOAK_SEED={SEED}: {self.good} right reads in {SECONDS:.0f} s, "
            f"troubles {dict(self.troubles)}, calls that failed {dict(self.failures)}"
        )


def strangers_knock(address: str, dice: random.Random) -> None:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.send(dice.randbytes(dice.randrange(1, 300)))


def level() -> tuple[int, int, int]:
    """Descriptors, threads, mappings of memfds."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mapped


def run_all(works: list[Callable[[], object]], seconds: float) -> list[str]:
    """Names of those that did not end."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


@pytest.mark.parametrize("transport", ["shm", "tcp", "fake"])
def test_a40_a_soak_leaves_nothing_stuck_wrong_or_behind(transport: str) -> None:
    endure(transport)


def endure(transport: str, near: Rdma = ANY_PORTS, far: Rdma = ANY_PORTS) -> None:
    Soak(transport, SEED, near, far).close()
    before = level()
    soak = Soak(transport, SEED, near, far)
    works: list[Callable[[], object]] = [soak.disturb]
    works += [partial(soak.work, SEED + n) for n in range(WORKERS)]
    stuck = run_all(works, SECONDS + 2 * RECOVERY_S)
    if not stuck and not soak.wrong:
        soak.last_word()
    soak.close()
    sys.stdout.write(f"{transport}: {soak.words()}\n")
    assert (stuck, soak.wrong) == ([], []), soak.words()
    assert soak.good > 0
    words = soak.words()
    works.clear()  # with them goes the engine, which holds a few descriptors until then
    del soak
    assert level() == before, words
