"""etcd's calls: path, request and reply type. What they mean is the business of master/etcd.py."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from mooncake_py.wire.v1 import etcd_pb2 as pb

__all__ = [
    "AUTHENTICATE", "COMPACT", "LEASE_GRANT", "LEASE_KEEP_ALIVE", "LEASE_REVOKE", "RANGE",
    "STATUS", "TXN", "WATCH", "EtcdCall", "pb",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class EtcdCall:
    """`repeatable`: whoever does not know whether a first attempt arrived may send it again."""

    path: str
    request: type[Message]
    reply: type[Message]
    repeatable: bool = True

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


RANGE = EtcdCall("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
TXN = EtcdCall("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse, repeatable=False)
COMPACT = EtcdCall("/etcdserverpb.KV/Compact", pb.CompactionRequest, pb.CompactionResponse)
LEASE_GRANT = EtcdCall(
    "/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse
)
LEASE_REVOKE = EtcdCall(
    "/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse
)
AUTHENTICATE = EtcdCall(
    "/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse
)
STATUS = EtcdCall(
    "/etcdserverpb.Maintenance/Status", pb.StatusOfMemberRequest, pb.StatusOfMemberResponse
)
# Streams.
LEASE_KEEP_ALIVE = EtcdCall(
    "/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
)
WATCH = EtcdCall("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)
