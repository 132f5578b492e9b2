"""What callers pass in, checked before anything else happens."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_py.errors import UsageError
from mooncake_py.model import KEY_MAX_BYTES, OBJECT_MAX_BYTES
from mooncake_py.store.targets import Range

TIMEOUT_MAX_MS = 1_000_000_000  # eleven days; a deadline must fit the native core's integers


def key_names(keys: Sequence[str]) -> list[bytes]:
    """UTF-8 of the keys. Raises UsageError for one that is none, before anything else happens."""
    if isinstance(keys, str | bytes):  # each of its letters would be a key
        raise UsageError("keys are a list of str, not one", keys=keys[:64])
    try:
        names = list(map(str.encode, keys))
    except (TypeError, UnicodeEncodeError):
        return [key_bytes(key) for key in keys]  # says which one and why
    if names and not (all(names) and max(map(len, names)) <= KEY_MAX_BYTES):
        return [key_bytes(key) for key in keys]
    return names


def key_bytes(key: str) -> bytes:
    if not isinstance(key, str):
        raise UsageError(f"a key is a str, not {type(key).__name__}", key=key)
    try:
        name = key.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the key is no valid text: {error}", key=key) from None
    if not 1 <= len(name) <= KEY_MAX_BYTES:
        raise UsageError(
            f"a key has 1 to {KEY_MAX_BYTES} bytes of UTF-8", nbytes=len(name), key=key[:64]
        )
    return name


def check_timeout(timeout_ms: int) -> None:
    if not isinstance(timeout_ms, int | float) or not 0 < timeout_ms <= TIMEOUT_MAX_MS:
        raise UsageError(
            f"timeout_ms is a number of milliseconds, from 1 to {TIMEOUT_MAX_MS}", got=timeout_ms
        )


def text_bytes(what: str, text: str) -> bytes:
    """UTF-8 of a text that may be empty. UsageError: it is none."""
    try:
        return text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise UsageError(f"{what} is no valid text: {error}") from None


def check_ranges(keys: Sequence[str], ranges: Sequence[Range]) -> None:
    if len(ranges) != len(keys):
        raise UsageError("one range a key", keys=len(keys), ranges=len(ranges))
    for start, nbytes in ranges:
        if not 0 <= start <= OBJECT_MAX_BYTES or not 0 <= (nbytes or 0) <= OBJECT_MAX_BYTES:
            raise UsageError("a range is (offset, bytes) of an object", range=(start, nbytes))
