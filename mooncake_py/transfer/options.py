"""What an engine is opened with."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake_py._native import ffi, lib
from mooncake_py.errors import UsageError
from mooncake_py.transfer.topology import choose_address, parse, read_addresses, read_snapshot

TRANSPORTS: dict[str, int] = {
    "local": lib.MC_TRANSPORT_LOCAL,
    "shm": lib.MC_TRANSPORT_SHM,
    "tcp": lib.MC_TRANSPORT_TCP,
    "rdma": lib.MC_TRANSPORT_RDMA,
    "fake": lib.MC_TRANSPORT_FAKE,
    "messages": lib.MC_TRANSPORT_MESSAGES,
}
_OFFERED = [name for name in TRANSPORTS if name not in ("fake", "messages")]  # for people
TRANSPORT_NAMES = {bit: name for name, bit in TRANSPORTS.items()}


@dataclass(frozen=True, slots=True)
class Faults:
    """What the `fake` transport does wrong, decided by `seed` alone.

    Shares are per million operations of this engine. `delay_us` is the longest delay of one.
    """

    seed: int
    loss_ppm: int = 0  # slices and messages that vanish
    corrupt_ppm: int = 0  # slices with a flipped bit
    cut_ppm: int = 0  # operations that cut the connection
    delay_us: int = 0


@dataclass(frozen=True, slots=True)
class Rdma:
    """How the `rdma` transport uses this machine's devices.

    `devices` are names like "mlx5_0" or "mlx5_0:1" (device and port), in the order of preference;
    () takes every active port. The i-th port of one side is joined with the i-th of the other.
    """

    devices: tuple[str, ...] = ()
    gid_index: int | None = None  # None: chosen, RoCE v2 with an IPv4 address first
    traffic_class: int = 0
    region_max_bytes: int = 0  # registered at once; 0: what the devices say
    rails_max: int = 1024  # queue pairs made at a time; idle ones are evicted beyond it


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Where an engine listens, what it may use, and what bounds it.

    `listen` is "host:port" with a name, an IPv4 or a bracketed IPv6 address; port 0 takes any free
    one; "" does not listen. `advertise` is the host that peers should use instead of the listening
    one; an engine that listens on all addresses and was told none advertises that of the best
    network card (`topology.py`). `transports` may be used; which one is used with a peer is found
    out by proof. With "messages" among them a peer may be opened with which there is no way for
    bytes: it can be sent messages, and reads and writes fail. `queue_max_bytes` bounds received
    messages that nobody took yet: with more than half of it, peers must wait. Each may have a
    window (a 64th of it, from 64 KiB to 1 MiB) and one message on its way all the same. Data and
    replies never wait for that.

    `silence_max_ms`: a TCP peer whose host or network is gone, and one that takes nothing of what
    it is sent, is lost after so long (to a second), idle or not; one that is idle and alive stays.
    Where this host has several addresses in a peer's network, the peer is called from the one that
    `listen` names, or else from that of the best network card.

    `tcp_lanes`: over how many connections large slices are striped; unless told otherwise two, and
    one between processes of one host, where more are slower (`design/tcp.md`).
    """

    listen: str = ""
    advertise: str = ""
    transports: tuple[str, ...] = ("local", "shm", "tcp")
    tcp_lanes: int | None = None  # connections a peer for large slices; None: see above
    silence_max_ms: int = 10_000  # of a TCP peer
    message_max_bytes: int = 16 << 20
    queue_max_bytes: int = 64 << 20
    rdma: Rdma = field(default_factory=Rdma)
    faults: Faults | None = field(default=None)


def options_for(names: Sequence[str], *, listen: str = "", advertise: str = "") -> EngineOptions:
    """The engine of a process that was given a list of transports by its user. "rdma:DEVICE" or
    "rdma:DEVICE+DEVICE" among them names the devices; plain "rdma" takes every active port.
    UsageError: they are no sequence of names."""
    _check_names(names)
    devices = [name.partition(":")[2] for name in names if name.startswith("rdma:")]
    return EngineOptions(
        listen=listen,
        advertise=advertise,
        transports=tuple(name.partition(":")[0] for name in names),
        rdma=Rdma(devices=tuple("+".join(devices).split("+")) if devices else ()),
    )


