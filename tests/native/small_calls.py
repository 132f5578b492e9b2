"""Makes small calls and says what each cost: `small_calls.py TRANSPORT COUNTED_LIBRARY`.

Prints "ready" once everything has been used before, waits for a line, and makes CALLS calls of each
kind, a marker (getsid, which nothing else calls) before and behind them, for whoever counts system
calls. Then a line of JSON: allocations and locks of the calling thread a kind, one number a call.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mooncake_py._native.memory import address_of
from mooncake_py.transfer import EngineOptions, TransferEngine, make_slices

CALLS, MS = 200, 10_000
FAR = Path(__file__).parents[1] / "conformance/transport_far.py"
COMMAND = 2


def counts(library: ctypes.CDLL, call: Callable[[], object]) -> list[float]:
    allocations, locks = ctypes.c_long(), ctypes.c_long()
    os.getsid(0)
    library.count_begin()
    for _ in range(CALLS):
        call()
    library.count_end(ctypes.byref(allocations), ctypes.byref(locks))
    os.getsid(0)
    return [allocations.value / CALLS, locks.value / CALLS]


def main() -> None:
    transport, library = sys.argv[1], ctypes.CDLL(sys.argv[2])
    options = {"listen": "127.0.0.1:0", "transports": [transport]}
    far = subprocess.Popen(
        [sys.executable, str(FAR), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
    )
    assert far.stdout
    near = TransferEngine(EngineOptions(transports=(transport,)))
    peer = near.open(far.stdout.readline().strip(), timeout_ms=MS)
    order = {
        "do": "register",
        "kind": "memfd",
        "sizes": [1 << 20],
        "seed": 7,
        "access": "read_write",
    }
    answer = json.loads(peer.request(COMMAND, json.dumps(order).encode(), timeout_ms=MS))
    target = np.zeros(4096, np.uint8)
    slices = make_slices(1)
    slices["region"], slices["length"] = answer["done"][0], target.nbytes
    slices["local"] = address_of(target)[0]
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: near.read(peer, slices, timeout_ms=MS),
        "write": lambda: near.write(peer, slices, timeout_ms=MS),
    }
    for call in calls.values():
        for _ in range(CALLS):
            call()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    found = {name: counts(library, call) for name, call in calls.items()}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    near.close()
    far.kill()
    far.communicate()


if __name__ == "__main__":
    main()
