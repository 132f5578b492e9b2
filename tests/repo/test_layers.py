"""The layer rule and the one-door rules (ARCHITECTURE.md, "What may import what")."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from tree import ROOT, begins_with, imports, python_files, syntax

# Modules of `master` that talk to the world. All others decide, and are pure.
MASTER_EDGES = {
    "__init__", "metadata", "embedded", "etcd", "etcd_session", "etcd_store", "service", "server",
    "client", "link", "doors", "inbox", "listen", "owner", "process", "quick", "reign", "route",
    "leader", "standby", "unsealer", "writer",
}  # fmt: skip
# With the packed keys of the catalog: a native data structure that waits for nothing.
GROUND = (
    "mooncake_py.errors", "mooncake_py.model", "mooncake_py.config", "mooncake_py._native.keys",
)  # fmt: skip
IMPURE = (
    "grpc", "asyncio", "threading", "time", "random", "socket", "os", "subprocess", "concurrent",
    "multiprocessing", "sqlite3", "secrets", "uuid", "datetime", "selectors",
)  # fmt: skip

# What only some files may import -> those files (prefixes of their paths).
DOORS = {
    "cffi": ("mooncake_py/_native/",),
    "mooncake_py._native._mooncake": ("mooncake_py/_native/",),
    "google.protobuf": ("mooncake_py/wire/",),
    "mooncake_py.wire.v1": ("mooncake_py/wire/",),
    "sqlite3": ("mooncake_py/master/embedded.py", "mooncake_py/store/disk_"),
    "etcd3": ("mooncake_py/master/etcd.py",),
    "sglang": ("mooncake_py/hicache/",),
    "time": ("mooncake_py/clock.py",),
    "datetime": ("mooncake_py/clock.py", "mooncake_py/log.py"),
}


def pure_master_files() -> list[str]:
    return [
        name
        for name in python_files("mooncake_py/master/")
        if name.rsplit("/", 1)[1].removesuffix(".py") not in MASTER_EDGES
    ]


def test_imports_point_down_only() -> None:
    """The contracts stand in pyproject.toml, [tool.importlinter]."""
    program = "from importlinter.cli import lint_imports_command as c; c()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", pure_master_files())
def test_deciding_modules_of_the_master_are_pure(name: str) -> None:
    pure = {path.removesuffix(".py").replace("/", ".") for path in pure_master_files()}
    for dotted in imports(name):
        assert not begins_with(dotted, *IMPURE), f"{name} imports {dotted}"
        if begins_with(dotted, "mooncake_py"):
            assert begins_with(dotted, *GROUND, *pure), f"{name} imports {dotted}, which is an edge"


@pytest.mark.parametrize("package", DOORS)
def test_there_is_one_door_to(package: str) -> None:
    through_the_wall = [
        name
        for name in python_files("mooncake_py/", "benchmarks/", "examples/")
        if not name.startswith(DOORS[package])
        and not (package in ("time", "datetime") and not name.startswith("mooncake_py/"))
        and any(begins_with(dotted, package) for dotted in imports(name))
    ]
    assert through_the_wall == []


def test_only_config_reads_the_environment() -> None:
    readers = [
        f"{name}:{node.lineno}"
        for name in python_files("mooncake_py/")
        if name != "mooncake_py/config.py"
        for node in ast.walk(syntax(name))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"))
        or (isinstance(node, ast.keyword) and node.arg in ("envvar", "auto_envvar_prefix"))
    ]
    assert readers == []


def test_native_layers_point_down_only() -> None:
    """base <- memory, transport <- engine <- node, master, client; nothing includes upward or
    sideways."""
    below = {
        "base": {"base"},
        "memory": {"base", "memory"},
        "transport": {"base", "memory", "transport"},
        "engine": {"base", "memory", "transport", "engine"},
        "node": {"base", "node"},  # the rest by the C ABI
        "master": {"base", "master"},
        "client": {"base", "client"},
    }
    wrong = []
    for room, allowed in below.items():
        for path in sorted((ROOT / "native/src" / room).rglob("*")):
            if path.suffix in (".cc", ".h"):
                for number, line in enumerate(path.read_text().splitlines(), 1):
                    target = line.partition('#include "')[2].partition('"')[0].split("/")[0]
                    if target in below and target not in allowed:
                        wrong.append(f"{path.relative_to(ROOT)}:{number}: {line}")
    assert wrong == []
