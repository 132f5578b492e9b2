"""The documents name only what exists: commands, options, files, and the calls of their example."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tree import ROOT, files

from mooncake_py import StoreClient, errors
from mooncake_py.master.server import main as master
from mooncake_py.ops.cli import cli
from mooncake_py.store.node import main as node

README = (ROOT / "README.md").read_text()
DOCUMENTS = ("README.md", "ARCHITECTURE.md")
PROGRAMS = {"mooncake": cli, "mooncake-master": master, "mooncake-node": node}


def blocks(language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def command_lines() -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks("") for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", README)
    return [t for t in lines + inline if t.split()[:1] and t.split()[0] in {"./dev", *PROGRAMS}]


def test_the_two_commands_stand_at_the_top() -> None:
    assert [line.split("#")[0].strip() for line in next(blocks("")).splitlines()] == [
        "./dev up",
        "./dev test",
    ]


@pytest.mark.parametrize("text", command_lines())
def test_commands_in_the_readme_exist(text: str) -> None:
    program, *words = shlex.split(text)
    if program == "./dev":
        commands = runpy.run_path(str(ROOT / "dev"))["COMMANDS"]
        assert set(words[:1]) <= {*commands, "help"}
        return
    command: click.Command = PROGRAMS[program]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command = command.commands[words.pop(0)]
    options = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


def test_the_example_calls_what_exists() -> None:
    (example,) = blocks("python")
    calls = {
        node.func.attr
        for node in ast.walk(ast.parse(example))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "store"
    }
    assert calls == {"put", "get"}
    assert all(hasattr(StoreClient, call) for call in calls)
    assert len(example.splitlines()) <= 11


def test_errors_in_the_readme_exist() -> None:
    named = set(re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? \|", README, re.MULTILINE))
    names = {name for pair in named for name in pair if name}
    assert len(names) > 5
    assert all(issubclass(getattr(errors, name), errors.MooncakeError) for name in names)


def rooms() -> dict[str, set[str]]:
    """Folder -> the modules that the map names in it."""
    table = (ROOT / "ARCHITECTURE.md").read_text().split("\n## Rooms\n")[1].split("\n## ")[0]
    found: dict[str, set[str]] = {}
    folder = ""
    for name, _, modules in re.findall(r"^\| (.*?)\| (.*?) \| (.*) \|$", table, re.MULTILINE)[1:]:
        folder = name.strip(" `") or folder
        found.setdefault(folder, set()).update(modules.split())
    return found


def test_the_map_names_every_module_in_its_room() -> None:
    there: dict[str, set[str]] = {}
    for path in map(Path, files()):
        ours = path.parts[0] == "mooncake_py" and path.parent.name != "v1"  # which is generated
        if path.parts[:2] == ("native", "src") and len(path.parts) > 3:
            there.setdefault("native/src", set()).add(path.parts[2])
        elif ours and path.suffix == ".py" and path.stem != "__init__":
            there.setdefault(path.parent.name, set()).add(path.stem)
    assert there.keys() == rooms().keys()
    for folder, modules in rooms().items():
        assert there[folder] ^ modules == set(), f"ARCHITECTURE.md, Rooms, {folder}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_documents_name_exist(document: str) -> None:
    """A path in backticks is one of the tree's files or folders, or of the package's."""
    known = {"/".join(name.split("/")[:depth]) for name in files() for depth in range(1, 9)}
    known |= {name.removeprefix("mooncake_py/") for name in known}
    for text in re.findall(r"`([^`\n]+)`", (ROOT / document).read_text()):
        if re.fullmatch(r"[\w./-]+/[\w./-]*|[\w-]+\.(md|py|toml|h)", text) and "..." not in text:
            name = text.removeprefix("./").rstrip("/")
            assert name in known or name.split("/")[0] in {".venv", "dev", "page"}, text
