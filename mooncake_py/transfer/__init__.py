"""The transfer engine: moves bytes between registered regions. Knows no keys and no master.

engine = TransferEngine(EngineOptions(listen="127.0.0.1:0"))
region = engine.register(bytearray(1 << 20))
peer = engine.open("otherhost:1234", timeout_ms=1000)
engine.read(peer, slices, timeout_ms=1000)       # slices: numpy array of SLICE
"""

from mooncake_py.transfer.batch import Batch
from mooncake_py.transfer.directory import Directory, StaticDirectory
from mooncake_py.transfer.engine import TransferEngine
from mooncake_py.transfer.memory import FileMemory, Mapping, Memory
from mooncake_py.transfer.messages import Inbox, Message
from mooncake_py.transfer.options import EngineOptions, Faults, Rdma, options_for
from mooncake_py.transfer.peer import Peer
from mooncake_py.transfer.region import Region
from mooncake_py.transfer.slices import FLAG_CRC, FLAG_FENCE, SLICE, make_slices

__all__ = [
    "FLAG_CRC",
    "FLAG_FENCE",
    "SLICE",
    "Batch",
    "Directory",
    "EngineOptions",
    "Faults",
    "FileMemory",
    "Inbox",
    "Mapping",
    "Memory",
    "Message",
    "Peer",
    "Rdma",
    "Region",
    "StaticDirectory",
    "TransferEngine",
    "make_slices",
    "options_for",
]
