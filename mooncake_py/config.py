"""Settings of a process: typed, from one place, with the origin of each value. The only door to
the process environment.

A settings class is a frozen dataclass whose field names carry their units (`_ms`, `_bytes`,
`_ratio`, `_count`, `_max` ...). A value comes from the command line, else from the environment
(`MOONCAKE_<PROCESS>_<FIELD>`), else it is the default of the class; a variable with the prefix of
the process that names no setting is an error, so that a typing mistake does not run for months.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mooncake_py.errors import UsageError

S = TypeVar("S")

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+)\s*(ms|s|m|h)?", re.IGNORECASE)
_MILLISECONDS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}

LOG_LEVELS = ("debug", "info", "warning", "error")
SEGMENT_MIN_BYTES = 1 << 20
PULL_THREADS_MAX = 64
DISK_THREADS_MAX = 64
DISK_MIN_BYTES = 1 << 20
NODE_NAME_MAX_BYTES = 200  # it is part of the name of the memory


@dataclass(frozen=True, slots=True)
class MasterSettings:
    """The master process around the catalog (whose own settings are `CatalogSettings`)."""

    listen: str = "127.0.0.1:50051"  # of the gRPC API; port 0: any free one
    lane_listen: str = "auto"  # of the hot lane; auto: any port of the same host; off: none
    advertise: str = ""  # host that others reach this one by; "": the host they dialled
    metadata: str = ""  # file, folder, "memory", etcd://...; "": a user's file, named by the port
    leader_lease_ms: int = 3_000  # with etcd: silence after which another master takes over
    metrics_listen: str = "off"  # of /metrics and /health; off: none
    log_level: str = "info"
    queue_calls_max: int = 1_024  # waiting calls; beyond it the answer is Backpressure
    queue_bytes_max: int = 64 << 20  # of waiting requests
    urgent_calls_max: int = 256  # waiting heartbeats, mounts, status calls; a queue of their own
    message_bytes_max: int = 32 << 20  # longest request accepted
    call_ms_max: int = 30_000  # a call without a deadline of its own gets this one
    tell_ms: int = 200  # what a node may take to hear of a removal before it is told again
    commit_bytes_max: int = 64 << 20  # records waiting for the disk; beyond it: Backpressure
    commit_linger_ms: int = 5  # records that nobody waits for are collected this long
    commit_retry_ms: int = 500  # between attempts while the metadata store refuses writes
    snapshot_record_bytes: int = 64 << 20  # records after which the catalog is written anew
    start_ms: int = 30_000  # what reaching a shared metadata store may take at start
    stop_ms: int = 3_000  # what a clean stop may take

    def validate(self) -> None:
        """UsageError: a value is out of bounds, or two contradict each other."""
        if self.log_level not in LOG_LEVELS:
            raise UsageError(f"log_level is one of {', '.join(LOG_LEVELS)}", got=self.log_level)
        check_host("advertise", self.advertise)
        if self.leader_lease_ms < 2_000 or self.leader_lease_ms % 1_000:
            raise UsageError(
                "leader_lease_ms is whole seconds, at least 2", got=self.leader_lease_ms
            )
        if "://" in self.metadata and not self.metadata.startswith(("etcd://", "etcds://")):
            raise UsageError(
                "metadata names a kind of store that there is not",
                remedy="give a path, memory, or etcd://h1,h2,h3",
                got=self.metadata,
            )
        for name in (
            "queue_calls_max",
            "urgent_calls_max",
            "call_ms_max",
            "tell_ms",
            "commit_retry_ms",
            "start_ms",
            "stop_ms",
        ):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1")
        if self.message_bytes_max > self.queue_bytes_max:
            raise UsageError("settings contradict: message_bytes_max exceeds queue_bytes_max")


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """A node: what it offers, to whom, and how it is reached."""

    master: str = "127.0.0.1:50051"  # gRPC API, of several with commas between; or etcd://...
    listen: str = "127.0.0.1:0"  # of the transfer engine; port 0: any free one
    advertise: str = ""  # host that others reach this one by; "": the listening one
    name: str = ""  # unique in the cluster; "": host name and port
    segment_bytes: int = 1 << 30  # memory offered; taken and touched at start
    segment_file: str = ""  # in which it outlives the node (tmpfs or disk); "": anonymous memory
    transports: str = "local,shm,tcp"  # that peers may use, comma-separated
    health_listen: str = "auto"  # of the health service; auto: any port of the same host; off: none
    domain: str = ""  # label of what fails together, such as a rack; replicas go to distinct ones
    numa_node: str = (
        "auto"  # domain of memory and threads: auto (the network card's), off, a number
    )
    drain_ms: int = 10_000  # after SIGTERM: how long other nodes may copy what is here; 0: not
    pull_threads: int = 4  # pull requests served at once; a long copy occupies one
    disk: str = ""  # folder of the disk tier; "": there is none
    disk_size_bytes: int = 10 << 30  # what its objects may take
    disk_staging_bytes: int = 0  # memory for reads of it; 0: a quarter of segment_bytes, see below
    disk_threads: int = 4  # reads of it served at once
    start_ms: int = 30_000  # what reaching the master may take at start
    log_level: str = "info"

    def transport_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.transports.split(",") if name.strip())

    def staging_bytes(self) -> int:
        """Memory for reads of the disk tier: by default a quarter of the segment, at least 16 MiB
        and at most 128 MiB. Larger objects are not offloaded."""
        chosen = min(max(self.segment_bytes // 4, 16 << 20), 128 << 20)
        return self.disk_staging_bytes or chosen

    def validate(self) -> None:
        """UsageError: a value is out of bounds."""
        if self.log_level not in LOG_LEVELS:
            raise UsageError(f"log_level is one of {', '.join(LOG_LEVELS)}", got=self.log_level)
        if not 1 <= self.disk_threads <= DISK_THREADS_MAX:
            raise UsageError(f"disk_threads is 1 to {DISK_THREADS_MAX}", got=self.disk_threads)
        if self.disk and self.disk_size_bytes < DISK_MIN_BYTES:
            raise UsageError(
                f"disk_size_bytes must be at least {DISK_MIN_BYTES}", got=self.disk_size_bytes
            )
        if self.segment_bytes < SEGMENT_MIN_BYTES:
            raise UsageError(
                f"segment_bytes must be at least {SEGMENT_MIN_BYTES}", got=self.segment_bytes
            )
        if not 1 <= self.pull_threads <= PULL_THREADS_MAX:
            raise UsageError(f"pull_threads is 1 to {PULL_THREADS_MAX}", got=self.pull_threads)
        if self.numa_node not in ("auto", "off") and not self.numa_node.isdecimal():
            raise UsageError("numa_node is auto, off or the number of one", got=self.numa_node)
        names = {name.partition(":")[0] for name in self.transport_names()}
        if not names & {"shm", "rdma", "tcp"} or names - {"local", "shm", "rdma", "tcp"}:
            raise UsageError("transports are of local, shm, rdma and tcp", got=self.transports)
        if len(self.name.encode()) > NODE_NAME_MAX_BYTES or re.search(r"[^\x21-\x7e]", self.name):
            raise UsageError(f"name has up to {NODE_NAME_MAX_BYTES} printable bytes, no blanks")
        if len(self.domain.encode()) > NODE_NAME_MAX_BYTES:
            raise UsageError(f"domain has up to {NODE_NAME_MAX_BYTES} bytes", got=self.domain)
        check_host("advertise", self.advertise)
        _check_masters(self.master)
        host, _ = split_address(self.listen)
        if host in ("", "0.0.0.0", "::") and not self.advertise:
            raise UsageError(
                f"listen {self.listen} is no address that others could reach this node by",
                remedy="add --advertise with this machine's host name or address",
            )
        if self.health_listen not in ("auto", "off"):
            split_address(self.health_listen)


def _check_masters(text: str) -> None:
    """UsageError: an address that is no HOST:PORT. One of etcd is read by who opens it."""
    if not text.startswith(("etcd://", "etcds://")):
        for master in text.split(","):
            split_address(master.strip())


@dataclass(frozen=True, slots=True)
class Origin:
    """One value and where it came from."""

    name: str
    value: object
    source: str  # "option", "environment", "default"

    def __str__(self) -> str:
        return f"{self.name}={self.value} ({self.source})"


def size_bytes(text: str) -> int:
    """`4096`, `64KiB`, `512M`, `4g`: a whole number and a binary unit. UsageError else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no size", remedy="write it like 512MiB, 4G or 65536")
    return int(match[1]) * _UNITS[match[2].lower()]


