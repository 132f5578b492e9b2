"""What can be asked of the catalog, what it answers, and what it wants done.

`Catalog.apply(command, now_ms) -> Applied`. Commands and answers are plain values; per-key data are
parallel sequences or packed rows (`model.py`). The edges (gRPC, hot lane, simulator, recovery)
build commands and carry out what comes back:

* `records` are to be made durable, in order. With `durable_first` the reply must wait for that,
  and for all records of earlier commands (also when this command has none of its own);
  otherwise it may be sent at once (for a put, the sealed extent on the node is a record too).
* `effects` go to nodes.

Statuses are codes of `errors.py`, one byte a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake_py.master.disk_commands import DiskTasks, DiskWork
from mooncake_py.model import ReplicaPolicy

# --- clients ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exists:
    tenant: str
    keys: Sequence[bytes]
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class Locate:
    tenant: str
    keys: Sequence[bytes]
    prefix: bool = False
    lease_ms: int = 0  # 0: the default of the settings


@dataclass(frozen=True, slots=True)
class PutStart:
    tenant: str
    keys: Sequence[bytes]
    lengths: Sequence[int]
    digests: bytes  # 16 a key
    policy: ReplicaPolicy = field(default_factory=ReplicaPolicy)
    host_id: str = ""  # of the writer
    groups: Sequence[int] = ()  # per key, equal = one fate (groups.py); 0 or empty: none
    random: int = 0  # 64 random bits for placement; the catalog draws none itself
    upsert: bool = False  # an object under the key is replaced at the commit, readable until then


@dataclass(frozen=True, slots=True)
class PutEnd:
    tenant: str
    keys: Sequence[bytes]
    generations: Sequence[int]
    failed: Sequence[tuple[int, int]] = ()  # (key index, segment id) not sealed
    reserved: bool = False  # the generations are of reservations; each gets its key here


@dataclass(frozen=True, slots=True)
class Reserve:
    """Grants for keys that are named at the commit (reservations.py)."""

    tenant: str
    length: int  # of every object
    count: int
    host_id: str = ""  # of the writer
    random: int = 0  # 64 random bits for placement
    digest: bytes = bytes(16)  # of no key, under the tenant's secret


@dataclass(frozen=True, slots=True)
class PutRevoke:
    tenant: str
    keys: Sequence[bytes]
    generations: Sequence[int]


@dataclass(frozen=True, slots=True)
class Remove:
    tenant: str
    keys: Sequence[bytes] = ()
    force: bool = False
    all: bool = False  # every object of the tenant whose key begins with `prefix`
    prefix: bytes = b""
    pattern: bytes = b""  # with all: only keys in which this is found (pattern.py)
    cursor: bytes = b""  # with all: of the answer before, to go on
    patience_ms: int = 0  # for the answer, which waits for others than the catalog; 0: unknown


@dataclass(frozen=True, slots=True)
class Pin:
    """From now on these objects are pinned so and not otherwise (pins.py); neither: not at all."""

    tenant: str
    keys: Sequence[bytes]
    soft_pin_ms: int = 0
    hard_pin: bool = False


@dataclass(frozen=True, slots=True)
class List:
    tenant: str
    prefix: bytes = b""
    after: bytes = b""
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class Report:
    tenant: str
    keys: Sequence[bytes]
    generations: Sequence[int]
    segment_ids: Sequence[int]
    codes: Sequence[int]
    incarnations: Sequence[int] = ()  # of the nodes that were asked, as far as they are known


@dataclass(frozen=True, slots=True)
class SetQuota:
    """What a tenant may hold; 0 = no limit in that respect. `policy`: what a put beyond it meets,
    "reject", "evict_own" or "borrow" (tenant.py). `remove`: the quota ends."""

    tenant: str
    bytes_max: int = 0
    keys_max: int = 0
    policy: str = "reject"
    remove: bool = False


@dataclass(frozen=True, slots=True)
class CopyObjects:
    """Let each object have a replica on `to_node`; with `from_node` it moves, so that it has none
    there. Answered at once with a status a key: OK once it is so, BACKPRESSURE while it is being
    copied; ask again until then. OUT_OF_SPACE, OBJECT_NOT_FOUND: not now."""

    tenant: str
    keys: Sequence[bytes]
    to_node: str
    from_node: str = ""


@dataclass(frozen=True, slots=True)
class Drain:
    """Empty a node, or one segment by its id, so that it can leave; asked again for progress.
    `cancel`: it takes new objects again."""

    what: str
    cancel: bool = False


@dataclass(frozen=True, slots=True)
class Events:
    """What happened to objects after this sequence number (events.py). 0: from the oldest kept."""

    after: int = 0
    limit: int = 1000


# --- nodes and time -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mount:
    node: str
    incarnation: int
    address: str
    region: int
    nbytes: int
    host_id: str
    segment_id: int = 0  # 0: a new segment
    domain: str = ""  # what fails together with others of the same label (rack, zone); "": unknown
    # Of recovery (recovery.py):
    recovers: bool = False  # the node answers with its inventory if it is asked to
    foreign: bool = False  # its segment id is of another cluster than this one
    warm: bool = False  # another incarnation that has taken over the memory of `segment_id`
    keeps: bool = False  # the memory outlives its process, so it may come back
    former_term: int = 0  # of the master that granted what it holds
    disk_id: int = 0  # not 0: a disk with this identity, which outlives its node


@dataclass(frozen=True, slots=True)
class Name:
    """What an extent's object is called. Deadlines: ms, 0 none. `generation`: of the object, when
    this replica was copied and carries another one, else 0."""

    tenant: str
    key: bytes
    soft_pin_until_ms: int = 0
    ttl_until_ms: int = 0
    hard_pin: bool = False
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a node holds, page by page (recovery.py). `names`: one a row, None where unknown."""

    node: str
    incarnation: int
    segment_id: int
    rows: bytes = b""  # EXTENT_ROW
    names: Sequence[Name | None] = ()
    recorded: bool = False
    compare: bool = False
    cursor: int = 0
    absent: bytes = b""  # REPLICA_ROW
    first_generation: int = 0  # of the mount that asked for it; 0: it does not say


