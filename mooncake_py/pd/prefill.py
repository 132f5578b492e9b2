"""The prefill side of a hand-over: writes pages into decode ranks as its layers are computed.

    send() -> Outgoing: waits for the offers of the decode ranks that hold its heads
    write_layer() : slices to all of them at once, then one Part each (the bytes are there by then)
    finish()      : one Done each, which every decode rank confirms

An offer may come before `send` (it waits as an orphan, for `orphan_ms`) or after it. When a write
fails, the decode rank is asked which positions it has (Resume), over a new connection if need be,
and only what is missing is written again, until the deadline or until the other side is dead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_py.clock import Clock
from mooncake_py.errors import (
    Backpressure,
    MooncakeError,
    PeerUnreachable,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    UsageError,
)
from mooncake_py.pd.layout import KvPool, Target, partners
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
    decode_masks,
    encode_abort,
)
from mooncake_py.pd.rank import Pulses, Rank, Sign, check_room, group
from mooncake_py.pd.settings import HandOverSettings
from mooncake_py.transfer import Batch, EngineOptions, Message
from mooncake_py.transfer.slices import OP_WRITE

RETRY_S = 0.02


class Producer(Protocol):
    """What computes a layer's bytes; `torch.cuda.Event` is one."""

    def synchronize(self) -> object:
        """Return when the bytes are complete in memory."""


class _Offered:
    """An accepted offer. Guarded by the rank's condition."""

    __slots__ = ("arrived_ms", "heard_ms", "offer", "target")

    def __init__(self, offer: Offer, heads: range, now_ms: int) -> None:
        self.offer = offer
        self.target = Target(offer.layout, offer.region, heads)
        self.arrived_ms = self.heard_ms = now_ms

    @property
    def rank(self) -> int:
        return self.offer.layout.rank


