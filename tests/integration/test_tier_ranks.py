"""Ranks of tensor parallelism as real processes, with torch.distributed (gloo) between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 4  # a page
Settings = tuple[int, int, int]  # device pages, host pages, seed


class RankProcess:
    def __init__(self, rank: int, count: int, meeting: Path, settings: Settings) -> None:
        program = str(Path(__file__).with_name("tier_rank.py"))
        arguments = [str(each) for each in (rank, count, meeting, *settings)]
        self.process = subprocess.Popen(
            [sys.executable, program, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip

    def say(self, words: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the rank died"
        said: dict[str, Any] = json.loads(line)
        return said

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def ranks(folder: Path, *settings: Settings) -> Iterator[list[RankProcess]]:
    with ExitStack() as stack:
        found = []
        for rank, each in enumerate(settings):
            found.append(RankProcess(rank, len(settings), folder / "meeting", each))
            stack.callback(found[-1].end)
        for process in found:
            process.hear()
        yield found


def everyone(processes: list[RankProcess], words: str) -> list[dict[str, Any]]:
    for process in processes:
        process.say(words)
    return [process.hear() for process in processes]


def one(answers: list[dict[str, Any]], name: str) -> Any:
    first, *others = [answer[name] for answer in answers]
    assert all(other == first for other in others), answers
    return first


def test_a63_two_ranks_agree_on_the_prefix_that_both_have(tmp_path: Path) -> None:
    with ranks(tmp_path, (16, 32, 1), (12, 20, 2)) as processes:
        assert one(everyone(processes, "serve 1 6"), "cached") == 0
        assert one(everyone(processes, "serve 1 6"), "cached") == 6
        processes[1].say("forget")
        processes[1].hear()
        assert one(everyone(processes, "serve 1 6"), "cached") == 0, "one rank has nothing"
        assert one(everyone(processes, "serve 1 6"), "cached") == 6

        capacity = everyone(processes, "capacity")
        assert one(capacity, "tokens") == [12 * TOKENS, 20 * TOKENS], "of the smaller, not the sum"
        text = one(capacity, "text")
        assert "not added up" in text
        assert f"rank 0: device {16 * TOKENS} tokens" in text
        assert f"rank 1: device {12 * TOKENS} tokens" in text

        found = everyone(processes, "pressure 150")
        met = {tuple(each) for each in one(found, "cached")}  # ranks never differ, nor hang
        assert len(met) > 5
        assert any(waited > loaded for waited, loaded in met), "a rank lacked room for its load"


def test_a63_a_rank_that_dies_ends_the_others_calls(tmp_path: Path) -> None:
    with ranks(tmp_path, (16, 32, 1), (16, 32, 1)) as (alive, dies):
        everyone([alive, dies], "serve 1 4")
        alive.say("serve 1 4")
        dies.process.kill()
        assert alive.hear() == {"error": "PeerUnreachable"}
