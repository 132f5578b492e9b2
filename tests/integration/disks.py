"""Clusters whose nodes have a disk tier, and how a test fills them past their memory.

`fill` lets the disk keep up, so that nothing is dropped on the way; values are a function of the
key and a version (`value`), so a reader needs to remember nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from daemons import status, wait_until

from mooncake_py import StoreClient
from mooncake_py.errors import ObjectNotFound
from mooncake_py.master.client import MasterClient
from mooncake_py.ops.cluster import Cluster, ClusterOptions

KIB, MIB = 1 << 10, 1 << 20
MEMORY = 16 * MIB
SIZE = 64 * KIB


def options(
    folder: Path,
    size: int = 256 * MIB,
    memory: int = MEMORY,
    node: Sequence[str] = (),
    master: Sequence[str] = (),
) -> ClusterOptions:
    """One node with a disk. Leases are short, so that eviction has something to take."""
    return ClusterOptions(
        node_count=1,
        segment_bytes=memory,
        node_arguments=["--disk", str(folder), "--disk-size", str(size), *node],
        master_arguments=["--set", "lease_ms=300", *master],
    )


def value(key: str, nbytes: int = SIZE, version: int = 0) -> bytes:
    seed = hashlib.blake2b(f"{key} {version}".encode(), digest_size=64).digest()
    return (seed * (nbytes // 64 + 1))[:nbytes]


def numbers(cluster: Cluster) -> dict[str, float]:
    return status(cluster).counters


def caught_up(cluster: Cluster) -> bool:
    """Is as much ready on the disk as the master wants, and nothing on its way?"""
    found = status(cluster)
    counted = found.counters
    if counted.get("disk_pending_bytes", 0):
        return False
    capacity = found.capacity_bytes
    wanted = min(0.1 * capacity, found.used_bytes - 0.8 * capacity)  # as offload_ahead_ratio says
    return counted.get("disk_ready_bytes", 0) + 2 * SIZE >= wanted


def fill(cluster: Cluster, store: StoreClient, keys: Sequence[str], nbytes: int = SIZE) -> None:
    """Put all of them, and wait every now and then until the disk has caught up."""
    step = max(1, MEMORY // 32 // nbytes)
    for at in range(0, len(keys), step):
        for key in keys[at : at + step]:
            store.put(key, value(key, nbytes))
        wait_until(lambda: caught_up(cluster))


def read_all(
    store: StoreClient, keys: Iterable[str], nbytes: int = SIZE
) -> tuple[list[str], list[str]]:
    """(found, missed); wrong bytes are an AssertionError."""
    found, missed = [], []
    for key in keys:
        try:
            data = store.get(key)
        except ObjectNotFound:
            missed.append(key)
        else:
            assert data == value(key, nbytes), f"wrong bytes under {key}"
            found.append(key)
    return found, missed


def cold(cluster: Cluster, keys: Iterable[str]) -> list[str]:
    """Those that are on a disk only. Asks the master, reads nothing."""
    wanted = [key.encode() for key in keys]
    with closing(MasterClient(cluster.address)) as master:
        found = master.locate("default", wanted, timeout_ms=10_000)
    disks = [bool(each.disk_id) for each in found.segments]
    ways: dict[int, set[bool]] = {}
    for row in found.rows:
        ways.setdefault(int(row["key_index"]), set()).add(disks[int(row["segment_index"])])
    return [wanted[at].decode() for at, on_disk in ways.items() if on_disk == {True}]
