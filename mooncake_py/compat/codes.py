"""Upstream's integer codes, and which of our errors is which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake_py import errors
from mooncake_py.errors import MooncakeError

OK = 0
INTERNAL_ERROR = -1
NO_AVAILABLE_HANDLE = -200
INVALID_PARAMS = -600
OBJECT_NOT_FOUND = -704
OBJECT_ALREADY_EXISTS = -705
OBJECT_HAS_LEASE = -706
LEASE_EXPIRED = -707
TRANSFER_FAIL = -800
CHECKSUM_MISMATCH = -801
RPC_FAIL = -900
RPC_TIMEOUT = -901
FILE_WRITE_FAIL = -1103
SEGMENT_NOT_FOUND = -101
TASK_NOT_FOUND = -1400
TENANT_QUOTA_EXCEEDED = -1700

_CODES: dict[type[MooncakeError], int] = {
    errors.UsageError: INVALID_PARAMS,
    errors.ObjectNotFound: OBJECT_NOT_FOUND,
    errors.ObjectExists: OBJECT_ALREADY_EXISTS,
    errors.ObjectLeased: OBJECT_HAS_LEASE,
    errors.OutOfSpace: NO_AVAILABLE_HANDLE,
    errors.QuotaExceeded: TENANT_QUOTA_EXCEEDED,
    errors.Backpressure: NO_AVAILABLE_HANDLE,
    errors.PeerUnreachable: TRANSFER_FAIL,
    errors.TransferTimeout: TRANSFER_FAIL,
    errors.ChecksumMismatch: CHECKSUM_MISMATCH,
    errors.LeaseExpired: LEASE_EXPIRED,
    errors.AccessRefused: TRANSFER_FAIL,
    errors.TransferCancelled: TRANSFER_FAIL,
    errors.MasterUnavailable: RPC_FAIL,
    errors.NotLeader: RPC_FAIL,
    errors.NodeDraining: NO_AVAILABLE_HANDLE,
    errors.VersionMismatch: RPC_FAIL,
}


def code_of(error: MooncakeError) -> int:
    """Upstream's code for this error."""
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), INTERNAL_ERROR)


def numbers(outcomes: Sequence[Any]) -> list[int]:
    """Outcomes of a batch read: bytes, or upstream's codes."""
    return [code_of(each) if isinstance(each, MooncakeError) else int(each) for each in outcomes]
