"""What the two sides of a hand-over tell each other, as messages of the transfer engine.

    decode                              prefill
      Offer (request)   ------------>           my pages wait in this region for these heads
                        <------------  Part     written, and in place
                        <------------  Resume (request)   what do you have? -> masks of positions
                        <------------  Done (request)     every part was written
      Abort             <----------->  Abort    do not go on; the reason
      Pulse             <----------->  Pulse    these rooms are alive here

A room is a number that the router gives a request. An offer is a random number that one decode rank
gives one life of a room: what names another offer belongs to an earlier life and is ignored.
Messages come from other processes: whatever does not parse raises UsageError and changes nothing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_py.errors import MooncakeError, UsageError, VersionMismatch, error_of
from mooncake_py.pd.layout import KvLayout

VERSION = 1
OFFER, PART, RESUME, DONE, ABORT, PULSE = range(0x7064_0001, 0x7064_0007)
ROOM_MAX = (1 << 63) - 1
PAGES_MAX = 1 << 24
CAUSE_MAX = 1_000

_OFFER_FIELDS: dict[str, int | None] = {
    "room": ROOM_MAX,
    "offer": ROOM_MAX,
    "region": (1 << 32) - 1,
    "pages": PAGES_MAX,
    "address": None,
}
_ID = struct.Struct("<QQI")  # room, offer, rank of the sender of the message
_PART = struct.Struct("<QQIIII")  # ..., layer, first position, count


@dataclass(frozen=True, slots=True)
class Offer:
    """From a decode rank: where one room's pages of all layers may be written."""

    room: int
    offer: int
    layout: KvLayout  # of the decode rank
    region: int  # of its engine; pieces of all layers and planes, pages in room order
    pages: int
    address: str  # of its engine

    def encode(self) -> bytes:
        fields = {name: getattr(self, name) for name in _OFFER_FIELDS}
        return json.dumps({"version": VERSION, "layout": self.layout.to_json(), **fields}).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Offer:
        found = _json(payload)
        if found.pop("version", None) != VERSION:
            raise VersionMismatch("the other side speaks another version", ours=VERSION)
        layout = KvLayout.from_json(found.pop("layout", None))
        if set(found) != set(_OFFER_FIELDS):
            raise UsageError("this is no offer")
        for name, most in _OFFER_FIELDS.items():
            value = found[name]
            if most is None:
                if not isinstance(value, str) or len(value) > 512:
                    raise UsageError("an offer has an address")
            elif type(value) is not int or not 0 <= value <= most:
                raise UsageError(f"{name} of an offer is from 0 to {most}", got=value)
        if found["pages"] == 0:
            raise UsageError("an offer has pages")
        return cls(layout=layout, **found)


@dataclass(frozen=True, slots=True)
class Part:
    """From a prefill rank: these positions of a layer are in place; or only names the room."""

    room: int
    offer: int
    rank: int
    layer: int = 0
    first: int = 0
    count: int = 0

    def encode(self) -> bytes:
        return _PART.pack(self.room, self.offer, self.rank, self.layer, self.first, self.count)

    @classmethod
    def decode(cls, payload: bytes) -> Part:
        return cls(*_unpack(_PART, payload))


def encode_answer(error: MooncakeError | None, payload: bytes = b"") -> bytes:
    """A reply: code of errors.py, then the payload, or the cause in words."""
    if error is None:
        return struct.pack("<I", 0) + payload
    words = str(type(error)(error.cause, remedy="", **error.context))  # a remedy is added there
    return struct.pack("<I", type(error).code) + words.encode()[:CAUSE_MAX]


def decode_answer(reply: bytes, **context: Any) -> bytes:
    """The payload. Raises the other side's error."""
    if len(reply) < 4:
        raise UsageError("the other side's answer is none of a hand-over", **context)
    code = int.from_bytes(reply[:4], "little")
    if code:
        raise error_of(code, reply[4:].decode(errors="replace"), **context)
    return reply[4:]


def encode_masks(masks: Sequence[int], pages: int) -> bytes:
    """One mask of positions a layer."""
    size = (pages + 7) // 8
    return b"".join(mask.to_bytes(size, "little") for mask in masks)


def decode_masks(payload: bytes, layers: int, pages: int) -> list[int]:
    size = (pages + 7) // 8
    if len(payload) != layers * size:
        raise UsageError("masks of another size", got=len(payload), expected=layers * size)
    return [
        int.from_bytes(payload[at : at + size], "little") for at in range(0, len(payload), size)
    ]


def encode_abort(room: int, offer: int, rank: int, cause: str) -> bytes:
    return _ID.pack(room, offer, rank) + cause.encode()[:CAUSE_MAX]


def decode_abort(payload: bytes) -> tuple[int, int, int, str]:
    room, offer, rank = _unpack(_ID, payload[: _ID.size])
    return room, offer, rank, payload[_ID.size :][:CAUSE_MAX].decode(errors="replace")


def encode_pulse(signs: Iterable[tuple[int, int, int]]) -> bytes:
    """(room, offer, rank of the sender) each."""
    return b"".join(_ID.pack(*sign) for sign in signs)


def decode_pulse(payload: bytes) -> list[tuple[int, int, int]]:
    if len(payload) % _ID.size:
        raise UsageError("a pulse of a broken length", got=len(payload))
    return [(room, offer, rank) for room, offer, rank in _ID.iter_unpack(payload)]


def _unpack(form: struct.Struct, payload: bytes) -> tuple[Any, ...]:
    if len(payload) != form.size:
        raise UsageError("a message of a wrong length", got=len(payload), expected=form.size)
    return form.unpack(payload)


def _json(payload: bytes) -> dict[str, Any]:
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"a message that is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError("a message that is no JSON object")
    return found
