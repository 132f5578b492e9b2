"""`mooncake quota`: what tenants hold and may hold."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict

from mooncake_py.clock import SystemClock
from mooncake_py.master.client import MasterClient
from mooncake_py.master.commands import SetQuota, TenantInfo
from mooncake_py.ops.sizes import size_text


def tenants(master: str, timeout_ms: int) -> list[TenantInfo]:
    """As many as a status names. Raises MasterUnavailable, VersionMismatch."""
    with closing(MasterClient(master, engine=None, role="tool", clock=SystemClock())) as client:
        client.connect(timeout_ms=timeout_ms)
        return list(client.status(timeout_ms=timeout_ms).tenants)


def change(master: str, quota: SetQuota, timeout_ms: int) -> None:
    """Durable when this returns. Raises MasterUnavailable, UsageError."""
    with closing(MasterClient(master, engine=None, role="tool", clock=SystemClock())) as client:
        client.connect(timeout_ms=timeout_ms)
        client.set_quota(quota, timeout_ms=timeout_ms)


def line(tenant: TenantInfo) -> str:
    """For people."""
    held = f"{tenant.name}: {tenant.keys:,} keys, {size_text(tenant.used_bytes)}"
    if not tenant.policy:
        return f"{held}; no quota"
    nbytes = size_text(tenant.bytes_max) if tenant.bytes_max else "any number of bytes"
    keys = f"{tenant.keys_max:,} keys" if tenant.keys_max else "any number of keys"
    return f"{held}; quota {nbytes}, {keys}, {tenant.policy}"


def unknown(tenant: str, known_count: int) -> str:
    """Of a tenant that the master does not name; it names the first hundred or so."""
    if not tenant:
        return "no tenant holds anything or has a quota"
    return f"{tenant} is not among the {known_count} tenants that the master names"


def as_dict(tenant: TenantInfo) -> dict[str, object]:
    return asdict(tenant)
