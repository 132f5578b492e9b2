"""The decode side of a hand-over: offers pages, collects what arrives, and can take them back.

    receive() --> OPEN --every source said Done--> COMPLETE
                   |--abort(), the sender's abort, or a dead sender--> FAILED

Each room is a region of its own: the engine lets peers write into exactly the pages of that room,
and once the region is closed nothing writes there any more, on whichever transport and whatever the
sender does. A room becomes COMPLETE or FAILED only after its region was closed; so when `wait`,
`abort` or a failure returns, the pages may be used for anything. Should the engine not be able to
promise that (a copy that does not end), the pages stay reserved and the error says so.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake_py.clock import Clock
from mooncake_py.errors import (
    MooncakeError,
    PeerUnreachable,
    TransferCancelled,
    TransferTimeout,
    UsageError,
)
from mooncake_py.pd.layout import KvLayout, KvPool, partners
from mooncake_py.pd.protocol import (
    ABORT,
    DONE,
    OFFER,
    PART,
    RESUME,
    Offer,
    Part,
    decode_abort,
    decode_answer,
    encode_abort,
    encode_masks,
)
from mooncake_py.pd.rank import Pulses, Rank, Sign, check_room, group
from mooncake_py.pd.settings import HandOverSettings
from mooncake_py.transfer import EngineOptions, Message, Region

REMEMBERED = 4_096  # offers that were completed: a last word said twice is answered the same


@dataclass(frozen=True, slots=True)
class PrefillInstance:
    """The ranks of one prefill instance: their common layout, and their addresses in rank order.
    From the bootstrap (`bootstrap.py`), or known otherwise."""

    layout: KvLayout
    addresses: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.addresses) != self.layout.rank_count:
            raise UsageError(
                "one address a rank",
                ranks=self.layout.rank_count, addresses=len(self.addresses),
            )  # fmt: skip


class _Source:
    """What one prefill rank has sent of a room. Guarded by the rank's condition."""

    __slots__ = ("address", "done", "heads", "heard_ms", "masks", "peer_ids")

    def __init__(self, address: str, heads: range, layers: int) -> None:
        self.address = address
        self.heads = heads
        self.heard_ms: int | None = None  # since it accepted the offer
        self.peer_ids: set[int] = set()  # connections that it was heard over
        self.masks = [0] * layers  # of positions that are in place
        self.done = False


class Incoming:
    """One room on its way in. Made by `DecodeRank.receive`. Thread-safe."""

    def __init__(self, owner: DecodeRank, room: int, pages: NDArray[np.int64]) -> None:
        self.room = room
        self.pages = pages
        self._owner = owner
        self._offer = secrets.randbits(63)
        self._region: Region | None = None
        self._sources: dict[int, _Source] = {}
        self._error: MooncakeError | None = None  # set first; the room is FAILED once released
        self._ending = False
        self._released = False
        self._held_on = False  # the pages could not be taken back: they stay reserved
        self._full = (1 << pages.size) - 1

    def layers(self) -> list[int]:
        """Layers whose pages are all in place, from every source."""
        with self._owner._changed:
            return [i for i in range(self._owner.pool.layout.layer_count) if self._has(i)]

    def wait_layer(self, layer: int, *, timeout_ms: int) -> None:
        """Until all pages of this layer are in place. Raises what ended the room, and
        TransferTimeout (the room goes on)."""
        if not 0 <= layer < self._owner.pool.layout.layer_count:
            raise UsageError("no such layer", layer=layer)
        self._wait(lambda: self._has(layer), timeout_ms, f"layer {layer}")

    def wait(self, *, timeout_ms: int) -> None:
        """Until everything is in place and nothing can be written into the pages any more."""
        self._wait(lambda: self._released, timeout_ms, "the last layer")

    def abort(self, cause: str = "the decode side gave up") -> None:
        """End it, whatever the sender does. Once this returned the pages may be used again. After
        the end of the room this does nothing. TransferTimeout: they stay reserved, and it may be
        called again."""
        self._owner._end(self, TransferCancelled(cause, room=self.room), tell=True)
        if not self._owner._await_release(self):
            raise TransferTimeout("a copy into the room's pages does not end", room=self.room)

    def _has(self, layer: int) -> bool:
        return all(
            not source.heads or source.masks[layer] == self._full
            for source in self._sources.values()
        )

    def _over(self) -> bool:
        return self._released or self._held_on

    def _wait(self, condition: Callable[[], object], timeout_ms: int, what: str) -> None:
        with self._owner._changed:
            self._owner._changed.wait_for(
                lambda: condition() or (self._error and self._over()), timeout_ms / 1000
            )
            if self._error is not None and self._over():
                raise self._error
            if condition():
                return
        raise TransferTimeout(f"{what} has not arrived in {timeout_ms} ms", room=self.room)


