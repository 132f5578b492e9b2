"""What users hold on to: exported names, errors, and what the documents say."""

from __future__ import annotations

import inspect

import pytest

import mooncake_py
from mooncake_py import errors

EXPORTED = {
    "AsyncStoreClient",
    "EngineOptions",
    "ObjectInfo",
    "ReplicaPolicy",
    "StoreClient",
    "TransferEngine",
}


def error_classes() -> list[type[errors.MooncakeError]]:
    return [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.MooncakeError)
    ]


def test_exported_names_are_the_list() -> None:
    assert set(getattr(mooncake_py, "__all__", ())) == EXPORTED


def test_error_codes_are_unique() -> None:
    with_code = [cls for cls in error_classes() if "code" in vars(cls) and cls.code != 50]
    assert len({cls.code for cls in with_code}) == len(with_code)
    assert {cls.code for cls in with_code} == set(errors.BY_CODE) - {50}
    assert all(0 < cls.code < 256 for cls in with_code)  # one byte a key on the wire


@pytest.mark.parametrize("cls", [c for c in error_classes() if "code" in vars(c)])
def test_every_error_has_a_remedy(cls: type[errors.MooncakeError]) -> None:
    if cls is errors.MooncakeError:
        return
    error = cls("cause", key="k")
    assert cls.remedy
    assert str(error) == f"cause [key='k']. Remedy: {cls.remedy}"


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
def test_every_code_leads_back_to_its_error(code: int) -> None:
    for number in (code, -code):
        error = errors.error_of(number, "cause", key="k")
        assert error.code == code
        assert error.context == {"key": "k"}
