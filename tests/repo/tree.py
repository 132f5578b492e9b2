"""The files of the repository, for the tests of the repository itself."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("mooncake_py/wire/v1/",)


@cache
def files() -> tuple[str, ...]:
    """Every file that is or would be committed, relative to the root."""
    if not (ROOT / ".git").exists():  # an unpacked archive: all that is there
        hidden = (".venv", ".git")
        return tuple(
            str(path.relative_to(ROOT))
            for path in sorted(ROOT.rglob("*"))
            if path.is_file() and not any(part in hidden for part in path.parts)
        )
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return tuple(sorted({n for n in listed.stdout.split("\0") if n and (ROOT / n).exists()}))


def python_files(*below: str) -> Iterator[str]:
    """Hand-written Python files under the given folders."""
    for name in files():
        if name.endswith(".py") and name.startswith(below) and not name.startswith(GENERATED):
            yield name


@cache
def syntax(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(), filename=name)


def imports(name: str) -> Iterator[str]:
    """Dotted names that a file imports, wherever in it; `from a import b` gives `a.b`."""
    for node in ast.walk(syntax(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def begins_with(dotted: str, *packages: str) -> bool:
    return any(dotted == package or dotted.startswith(package + ".") for package in packages)
