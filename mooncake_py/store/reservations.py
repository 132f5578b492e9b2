"""Extents that a client holds ready for its next puts, so that a put costs one master call.

Rules.
* There is a stock for each length that was put more than once lately. It is refilled in the
  background: no put waits for it, and one that finds too little goes the long way.
* A stock is as large as what it is used for: it doubles when it runs dry, halves when some of it
  expires unused. Bounded by count, by bytes, and by the number of lengths.
* What the master would take back soon is not used. Nothing is given back by hand: unused ones end
  by themselves within seconds.

Thread-safe.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from concurrent.futures import Executor
from dataclasses import dataclass, field

from mooncake_py.clock import Clock
from mooncake_py.errors import MooncakeError
from mooncake_py.master.client import MasterClient, Reservations

log = logging.getLogger(__name__)

LENGTHS_MAX = 32
COUNT_MIN, COUNT_MAX = 8, 512  # reservations of one length
BYTES_MAX = 32 << 20  # likewise; a longer batch goes the long way
_BATCHES = 4  # of the last one's size are asked for at a time
_INTEREST_MS = 10_000  # two puts of one length within this time are worth a stock
_PAUSE_MS = 1_000  # after the master had none, or did not answer
_CALL_MS = 2_000


@dataclass(slots=True)
class _Lot:
    """What one call of the master brought for one segment; `used` of it are gone."""

    until_ms: int
    whole: Reservations
    used: int = 0

    @property
    def left(self) -> int:
        return self.whole.row_count - self.used


@dataclass(slots=True)
class _Stock:
    nbytes: int
    lots: deque[_Lot] = field(default_factory=deque)  # oldest first
    count: int = 0  # in all of them
    target: int = COUNT_MIN
    used_ms: int = 0
    pause_until_ms: int = 0
    filling: bool = False


def _most(nbytes: int) -> int:
    return max(1, BYTES_MAX // max(1, nbytes))


def _pick(stock: _Stock, count: int) -> list[Reservations]:
    """There are as many."""
    stock.count -= count
    taken = []
    while count:
        lot = stock.lots[0]
        stop = min(lot.used + count, lot.whole.row_count)
        taken.append(lot.whole.cut(lot.used, stop))
        count -= stop - lot.used
        lot.used = stop
        if not lot.left:
            stock.lots.popleft()
    return taken


class ReservationPool:
    def __init__(
        self, master: MasterClient, tenant: str, host_id: str, executor: Executor, clock: Clock
    ) -> None:
        self._master = master
        self._tenant = tenant
        self.host_id = host_id
        self._executor = executor
        self._clock = clock
        self._lock = threading.Lock()
        self._stocks: OrderedDict[int, _Stock] = OrderedDict()

    def take(self, nbytes: int, count: int) -> list[Reservations] | None:
        """`count` of them, in runs, or None: there are not so many. Either way more are on their
        way, if that is worth it."""
        if count > COUNT_MAX or nbytes * count > BYTES_MAX:
            return None
        now_ms = self._clock.now_ms()
        with self._lock:
            stock = self._stocks.get(nbytes)
            if stock is None:
                self._begin(nbytes, count, now_ms)
                return None
            again = now_ms - stock.used_ms < _INTEREST_MS
            stock.used_ms = now_ms
            self._drop_old(stock, now_ms)
            taken = _pick(stock, count) if stock.count >= count else None
            if again and not stock.filling and stock.count < max(count, stock.target // 2):
                if taken is None and stock.target >= count:
                    stock.target = min(2 * stock.target, COUNT_MAX, _most(nbytes))
                enough = min(_BATCHES * count if count > 1 else 1, COUNT_MAX, _most(nbytes))
                stock.target = max(stock.target, enough, count)
                self._refill(stock, now_ms)
        return taken

    def clear(self) -> None:
        """None is good any more: another master leads, or a node is gone."""
        with self._lock:
            for stock in self._stocks.values():
                stock.lots.clear()
                stock.count = 0

    # --- under the lock ---

    def _begin(self, nbytes: int, count: int, now_ms: int) -> None:
        if len(self._stocks) >= LENGTHS_MAX:
            self._stocks.popitem(last=False)
        target = min(max(COUNT_MIN, count), _most(nbytes))
        self._stocks[nbytes] = _Stock(nbytes, target=target, used_ms=now_ms)

    @staticmethod
    def _drop_old(stock: _Stock, now_ms: int) -> None:
        before = stock.count
        while stock.lots and stock.lots[0].until_ms <= now_ms:
            stock.count -= stock.lots.popleft().left
        if stock.count < before:
            stock.target = max(1, stock.target // 2)

    def _refill(self, stock: _Stock, now_ms: int) -> None:
        if now_ms < stock.pause_until_ms:
            return
        stock.filling = True
        self._stocks.move_to_end(stock.nbytes)
        try:
            self._executor.submit(self._fetch, stock, stock.target - stock.count)
        except RuntimeError:
            return  # the client is being closed

    # --- in the background ---

    def _fetch(self, stock: _Stock, count: int) -> None:
        asked_ms = self._clock.now_ms()
        found: list[Reservations] = []
        lifetime_ms = 0
        try:
            found, lifetime_ms = self._master.reserve(
                self._tenant, stock.nbytes, count, host_id=self.host_id, timeout_ms=_CALL_MS
            )
        except MooncakeError as error:
            log.debug("no reservations: %s", error)
        except Exception:
            log.exception("reservations were not fetched in a way that must not be; puts go on")
        until_ms = asked_ms + lifetime_ms * 3 // 4  # the rest is for the put itself
        with self._lock:
            stock.filling = False
            stock.lots.extend(_Lot(until_ms, each) for each in found)
            fetched = sum(each.row_count for each in found)
            stock.count += fetched
            if fetched < count:
                stock.pause_until_ms = self._clock.now_ms() + _PAUSE_MS
