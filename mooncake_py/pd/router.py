"""Which instances serve a request: by the prefix they have, and by the load they carry.

The router remembers which pages it sent to which prefill instance (`pages_max` each, least recently
used out), because that is where they are likely cached. An instance's cost is the pages it must
compute for this request plus those queued there already; the cheapest wins, so a long shared prefix
beats an idle instance, and a queue longer than the prefix saves beats the prefix; among equals the
one with the fewest pages wins, so that every cache fills. Decode instances
carry what they hold until the request is finished; the least loaded wins.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from mooncake_py.errors import PeerUnreachable, UsageError
from mooncake_py.pd.protocol import ROOM_MAX


@dataclass(frozen=True, slots=True)
class Route:
    """Where one request goes. `cached` leading pages are likely at the prefill instance."""

    room: int
    prefill: str
    decode: str
    pages: int
    cached: int


class _Prefill:
    def __init__(self) -> None:
        self.queued = 0  # pages to compute
        self.seen: OrderedDict[Hashable, None] = OrderedDict()


class Router:
    """Thread-safe; no call waits for anything but another short call."""

    def __init__(
        self, prefills: Iterable[str], decodes: Iterable[str], *, pages_max: int = 1 << 20
    ) -> None:
        if pages_max < 1:
            raise UsageError("pages_max is positive", got=pages_max)
        self._lock = threading.Lock()
        self._pages_max = pages_max
        self._prefills = {name: _Prefill() for name in prefills}
        self._decodes = dict.fromkeys(decodes, 0)  # pages held
        self._routes: dict[int, Route] = {}
        self._computing: set[int] = set()

    def route(self, pages: Sequence[Hashable]) -> Route:
        """For a prompt with these page hashes (each covers its whole prefix). PeerUnreachable: no
        instance of one kind is left."""
        with self._lock:
            if not self._prefills or not self._decodes:
                raise PeerUnreachable(
                    "no instance is left",
                    prefill=len(self._prefills), decode=len(self._decodes),
                    remedy="add one with `join`",
                )  # fmt: skip
            hits = {name: self._hit(known, pages) for name, known in self._prefills.items()}
            prefill = min(self._prefills, key=lambda name: self._cost(name, hits[name]))
            decode = min(self._decodes, key=self._decodes.__getitem__)
            room = secrets.randbelow(ROOM_MAX)
            while room in self._routes:
                room = secrets.randbelow(ROOM_MAX)
            route = Route(room, prefill, decode, len(pages), hits[prefill])
            self._routes[room] = route
            self._computing.add(room)
            self._prefills[prefill].queued += route.pages - route.cached
            self._decodes[decode] += route.pages
            self._remember(self._prefills[prefill], pages)
            return route

    def prefilled(self, route: Route) -> None:
        """Its prefill has ended, well or not. Twice is fine."""
        with self._lock:
            self._end_prefill(route)

    def finished(self, route: Route) -> None:
        """Its decoding has ended, well or not. Twice is fine."""
        with self._lock:
            self._end_prefill(route)
            if self._routes.pop(route.room, None) is not None and route.decode in self._decodes:
                self._decodes[route.decode] -= route.pages

    def join(self, *, prefill: str | None = None, decode: str | None = None) -> None:
        """A new or returned instance, with an empty cache."""
        with self._lock:
            if prefill is not None:
                self._prefills.setdefault(prefill, _Prefill())
            if decode is not None:
                self._decodes.setdefault(decode, 0)

    def leave(self, name: str) -> None:
        """Send nothing more there; what it has is forgotten."""
        with self._lock:
            self._prefills.pop(name, None)
            self._decodes.pop(name, None)
            for room, route in list(self._routes.items()):
                if name == route.decode:
                    self._end_prefill(route)
                    del self._routes[room]
                elif name == route.prefill:
                    self._computing.discard(room)

    def _end_prefill(self, route: Route) -> None:
        if route.room in self._computing:
            self._computing.discard(route.room)
            if route.prefill in self._prefills:
                self._prefills[route.prefill].queued -= route.pages - route.cached

    def _cost(self, name: str, hit: int) -> tuple[int, int]:
        """Pages ahead of it; among equals the one with the emptier cache."""
        known = self._prefills[name]
        return known.queued - hit, len(known.seen)

    @staticmethod
    def _hit(known: _Prefill, pages: Sequence[Hashable]) -> int:
        for count, page in enumerate(pages):
            if page not in known.seen:
                return count
        return len(pages)

    def _remember(self, known: _Prefill, pages: Sequence[Hashable]) -> None:
        for page in reversed(pages):  # the tail is forgotten before its prefix
            known.seen[page] = None
            known.seen.move_to_end(page)
        while len(known.seen) > self._pages_max:
            known.seen.popitem(last=False)
