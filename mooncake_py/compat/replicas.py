"""Upstream's value types of the store: how to replicate, what was found where, fetched bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from mooncake_py._native.memory import address_of
from mooncake_py.model import Group, ReplicaPolicy

SOFT_PIN_DEFAULT_MS = 30 * 60_000  # when it is asked for without a time


class ObjectDataType(IntEnum):
    """What an object holds. Upstream's placement may look at it; ours does not."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class SoftPinAction(IntEnum):
    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ReplicateConfig:
    """How many replicas, where, how protected. Plain attributes; read when a call is made, so one
    object may be changed and used again. Class attributes are the defaults."""

    replica_num: int = 1
    nof_replica_num: int = 0
    dfs_replica_num: int = 0
    soft_pin_action: SoftPinAction = SoftPinAction.PRESERVE
    soft_pin_ttl_ms: int | None = None
    with_soft_pin: bool = False
    with_hard_pin: bool = False
    preferred_segment: str = ""
    preferred_segments: Sequence[str] = ()
    prefer_alloc_in_same_node: bool = False
    data_type: ObjectDataType = ObjectDataType.UNKNOWN
    group_ids: Sequence[str] | None = None

    def __repr__(self) -> str:
        return f"ReplicateConfig({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


def policy_of(config: Any) -> ReplicaPolicy:
    """Our policy for upstream's config (None: the default)."""
    if config is None:
        return ReplicaPolicy()
    preferred = [*config.preferred_segments]
    if config.preferred_segment and config.preferred_segment not in preferred:
        preferred.append(config.preferred_segment)
    pinned = config.with_soft_pin or config.soft_pin_action == SoftPinAction.ENABLE
    ttl = config.soft_pin_ttl_ms
    return ReplicaPolicy(
        replica_count=int(config.replica_num),
        preferred_nodes=tuple(preferred),
        soft_pin_ms=(SOFT_PIN_DEFAULT_MS if ttl is None else int(ttl)) if pinned else 0,
        hard_pin=bool(config.with_hard_pin),
    )


def groups_of(config: Any, count: int) -> list[int | Group]:
    """The group of each key by its id, which other calls may name, too; empty when there are none,
    or not one a key."""
    ids = None if config is None else config.group_ids
    if not ids or len(ids) != count:
        return []
    return [Group(str(each)) if each else 0 for each in ids]


class BufferHandle(bytearray):
    """An object's bytes, with the buffer protocol."""

    def size(self) -> int:
        return len(self)

    def ptr(self) -> int:
        """Address of the bytes, valid as long as this object is."""
        return address_of(self)[0]


class ReplicaStatus(IntEnum):
    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class BufferDescriptor:
    """Bytes in a node's memory. Ours are read by asking for their key: the address is not told (0).
    transport_endpoint: the node's name, as in `preferred_segment`."""

    size: int
    transport_endpoint: str
    buffer_address: int = 0


@dataclass(frozen=True, slots=True)
class MemoryDescriptor:
    buffer_descriptor: BufferDescriptor


@dataclass(frozen=True, slots=True)
class DiskDescriptor:
    """On a node's own disk. How it names its files is its business: the path is not told ("")."""

    object_size: int
    transport_endpoint: str
    file_path: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaDescriptor:
    """Where one replica lies, as the master said: on which node, in its memory or on its disk."""

    size: int
    transport_endpoint: str
    on_disk: bool = False
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        return not self.on_disk

    def is_disk_replica(self) -> bool:
        """On a file system that all share: there is none here."""
        return False

    def is_local_disk_replica(self) -> bool:
        return self.on_disk

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """Raises RuntimeError for one that is on a disk."""
        if self.on_disk:
            raise RuntimeError("this replica is on a disk")
        return MemoryDescriptor(BufferDescriptor(self.size, self.transport_endpoint))

    def get_disk_descriptor(self) -> DiskDescriptor:
        """Raises RuntimeError for one that is in memory."""
        if not self.on_disk:
            raise RuntimeError("this replica is in memory")
        return DiskDescriptor(self.size, self.transport_endpoint)
