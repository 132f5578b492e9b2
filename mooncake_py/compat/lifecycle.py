"""From upstream's `setup` arguments to a client, and a node when memory is to be offered."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mooncake_py.config import (
    NodeSettings,
    join_address,
    size_bytes,
    split_address,
    upstream_variable,
)
from mooncake_py.errors import UsageError
from mooncake_py.store.client import StoreClient
from mooncake_py.store.node_process import Node

log = logging.getLogger(__name__)

MASTER_DEFAULT = "127.0.0.1:50051"
SEGMENT_DEFAULT_BYTES = 16 << 20  # of the dictionary form
CLUSTER_DEFAULT = "mooncake_cluster"  # of `mooncake_master --enable_ha`, unless it is told another
SETUP_MS = 20_000
SEGMENT_MIN_BYTES = 1 << 20
HOST_PROTOCOLS = frozenset({"", "tcp", "shm", "local"})
RDMA_PROTOCOLS = frozenset({"rdma", "roce", "ib", "efa"})

# Both spellings that are in use -> the argument's name.
_SYNONYMS = {
    "master_server_address": "master_server_addr",
    "device_name": "rdma_devices",
}


@dataclass(frozen=True, slots=True)
class SetupOptions:
    """What of upstream's arguments matters here. The metadata server, the staging buffer and the
    devices are found out by us."""

    local_hostname: str
    global_segment_size: int
    protocol: str
    master_server_addr: str
    tenant_id: str = "default"
    rdma_devices: str = ""


def options_of(config: Mapping[str, Any]) -> SetupOptions:
    """The dictionary form: values are texts or numbers, unknown keys are ignored. Raises
    UsageError for what cannot be read."""
    given = {_SYNONYMS.get(key, key): value for key, value in config.items()}
    if not given.get("local_hostname"):
        raise UsageError("setup needs local_hostname")
    size = given.get("global_segment_size", SEGMENT_DEFAULT_BYTES)
    return SetupOptions(
        local_hostname=str(given["local_hostname"]),
        global_segment_size=size_bytes(size) if isinstance(size, str) else int(size),
        protocol=str(given.get("protocol") or "tcp"),
        master_server_addr=str(given.get("master_server_addr") or MASTER_DEFAULT),
        tenant_id=str(given.get("tenant_id") or "default"),
        rdma_devices=str(given.get("rdma_devices") or ""),
    )


def transports_of(protocol: str, devices: str = "") -> tuple[str, ...]:
    """The ways of ours for upstream's name of one. tcp alone when it is forced; else always shared
    memory on one host, RDMA where it was asked for and is there (the engine says in its log why it
    is not), and TCP. devices: names of RDMA cards, with commas between; "": all.

    Raises UsageError for a way that is none of ours.
    """
    name = protocol.strip().lower()
    if name not in HOST_PROTOCOLS and name not in RDMA_PROTOCOLS:
        raise UsageError(
            f"the protocol {protocol!r} is none of tcp, rdma",
            remedy="memory of accelerators is moved over RDMA, or through host memory over TCP",
        )
    if upstream_variable("MC_FORCE_TCP") not in ("", "0"):
        return ("tcp",)
    if name in HOST_PROTOCOLS:
        return ("local", "shm", "tcp")
    cards = "+".join(each.strip() for each in devices.split(",") if each.strip())
    return ("local", "shm", f"rdma:{cards}" if cards else "rdma", "tcp")


def host_and_port(hostname: str) -> tuple[str, int]:
    """`host`, `host:port`, `[v6]:port`, or a bare IPv6 address. Raises UsageError."""
    if hostname.count(":") > 1 and not hostname.startswith("["):
        return hostname, 0
    return split_address(hostname) if ":" in hostname else (hostname, 0)


def master_of(address: str) -> str:
    """Our form of upstream's address: host:port, of several with commas between; or
    `etcd://a:1;b:2`, which says who leads, in the cluster that `MC_METADATA_CLUSTER_ID` names, or a
    path behind it, else in the one that `mooncake_master` uses. UsageError: of another kind."""
    scheme, found, rest = address.partition("://")
    if not found:
        return address.replace(";", ",")
    if scheme not in ("etcd", "etcds"):
        raise UsageError(
            f"masters are not found by {scheme}",
            remedy="name them as host:port with commas between, or by etcd://host:port;host:port",
            got=address,
        )
    members = rest.replace("http://", "").replace("https://", "").rstrip("/")
    if "/" in members:
        return f"{scheme}://{members}"
    cluster = upstream_variable("MC_METADATA_CLUSTER_ID") or CLUSTER_DEFAULT
    return f"{scheme}://{members}/{cluster.strip('/')}"


def open_client(options: SetupOptions) -> tuple[StoreClient, Node | None]:
    """Raises what StoreClient and Node raise, and UsageError for an address of another scheme."""
    options = replace(options, master_server_addr=master_of(options.master_server_addr))
    client = StoreClient(
        options.master_server_addr,
        tenant=options.tenant_id,
        transports=transports_of(options.protocol, options.rdma_devices),
        timeout_ms=SETUP_MS,
    )
    if options.global_segment_size <= 0:
        return client, None
    try:
        return client, open_node(options, options.global_segment_size)
    except BaseException:
        client.close()
        raise


def open_node(options: SetupOptions, nbytes: int, file: str = "") -> Node:
    """This process offers memory itself, on the host that it was told; file: in which that memory
    lies, and outlives the process. Raises what Node raises."""
    host, _ = host_and_port(options.local_hostname)
    node = Node(
        NodeSettings(
            master=master_of(options.master_server_addr),
            listen=join_address(host, 0),
            segment_bytes=max(SEGMENT_MIN_BYTES, nbytes),
            segment_file=file,
            health_listen="off",
            start_ms=SETUP_MS,
            drain_ms=0,
        )
    )
    node.start()
    return node
