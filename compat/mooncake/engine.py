"""`mooncake.engine`, by mooncake_py."""

from mooncake_py.compat.engine import TransferEngine, TransferNotify, TransferOpcode

Read, Write = TransferOpcode.Read, TransferOpcode.Write
# Memory of accelerators is none of what this engine moves by itself.
SUPPORT_CUDA = SUPPORT_EFA = SUPPORT_HIP = SUPPORT_MUSA = False
SUPPORT_MNNVL = SUPPORT_INTRA_NVLINK = False

__all__ = ["Read", "TransferEngine", "TransferNotify", "TransferOpcode", "Write"]
