"""Quotas: set, kept, and enforced when a put starts.

Rules. A quota counts what a tenant holds, complete and in writing, with headers and all replicas.
A put beyond it meets the quota's policy (`tenant.Quota`). A quota that is set below what is held
takes nothing away by itself; only with `evict_own` ticks do, `step_max` objects each. One put start
evicts so many for the quota, too; what does not fit then is refused until the ticks are through.
Pure.
"""

from __future__ import annotations

from mooncake_py.errors import UsageError
from mooncake_py.master import records
from mooncake_py.master.commands import Applied, Done, Refused, SetQuota, TenantInfo
from mooncake_py.master.evicting import evict
from mooncake_py.master.state import CatalogState
from mooncake_py.master.tenant import EVICT_OWN, POLICIES, REJECT, Quota, Tenant
from mooncake_py.master.work import Work
from mooncake_py.model import EXTENT_ALIGN_BYTES


def set_quota(state: CatalogState, command: SetQuota, now_ms: int) -> Applied:
    if command.policy not in POLICIES:
        cause = f"policy is {command.policy!r}; it must be one of {', '.join(POLICIES)}"
        return Applied(Refused(UsageError.code, cause))
    if not (0 <= command.bytes_max < 1 << 64 and 0 <= command.keys_max < 1 << 64):
        return Applied(Refused(UsageError.code, "a quota is a number of at most 64 bits"))
    policy = None if command.remove else POLICIES.index(command.policy)
    fields = records.QuotaFields(command.tenant, command.bytes_max, command.keys_max, policy)
    fault = apply_quota(state, fields)
    if fault:
        return Applied(Refused(UsageError.code, fault))
    work = Work()
    work.records.append(records.encode(fields))
    work.durable = True
    return work.done(Done(), now_ms)


def apply_quota(state: CatalogState, fields: records.QuotaFields) -> str:
    """Why it cannot be, or ""."""
    tenant = state.tenants.obtain(fields.tenant)
    if isinstance(tenant, str):
        return tenant
    quota = None
    if fields.policy is not None and fields.policy < len(POLICIES):
        quota = Quota(fields.bytes_max, fields.keys_max, POLICIES[fields.policy])
    state.tenants.set_quota(tenant, quota)
    return ""


def trim_tenants(state: CatalogState, work: Work, now_ms: int, count_max: int) -> bool:
    """Tenants that hold more than their quota and evict for it lose so many of their objects,
    at most; is that not enough?"""
    for tenant in state.tenants.trimmed:
        while tenant.over_quota:
            if not count_max:
                return True
            if not evict(state, work, 1, now_ms, 1, tenant):
                break
            count_max -= 1
    return False


def forget_empty_tenants(state: CatalogState) -> None:
    for tenant in state.tenants.forget_empty():
        state.order.forget(tenant.pool)
        tenant.pool.close()


def quota_fields(tenant: Tenant) -> records.QuotaFields:
    quota = tenant.quota
    if quota is None:
        return records.QuotaFields(tenant.name, 0, 0, None)
    policy = POLICIES.index(quota.policy)
    return records.QuotaFields(tenant.name, quota.bytes_max, quota.keys_max, policy)


class Allowance:
    """What a tenant may still start to write within one put start."""

    def __init__(self, state: CatalogState, tenant: Tenant) -> None:
        self._state = state
        self._tenant = tenant
        self._units = 0  # granted by this put start and not yet accounted for
        self._keys = 0
        self._evictions = state.settings.step_max  # that are left to it

    def take(self, work: Work, units: int, now_ms: int) -> bool:
        """One more key with so many units; False: beyond the quota, and nothing helped."""
        tenant, quota = self._tenant, self._tenant.quota
        if quota is None:
            return True
        while quota.policy in (REJECT, EVICT_OWN) and self._beyond(quota, units):
            if quota.policy == REJECT or not self._possible(quota, units):
                return False
            if not self._evictions or not evict(self._state, work, 1, now_ms, 1, tenant):
                return False
            self._evictions -= 1
        self._units += units
        self._keys += 1
        return True

    def give_back(self, units: int) -> None:
        """The key found no place."""
        if self._tenant.quota is not None:
            self._units -= units
            self._keys -= 1

    def give_back_units(self, units: int) -> None:
        """Some of its replicas found no place."""
        if self._tenant.quota is not None:
            self._units -= units

    def _beyond(self, quota: Quota, units: int) -> bool:
        tenant = self._tenant
        used = tenant.used_bytes + (self._units + units) * EXTENT_ALIGN_BYTES
        return quota.exceeded(used, tenant.key_count + self._keys + 1)

    @staticmethod
    def _possible(quota: Quota, units: int) -> bool:
        """Could it fit if the tenant held nothing else?"""
        return not quota.exceeded(units * EXTENT_ALIGN_BYTES, 1)


def tenant_info(tenant: Tenant, now_ms: int) -> TenantInfo:
    quota = tenant.quota
    return TenantInfo(
        name=tenant.name,
        keys=tenant.key_count,
        used_bytes=tenant.used_bytes,
        bytes_max=quota.bytes_max if quota else 0,
        keys_max=quota.keys_max if quota else 0,
        policy=quota.policy if quota else "",
        counters={
            **tenant.counters,
            "hard_pinned_bytes": EXTENT_ALIGN_BYTES * tenant.hard_pinned_units,
            "soft_pinned_bytes": EXTENT_ALIGN_BYTES * tenant.soft_pinned_units(now_ms),
        },
    )
