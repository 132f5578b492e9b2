"""A client process of a replay: reads its job from standard input, tells how it goes in lines.

    {"event": "progress", "done": 12}
    {"event": "phase", "tally": {...}}       one a phase, in order
    {"event": "failed", "cause": "..."}      instead of the rest

Run as `python -m mooncake_py.ops.worker`; `replay.py` is the other end.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import click

from mooncake_py.clock import stopwatch_ns
from mooncake_py.errors import MooncakeError
from mooncake_py.ops.pages import Pages
from mooncake_py.ops.session import Session, Tally
from mooncake_py.store.client import StoreClient

_PROGRESS_EVERY_NS = 100_000_000
TRANSPORTS = {"shm": ("shm",), "tcp": ("tcp",)}


@dataclass(frozen=True, slots=True)
class Phase:
    """Some prompts over one transport: `serve` as an engine would, or only `fetch`."""

    transport: str
    verb: str
    prompts: list[list[int]]


@dataclass(frozen=True, slots=True)
class Job:
    master: str
    page_bytes: int
    timeout_ms: int
    phases: list[Phase]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        fields: dict[str, Any] = json.loads(text)
        phases = [Phase(**phase) for phase in fields.pop("phases")]
        return Job(phases=phases, **fields)


def say(event: str, **fields: object) -> None:
    click.echo(json.dumps({"event": event} | fields))


def run(job: Job) -> None:
    pages = Pages(job.page_bytes)
    done = 0
    for phase in job.phases:
        transports = TRANSPORTS[phase.transport]
        with StoreClient(job.master, transports=transports, timeout_ms=job.timeout_ms) as store:
            session = Session(store, pages, Tally(transport=phase.transport))
            step = session.serve if phase.verb == "serve" else session.fetch
            said_ns = stopwatch_ns()
            for prompt in phase.prompts:
                step(prompt)
                done += 1
                if stopwatch_ns() - said_ns >= _PROGRESS_EVERY_NS:
                    said_ns = stopwatch_ns()
                    say("progress", done=done)
            say("progress", done=done)
            say("phase", tally=asdict(session.tally))


def main() -> None:
    try:
        run(Job.from_json(sys.stdin.read()))
    except MooncakeError as error:
        say("failed", cause=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
