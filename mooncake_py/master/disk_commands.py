"""What a disk tells the catalog, and what it is told. See `commands.py` and `tiering.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DiskWork:
    """A node tells what its disk did, has and may take, and asks for work (tiering.py). `done`:
    (task, code); `wanted`: generations of `keys` that were read again; `held`: with `auditing`, a
    page of the generations that are there; `numbers`: of the tier, empty for "as before"."""

    node: str
    incarnation: int
    segment_id: int
    usable_bytes: int
    done: Sequence[tuple[int, int]] = ()
    tenants: Sequence[str] = ()
    keys: Sequence[bytes] = ()
    wanted: Sequence[int] = ()
    auditing: bool = False
    held: Sequence[int] = ()
    held_after: int = 0
    held_last: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DiskTasks:
    """`offloads`, `promotions`: DISK_TASK_ROWs, the former with the names of their objects."""

    offloads: bytes
    tenants: Sequence[str]
    keys: Sequence[bytes]
    promotions: bytes
    drops: Sequence[int]  # generations
    more: bool = False
