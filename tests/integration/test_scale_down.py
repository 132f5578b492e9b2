"""Three engines become one while all are busy; the one that stays neither fails nor waits."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from daemons import send, status, wait_until

from mooncake_py import StoreClient
from mooncake_py.errors import MooncakeError, ObjectNotFound
from mooncake_py.ops.cluster import Cluster, ClusterOptions

NBYTES = 100_000
CALL_MS = 2_000


class Engine(threading.Thread):
    """Stores pages and reads those of all engines, its own and others'."""

    def __init__(self, name: str, address: str, transport: str) -> None:
        super().__init__(name=name)
        self._address, self._transport = address, transport
        self.halt = threading.Event()
        self.rounds = 0
        self.slowest_s = 0.0
        self.wrong: list[str] = []
        self.failures: list[MooncakeError] = []
        self.crash: BaseException | None = None

    def run(self) -> None:
        try:
            with StoreClient(
                self._address, transports=(self._transport,), timeout_ms=CALL_MS
            ) as store:
                while not self.halt.is_set():
                    self._serve(store)
        except BaseException as error:
            self.crash = error
            raise

    def _serve(self, store: StoreClient) -> None:
        began = time.monotonic()
        key = f"{self.name}/{self.rounds}"
        try:
            store.put(key, key.encode() * (NBYTES // len(key)))
        except MooncakeError as error:
            self.failures.append(error)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        for other in ("e0", "e1", "e2"):
            began = time.monotonic()
            page = f"{other}/{max(0, self.rounds - 3)}"
            try:
                if store.get(page) != page.encode() * (NBYTES // len(page)):
                    self.wrong.append(page)
            except ObjectNotFound:
                pass
            except MooncakeError as error:
                self.failures.append(error)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.rounds += 1


@pytest.mark.parametrize(("transport", "how"), [("shm", signal.SIGKILL), ("tcp", signal.SIGTERM)])
def test_a32_three_engines_become_one_under_traffic_and_it_goes_on(
    transport: str, how: signal.Signals
) -> None:
    """With each engine goes its node, at once or after a drain."""
    options = ClusterOptions(node_count=3, segment_bytes=128 << 20)
    with Cluster(options) as cluster:
        engines = [Engine(f"e{i}", cluster.address, transport) for i in range(3)]
        for engine in engines:
            engine.start()
        try:
            wait_until(lambda: all(engine.rounds > 5 for engine in engines), 30_000)
            for engine in engines[1:]:
                engine.halt.set()
                send(cluster.nodes[-1], how)
                leaves = cluster.nodes.pop()
                wait_until(lambda leaves=leaves: leaves.child.exit_code() is not None)  # type: ignore[misc]
            stays = engines[0]
            wait_until(
                lambda: len([s for s in status(cluster).segments if s.state == "alive"]) == 1
            )
            before = stays.rounds
            wait_until(lambda: stays.rounds > before + 20)
            with StoreClient(cluster.address) as store:
                store.put("after", b"all of it")
                assert store.get("after") == b"all of it"
        finally:
            for engine in engines:
                engine.halt.set()
            for engine in engines:
                engine.join(30)
        assert not any(engine.crash for engine in engines)
        assert not any(engine.wrong for engine in engines)
        assert all(error.retryable for engine in engines for error in engine.failures)
        assert max(engine.slowest_s for engine in engines) < CALL_MS / 1_000 + 1.5
