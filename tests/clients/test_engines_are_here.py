"""Says out loud that the tests of this folder did not run, where the engines are not installed."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.mark.parametrize("name", ["sglang", "lmcache", "vllm"])
def test_the_engine_is_installed(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip("needs ./dev clients")
