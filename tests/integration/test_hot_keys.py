"""A hot key gains a replica while it is hot, over real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mooncake_py import StoreClient
from mooncake_py.ops.cluster import Cluster, ClusterOptions

READERS = 4
COLD = [f"cold/{i}" for i in range(40)]
SETTINGS = ("lease_ms=50", "hot_copies_max=1", "hot_window_ms=1000", "hot_min=4")


def until(holds: Callable[[], bool], what: str, seconds: float = 20) -> float:
    """How long it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, what
    return time.monotonic() - began


def test_f51_a_hot_key_gains_a_replica_and_loses_it_after_cooling() -> None:
    arguments = [word for setting in SETTINGS for word in ("--set", setting)]
    options = ClusterOptions(node_count=2, segment_bytes=16 << 20, master_arguments=arguments)
    with Cluster(options) as cluster, StoreClient(cluster.address) as store:
        assert store.put_batch(["hot", *COLD], [b"h" * 1000] * 41) == [None] * 41
        cool = threading.Event()
        wrong: list[bytes | int] = []

        def read() -> None:
            with StoreClient(cluster.address) as reader:
                while not cool.is_set():
                    found = reader.get("hot")
                    if found != b"h" * 1000:
                        wrong.append(found)

        def read_the_others() -> None:
            """Hot is what is read ten times as often as others, so others are read, too."""
            with StoreClient(cluster.address) as reader:
                while not cool.wait(0.7):
                    reader.get_batch(COLD)

        def replicas() -> int:
            return next(iter(store.list("hot"))).replicas

        threads = [threading.Thread(target=read) for _ in range(READERS)]
        threads.append(threading.Thread(target=read_the_others))
        for thread in threads:
            thread.start()
        try:
            until(lambda: replicas() == 2, "it gains none")
        finally:
            cool.set()
            for thread in threads:
                thread.join(20)
        until(lambda: replicas() == 1, "it keeps it")
        assert wrong == []
        assert store.get("hot") == b"h" * 1000
        assert [each.replicas for each in store.list("cold/")] == [1] * 40
