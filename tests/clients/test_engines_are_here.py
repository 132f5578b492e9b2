"""Says out loud that the tests of this folder did not run, where the engines are not installed."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs ./dev clients")
def test_sglang_is_installed() -> None:
    assert importlib.util.find_spec("sglang.srt") is not None
