"""Requests at a rate through bootstrap and hand-over, each of 1,024 tokens: how long one waits
until its room is open on both sides.

python -m tests.integration.pd_rate [SECONDS [REQUESTS_PER_SECOND]]      (600 and 64)
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mooncake_py.pd import (
    Bootstrap,
    DecodeRank,
    KvLayout,
    KvPool,
    PrefillRank,
    find_instance,
    publish_rank,
)

LAYOUT = KvLayout(layer_count=4, page_tokens=16, head_count=4, head_bytes=64)
PAGES, AT_ONCE = 64, 32  # of a request; requests
CALL_MS = 30_000


def pool() -> KvPool:
    nbytes = PAGES * AT_ONCE * LAYOUT.page_bytes
    return KvPool(LAYOUT, [np.zeros(nbytes, np.uint8) for _ in range(LAYOUT.layer_count * 2)])


class Traffic:
    def __init__(self, url: str, prefill: PrefillRank, decode: DecodeRank) -> None:
        self.url, self.prefill, self.decode = url, prefill, decode
        self.opening_s: list[float] = []
        self.total_s: list[float] = []
        self.failed: list[BaseException] = []
        self._free = list(range(AT_ONCE))
        self._lock = threading.Lock()

    def request(self, room: int, arrived: float) -> None:
        """arrived: when it should have begun; waiting for its turn counts."""
        with self._lock:
            place = self._free.pop()
        try:
            pages = list(range(place * PAGES, (place + 1) * PAGES))
            instance = find_instance(self.url, "p", timeout_ms=CALL_MS)
            incoming = self.decode.receive(room, pages, instance, timeout_ms=CALL_MS)
            outgoing = self.prefill.send(room, pages)
            self.opening_s.append(time.monotonic() - arrived)
            for layer in range(LAYOUT.layer_count):
                outgoing.write_layer(layer, timeout_ms=CALL_MS)
            outgoing.finish(timeout_ms=CALL_MS)
            incoming.wait(timeout_ms=CALL_MS)
            self.total_s.append(time.monotonic() - arrived)
        finally:
            with self._lock:
                self._free.append(place)


def drive(seconds: float, rate: float) -> Traffic:
    with Bootstrap() as bootstrap, PrefillRank(pool()) as prefill, DecodeRank(pool()) as decode:
        publish_rank(bootstrap.url, "p", LAYOUT, prefill.address, timeout_ms=CALL_MS)
        traffic = Traffic(bootstrap.url, prefill, decode)
        began, pause = time.monotonic(), threading.Event()
        with ThreadPoolExecutor(AT_ONCE) as threads:
            jobs = []
            for number in range(int(seconds * rate)):
                due = began + number / rate
                pause.wait(max(0.0, due - time.monotonic()))
                jobs.append(threads.submit(traffic.request, number, due))
            for job in jobs:
                error = job.exception()
                if error is not None:
                    traffic.failed.append(error)
        assert not prefill._rooms
        assert not prefill._orphans
        assert not decode._rooms
        assert not decode._reserved
    return traffic


def main() -> None:
    given = [float(each) for each in sys.argv[1:]]
    traffic = drive(*given, *(600.0, 64.0)[len(given) :])
    for name, times in (("until open", traffic.opening_s), ("whole", traffic.total_s)):
        ordered = sorted(times)
        p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
        print(f"{name}: {len(ordered)} requests, p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, "
              f"longest {ordered[-1] * 1e3:.1f} ms")  # fmt: skip
    print(f"failed: {len(traffic.failed)} {traffic.failed[:1]}")


if __name__ == "__main__":
    main()
