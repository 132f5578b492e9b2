"""What happened to objects, for those who mirror the keys (routers, an index in shared memory).

Rules. Every object that becomes visible and every one that ends is an event with a sequence number;
numbers have no holes. The newest `events_max` are kept. Who asks for what comes after a number gets
it, or is told that there is a *gap*: that events after it are not kept any more, or that it comes
from another master. Then list the keys and go on from the number that came with the answer. Pure.
"""

from __future__ import annotations

from mooncake_py.errors import UsageError
from mooncake_py.master.commands import Applied, EventPage, Events, ObjectEvent, Refused
from mooncake_py.model import PART_MARK

STORED = "stored"


class EventLog:
    """A ring of the newest events."""

    __slots__ = ("_count_max", "_ring", "first", "next")

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._ring: list[ObjectEvent] = []
        self.first = 1  # sequence number of the oldest that is kept
        self.next = 1

    def begin(self, sequence: int) -> None:
        """Numbers from here on; nothing that came before is kept."""
        self._ring.clear()
        self.first = self.next = max(sequence, self.next)

    def add(self, what: str, tenant: str, key: bytes, generation: int) -> None:
        if not self._count_max or key[:1] == PART_MARK:
            return
        event = ObjectEvent(self.next, what, tenant, key, generation)
        if len(self._ring) < self._count_max:
            self._ring.append(event)
        else:
            self._ring[(self.next - self.first) % self._count_max] = event
        self.next += 1

    @property
    def oldest(self) -> int:
        return max(self.first, self.next - self._count_max)

    def page(self, after: int, limit: int) -> EventPage:
        gap = not self.oldest - 1 <= after < self.next
        start = self.oldest if gap else after + 1
        end = min(self.next, start + limit)
        events = [
            self._ring[(number - self.first) % self._count_max] for number in range(start, end)
        ]
        return EventPage(events, self.next - 1, gap)


def events(log: EventLog, command: Events) -> Applied:
    if command.limit < 1:
        return Applied(Refused(UsageError.code, "limit of a page of events must be at least 1"))
    return Applied(log.page(command.after, command.limit))