@dataclass(frozen=True, slots=True)
class Heartbeat:
    node: str
    incarnation: int
    segment_id: int
    draining: bool = False
    used_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Tasks:
    """A node reports tasks that it has done, (task, code) each, and asks for at most `limit`."""

    node: str
    incarnation: int
    segment_id: int
    done: Sequence[tuple[int, int]] = ()
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Unmount:
    """`returns`: the memory outlives the process, and another one will come with it."""

    node: str
    incarnation: int
    segment_id: int
    returns: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: expire grants, leases, TTLs and pins, judge nodes, evict down to the low
    watermark (at most `evict_max` objects a tick). Of everything else a tick does at most
    `CatalogSettings.step_max`. Sent every `CatalogSettings.tick_ms`. Without `bury` silent nodes
    are neither suspect nor dead. `excused_ms` of the silence so far was the master's own: it stood
    still."""

    evict_max: int = 1000
    bury: bool = True
    excused_ms: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    pass


Command = (
    Exists | Locate | PutStart | Reserve | PutEnd | PutRevoke | Remove | Pin | List | Report
    | SetQuota | Events | CopyObjects | Drain | Mount | Heartbeat | Unmount | Tasks | DiskWork
    | Tick | Status | Inventory
)  # fmt: skip

# --- answers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refused:
    """The call as a whole cannot be served (unknown node, tenant over its limits, usage)."""

    code: int
    cause: str


@dataclass(frozen=True, slots=True)
class Statuses:
    """Answer of PutEnd, PutRevoke, Remove, Pin, Report."""

    status: bytes = b""
    removed: int = 0
    kept: int = 0
    cursor: bytes = b""  # of a removal of all; not empty: there is more, ask again with it


@dataclass(frozen=True, slots=True)
class Present:
    present: bytes  # one byte a key, 1 or 0; with prefix only up to and with the first 0


@dataclass(frozen=True, slots=True)
class Located:
    status: bytes
    segment_ids: Sequence[int]  # the table that rows index
    placements: bytes  # PLACEMENT_ROW, replicas of a key together
    lease_ms: int
    parts: bytes = b""  # PART_ROW, of objects that lie in several parts: these have no placement
    objects: bytes = b""  # u64 a key, its own generation (0: a miss); empty if each row has that


@dataclass(frozen=True, slots=True)
class Granted:
    status: bytes
    generations: Sequence[int]  # per key, 0 where status is not 0
    segment_ids: Sequence[int]
    rows: Sequence[bytes]  # per entry of segment_ids: EXTENT_ROWs of its grants
    # (entry, row in it, key) of further parts of striped objects; their digests are still to come
    part_rows: Sequence[tuple[int, int, bytes]] = ()
    # Of another object's deadlines that these take over what is left (soft pin, TTL; 0: none).
    inherited_ms: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Reserved:
    """As many as could be had, perhaps none; generations are in the rows."""

    segment_ids: Sequence[int]
    rows: Sequence[bytes]  # per entry of segment_ids: EXTENT_ROWs
    lifetime_ms: int


@dataclass(frozen=True, slots=True)
class Listed:
    keys: Sequence[bytes]
    lengths: Sequence[int]
    replicas: Sequence[int]
    more: bool


@dataclass(frozen=True, slots=True)
class Again:
    """The call takes further steps: apply the same command again, and others in between."""


@dataclass(frozen=True, slots=True)
class Mounted:
    """`recover`: the master wants the inventory, first that of `unrecorded` generations (ranges
    from, below); what was granted from `first_generation` on it knows anyway."""

    segment_id: int
    recover: bool = False
    unrecorded: Sequence[tuple[int, int]] = ()
    first_generation: int = 0


@dataclass(frozen=True, slots=True)
class Inventoried:
    """`believed`: a page of what the catalog believes to be there; `more` follows at `cursor`."""

    unseal: bytes = b""  # EXTENT_ROW: of the rows given, those that have ended
    believed: bytes = b""  # REPLICA_ROW
    cursor: int = 0
    more: bool = False


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    segment_id: int
    node: str
    incarnation: int
    address: str
    region: int
    nbytes: int
    host_id: str
    used_bytes: int
    state: str  # alive, suspect, draining
    domain: str = ""  # what fails together with others of the same label
    disk_id: int = 0


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """`what`: "stored", or the event of lifecycle.py that ended the object."""

    sequence: int
    what: str
    tenant: str
    key: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class EventPage:
    """`newest`: sequence of the last event there is. `gap`: events between `after` and the first
    of these are not kept."""

    events: Sequence[ObjectEvent]
    newest: int
    gap: bool


@dataclass(frozen=True, slots=True)
class TenantInfo:
    name: str
    keys: int  # complete and in writing
    used_bytes: int  # of their extents, all replicas
    bytes_max: int  # 0: no quota
    keys_max: int
    policy: str  # "" without a quota
    counters: dict[str, int]


@dataclass(frozen=True, slots=True)
class StatusInfo:
    objects: int
    used_bytes: int
    capacity_bytes: int
    segments: Sequence[SegmentInfo]
    counters: dict[str, float]
    tenants: Sequence[TenantInfo] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """Answer of Heartbeat, Unmount, Tick, SetQuota. `more`: this tick left work that was due; let
    the next one come soon. `tasks`: so many wait for this node."""

    more: bool = False
    tasks: int = 0


@dataclass(frozen=True, slots=True)
class CopyTask:
    """Make a replica: read the extent of `source_generation` at `source_offset` of the segment
    `segment_ids[source]`, write it to `offset` of the node's own segment under `generation`, which
    names the task. Nothing is written after `expires_ms` of the master's clock."""

    name: Name
    group: int
    members: int  # of the group
    length: int
    generation: int
    offset: int
    expires_ms: int
    source: int
    source_offset: int
    source_generation: int


