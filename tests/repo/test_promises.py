"""Every promise that must have a test has one (`./dev trace` lists all)."""

from __future__ import annotations

from promises import covered, promises, required


def test_required_promises_have_a_test() -> None:
    tests = covered()
    missing = {number: promises()[number] for number in required() if number not in tests}
    assert missing == {}


def test_tests_name_only_promises_that_exist() -> None:
    assert set(covered()) <= set(promises())
