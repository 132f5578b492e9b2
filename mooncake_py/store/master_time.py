"""The master's clock as a node may rely on it: never behind the truth.

A grant ends at a time on the master's clock. The node must never take a grant as running that has
ended, so it needs an upper bound of the master's time. A reply stamped T by the master was stamped
after the request left here; whatever passed here since then, the master's clock shows at most
T + that. (Clocks that tick at equal rates are assumed, equal times are not.)
"""

from __future__ import annotations

from mooncake_py.clock import Clock


class MasterTime:
    """Upper bound of the master's clock. One writer, many readers; assignment is atomic."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_ms: int | None = None

    def learnt(self, master_now_ms: int, asked_at_ms: int) -> None:
        """A reply said `master_now_ms`; its request left at `asked_at_ms` of our clock."""
        self._ahead_ms = master_now_ms - asked_at_ms

    def forget(self) -> None:
        """Another master, another clock: until it is learnt, no grant counts as running."""
        self._ahead_ms = None

    def latest_ms(self) -> int:
        """The master's clock shows at most this. Before the first reply: the end of time."""
        ahead = self._ahead_ms
        return (1 << 63) - 1 if ahead is None else self._clock.now_ms() + ahead
