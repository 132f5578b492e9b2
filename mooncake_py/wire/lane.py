"""The master's methods, as both of its doors know them.

A call is a method number and the bytes of one request message; its answer is the bytes of one
reply message. Over gRPC the number is spelled as a path, over the hot lane it is the kind of a
transfer-engine message. Nothing else differs, so one dispatcher serves both doors.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from mooncake_py.wire.v1 import master_pb2 as pb

SERVICE = "mooncake.v1.Master"


@dataclass(frozen=True, slots=True)
class Method:
    """One call of the master.

    `urgent`: small and about liveness; served before everything that waits. `changes`: alters
    the catalog, so it is refused while nothing can be made durable. `repeatable`: a client that
    does not know whether its first attempt arrived may send it again.
    """

    number: int
    name: str
    request: type[Message]
    reply: type[Message]
    urgent: bool = False
    changes: bool = False
    repeatable: bool = True

    @property
    def path(self) -> str:
        return f"/{SERVICE}/{self.name}"


CONNECT = Method(pb.LANE_CONNECT, "Connect", pb.ConnectRequest, pb.ConnectReply, urgent=True)
EXISTS = Method(pb.LANE_EXISTS, "Exists", pb.ExistsRequest, pb.ExistsReply)
LOCATE = Method(pb.LANE_LOCATE, "Locate", pb.LocateRequest, pb.LocateReply)
# Sent twice, the second answer would say that the key exists: by the first attempt's own grant.
PUT_START = Method(
    pb.LANE_PUT_START, "PutStart", pb.PutStartRequest, pb.PutStartReply,
    changes=True, repeatable=False,
)  # fmt: skip
RESERVE = Method(pb.LANE_RESERVE, "Reserve", pb.ReserveRequest, pb.ReserveReply, changes=True)
PUT_END = Method(pb.LANE_PUT_END, "PutEnd", pb.PutEndRequest, pb.PutEndReply, changes=True)
PUT_REVOKE = Method(pb.LANE_PUT_REVOKE, "PutRevoke", pb.PutRevokeRequest, pb.PutRevokeReply)
REMOVE = Method(pb.LANE_REMOVE, "Remove", pb.RemoveRequest, pb.RemoveReply, changes=True)
PIN = Method(pb.LANE_PIN, "Pin", pb.PinRequest, pb.PinReply, changes=True)
LIST = Method(pb.LANE_LIST, "List", pb.ListRequest, pb.ListReply)
REPORT = Method(pb.LANE_REPORT, "Report", pb.ReportRequest, pb.ReportReply)
MOUNT = Method(pb.LANE_MOUNT, "Mount", pb.MountRequest, pb.MountReply, urgent=True, changes=True)
HEARTBEAT = Method(
    pb.LANE_HEARTBEAT, "Heartbeat", pb.HeartbeatRequest, pb.HeartbeatReply, urgent=True
)
UNMOUNT = Method(pb.LANE_UNMOUNT, "Unmount", pb.UnmountRequest, pb.UnmountReply, urgent=True)
DISK_WORK = Method(
    pb.LANE_DISK_WORK, "DiskWork", pb.DiskWorkRequest, pb.DiskWorkReply, changes=True
)
STATUS = Method(pb.LANE_STATUS, "Status", pb.StatusRequest, pb.StatusReply, urgent=True)
SET_QUOTA = Method(
    pb.LANE_SET_QUOTA, "SetQuota", pb.SetQuotaRequest, pb.SetQuotaReply, changes=True
)
EVENTS = Method(pb.LANE_EVENTS, "Events", pb.EventsRequest, pb.EventsReply)
TASKS = Method(pb.LANE_TASKS, "Tasks", pb.TasksRequest, pb.TasksReply, changes=True)
COPY = Method(pb.LANE_COPY, "Copy", pb.CopyRequest, pb.CopyReply, changes=True)
DRAIN = Method(pb.LANE_DRAIN, "Drain", pb.DrainRequest, pb.DrainReply)

INVENTORY = Method(pb.LANE_INVENTORY, "Inventory", pb.InventoryRequest, pb.InventoryReply)

METHODS = (
    CONNECT, EXISTS, LOCATE, PUT_START, PUT_END, PUT_REVOKE, REMOVE, LIST, REPORT, MOUNT,
    HEARTBEAT, UNMOUNT, DISK_WORK, STATUS, SET_QUOTA, EVENTS, TASKS, COPY,
    DRAIN, RESERVE, INVENTORY, PIN,
)  # fmt: skip
BY_NUMBER = {method.number: method for method in METHODS}
