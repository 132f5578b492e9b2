"""Memory of a GPU or another device: the one place that says what becomes of it.

No processor may touch such memory, so it can only be read and written by a network card, either by
a dmabuf descriptor that its driver exports or through a peer memory module of that driver. What
this machine has of both is decided in native code (`plan_device_memory`) and told in
`describe()["rdma"]["device_memory"]`. This release registers none itself, also where the plan
finds a way: bytes pass through memory of the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake_py.errors import UsageError

if TYPE_CHECKING:
    from mooncake_py.transfer.engine import TransferEngine

DLPACK_HOSTS = {1, 3, 11}  # CPU, and what CUDA and ROCm call memory of the host that they pinned


def device_of(buffer: Any) -> str:
    """Where the bytes of a tensor lie when that is not the host's memory, else ""."""
    device = getattr(buffer, "device", None)
    kind = getattr(device, "type", None)
    if isinstance(kind, str):
        return "" if kind == "cpu" else str(device)
    if hasattr(buffer, "__cuda_array_interface__"):
        return "a CUDA device"
    if hasattr(buffer, "__dlpack_device__"):
        kind, number = buffer.__dlpack_device__()
        return "" if int(kind) in DLPACK_HOSTS else f"device {number} of DLPack kind {int(kind)}"
    return ""


def refuse_device_memory(engine: TransferEngine, buffer: Any) -> None:
    """Raises UsageError, with what this machine lacks, for memory that is not the host's."""
    device = device_of(buffer)
    if device:
        raise UsageError(
            f"memory of {device} is not registered: {engine.describe()['rdma']['device_memory']}",
            remedy="copy it to memory of the host first (tensor.cpu(), or a pinned buffer)",
        )
