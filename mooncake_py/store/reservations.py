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
from mooncake_py.master.client import MasterClient, Reservation

log = logging.getLogger(__name__)

LENGTHS_MAX = 32
COUNT_MIN, COUNT_MAX = 8, 512  # reservations of one length
BYTES_MAX = 32 << 20  # likewise; a longer batch goes the long way
_INTEREST_MS = 10_000  # two puts of one length within this time are worth a stock
_PAUSE_MS = 1_000  # after the master had none, or did not answer
_CALL_MS = 2_000


@dataclass(slots=True)
class _Stock:
    nbytes: int
    ready: deque[tuple[int, Reservation]] = field(default_factory=deque)  # usable until ms
    target: int = COUNT_MIN
    used_ms: int = 0
    pause_until_ms: int = 0
    filling: bool = False


def _most(nbytes: int) -> int:
    return max(1, BYTES_MAX // max(1, nbytes))


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

    def take(self, nbytes: int, count: int) -> list[Reservation] | None:
        """`count` of them, or None: there are not so many. Either way more are on their way, if
        that is worth it."""
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
            ready = stock.ready
            taken = [ready.popleft()[1] for _ in range(count)] if len(ready) >= count else None
            if again and not stock.filling and len(ready) < max(count, stock.target // 2):
                if taken is None and stock.target >= count:
                    stock.target = min(2 * stock.target, COUNT_MAX, _most(nbytes))
                stock.target = max(stock.target, count)
                self._refill(stock, now_ms)
        return taken

    def clear(self) -> None:
        """None is good any more: another master leads, or a node is gone."""
        with self._lock:
            for stock in self._stocks.values():
                stock.ready.clear()

    # --- under the lock ---

    def _begin(self, nbytes: int, count: int, now_ms: int) -> None:
        if len(self._stocks) >= LENGTHS_MAX:
            self._stocks.popitem(last=False)
        target = min(max(COUNT_MIN, count), _most(nbytes))
        self._stocks[nbytes] = _Stock(nbytes, target=target, used_ms=now_ms)

    @staticmethod
    def _drop_old(stock: _Stock, now_ms: int) -> None:
        before = len(stock.ready)
        while stock.ready and stock.ready[0][0] <= now_ms:
            stock.ready.popleft()
        if len(stock.ready) < before:
            stock.target = max(1, stock.target // 2)

    def _refill(self, stock: _Stock, now_ms: int) -> None:
        if now_ms < stock.pause_until_ms:
            return
        stock.filling = True
        self._stocks.move_to_end(stock.nbytes)
        try:
            self._executor.submit(self._fetch, stock, stock.target - len(stock.ready))
        except RuntimeError:
            return  # the client is being closed

    # --- in the background ---

    def _fetch(self, stock: _Stock, count: int) -> None:
        asked_ms = self._clock.now_ms()
        found: list[Reservation] = []
        lifetime_ms = 0
        try:
            found, lifetime_ms = self._master.reserve(
                self._tenant, stock.nbytes, count, host_id=self.host_id, timeout_ms=_CALL_MS
            )
        except MooncakeError as error:
            log.debug("no reservations: %s", error)
        until_ms = asked_ms + lifetime_ms * 3 // 4  # the rest is for the put itself
        with self._lock:
            stock.filling = False
            stock.ready.extend((until_ms, each) for each in found)
            if len(found) < count:
                stock.pause_until_ms = self._clock.now_ms() + _PAUSE_MS
