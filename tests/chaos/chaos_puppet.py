"""A client process that does what it is told, on a host of the network.

    python -m tests.chaos.chaos_puppet MASTERS TIMEOUT_MS

Standard input: a JSON list [verb, key, ...] a line. Standard output: [outcome, milliseconds] a
line; the outcome is the value's text, "ok", or the name of the error.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from mooncake_py import StoreClient
from mooncake_py.errors import MooncakeError
from mooncake_py.model import ReplicaPolicy

MODULE = "tests.chaos.chaos_inside"


class Puppet:
    """The other end: calls it."""

    def __init__(
        self, namespace: str, masters: str, timeout_ms: int = 3_000, clock: str = "-"
    ) -> None:
        command = [sys.executable, "-m", MODULE, namespace, clock, "tests.chaos.chaos_puppet"]
        self._process = subprocess.Popen(
            [*command, masters, str(timeout_ms)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, *words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def answer(self) -> tuple[str, float]:
        assert self._process.stdout is not None
        outcome, took_ms = json.loads(self._process.stdout.readline())
        return outcome, took_ms

    def ask(self, *words: Any) -> str:
        self.send(*words)
        return self.answer()[0]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def put(
    store: StoreClient, key: str, value: str, nodes: tuple[str, ...] = (), ttl_ms: int = 0
) -> str:
    policy = ReplicaPolicy(
        replica_count=max(1, len(nodes)), preferred_nodes=tuple(nodes), ttl_ms=ttl_ms
    )
    store.put(key, value.encode(), policy=policy)
    return "ok"


def get(store: StoreClient, key: str) -> str:
    value = store.get(key)
    assert isinstance(value, bytes)
    return value.decode()


def remove(store: StoreClient, key: str) -> str:
    outcome = store.remove(key, force=True)
    if isinstance(outcome, MooncakeError):
        raise outcome
    return "ok"


def main() -> None:
    masters, timeout_ms = sys.argv[1:]
    verbs: dict[str, Callable[..., str]] = {"put": put, "get": get, "remove": remove}
    store: StoreClient | None = None
    for line in sys.stdin:
        verb, *words = json.loads(line)
        began = time.monotonic()
        try:
            store = store or StoreClient(masters, timeout_ms=int(timeout_ms))
            outcome = verbs[verb](store, *words)
        except MooncakeError as error:
            outcome = type(error).__name__
        took_ms = (time.monotonic() - began) * 1000
        sys.stdout.write(json.dumps([outcome, took_ms]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
