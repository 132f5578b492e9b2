"""A wire between two engines that a test can pull: it cuts, resets, delays, corrupts, falls silent.

Stands between `listen` and wherever it is aimed at. Only bytes to the caller are corrupted, so that
the far program may believe what it is told; only connections that are open now are harmed.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

CHUNK = 1 << 16
NO_LINGER = struct.pack("ii", 1, 0)  # closing sends a reset


class Wire:
    """Two connected sockets and what was done to them."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = near, far
        self.silent = False
        self.reset = False
        self.flips = 0
        self.pause_s = 0.0

    def end(self) -> None:
        for sock in (self.near, self.far):
            with suppress(OSError):  # reading alone: the peer hears of it when it is closed
                sock.shutdown(socket.SHUT_RD if self.reset else socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in (self.near, self.far):
            if self.reset:
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            sock.close()


class Relay:
    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._target = ("", 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._wires: set[Wire] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._pause = threading.Event()
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._start(self._accept)

    def aim(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._target = (host, int(port))

    def harm(self, how: str) -> None:
        """`how`: cut, reset, delay, corrupt or silence."""
        with self._lock:
            wires = sorted(self._wires, key=id)
        for wire in wires:
            if how in ("cut", "reset"):
                wire.reset = how == "reset"
                wire.end()
            elif how == "delay":
                wire.pause_s = self._dice.uniform(0.01, 0.3)
            elif how == "corrupt":
                wire.flips = self._dice.randrange(1, 4)
            else:
                wire.silent = True

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._pause.set()
        self.harm("cut")
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)
        thread.start()
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=5)
                far.settimeout(None)
            except OSError:  # nobody there: so it looks from here, too
                near.close()
                continue
            wire = Wire(near, far)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._wires.add(wire)
            pumps = [
                threading.Thread(target=self._pump, args=(wire, near, far)),
                threading.Thread(target=self._pump, args=(wire, far, near)),
            ]
            self._start(self._carry, wire, pumps)

    def _carry(self, wire: Wire, pumps: list[threading.Thread]) -> None:
        for pump in pumps:
            pump.start()
        for pump in pumps:
            pump.join()
        with self._lock:
            self._wires.discard(wire)
        wire.close()

    def _pump(self, wire: Wire, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(CHUNK)):
                self._pause.wait(wire.pause_s)
                if sink is wire.near and wire.flips:
                    wire.flips -= 1
                    bit = self._dice.randrange(len(data) * 8)
                    data[bit // 8] ^= 1 << bit % 8
                if not wire.silent:
                    sink.sendall(data)
        wire.end()
