"""What bounds a hand-over."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_py.errors import UsageError


@dataclass(frozen=True, slots=True)
class HandOverSettings:
    """Times of one rank. A peer that is not heard for `silence_ms` is dead: its rooms fail. Both
    sides send a pulse each `pulse_ms` while they share rooms."""

    pulse_ms: int = 150
    silence_ms: int = 750  # found within a second, then
    call_ms: int = 5_000  # for an offer's or a last word's answer
    orphan_ms: int = 30_000  # an offer for a room that the prefill side does not open
    orphans_max: int = 4_096

    def __post_init__(self) -> None:
        if not 1 <= self.pulse_ms * 3 <= self.silence_ms:
            raise UsageError("silence_ms is at least three times pulse_ms, which is positive",
                             pulse_ms=self.pulse_ms, silence_ms=self.silence_ms)  # fmt: skip
        if min(self.call_ms, self.orphan_ms, self.orphans_max) < 1:
            raise UsageError("call_ms, orphan_ms and orphans_max are positive")