class Outgoing:
    """One room on its way out. Made by `PrefillRank.send`. One thread writes it; any may abort.

    The pages must keep their bytes until `finish` or `abort` returned, or a call raised what ended
    the room (which `error` has from then on).
    """

    def __init__(self, owner: PrefillRank, room: int, pages: NDArray[np.int64]) -> None:
        self.room = room
        self.pages = pages
        self._owner = owner
        self._offers: dict[int, _Offered] = {}
        self._written = [0] * owner.pool.layout.layer_count  # positions given to write_layer
        self._full = (1 << pages.size) - 1
        self._batches: list[Batch] = []  # on their way
        self.error: MooncakeError | None = None

    def write_layer(
        self,
        layer: int,
        *,
        timeout_ms: int,
        part: range | None = None,
        ready: Producer | None = None,
    ) -> None:
        """Write one layer of all pages, or of `part` of them (positions in the room: a chunk of the
        prompt), and tell the receivers. Waits for their offers first, and for `ready`.

        What was written already is not sent again. TransferTimeout: not in time, and it may be
        called again. Any other error ended the room.
        """
        layers = self._owner.pool.layout.layer_count
        part = range(self.pages.size) if part is None else part
        inside = 0 <= part.start < part.stop <= self.pages.size and part.step == 1
        if not 0 <= layer < layers or not inside:
            raise UsageError("no such layer or part", layer=layer, part=part, layers=layers)
        deadline_ms = self._owner._clock.now_ms() + timeout_ms
        if ready is not None:
            ready.synchronize()
        mask = ((1 << len(part)) - 1) << part.start
        missing = list(_ranges(mask & ~self._written[layer]))
        with self._ending_on_failure():
            offers = self._await_offers(deadline_ms)
            try:
                started = [
                    (offered, piece, self._start(offered, layer, piece, deadline_ms))
                    for offered in offers
                    for piece in missing
                ]
                for offered, piece, batch in started:
                    self._complete(offered, layer, piece, batch, deadline_ms)
            finally:
                self._cut()
        self._written[layer] |= mask

    def finish(self, *, timeout_ms: int) -> None:
        """Say that everything was written. Returns when every receiver has it all.

        UsageError: layers were not written. Other errors as for `write_layer`.
        """
        lacking = [i for i, mask in enumerate(self._written) if mask != self._full]
        if lacking:
            raise UsageError("layers were not written yet", room=self.room, layers=lacking[:16])
        deadline_ms = self._owner._clock.now_ms() + timeout_ms
        with self._ending_on_failure():
            try:
                for offered in self._await_offers(deadline_ms):
                    self._say_done(offered, deadline_ms)
            finally:
                self._cut()
        self._owner._forget(self)

    def abort(self, cause: str = "the prefill side gave up") -> None:
        """End it on both sides. Nothing is read from its pages for it afterwards."""
        self._owner._end(self, TransferCancelled(cause, room=self.room), tell=True)

    # --- inside ---

    def _ending_on_failure(self) -> _EndingOnFailure:
        return _EndingOnFailure(self)

    def _cut(self) -> None:
        """End what is on its way: nothing is read from the pages for it any more."""
        with self._owner._changed:
            batches, self._batches = self._batches, []
        for batch in batches:
            batch.close()

    def _check_alive(self) -> None:
        if self.error is not None:
            raise self.error

    def _await_offers(self, deadline_ms: int) -> list[_Offered]:
        owner = self._owner
        with owner._changed:
            while True:
                self._check_alive()
                expected = owner._expected(self)
                if expected is not None and expected <= self._offers.keys():
                    return list(self._offers.values())
                left_ms = deadline_ms - owner._clock.now_ms()
                if left_ms <= 0:
                    missing = "any" if expected is None else sorted(expected - self._offers.keys())
                    raise TransferTimeout(
                        "decode ranks have not offered their pages", room=self.room, ranks=missing
                    )
                owner._changed.wait(left_ms / 1000)

    def _start(self, offered: _Offered, layer: int, piece: range, deadline_ms: int) -> Batch | None:
        """None: could not be started; `_complete` finds out why and does it again."""
        self._check_alive()
        if not offered.target.heads:
            return None
        slices = self._owner.pool.slices(layer, self.pages, piece, offered.target)
        slices["op"] = OP_WRITE
        left_ms = deadline_ms - self._owner._clock.now_ms()
        if left_ms <= 0:
            raise TransferTimeout("the layer was not written in time", layer=layer)
        engine = self._owner.engine
        try:
            peer = engine.open(offered.offer.address, timeout_ms=left_ms)
            batch = engine.submit(peer, slices, timeout_ms=left_ms)
        except TransferError:
            return None
        with self._owner._changed:
            self._batches.append(batch)
        self._check_alive()  # or whoever ended the room cut before this batch was known
        return batch

    def _complete(
        self, offered: _Offered, layer: int, piece: range, batch: Batch | None, deadline_ms: int
    ) -> None:
        """Bytes in place and receiver told, over as many connections as it takes."""
        if not offered.target.heads:
            return
        while True:
            try:
                if batch is not None:
                    batch.wait(max(1, deadline_ms - self._owner._clock.now_ms()))
                    self._tell_part(offered, layer, piece, deadline_ms)
                    return
            except TransferError:
                self._check_alive()
            left = self._what_is_missing(offered, layer, piece, deadline_ms)
            if left is None:
                return
            piece = left
            batch = self._start(offered, layer, piece, deadline_ms)

    def _tell_part(self, offered: _Offered, layer: int, piece: range, deadline_ms: int) -> None:
        rank = self._owner.pool.layout.rank
        part = Part(self.room, offered.offer.offer, rank, layer, piece.start, len(piece))
        left_ms = max(1, deadline_ms - self._owner._clock.now_ms())
        peer = self._owner.engine.open(offered.offer.address, timeout_ms=left_ms)
        peer.send(PART, part.encode(), timeout_ms=left_ms)

    def _what_is_missing(
        self, offered: _Offered, layer: int, piece: range, deadline_ms: int
    ) -> range | None:
        """The span of `piece` that the receiver lacks; None: it has all."""
        reply = self._ask(offered, RESUME, deadline_ms)
        layers = offered.offer.layout.layer_count
        has = decode_masks(reply, layers, self.pages.size)[layer]
        missing = list(_ranges((((1 << len(piece)) - 1) << piece.start) & ~has))
        return range(missing[0].start, missing[-1].stop) if missing else None

    def _say_done(self, offered: _Offered, deadline_ms: int) -> None:
        while True:
            try:
                self._ask(offered, DONE, deadline_ms)
                return
            except TransferTimeout:
                if self._owner._clock.now_ms() >= deadline_ms:
                    raise
            everything = range(self.pages.size)  # a Part was lost with its connection
            for layer in range(offered.offer.layout.layer_count):
                self._complete(offered, layer, everything, None, deadline_ms)

    def _ask(self, offered: _Offered, kind: int, deadline_ms: int) -> bytes:
        """A request that is repeated over new connections. Raises what the receiver answered."""
        owner = self._owner
        word = Part(self.room, offered.offer.offer, owner.pool.layout.rank).encode()
        while True:
            self._check_alive()
            left_ms = deadline_ms - owner._clock.now_ms()
            if left_ms <= 0:
                raise TransferTimeout("the receiver did not answer in time", room=self.room)
            try:
                peer = owner.engine.open(offered.offer.address, timeout_ms=left_ms)
                reply = peer.request(kind, word, timeout_ms=left_ms)
            except (TransferError, Backpressure):
                with owner._changed:
                    owner._changed.wait_for(lambda: self.error is not None, RETRY_S)
                continue
            return decode_answer(reply, decode_rank=offered.rank)