class DecodeRank(Rank):
    """Receives KV pages into `pool`. Methods are thread-safe; many rooms may be open at once.

    `options.listen` is where prefill ranks find this process again after a broken connection.
    """

    def __init__(
        self,
        pool: KvPool,
        options: EngineOptions | None = None,
        settings: HandOverSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(pool, options, settings, clock)
        self._rooms: dict[int, Incoming] = {}
        self._reserved: dict[int, int] = {}  # page -> room that may write it
        self._completed: deque[int] = deque(maxlen=REMEMBERED)
        self._handlers |= {
            PART: self._on_part,
            RESUME: self._on_resume,
            DONE: self._on_done,
            ABORT: self._on_abort,
        }
        self._start()

    def receive(
        self, room: int, pages: Sequence[int], prefill: PrefillInstance, *, timeout_ms: int
    ) -> Incoming:
        """Offer `pages` (this pool's, in the order of the prompt) for a room to every rank of the
        prefill instance that holds heads of this rank.

        UsageError: a room or page that is in use, or layouts that do not meet. PeerUnreachable,
        TransferTimeout, or what the prefill side answered: nothing stays reserved.
        """
        check_room(room)
        own = self.pool.layout
        own.check_meets(prefill.layout)
        incoming = Incoming(self, room, self.pool.check_pages(pages))
        for rank, heads in partners(prefill.layout, own)[own.rank].items():
            incoming._sources[rank] = _Source(prefill.addresses[rank], heads, own.layer_count)
        self._reserve(incoming)
        try:
            incoming._region = self.engine.register(
                self.pool.pieces(incoming.pages), access="read_write"
            )
            self._send_offers(incoming, timeout_ms)
        except BaseException as error:
            cause = error if isinstance(error, MooncakeError) else TransferCancelled(repr(error))
            self._end(incoming, cause, tell=True)
            self._await_release(incoming)
            raise
        return incoming

    def _reserve(self, incoming: Incoming) -> None:
        with self._changed:
            if self._stop.is_set():
                raise UsageError("this rank was closed")
            if incoming.room in self._rooms:
                raise UsageError("this room is open already", room=incoming.room)
            taken = {int(page): self._reserved[page] for page in incoming.pages.tolist()
                     if page in self._reserved}  # fmt: skip
            if taken:
                raise UsageError(
                    "pages of another open room", page_and_room=list(taken.items())[:8]
                )
            self._rooms[incoming.room] = incoming
            self._reserved |= dict.fromkeys(incoming.pages.tolist(), incoming.room)

    def _send_offers(self, incoming: Incoming, timeout_ms: int) -> None:
        assert incoming._region is not None
        offer = Offer(
            incoming.room, incoming._offer, self.pool.layout, incoming._region.id,
            incoming.pages.size, self.address,
        ).encode()  # fmt: skip
        end_ms = self._clock.now_ms() + timeout_ms
        for rank, source in incoming._sources.items():
            left_ms = max(1, end_ms - self._clock.now_ms())
            peer = self.engine.open(source.address, timeout_ms=left_ms)
            left_ms = max(1, end_ms - self._clock.now_ms())
            decode_answer(peer.request(OFFER, offer, timeout_ms=left_ms), prefill_rank=rank)
            source.heard_ms = self._clock.now_ms()
            source.peer_ids.add(peer.id)

    # --- the end of a room ---

    def _end(self, incoming: Incoming, error: MooncakeError | None, *, tell: bool) -> None:
        """Close the region in a thread of its own: messages and pulses of other rooms go on."""
        with self._changed:
            if incoming._ending and not incoming._held_on:
                return
            incoming._ending, incoming._held_on = True, False
            incoming._error = incoming._error or error  # what ended it, not a second attempt
            told = [source.address for source in incoming._sources.values()] if tell else []
        release = threading.Thread(
            target=self._release, args=(incoming, told), name="mooncake-release", daemon=True
        )
        release.start()

    def _release(self, incoming: Incoming, told: list[str]) -> None:
        safe = True
        if incoming._region is not None:
            try:
                incoming._region.close()
            except TransferTimeout as error:
                safe = False
                with self._changed:
                    incoming._error = error
        with self._changed:
            self._rooms.pop(incoming.room, None)
            if safe:
                for page in incoming.pages.tolist():
                    self._reserved.pop(page, None)
            incoming._released, incoming._held_on = safe, not safe
            self._changed.notify_all()
        rank, cause = self.pool.layout.rank, str(incoming._error)
        for address in told:
            payload = encode_abort(incoming.room, incoming._offer, rank, cause)
            self._tell(address, ABORT, payload, self.settings.pulse_ms)

    def _await_release(self, incoming: Incoming) -> bool:
        with self._changed:
            self._changed.wait_for(incoming._over, self.settings.call_ms * 4 / 1000)
            return incoming._released

    def _end_all(self) -> None:
        with self._changed:
            rooms = list(self._rooms.values())
        for incoming in rooms:
            self._end(incoming, TransferCancelled("the decode rank was closed"), tell=True)
        with self._changed:
            self._changed.wait_for(lambda: not self._rooms, self.settings.call_ms / 1000)

    # --- messages ---

    def _source(self, room: int, offer: int, rank: int) -> tuple[Incoming, _Source]:
        """Holds the condition. TransferCancelled: no such room in this life."""
        incoming = self._rooms.get(room)
        if incoming is None or incoming._offer != offer or incoming._ending:
            cause = incoming._error.cause if incoming and incoming._error else "it was ended"
            raise TransferCancelled(f"this room is not open here: {cause}", room=room)
        if rank not in incoming._sources:
            raise UsageError("this rank has no part in the room", room=room, rank=rank)
        return incoming, incoming._sources[rank]

    def _on_part(self, message: Message) -> None:
        part = Part.decode(message.payload)
        with self._changed:
            incoming, source = self._source(part.room, part.offer, part.rank)
            end = part.first + part.count
            if part.layer >= len(source.masks) or end > incoming.pages.size:
                raise UsageError("no such part of the room", room=part.room, layer=part.layer)
            source.peer_ids.add(message.peer_id)
            source.masks[part.layer] |= ((1 << part.count) - 1) << part.first
            source.heard_ms = self._clock.now_ms()
            self._changed.notify_all()

    def _on_resume(self, message: Message) -> bytes:
        part = Part.decode(message.payload)
        with self._changed:
            incoming, source = self._source(part.room, part.offer, part.rank)
            return encode_masks(source.masks, incoming.pages.size)

    def _on_done(self, message: Message) -> None:
        part = Part.decode(message.payload)
        with self._changed:
            if part.offer in self._completed:
                return
            incoming, source = self._source(part.room, part.offer, part.rank)
            if source.heads and any(mask != incoming._full for mask in source.masks):
                raise TransferTimeout("parts are missing: ask with resume", room=part.room)
            source.done = True
            complete = all(source.done for source in incoming._sources.values())
            if complete:
                self._completed.append(part.offer)
        if complete:
            self._end(incoming, None, tell=False)

    def _on_abort(self, message: Message) -> None:
        room, offer, rank, cause = decode_abort(message.payload)
        with self._changed:
            incoming, _ = self._source(room, offer, rank)
        error = TransferCancelled(f"prefill rank {rank} aborted: {cause}", room=room)
        self._end(incoming, error, tell=True)

    # --- the pulse ---

    def _pulses(self) -> Pulses:
        rank = self.pool.layout.rank
        return group(
            (source.address, (incoming.room, incoming._offer, rank))
            for incoming in self._rooms.values()
            for source in incoming._sources.values()
            if source.heard_ms is not None
        )

    def _heard(self, sign: Sign, now_ms: int, peer_id: int) -> None:
        room, offer, rank = sign
        incoming = self._rooms.get(room)
        if incoming is not None and incoming._offer == offer and rank in incoming._sources:
            incoming._sources[rank].heard_ms = now_ms
            incoming._sources[rank].peer_ids.add(peer_id)

    def _judge(self, now_ms: int, late_ms: int) -> None:
        dead: list[tuple[Incoming, PeerUnreachable]] = []
        silent: set[int] = set()
        with self._changed:
            for incoming in self._rooms.values():
                for rank, source in incoming._sources.items():
                    if source.heard_ms is None or source.done:
                        continue
                    source.heard_ms += late_ms
                    error = self._silence(now_ms - source.heard_ms, incoming.room)
                    if error is not None:
                        error.context |= {"prefill_rank": rank, "address": source.address}
                        silent |= source.peer_ids
                        dead.append((incoming, error))
                        break
        for peer_id in silent:
            self._cut(peer_id)  # or closing the regions would wait for its answer
        for incoming, error in dead:
            self._end(incoming, error, tell=True)
