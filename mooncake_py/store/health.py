"""The standard gRPC health service of a node, so that any probe works unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from mooncake_py.errors import UsageError

_LOOK_S = 0.25  # between two looks at `healthy`
_STOP_S = 1.0


class HealthDoor:
    """Serves the state of `healthy()` on `address` until closed.

    Raises UsageError when the address cannot be listened on. `healthy` is called from a thread of
    this object and must not block.
    """

    def __init__(self, address: str, healthy: Callable[[], bool]) -> None:
        self._healthy = healthy
        self._service = health.HealthServicer()
        self._server = grpc.server(
            ThreadPoolExecutor(2, thread_name_prefix="mooncake-health"),
            options=[("grpc.so_reuseport", 0)],  # a second listener is refused, not load-balanced
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._service, self._server)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise UsageError(
                f"--health-listen {address}: {error}",
                remedy="choose another address, or stop the process that has it",
            ) from None
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="mooncake-health", daemon=True)
        self._tell()
        self._server.start()
        self._watcher.start()

    def close(self) -> None:
        self._closing.set()
        self._watcher.join()
        self._service.enter_graceful_shutdown()
        self._server.stop(_STOP_S).wait(_STOP_S)

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_S):
            self._tell()

    def _tell(self) -> None:
        kind = health_pb2.HealthCheckResponse
        self._service.set("", kind.SERVING if self._healthy() else kind.NOT_SERVING)