class _EndingOnFailure:
    """An error other than a missed deadline ends the room; both sides then know."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, TransferTimeout):
            return
        cause = error if isinstance(error, MooncakeError) else TransferCancelled(repr(error))
        self._outgoing._owner._end(self._outgoing, cause, tell=True)


class PrefillRank(Rank):
    """Sends KV pages out of `pool`. Methods are thread-safe; many rooms may be open at once."""

    def __init__(
        self,
        pool: KvPool,
        options: EngineOptions | None = None,
        settings: HandOverSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(pool, options, settings, clock)
        self._region = self.engine.register(pool.buffers, access="read")  # once, for all rooms
        self._rooms: dict[int, Outgoing] = {}
        self._orphans: dict[int, dict[int, _Offered]] = {}  # room -> decode rank -> offer
        self._handlers |= {OFFER: self._on_offer, ABORT: self._on_abort}
        self._start()

    def send(self, room: int, pages: Sequence[int]) -> Outgoing:
        """Open a room for these pages (this pool's, in the order of the prompt). Offers may be
        there already or come later. UsageError: the room is open, or the offers are for another
        number of pages (then their senders are told)."""
        outgoing = Outgoing(self, check_room(room), self.pool.check_pages(pages))
        with self._changed:
            if self._stop.is_set():
                raise UsageError("this rank was closed")
            if room in self._rooms:
                raise UsageError("this room is open already", room=room)
            outgoing._offers = self._orphans.pop(room, {})
            wrong = {o.offer.pages for o in outgoing._offers.values()} - {outgoing.pages.size}
            if not wrong:
                self._rooms[room] = outgoing
                return outgoing
        error = UsageError(
            "the decode side offered another number of pages",
            room=room, offered=sorted(wrong), pages=outgoing.pages.size,
        )  # fmt: skip
        self._end(outgoing, error, tell=True)
        raise error

    def _expected(self, outgoing: Outgoing) -> set[int] | None:
        """Decode ranks that will offer; None before the first one did."""
        for offered in outgoing._offers.values():
            own = self.pool.layout
            table = partners(own, offered.offer.layout)
            return {rank for rank, sources in table.items() if own.rank in sources}
        return None

    def _forget(self, outgoing: Outgoing) -> None:
        with self._changed:
            if self._rooms.get(outgoing.room) is outgoing:
                del self._rooms[outgoing.room]

    def _end(self, outgoing: Outgoing, error: MooncakeError, *, tell: bool) -> None:
        with self._changed:
            if outgoing.error is None:
                outgoing.error = error
            told = list(outgoing._offers.values())
            if self._rooms.get(outgoing.room) is outgoing:
                del self._rooms[outgoing.room]
            elif tell and outgoing.error is not error:
                return
            self._changed.notify_all()
        outgoing._cut()
        if tell:
            for offered in told:
                self._tell_abort(offered, str(error))

    def _tell_abort(self, offered: _Offered, cause: str) -> None:
        offer, rank = offered.offer, self.pool.layout.rank
        payload = encode_abort(offer.room, offer.offer, rank, cause)
        self._tell(offer.address, ABORT, payload, self.settings.pulse_ms)

    def _end_all(self) -> None:
        with self._changed:
            rooms = list(self._rooms.values())
            orphans = [o for offers in self._orphans.values() for o in offers.values()]
            self._orphans.clear()
        for outgoing in rooms:
            self._end(outgoing, TransferCancelled("the prefill rank was closed"), tell=True)
        for offered in orphans:
            self._tell_abort(offered, "the prefill rank was closed")

    # --- messages ---

    def _on_offer(self, message: Message) -> None:
        offer = Offer.decode(message.payload)
        own = self.pool.layout
        own.check_meets(offer.layout)
        sources = partners(own, offer.layout)[offer.layout.rank]
        if own.rank not in sources:
            raise UsageError("this offer is for another prefill rank", prefill_rank=own.rank)
        offered = _Offered(offer, sources[own.rank], self._clock.now_ms())
        with self._changed:
            outgoing = self._rooms.get(offer.room)
            offers = outgoing._offers if outgoing else self._orphans.get(offer.room, {})
            if offered.rank in offers:
                raise UsageError(
                    "this decode rank has offered already: a request has a room of its own",
                    room=offer.room, decode_rank=offered.rank,
                )  # fmt: skip
            _check_alike(offer, [other.offer for other in offers.values()])
            if outgoing is not None and offer.pages != outgoing.pages.size:
                raise UsageError("the prefill side sends another number of pages",
                                 offered=offer.pages, pages=outgoing.pages.size)  # fmt: skip
            if outgoing is None:
                if sum(map(len, self._orphans.values())) >= self.settings.orphans_max:
                    raise Backpressure("too many offers wait for their rooms")
                offers = self._orphans.setdefault(offer.room, {})
            offers[offered.rank] = offered
            self._changed.notify_all()

    def _on_abort(self, message: Message) -> None:
        room, offer, rank, cause = decode_abort(message.payload)
        with self._changed:
            outgoing = self._rooms.get(room)
            offers = outgoing._offers if outgoing else self._orphans.get(room, {})
            if rank not in offers or offers[rank].offer.offer != offer:
                raise TransferCancelled("no such room", room=room)
            if outgoing is None:
                self._drop_orphan(room, rank)
                return
            error = TransferCancelled(f"decode rank {rank} aborted: {cause}", room=room)
            outgoing.error = outgoing.error or error
            self._changed.notify_all()
        threading.Thread(
            target=self._end, args=(outgoing, error), kwargs={"tell": True}, daemon=True,
            name="mooncake-abort",
        ).start()  # fmt: skip

    def _drop_orphan(self, room: int, rank: int) -> None:
        offers = self._orphans[room]
        del offers[rank]
        if not offers:
            del self._orphans[room]

    # --- the pulse ---

    def _all_offers(self) -> Iterator[tuple[Outgoing | None, _Offered]]:
        for outgoing in self._rooms.values():
            for offered in outgoing._offers.values():
                yield outgoing, offered
        for offers in self._orphans.values():
            for offered in offers.values():
                yield None, offered

    def _pulses(self) -> Pulses:
        rank = self.pool.layout.rank
        return group(
            (offered.offer.address, (offered.offer.room, offered.offer.offer, rank))
            for _, offered in self._all_offers()
        )

    def _heard(self, sign: Sign, now_ms: int, peer_id: int) -> None:
        room, offer, rank = sign
        outgoing = self._rooms.get(room)
        offers = outgoing._offers if outgoing else self._orphans.get(room, {})
        if rank in offers and offers[rank].offer.offer == offer:
            offers[rank].heard_ms = now_ms

    def _judge(self, now_ms: int, late_ms: int) -> None:
        dead: list[tuple[Outgoing, PeerUnreachable]] = []
        expired: list[_Offered] = []
        with self._changed:
            for outgoing, offered in list(self._all_offers()):
                offered.heard_ms += late_ms
                error = self._silence(now_ms - offered.heard_ms, offered.offer.room)
                if outgoing is not None and error is not None:
                    error.context |= {"decode_rank": offered.rank, "address": offered.offer.address}
                    dead.append((outgoing, error))
                elif outgoing is None and now_ms - offered.arrived_ms > self.settings.orphan_ms:
                    expired.append(offered)
                    self._drop_orphan(offered.offer.room, offered.rank)
                elif outgoing is None and error is not None:
                    self._drop_orphan(offered.offer.room, offered.rank)
        for silent, cause in dead:
            self._end(silent, cause, tell=True)
        for offered in expired:
            self._tell_abort(offered, "no request of this room came to the prefill side")


def _check_alike(offer: Offer, others: list[Offer]) -> None:
    for other in others:
        theirs, ours = other.layout.of_rank(0), offer.layout.of_rank(0)
        if theirs != ours or other.pages != offer.pages:
            raise UsageError("the decode ranks of one room differ", room=offer.room)


def _ranges(mask: int) -> Iterator[range]:
    """The stretches of ones."""
    at = 0
    while mask:
        zeros = (mask & -mask).bit_length() - 1
        mask >>= zeros
        ones = (~mask & (mask + 1)).bit_length() - 1
        yield range(at + zeros, at + zeros + ones)
        mask >>= ones
        at += zeros + ones
