"""Which nodes a master took for dead or doubtful although nobody had hurt them. Pure.

On a machine where one processor serves all processes, a node may not be heard for longer than a
master waits. It is *suspect* then, which the master says, and what only it holds is a miss until it
is heard again: that is promised, and no loss. Such a time excuses a miss where the machine is known
to be so slow (rounds over RDMA, in a guest). What the master says a node *lost* is never excused
here, and an object that is not there again when all is quiet is lost whatever was suspected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

from chaos_history import SECOND, Excuse

_LINE = re.compile(r"^(\S+Z) \w+ master\.node_log node (\w+) \(segment \d+\) (.*)$")


def suspicions(lines: Iterable[str], wall_ahead_ns: int, grace_ns: int) -> list[Excuse]:
    """lines: of all masters, in the order of their times. wall_ahead_ns: the wall clock minus the
    one that operations are timed by. grace_ns: how much earlier the first one may miss it, and how
    long some go on avoiding it. One that does not end is no excuse: its node was lost or hurt."""
    found: list[Excuse] = []
    since: dict[str, int] = {}
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        stamp, node, said = match.groups()
        now = int(datetime.fromisoformat(stamp).timestamp() * SECOND) - wall_ahead_ns
        if said.startswith("is suspect"):
            since.setdefault(node, now)
        elif (began := since.pop(node, None)) is not None and said == "is back":
            found.append(Excuse(node, began - grace_ns, now + grace_ns))
    return found
