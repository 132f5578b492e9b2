"""The commands of a guide, as a stranger would type them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

DEPLOY = Path(__file__).parents[2] / "deploy"


def blocks(name: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", (DEPLOY / name).read_text(), re.MULTILINE | re.DOTALL)


def commands(name: str) -> list[list[str]]:
    """Every command of every block, in words; files that are written by `cat` are left out."""
    found = []
    for block in blocks(name):
        text = re.sub(r"^cat > .*?^(JSON|YAML)\n", "", block, flags=re.MULTILINE | re.DOTALL)
        found += [words for line in _lines(text) if (words := shlex.split(line, comments=True))]
    return found


def _lines(text: str) -> list[str]:
    """Lines with what belongs to them: those that end in a backslash, or within quotes."""
    done, held = [], ""
    for line in text.splitlines():
        held += re.sub(r"(^|\s)# .*", "", line) + "\n"
        if held.endswith("\\\n"):
            held = held[:-2] + " "
        elif held.count("'") % 2 == 0:
            done.append(held)
            held = ""
    return done


def files(name: str) -> dict[str, str]:
    """What the guide writes into files by `cat > FILE <<'...'`."""
    found = {}
    for block in blocks(name):
        for file, mark, text in re.findall(
            r"^cat > (\S+) <<'(\w+)'\n(.*?)^\2$", block, re.MULTILINE | re.DOTALL
        ):
            del mark
            found[file] = text
    return found


def launched(name: str, *words: str) -> list[list[str]]:
    """The arguments of every command that has these words in a row, after them."""
    found = []
    for command in commands(name):
        for at in range(len(command) - len(words) + 1):
            if tuple(command[at : at + len(words)]) == words:
                found.append(command[at + len(words) :])
    return found
