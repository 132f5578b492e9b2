"""Request traces: what an engine was asked, as one JSON object a line.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}

`timestamp` is in ms, lengths are in tokens, and `hash_ids` name the pages of the prompt from its
beginning on. An equal id means equal tokens *and* equal pages before it, so ids form chains and a
cached page is of use only when all pages before it are cached too.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from mooncake_py.errors import UsageError

PAGE_TOKENS = 512  # of the published traces
_FIELDS = ("timestamp", "input_length", "output_length")
_ID_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `hash_ids` may be empty (a prompt shorter than a page)."""

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """The first `limit` requests of the file (None: all). Blank lines are passed over.

    A file that cannot be read, a line that is not such an object, or a trace without any request
    is a UsageError that begins with `file:line`.
    """
    requests: list[Request] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if line.strip():
                    requests.append(_parse(line, f"{path}:{number}"))
    except OSError as error:
        cause = f"{path}: {error.strerror or error}"
        raise UsageError(cause, remedy="name a readable file") from None
    if not requests:
        raise UsageError(f"{path}:1: the trace holds no request", remedy="name another file")
    return requests


def _parse(line: bytes, where: str) -> Request:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise _malformed(where, f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise _malformed(where, "not a JSON object")
    for name in _FIELDS:
        if not _is_count(value.get(name)):
            raise _malformed(where, f"{name!r} must be a whole number of at least 0")
    ids = value.get("hash_ids")
    if not isinstance(ids, list) or not all(_is_count(each) for each in ids):
        raise _malformed(where, "'hash_ids' must be a list of whole numbers of at least 0")
    return Request(value["timestamp"], value["input_length"], value["output_length"], tuple(ids))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _ID_MAX


def _malformed(where: str, what: str) -> UsageError:
    fields = ", ".join(_FIELDS)
    return UsageError(f"{where}: {what}", remedy=f"a line is an object with {fields}, hash_ids")


def generate_trace(count: int, seed: int = 1) -> list[Request]:
    """`count` requests of conversations that share a few system prompts and take turns.

    A turn's prompt is everything said before plus some new pages, which is what makes a prefix
    cache worth having. The same `count` and `seed` give the same trace everywhere.
    """
    draw = random.Random(seed)
    fresh = iter(range(1 << 62))
    systems = [tuple(next(fresh) for _ in range(draw.randint(2, 6))) for _ in range(4)]
    talks: list[tuple[int, ...]] = []
    requests = []
    timestamp_ms = 0
    for _ in range(count):
        timestamp_ms += draw.randint(0, 400)
        if not talks or draw.random() < 0.25:
            talks.append(draw.choice(systems))
        # Recent conversations go on more often than old ones.
        at = len(talks) - 1 - min(int(draw.expovariate(1 / 6)), len(talks) - 1)
        talks[at] += tuple(next(fresh) for _ in range(draw.randint(1, 8)))
        ids = talks[at]
        tokens = len(ids) * PAGE_TOKENS - draw.randrange(PAGE_TOKENS)
        requests.append(Request(timestamp_ms, tokens, draw.randint(20, 600), ids))
        if len(ids) > 96:  # the user is done
            talks.pop(at)
    return requests
