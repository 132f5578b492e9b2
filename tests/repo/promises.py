"""Which promise (promises.toml) has a test. `./dev trace [--missing]` prints it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"^(?:test_)?((?:[af]\d\d_)+)")


def promises() -> dict[str, str]:
    """Number -> what is promised."""
    table = tomllib.loads((ROOT / "tests/repo/promises.toml").read_text())
    return table["features"] | table["requirements"]


def required() -> list[str]:
    return tomllib.loads((ROOT / "tests/repo/promises.toml").read_text())["required"]


def covered() -> dict[str, list[str]]:
    """Number -> tests that carry it, as `path::name`, in Python and in native code."""
    found: dict[str, list[str]] = {}
    for path, name in [*_python_tests(), *_native_tests()]:
        match = _NAME.match(name.lower())
        for number in re.findall(r"[af]\d\d", match.group(1)) if match else ():
            found.setdefault(number.upper(), []).append(f"{path.relative_to(ROOT)}::{name}")
    return found


def _python_tests() -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
                "test_"
            ):
                yield path, node.name


def _native_tests() -> Iterator[tuple[Path, str]]:
    """Names of the native tests: any identifier `test_...` that is defined there."""
    for path in sorted((ROOT / "native").glob("test/**/*.cc")):
        for name in re.findall(r"\b(test_[a-z0-9_]+)\s*\(\s*\)\s*{", path.read_text()):
            yield path, name


def main() -> None:
    tests = covered()
    only_missing = sys.argv[1:] == ["--missing"]
    for number, title in sorted(promises().items()):
        names = tests.get(number, [])
        if names and only_missing:
            continue
        mark = f"{len(names):3} test{'s' if len(names) != 1 else ' '}" if names else "       -"
        print(f"{number} {mark}  {title}")
        if names and not only_missing:
            print("".join(f"{'':15}{name}\n" for name in names), end="")
    print(f"{sum(n in tests for n in promises())} of {len(promises())} promises have a test")


if __name__ == "__main__":
    main()