@dataclass(frozen=True, slots=True)
class TaskList:
    """`waiting`: so many more there are."""

    segment_ids: Sequence[int]  # the table that `source` indexes
    copies: Sequence[CopyTask]
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class DrainInfo:
    """Numbers of objects. `moved` to other nodes; `dropped`: had enough replicas elsewhere;
    `ended`: removed or evicted while they were copied; `failed`: attempts, which are repeated;
    `left`: still there when all were last looked at. `state`: running; done; stuck: there is no
    place for what is left; cancelled."""

    state: str
    moved: int
    moved_bytes: int
    dropped: int
    ended: int
    failed: int
    left: int
    left_bytes: int  # of extents, also of puts that run


Reply = (
    Refused | Statuses | Present | Located | Granted | Reserved | Listed | Mounted | StatusInfo
    | Done | EventPage | Again | TaskList | DrainInfo | Inventoried | DiskTasks
)  # fmt: skip

# --- effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unseal:
    """Tell the node of this segment to unseal these extents (removed objects must not be adopted
    again from memory). Lost effects are harmless while the record is durable."""

    segment_id: int
    rows: bytes  # EXTENT_ROW
    read_until_ms: int = 0  # whoever waits for the removal waits for the node, or until then


Effect = Unseal


@dataclass(slots=True)
class Applied:
    reply: Reply
    records: list[bytes] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    durable_first: bool = False
    term_wanted: int = 0  # refused until this master has begun this term (`Catalog.raise_term`)
    hold_until_ms: int = 0  # an answer that waits for the record waits until then, too
