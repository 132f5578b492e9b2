"""Which master a client asks: the addresses it was given, and the one that leads.

Any of them may be asked first. One that follows names the leader, and is believed: its hint may be
an address that was not in the list. One that cannot be reached is left for the next in the list, or
for the one that `discover` names (etcd's word, where only etcd's address is known).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc

from mooncake_py.config import join_address, split_address
from mooncake_py.errors import UsageError
from mooncake_py.wire import lane

_CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # the master is inside; a proxy variable is about the outside
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # gRPC's name for the time a connect may take
    ("grpc.max_reconnect_backoff_ms", 100),  # else one that came back is not seen for long
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]


class Stop:
    """One master on the route: its address, and its calls by number, bytes to bytes."""

    def __init__(self, address: str) -> None:
        self.host, port = split_address(address)
        self.address = join_address(self.host, port)
        self.channel = grpc.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        self.unary: dict[int, Callable[..., Any]] = {
            method.number: self.channel.unary_unary(method.path, None, None)
            for method in lane.METHODS
        }


class Route:
    """`text`: `HOST:PORT[,HOST:PORT...]`. discover: answers the leader's address, or "".
    UsageError: not of this form. Thread-safe."""

    def __init__(self, text: str, discover: Callable[[], str] | None = None) -> None:
        self._lock = threading.Lock()
        self._discover = discover
        names = [part.strip() for part in text.split(",")]
        if not all(names):
            raise UsageError(f"{text!r} names no master", remedy="write HOST:PORT[,HOST:PORT...]")
        self._listed = [Stop(name) for name in names]
        self._others: dict[str, Stop] = {}  # that were hinted at
        self.current = self._listed[0]

    @property
    def several(self) -> bool:
        several = len(self._listed) > 1 or self.current is not self._listed[0]
        return several or self._discover is not None

    def turn(self, stop: Stop, hint: str = "") -> bool:
        """Away from `stop`, unless another thread has already turned: to the leader it hinted at,
        else to the next of the list. False: there is nowhere else to go."""
        if not hint and self._discover is not None and self.current is stop:
            hint = self._discover()  # not under the lock: it may take its time
        with self._lock:
            if self.current is not stop:
                return True
            self.current = self._hinted(hint, stop) or self._next(stop)
            # Who can discover looks again, although the same one is named still.
            return self.current is not stop or self._discover is not None

    def close(self) -> None:
        for stop in (*self._listed, *self._others.values()):
            stop.channel.close()

    def _hinted(self, hint: str, stop: Stop) -> Stop | None:
        if not hint or hint == stop.address:
            return None
        for listed in self._listed:
            if listed.address == hint:
                return listed
        if hint not in self._others:
            try:
                self._others[hint] = Stop(hint)
            except UsageError:
                return None
        return self._others[hint]

    def _next(self, stop: Stop) -> Stop:
        if self._discover is not None:
            return stop
        if stop not in self._listed:
            return self._listed[0]
        return self._listed[(self._listed.index(stop) + 1) % len(self._listed)]
