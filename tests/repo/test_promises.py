"""Every promise that must have a test has one (`./dev trace` lists all)."""

from __future__ import annotations

import re
import tomllib

import pytest
from promises import ROOT, covered, promises, required


def test_required_promises_have_a_test() -> None:
    tests = covered()
    missing = {number: promises()[number] for number in required() if number not in tests}
    assert missing == {}


def test_tests_name_only_promises_that_exist() -> None:
    assert set(covered()) <= set(promises())


@pytest.mark.parametrize("room", ["clients", "conformance", "integration", "rdma", "sim", "unit"])
def test_every_sentence_has_tests_that_exist(room: str) -> None:
    tests = ROOT / "tests"
    table = tomllib.loads((tests / room / "sentences.toml").read_text())
    battery = "".join(
        (tests / "conformance" / name).read_text()
        for name in ("transport_battery.py", "transport_lifetimes.py")
    )
    missing = [
        f"{sentence}: {test}"
        for part in table.values()
        for sentence, held in part.items()
        for test in held or ["nothing"]
        if not _exists(test, battery)
    ]
    assert missing == []


def _exists(test: str, battery: str) -> bool:
    file, _, name = test.partition("::")
    if test.startswith("Battery."):
        text, name = battery, test.removeprefix("Battery.")
    elif file.endswith(".cc"):
        return (ROOT / file).exists()
    else:
        path = ROOT / "tests" / file
        text = path.read_text() if path.exists() else ""
    return re.search(rf"def {name}\(", text) is not None
