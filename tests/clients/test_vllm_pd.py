"""vLLM's MooncakeConnector from prefill to decode, with its schedulers, over mooncake_py.compat."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import vllm_pd
import vllm_scheduler as vllm
from daemons import wait_until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """vLLM waits 30 s for the other side's word and keeps blocks that nobody fetches for 480 s; it
    is told to be quicker, because that is not what is looked at here."""
    monkeypatch.setenv("VLLM_MOONCAKE_CONNECTOR_TIMEOUT", "2")
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "4")
    with ExitStack() as opened:
        yield opened


def engine(stack: ExitStack, role: str) -> vllm_pd.Engine:
    made = vllm_pd.Engine(role)
    stack.callback(made.close)
    return made


class Child:
    """An engine of this role in a process of its own."""

    def __init__(self, stack: ExitStack, role: str) -> None:
        names = (str(ROOT), str(HERE), str(ROOT / "compat"))
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "vllm_pd.py"), role], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(names)},
        )  # fmt: skip
        stack.callback(self.kill)

    @cached_property
    def where(self) -> Any:
        """Where it is reached; waits until it is."""
        return self.line()

    def line(self) -> Any:
        assert self.process.stdout is not None
        while not (text := self.process.stdout.readline()).startswith("{"):
            assert text, "the engine has ended"
        return json.loads(text)

    def ask(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def prompts(count: int) -> dict[str, list[int]]:
    choose = random.Random(3)
    return {
        f"r{i}": [choose.randrange(50_000) for _ in range(choose.randrange(20, 120))]
        for i in range(count)
    }


def both(*engines: vllm_pd.Engine) -> None:
    if not any([each.step() for each in engines]):
        vllm.wait_ms(1)


def ended(made: vllm_pd.Engine, name: str) -> bool:
    return bool(vllm.RequestStatus.is_finished(made.requests[name].status))


def test_f68_f26_what_one_vllm_has_computed_another_goes_on_from(stack: ExitStack) -> None:
    first, second = engine(stack, "kv_producer"), engine(stack, "kv_consumer")
    assert type(first.transfers).__module__ == "mooncake_py.compat.engine"
    free = first.free_blocks
    wanted = prompts(6)
    for name, prompt in wanted.items():
        first.prefill(name, prompt)
        second.decode(name, prompt, 5, first.where)
    deadline = time.monotonic() + 30
    while not all(ended(second, name) for name in wanted):
        both(first, second)
        assert time.monotonic() < deadline
    for name, prompt in wanted.items():
        assert list(second.requests[name].output_token_ids) == vllm.answer(prompt, 5)
        assert second.computed[name] <= 6, "the prompt came over, but for its last token"

    def released() -> bool:
        first.step()
        return first.free_blocks == free and not first.scheduler.has_requests()

    wait_until(released, 10_000)


def test_f68_a53_what_the_prefill_side_of_vllm_cannot_send_is_computed_by_the_other(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes that fail, at random, and a prefill side that is not there any more."""
    first, second = engine(stack, "kv_producer"), engine(stack, "kv_consumer")
    write, choose = type(first.transfers).batch_transfer_sync_write, random.Random(1)
    failed: list[bool] = []

    def unlucky(self: Any, *arguments: Any) -> int:
        vllm.wait_ms(choose.random() * 20)
        failed.append(choose.random() < 0.5)
        return -1 if failed[-1] else int(write(self, *arguments))

    monkeypatch.setattr(type(first.transfers), "batch_transfer_sync_write", unlucky)
    wanted = prompts(8)
    deadline = time.monotonic() + 40
    for name, prompt in wanted.items():
        first.prefill(name, prompt)
        second.decode(name, prompt, 5, first.where)
        while not ended(second, name):
            both(first, second)
            assert time.monotonic() < deadline
        assert list(second.requests[name].output_token_ids) == vllm.answer(prompt, 5)
    assert True in failed
    assert False in failed
    gone = {**first.where, "remote_bootstrap_addr": "http://127.0.0.1:9", "remote_engine_id": "x"}
    prompt = wanted["r0"]
    second.scheduler.reset_prefix_cache()
    second.decode("gone", prompt, 4, gone)
    start = time.monotonic()
    assert second.run("gone") == [vllm.answer(prompt, 4)]
    assert second.computed["gone"] >= len(prompt)
    assert time.monotonic() - start < 20


def test_f68_a53_a_decode_side_of_vllm_that_dies_frees_the_prefill_side(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed when the first byte is about to be written into its memory."""
    first, second = engine(stack, "kv_producer"), Child(stack, "kv_consumer")
    assert second.where
    free = first.free_blocks
    (name, prompt) = next(iter(prompts(1).items()))
    write = type(first.transfers).batch_transfer_sync_write
    codes: list[int] = []
    took_s: list[float] = []

    def killed(self: Any, *arguments: Any) -> int:
        second.kill()
        start = time.monotonic()
        codes.append(write(self, *arguments))
        took_s.append(time.monotonic() - start)
        return codes[-1]

    monkeypatch.setattr(type(first.transfers), "batch_transfer_sync_write", killed)
    first.prefill(name, prompt)
    second.ask("decode", name=name, prompt=prompt, tokens=4, where=first.where)

    def released() -> bool:
        first.step()
        return bool(codes) and first.free_blocks == free

    wait_until(released, 30_000)
    assert codes == [-1]
    assert took_s[0] < 8
    monkeypatch.undo()
    third = engine(stack, "kv_consumer")
    first.prefill("again", prompt)
    third.decode("again", prompt, 4, first.where)
    while not ended(third, "again"):
        both(first, third)
    assert list(third.requests["again"].output_token_ids) == vllm.answer(prompt, 4)


def test_f68_a53_a_prefill_side_of_vllm_that_dies_costs_the_decode_side_a_computation(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed after a hand-over, with the next one asked of it: the other side waits for as
    long as it is told (and a minute more), computes the prompt, and takes from a new one."""
    first, third = Child(stack, "kv_producer"), Child(stack, "kv_producer")
    second = engine(stack, "kv_consumer")
    (one, prompt), (two, other) = list(prompts(2).items())
    first.ask("prefill", name=one, prompt=prompt)
    second.decode(one, prompt, 4, first.where)
    assert second.run(one) == [vllm.answer(prompt, 4)]
    assert second.computed[one] <= 5, "the prompt came over"
    puller = type(second.worker.connector_worker)
    build, asked = puller._build_pull_metadata, []

    def build_and_tell(self: Any, *arguments: Any, **named: Any) -> Any:
        asked.append(arguments)
        return build(self, *arguments, **named)

    monkeypatch.setattr(puller, "_build_pull_metadata", build_and_tell)
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "-57")  # and a minute: three seconds
    second.decode(two, other, 4, first.where)
    wait_until(lambda: (second.step(), bool(asked))[1], 10_000)
    first.kill()
    start = time.monotonic()
    assert second.run(two) == [vllm.answer(other, 4)]
    assert second.computed[two] >= len(other), "it was computed here"
    assert time.monotonic() - start < 20
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "4")
    third.ask("prefill", name="again", prompt=prompt)
    second.scheduler.reset_prefix_cache()
    second.decode("again", prompt, 4, third.where)
    assert second.run("again") == [vllm.answer(prompt, 4)]
    assert second.computed["again"] <= 5
