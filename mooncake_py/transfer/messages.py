"""Messages: small bytes between engines, with or without a reply."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mooncake_py._native import ffi, lib
from mooncake_py._native.check import check
from mooncake_py.errors import MooncakeError

if TYPE_CHECKING:
    from mooncake_py._native.memory import Buffer
    from mooncake_py.transfer.engine import TransferEngine

log = logging.getLogger(__name__)

JOIN_S = 5.0  # a handler that does not return by then is left behind, as a daemon
LOOK_MS = 60_000  # between two looks whether the engine is still there
_MESSAGE = ffi.typeof("mc_message *")


class Message:
    """A received message. `correlation` is 0 when nobody waits for a reply; `peer_id` is for
    `TransferEngine.peer`."""

    __slots__ = ("_engine", "correlation", "kind", "payload", "peer_id")

    def __init__(
        self, engine: TransferEngine, peer_id: int, kind: int, correlation: int, payload: bytes
    ) -> None:
        self._engine = engine
        self.peer_id = peer_id
        self.kind = kind
        self.correlation = correlation
        self.payload = payload

    def reply(self, payload: Buffer) -> None:
        """Answer a request. Never waits: Backpressure when its sender does not read.

        Raises UsageError when nobody waits for a reply, PeerUnreachable when the sender is gone.
        """
        request = ffi.new(_MESSAGE)
        request.peer, request.correlation = self.peer_id, self.correlation
        data = ffi.from_buffer(payload)
        check(lib.mc_message_reply(self._engine.native, request, data, len(data)), "reply")


class Inbox:
    """Received messages that nobody took yet, of all peers, oldest first. Thread-safe."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = weakref.ref(engine)
        self._native = engine.native
        self._threads: list[threading.Thread] = []

    def receive(
        self, timeout_ms: int, *, through: Callable[[int, Any], int] | None = None
    ) -> Message | None:
        """The next message; None: none came, woken, or closed. `through`: native code that serves
        what it understands by itself and hands out the rest, as mc_message_receive does."""
        out = ffi.new(_MESSAGE)
        if through is None:
            status = lib.mc_message_receive(self._native, timeout_ms, out)
        else:
            status = through(timeout_ms, out)
        if status:
            if status in (lib.MC_E_TIMEOUT, lib.MC_E_CANCELLED):
                return None
            check(status, "receive")
        try:
            engine = self._engine()
            if engine is None:  # collected while this waited
                return None
            payload = ffi.buffer(out.data, out.nbytes)[:]
            return Message(engine, out.peer, out.kind, out.correlation, payload)
        finally:
            lib.mc_message_free(out)

    def wake(self) -> None:
        """Make one `receive`, waiting or next, return None."""
        lib.mc_engine_wake(self._native)

    def _serve(self, handler: Callable[[Message], object], threads: int) -> None:
        for number in range(threads):
            thread = threading.Thread(
                target=self._work,
                args=(handler,),
                name=f"mooncake-messages-{len(self._threads) + number}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    def _work(self, handler: Callable[[Message], object]) -> None:
        while True:
            message = self.receive(LOOK_MS)
            if message is None:
                engine = self._engine()
                if engine is None or engine.closed:
                    return
                del engine
                continue
            try:
                handler(message)
            except MooncakeError as error:
                log.info("a message was not answered: %s", error)
            except Exception:
                log.exception("a message handler failed; the next message is handled")
            del message  # it holds the engine

    def _join(self) -> None:
        """After the engine was shut down; not from a handler's own thread for itself."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_S)
