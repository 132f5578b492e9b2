"""Extra config, environment, defaults: in that order, and nothing unknown."""

from __future__ import annotations

import pytest

from mooncake_py.errors import UsageError
from mooncake_py.hicache.settings import settings_of

SGLANG = {
    "backend_name": "mooncake_py", "module_path": "mooncake_py.hicache", "interface_v1": 1,
    "class_name": "HiCacheBackend", "allocator": "shm",
}  # fmt: skip


def test_the_extra_config_wins_over_the_environment_and_that_over_the_default() -> None:
    settings, origins = settings_of(
        {**SGLANG, "get_ms": "2s"},
        {"MOONCAKE_HICACHE_GET_MS": "1s", "MOONCAKE_HICACHE_PUT_MS": "1500"},
    )
    assert (settings.get_ms, settings.put_ms, settings.exists_ms) == (2_000, 1_500, 1_000)
    sources = {origin.name: origin.source for origin in origins}
    assert sources["get_ms"] == "option"
    assert sources["put_ms"] == "environment"
    assert sources["exists_ms"] == "default"


def test_names_of_upstreams_backend_are_understood() -> None:
    settings, _ = settings_of(
        {"master_server_address": "h:1", "tenant_id": "t", "extra_backend_tag": "x"}, {}
    )
    assert (settings.master, settings.tenant, settings.tag) == ("h:1", "t", "x")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"mster": "h:1"}, "did you mean 'master'"),
        ({"colour": "blue"}, "names no setting"),
        ({"get_ms": [1]}, "no int"),
        ({"get_ms": True}, "no int"),
        ({"get_ms": "soon"}, "no duration"),
        ({"get_ms": 0}, "at least 1"),
        ({"put_ms": 20_000}, "waits that long"),
        ({"master": "nowhere"}, "no address"),
        ({"tag": "a", "extra_backend_tag": "b"}, "twice"),
        ({"transports": " , "}, "at least one"),
    ],
)
def test_what_cannot_be_right_is_refused_with_its_name(extra: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings_of(extra, {})


def test_a_variable_that_names_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="MOONCAKE_HICACHE_MSTER"):
        settings_of({}, {"MOONCAKE_HICACHE_MSTER": "h:1"})