def _check_names(names: Sequence[str]) -> None:
    if isinstance(names, str):
        raise UsageError(
            f"transports are a tuple of names, not the str {names!r}",
            remedy=f"pass a tuple, such as ({names!r},)",
        )
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise UsageError(
            "transports are a tuple of names", remedy='pass a tuple, such as ("tcp",)', got=names
        )


def _advertised(options: EngineOptions) -> str:
    host = options.listen.rpartition(":")[0]
    if options.advertise or host not in ("0.0.0.0", "[::]"):
        return options.advertise
    found = choose_address(parse(read_snapshot()), read_addresses())
    return found or socket.gethostname()


def _interfaces(options: EngineOptions) -> list[str]:
    """The network cards by rank, where there is a choice."""
    if set(options.transports) <= {"local", "shm"}:
        return []
    try:
        if len(socket.if_nameindex()) <= 2:
            return []  # with one there, beside the loopback, nothing is to be chosen
        topology = parse(read_snapshot())
    except OSError:  # no descriptor is left; the native core says so with its remedy
        return []
    return [nic.name for nic in topology.rank(topology.interfaces) if "," not in nic.name]


def native_options(options: EngineOptions) -> tuple[Any, list[Any]]:
    """`mc_engine_options *` and what must be kept alive beside it. Raises UsageError."""
    _check_names(options.transports)
    unknown = [name for name in options.transports if name not in TRANSPORTS]
    if unknown or not options.transports:
        raise UsageError(
            "unknown or no transports",
            remedy=f"choose of {', '.join(_OFFERED)}",
            got=options.transports,
        )
    if options.tcp_lanes is not None and not 1 <= options.tcp_lanes <= 16:
        raise UsageError("tcp_lanes is from 1 to 16", got=options.tcp_lanes)
    if not 1 <= options.message_max_bytes < 1 << 31:
        raise UsageError("message_max_bytes is from 1 to 2 GiB", got=options.message_max_bytes)
    if not 2_000 <= options.silence_max_ms <= 600_000:
        raise UsageError("silence_max_ms is from 2 s to 10 min", got=options.silence_max_ms)
    if options.queue_max_bytes < 1:
        raise UsageError("queue_max_bytes is positive", got=options.queue_max_bytes)
    native = ffi.new("mc_engine_options *")
    keep = [
        ffi.new("char[]", options.listen.encode()),
        ffi.new("char[]", _advertised(options).encode()),
        ffi.new("char[]", ",".join(options.rdma.devices).encode()),
        ffi.new("char[]", ",".join(_interfaces(options)).encode()),
    ]
    native.struct_size = ffi.sizeof("mc_engine_options")
    native.transports = sum({TRANSPORTS[name] for name in options.transports})
    native.listen, native.advertise, native.rdma_devices, native.interfaces = keep
    native.silence_max_ms = options.silence_max_ms
    native.tcp_lanes = options.tcp_lanes or 0
    native.message_max_bytes = options.message_max_bytes
    native.queue_max_bytes = options.queue_max_bytes
    rdma = options.rdma
    wrong = [name for name in rdma.devices if not re.fullmatch(r"[^:,]+(:[1-9]\d{0,2})?", name)]
    if wrong:
        raise UsageError(
            "rdma: a device is a name, or a name and a port",
            remedy='write "mlx5_0" or "mlx5_0:1", as `ls /sys/class/infiniband` shows them',
            got=wrong,
        )
    if not 0 <= rdma.traffic_class <= 255 or rdma.rails_max < 1:
        raise UsageError("rdma: traffic_class is 0 to 255 and rails_max at least 1", got=rdma)
    native.rdma_gid_index = -1 if rdma.gid_index is None else rdma.gid_index
    native.rdma_traffic_class = rdma.traffic_class
    native.rdma_region_max_bytes = rdma.region_max_bytes
    native.rdma_rails_max = rdma.rails_max
    faults = options.faults or Faults(seed=0)
    native.fault_seed = faults.seed & (1 << 64) - 1
    native.fault_loss_ppm = faults.loss_ppm
    native.fault_corrupt_ppm = faults.corrupt_ppm
    native.fault_cut_ppm = faults.cut_ppm
    native.fault_delay_us = faults.delay_us
    return native, keep
