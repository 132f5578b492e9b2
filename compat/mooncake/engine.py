"""`mooncake.engine`, by mooncake_py."""

from mooncake_py.compat.engine import TransferEngine, TransferOpcode

__all__ = ["TransferEngine", "TransferOpcode"]
