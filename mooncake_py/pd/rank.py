"""What both sides of a hand-over are: an engine, a handler of messages, and a pulse.

Threads: `on_message` handles messages one after the other and never waits for a peer; the pulse
thread tells every peer which rooms are alive here, and fails rooms whose peer was not heard. One
condition per rank guards all its rooms. Nobody waits for a peer while holding it.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Self

from mooncake_py.clock import Clock, SystemClock
from mooncake_py.errors import MooncakeError, PeerUnreachable, UsageError, VersionMismatch
from mooncake_py.pd.layout import KvPool
from mooncake_py.pd.protocol import PULSE, ROOM_MAX, decode_pulse, encode_answer, encode_pulse
from mooncake_py.pd.settings import HandOverSettings
from mooncake_py.transfer import EngineOptions, Message, Peer, TransferEngine

log = logging.getLogger(__name__)

Handler = Callable[[Message], "bytes | None"]
Sign = tuple[int, int, int]  # room, offer, rank of the one that has it: a sign of life
Pulses = dict[str, list[Sign]]  # by address of the peer


class Rank(ABC):
    """One rank of a prefill or decode instance. `close` ends its rooms; twice is fine."""

    def __init__(
        self,
        pool: KvPool,
        options: EngineOptions | None = None,
        settings: HandOverSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.pool = pool
        self.settings = settings or HandOverSettings()
        self.engine = TransferEngine(options or EngineOptions(listen="127.0.0.1:0"))
        if not self.engine.address:
            self.engine.close()
            raise UsageError("a rank listens: its peers must find it again", listen="")
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._refused = 0  # messages that were not understood, or named no living room
        self._handlers: dict[int, Handler] = {PULSE: self._on_pulse}
        self._stop = threading.Event()
        self._pulse = threading.Thread(target=self._run, name="mooncake-hand-over", daemon=True)

    def _start(self) -> None:
        self.engine.on_message(self._dispatch)
        self._pulse.start()

    @property
    def address(self) -> str:
        """ "host:port" of its engine, for the other side."""
        return self.engine.address

    def close(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        self._end_all()
        self._pulse.join(self.settings.call_ms / 1000)
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what a side adds ---

    @abstractmethod
    def _end_all(self) -> None:
        """End every room: this rank closes."""

    @abstractmethod
    def _pulses(self) -> Pulses:
        """Whom to tell about which rooms. Holds the condition."""

    @abstractmethod
    def _heard(self, sign: Sign, now_ms: int, peer_id: int) -> None:
        """The other side, by this connection, has this room too. Holds the condition."""

    @abstractmethod
    def _judge(self, now_ms: int, late_ms: int) -> None:
        """Fail what was not heard. `late_ms`: this process stood still, which proves nothing."""

    # --- messages ---

    def _dispatch(self, message: Message) -> None:
        handler = self._handlers.get(message.kind)
        try:
            if handler is None:
                raise VersionMismatch("no such message of a hand-over", kind=message.kind)
            answer = encode_answer(None, handler(message) or b"")
        except MooncakeError as error:
            self._refused += 1
            log.info("refused a message of a hand-over: %s", error)
            answer = encode_answer(error)
        if message.correlation:
            message.reply(answer)

    def _on_pulse(self, message: Message) -> None:
        signs = decode_pulse(message.payload)
        now_ms = self._clock.now_ms()
        with self._changed:
            for sign in signs:
                self._heard(sign, now_ms, message.peer_id)

    # --- the pulse ---

    def _silence(self, silent_ms: int, room: int) -> PeerUnreachable | None:
        if silent_ms <= self.settings.silence_ms:
            return None
        return PeerUnreachable(
            "the other side of a hand-over was not heard", room=room, silent_ms=silent_ms,
            remedy="it died or stands still: give the request to another instance",
        )  # fmt: skip

    def _run(self) -> None:
        last_ms = self._clock.now_ms()
        while not self._stop.wait(self.settings.pulse_ms / 1000):
            now_ms = self._clock.now_ms()
            late_ms = now_ms - last_ms - self.settings.pulse_ms
            last_ms = now_ms
            try:
                self._judge(now_ms, late_ms if late_ms > self.settings.pulse_ms else 0)
                with self._changed:
                    pulses = self._pulses()
                for address, rooms in pulses.items():
                    self._tell(address, PULSE, encode_pulse(rooms), self.settings.pulse_ms)
            except Exception:
                log.exception("the pulse of a hand-over failed; it goes on")

    def _cut(self, peer_id: int) -> None:
        """End the connection over which a peer, silent by now, was heard."""
        Peer(self.engine, peer_id, f"peer {peer_id}", opened=True).close()

    def _tell(self, address: str, kind: int, payload: bytes, timeout_ms: int) -> None:
        """Send one word, connecting again when needed; a peer that cannot be told finds out."""
        try:
            peer = self.engine.open(address, timeout_ms=timeout_ms)
            peer.send(kind, payload, timeout_ms=timeout_ms)
        except MooncakeError as error:
            log.debug("could not tell %s: %s", address, error)


def check_room(room: int) -> int:
    if type(room) is not int or not 0 <= room <= ROOM_MAX:
        raise UsageError("a room is a number from 0 to 2^63 - 1", room=room)
    return room


def group(pairs: Iterable[tuple[str, Sign]]) -> Pulses:
    grouped: Pulses = {}
    for address, sign in pairs:
        grouped.setdefault(address, []).append(sign)
    return grouped
