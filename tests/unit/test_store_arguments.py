"""What callers pass in by mistake is refused in words, before anything happens."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_py.errors import UsageError
from mooncake_py.store.arguments import TIMEOUT_MAX_MS, check_timeout, key_names, text_bytes


@pytest.mark.parametrize("keys", ["abc", b"abc", "", [b"abc"], [None], [""], ["\ud800"]])
def test_c07_keys_that_are_none_are_refused(keys: Any) -> None:
    """One str is no list of keys: it would put every letter."""
    with pytest.raises(UsageError, match="key"):
        key_names(keys)


@pytest.mark.parametrize("timeout_ms", [0, -1, float("nan"), "5", None, 10**30, TIMEOUT_MAX_MS + 1])
def test_c07_timeouts_that_are_none_are_refused(timeout_ms: Any) -> None:
    with pytest.raises(UsageError, match="timeout_ms"):
        check_timeout(timeout_ms)


def test_longest_and_shortest_timeout_are_accepted() -> None:
    check_timeout(1)
    check_timeout(TIMEOUT_MAX_MS)


@pytest.mark.parametrize("text", [None, 5, b"bytes", "\ud800"])
def test_c07_texts_that_are_none_are_refused(text: Any) -> None:
    with pytest.raises(UsageError, match="prefix"):
        text_bytes("prefix", text)