def duration_ms(text: str) -> int:
    """`250`, `250ms`, `5s`, `2m`, `1h` in milliseconds. UsageError else."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no duration", remedy="write it like 250ms, 5s or 250")
    return int(match[1]) * _MILLISECONDS[(match[2] or "ms").lower()]


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of `host:port`, `1.2.3.4:port` or `[v6]:port`.

    UsageError: neither. The host may be empty (`:port`).
    """
    if "://" in address:
        raise UsageError(f"{address!r} is no address", remedy="write HOST:PORT, without a scheme")
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise UsageError(f"{address!r} is no address", remedy="write it as HOST:PORT")
    if bare == host and ":" in host:
        raise UsageError(f"{address!r} is no address", remedy="write IPv6 as [HOST]:PORT")
    if re.search(r"[\s/\[\]]", bare):
        raise UsageError(f"{address!r} is no address", remedy="write it as HOST:PORT")
    return bare, int(port)


def check_host(name: str, host: str) -> None:
    """UsageError: `host` is neither empty nor a host that can stand in an address."""
    if re.search(r"[\s/\[\]]", host):
        raise UsageError(f"{name}: {host!r} is no host", remedy="a name or a literal, no port")


def listen_remedy(option: str, number: int) -> str:
    """What to do when listening failed with this errno."""
    if number == errno.EADDRNOTAVAIL:
        return f"this machine has no such address: choose one that it has for {option}"
    return f"choose another {option}, or stop the process that has it"


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(
    kind: type[S],
    process: str,
    options: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
) -> tuple[S, list[Origin]]:
    """Values of the settings class `kind`, and where each came from.

    `options`: what the command line gave, by field name; None and missing names were not given.
    Texts are read by the field's type and unit. Calls `kind.validate()`. UsageError: a value
    cannot be read, or the settings contradict each other.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origins = []
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # S is a dataclass
        variable = variable_of(process, field.name)
        source = "default"
        value: Any = field.default
        if options.get(field.name) is not None:
            source, value = "option", options[field.name]
        elif variable in environ:
            source, value = "environment", environ[variable]
        if isinstance(value, str):
            value = _read(field.name, type(field.default), value)
        values[field.name] = value
        origins.append(Origin(field.name, value, source))
    settings = kind(**values)
    settings.validate()  # type: ignore[attr-defined]  # every settings class has it
    return settings, origins


def variable_of(process: str, name: str) -> str:
    return f"MOONCAKE_{process.upper()}_{name.upper()}"


def refuse_unknown(
    process: str, known: list[str], environ: Mapping[str, str] | None = None
) -> None:
    """UsageError: a variable with this process's prefix names no setting."""
    environ = os.environ if environ is None else environ
    names = {variable_of(process, name) for name in known}
    prefix = variable_of(process, "")
    for variable in environ:
        if variable.startswith(prefix) and variable not in names:
            raise UsageError(
                f"the environment variable {variable} names no setting",
                remedy=f"unset it; mooncake-{process} --help tells how to list the settings",
            )


def upstream_variable(name: str, default: str = "") -> str:
    """A variable of upstream's that the compatibility modules honour."""
    return os.environ.get(name, default)


def state_folder(environ: Mapping[str, str] | None = None) -> str:
    """Where this user's daemons keep what must outlive them."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local/state")
    return os.path.join(base, "mooncake")


def silence_grpc_core() -> None:
    """gRPC's native core prints its own lines on stderr unless told not to before it is loaded;
    what they say arrives here as exceptions. A value that the user set is left alone."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _read(name: str, kind: type, text: str) -> Any:
    try:
        if kind is bool:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
                text.strip().lower()
            ]
        if kind is int and ("bytes" in name.split("_")):
            return size_bytes(text)
        if kind is int and ("ms" in name.split("_")):
            return duration_ms(text)
        return kind(text)
    except (ValueError, KeyError) as error:
        if isinstance(error, UsageError):
            raise UsageError(f"{name}: {error.cause}", remedy=error.advice) from None
        raise UsageError(f"{name}: {text!r} is no {kind.__name__}") from None
