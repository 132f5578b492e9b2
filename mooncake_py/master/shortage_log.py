"""What an operator reads about puts without room: at most one line of the log in ten seconds."""

from __future__ import annotations

import logging

from mooncake_py.errors import OutOfSpace
from mooncake_py.master.commands import Granted, PutStart
from mooncake_py.master.membership import Membership
from mooncake_py.model import EXTENT_ALIGN_BYTES

log = logging.getLogger(__name__)

PERIOD_MS = 10_000


class ShortageLog:
    """Owner thread only."""

    def __init__(self) -> None:
        self._next_ms = 0
        self._untold = 0  # objects that found none since the last line

    def look(self, command: PutStart, granted: Granted, members: Membership, now_ms: int) -> None:
        """Log what found no room, and how much there is."""
        short = [
            length
            for length, code in zip(command.lengths, granted.status, strict=True)
            if code == OutOfSpace.code
        ]
        self._untold += len(short)
        if not short or now_ms < self._next_ms:
            return
        allocators = [each.allocator for each in members.placeable]
        log.warning(
            "no room for an object of %d bytes: %d bytes are free, in the largest piece %d, on %d "
            "segments that take objects; %d objects found none since the last such line. Remedy: "
            "add a node, or let leases and pins end",
            max(short),
            EXTENT_ALIGN_BYTES * sum(each.free for each in allocators),
            EXTENT_ALIGN_BYTES * max((each.largest for each in allocators), default=0),
            len(allocators),
            self._untold,
        )
        self._untold = 0
        self._next_ms = now_ms + PERIOD_MS
