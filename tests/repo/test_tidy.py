"""Habits that a test holds: no stray files, no machine's paths, no banned calls, sizes in view."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch

from tree import GENERATED, ROOT, files, python_files, syntax

ALLOWED = (
    ".gitignore", "MANIFEST.in", "pyproject.toml", "setup.py", "dev", ".ci/run", "LICENSE",
    "README.md", "ARCHITECTURE.md", "CHANGES/*.md", "design/*.md", "design/*.svg",
    "mooncake_py/*.py", "mooncake_py/*.pyi", "mooncake_py/py.typed",
    "native/abi/*.h", "native/include/*.h", "native/src/*.h", "native/src/*.cc",
    "native/test/*.cc", "native/test/*.h", "native/test/run.sh",
    "native/bench/*.cc", "native/README.md", "native/python/*.c", "tests/native/*.c",
    "proto/*.proto", "proto/generate.py",
    "compat/pyproject.toml", "compat/*.py",
    "deploy/*", "tests/*.py", "tests/repo/promises.toml", "tests/*/sentences.toml",
    "benchmarks/*.py", "examples/*.py",
)  # fmt: skip
FILE_MAX_BYTES = 100_000
FILE_MAX_LINES = 500
TEST_MAX_LINES = 700
FUNCTION_MAX_LINES = 60
# Files and functions that are larger, with the size they have. They may shrink; a new one is
# an argument to have in review.
LARGER: dict[str, int] = {}


def test_there_are_no_stray_files() -> None:
    stray = [name for name in files() if not any(fnmatch(name, pattern) for pattern in ALLOWED)]
    assert stray == []


def test_files_are_text_of_a_sane_size() -> None:
    for name in files():
        content = (ROOT / name).read_bytes()
        assert b"\0" not in content, f"{name} is not text"
        if not name.startswith(GENERATED):
            assert len(content) <= FILE_MAX_BYTES, f"{name} has {len(content)} bytes"
        assert not content or content.endswith(b"\n"), f"{name} does not end with a newline"


def test_no_path_of_somebodys_machine_is_in_the_tree() -> None:
    roots = ("ro" + "ot/", "ho" + "me/[a-z]", "Us" + "ers/", "wo" + "rk/", "tmp/w" + "t")
    places = "|".join("/" + root for root in roots)
    pattern = re.compile(rf"(?<![\w.])(?:{places})")
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in files()
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def called(name: str) -> list[tuple[str, int]]:
    """(dotted name of what is called, line)"""
    return [
        (ast.unparse(node.func), node.lineno)
        for node in ast.walk(syntax(name))
        if isinstance(node, ast.Call)
    ]


def test_no_test_sleeps() -> None:
    """Wait for the condition, with a deadline, or move the clock; never for time to pass."""
    sleeps = [
        f"{name}:{line}"
        for name in python_files("tests/")
        for call, line in called(name)
        if call in ("time.sleep", "sleep")
    ]
    assert sleeps == []


def test_the_library_does_not_print() -> None:
    """Logs go through logging; what the command line tools say goes through click or rich."""
    prints = [
        f"{name}:{line}"
        for name in python_files("mooncake_py/")
        for call, line in called(name)
        if call in ("print", "breakpoint", "sys.stdout.write")
    ]
    assert prints == []


def test_nothing_is_left_for_later() -> None:
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    found = [
        f"{name}:{number}"
        for name in files()
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []


def sizes() -> dict[str, int]:
    """Whatever is beyond its limit -> its size."""
    large = {}
    for name in files():
        if name.endswith((".py", ".cc", ".h")) and not name.startswith(GENERATED):
            lines = len((ROOT / name).read_text().splitlines())
            of_tests = not {"test", "tests"}.isdisjoint(name.split("/")[:2])
            if lines > (TEST_MAX_LINES if of_tests else FILE_MAX_LINES):
                large[name] = lines
    for name in python_files("mooncake_py/", "tests/", "benchmarks/", "examples/", "setup.py"):
        for node in ast.walk(syntax(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_MAX_LINES:
                    large[f"{name}::{node.name}"] = lines
    return large


def test_sizes_are_a_ratchet() -> None:
    """Complexity, parameters and line length are ruff's part of this."""
    assert sizes() == LARGER, "adjust LARGER down when something shrank; argue when it grew"


METHODS_MAX = {"StoreClient": 15, "TransferEngine": 9}


def test_public_methods_stay_few() -> None:
    for name in python_files("mooncake_py/store/", "mooncake_py/transfer/"):
        for cls in syntax(name).body:
            if isinstance(cls, ast.ClassDef) and cls.name in METHODS_MAX:
                public = [
                    node.name
                    for node in cls.body
                    if isinstance(node, ast.FunctionDef)
                    and not node.name.startswith("_")
                    and not any("property" in ast.unparse(d) for d in node.decorator_list)
                ]
                assert len(set(public)) <= METHODS_MAX[cls.name], (name, public)  # overloads once
