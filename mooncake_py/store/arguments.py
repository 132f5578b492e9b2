"""What callers pass in, checked before anything else happens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from numbers import Integral
from typing import Any

from mooncake_py.errors import UsageError
from mooncake_py.model import (
    COST_MAX,
    DEFAULT_POLICY,
    KEY_MAX_BYTES,
    OBJECT_MAX_BYTES,
    Group,
    ReplicaPolicy,
)
from mooncake_py.store.targets import Range

TIMEOUT_MAX_MS = 1_000_000_000  # eleven days; a deadline must fit the native core's integers
PERIOD_MAX_MS = 1 << 50  # likewise, with the time of day added
COUNT_MAX = (1 << 32) - 1


def key_names(keys: Sequence[str]) -> list[bytes]:
    """UTF-8 of the keys. Raises UsageError for one that is none, before anything else happens."""
    if isinstance(keys, str | bytes):  # each of its letters would be a key
        raise UsageError("keys are a list of str, not one", keys=keys[:64])
    try:
        names = list(map(str.encode, keys))
    except (TypeError, UnicodeEncodeError):
        return [key_bytes(key) for key in key_list(keys)]  # says which one and why
    if names and not (all(names) and max(map(len, names)) <= KEY_MAX_BYTES):
        return [key_bytes(key) for key in keys]
    return names


def key_list(keys: Sequence[str]) -> list[str]:
    """The keys as a list of their own. UsageError: they are none."""
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        kind = type(keys).__name__
        raise UsageError(f"keys are a list of str, not {kind}", remedy="pass a list of str")
    return list(keys)


def one_or_many(keys: str | Sequence[str]) -> tuple[list[str], list[bytes]]:
    """The keys as a list, and their UTF-8. Raises UsageError."""
    texts = [keys] if isinstance(keys, str) else key_list(keys)
    return texts, key_names(texts)


def check_paired(what: str, keys: Sequence[str], values: Sequence[Any]) -> None:
    """UsageError: it is not one a key."""
    if not isinstance(values, Sized):
        raise UsageError(
            f"one {what} a key, so they are a list, not {type(values).__name__}",
            remedy=f"pass a list with one {what} for every key",
        )
    if len(values) != len(keys):
        raise UsageError(f"one {what} a key", keys=len(keys), values=len(values))


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


def check_timeout(timeout_ms: int, name: str = "timeout_ms") -> None:
    if not isinstance(timeout_ms, int | float) or not 0 < timeout_ms <= TIMEOUT_MAX_MS:
        raise UsageError(
            f"{name} is a number of milliseconds, from 1 to {TIMEOUT_MAX_MS}", got=timeout_ms
        )


def text_bytes(what: str, text: str) -> bytes:
    """UTF-8 of a text that may be empty. UsageError: it is none."""
    if not isinstance(text, str):
        raise UsageError(
            f"{what} is a str, not {type(text).__name__}", remedy="pass a str", got=text
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is no valid text: {error}") from None


def check_ranges(keys: Sequence[str], ranges: Sequence[Range]) -> None:
    check_paired("range", keys, ranges)
    for each in ranges:
        if not _is_range(each):
            raise UsageError(
                "a range is (offset, bytes) of an object",
                remedy="pass two whole numbers that are not negative; None as the second: the rest",
                range=each,
            )


def _is_range(given: Any) -> bool:
    try:
        start, nbytes = given
    except (TypeError, ValueError):
        return False
    return _is_whole(start, 0, OBJECT_MAX_BYTES) and (
        nbytes is None or _is_whole(nbytes, 0, OBJECT_MAX_BYTES)
    )


def group_numbers(tenant: str, keys: Sequence[str], groups: Sequence[int | Group]) -> Sequence[int]:
    """The number of each key's group, 0 for none; empty when none was given."""
    if not isinstance(groups, Sequence) or (groups and len(groups) != len(keys)):
        raise UsageError("one group a key, or none at all", keys=len(keys), groups=groups)
    numbers: dict[int | Group, int] = {}
    for group in groups:
        if isinstance(group, Group) and isinstance(group.name, str) and group.name:
            if group not in numbers:
                numbers[group] = group.number(tenant)
        elif _is_whole(group, 0, COUNT_MAX):
            numbers[group] = int(group)  # type: ignore[arg-type]  # a whole number
        else:
            raise UsageError(
                f"a group is a whole number up to {COUNT_MAX}, or a Group with a name",
                remedy="pass 0 for a key that is in none",
                got=group,
            )
    return [numbers[group] for group in groups]


def check_sizes(sizes: Sequence[int]) -> None:
    if max(sizes) > OBJECT_MAX_BYTES:
        raise UsageError(f"an object has at most {OBJECT_MAX_BYTES} bytes", nbytes=max(sizes))


def check_policy(policy: ReplicaPolicy) -> None:
    """UsageError: a policy that no cluster could follow."""
    if policy is DEFAULT_POLICY:
        return
    if not isinstance(policy, ReplicaPolicy):
        raise UsageError(
            f"policy is a ReplicaPolicy, not {type(policy).__name__}",
            remedy="pass mooncake_py.ReplicaPolicy(replica_count=2), for example",
        )
    if not _is_whole(policy.replica_count, 1, COUNT_MAX):
        raise UsageError(
            "replica_count is a whole number, at least 1",
            remedy="pass 1 for one replica",
            got=policy.replica_count,
        )
    if not _is_whole(policy.recompute_cost, 1, COST_MAX):
        raise UsageError(
            f"recompute_cost is a whole number, 1 to {COST_MAX}",
            remedy="pass 1 for what is as dear as usual, 2 for twice as dear",
            got=policy.recompute_cost,
        )
    if policy.expires_with:
        key_bytes(policy.expires_with)
    for name in ("soft_pin_ms", "ttl_ms"):
        check_period(name, getattr(policy, name))
    for name in ("strict", "hard_pin"):
        if getattr(policy, name) not in (False, True):
            raise UsageError(
                f"{name} is a bool", remedy="pass True or False", got=getattr(policy, name)
            )
    names = policy.preferred_nodes
    named = isinstance(names, tuple) and all(isinstance(each, str) for each in names)
    if not named:
        raise UsageError(
            "preferred_nodes is a tuple of names of nodes",
            remedy='pass ("node-1",) for one; `mooncake status` lists the names',
            got=names,
        )


def check_period(name: str, given: int) -> None:
    if not _is_whole(given, 0, PERIOD_MAX_MS):
        raise UsageError(
            f"{name} is a whole number of milliseconds",
            remedy="pass 0 for none, or a number above it",
            got=given,
        )


def check_pin(soft_pin_ms: int | None, hard_pin: bool) -> None:
    if soft_pin_ms is None and not hard_pin:
        remedy = "pass soft_pin_ms=60_000 or hard_pin=True, or soft_pin_ms=0 to end the pin"
        raise UsageError("say how to pin", remedy=remedy)
    check_period("soft_pin_ms", soft_pin_ms or 0)


def _is_whole(number: Any, least: int, most: int) -> bool:
    whole = type(number) is int or isinstance(number, Integral)  # the first is the quick one
    return whole and least <= number <= most
