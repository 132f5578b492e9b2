"""The processes of one architecture, and how a request passes through them."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from decoder import PAGE
from workload import NEW_TOKENS

from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.pd import Bootstrap, Route, Router

ARCHITECTURES = ("one", "gateway", "shared", "split", "split-shared")
MARKS = {"node": "asked", "master": "asked"}  # where on its way the request is; else "layer"
TRIES = 3
REPLICA = Path(__file__).with_name("replica.py")


def victims(architecture: str) -> tuple[str, ...]:
    """What can be killed in it."""
    roles = ("prefill", "decode") if architecture.startswith("split") else ("replica",)
    return roles + (("node", "master") if "shared" in architecture else ())


class Process:
    """A replica; started again when it died."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.name = settings["name"]
        self.deaths = 0
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(REPLICA), json.dumps(self.settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ready(self) -> None:
        self.hear()

    def say(self, **words: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """BrokenPipeError: it died."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise BrokenPipeError(f"{self.name} died")
        said: dict[str, Any] = json.loads(line)
        return said

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def again(self) -> None:
        self.deaths += 1
        self.kill()
        self.close()
        self._start()
        self.ready()

    def close(self) -> None:
        """At the end of its input it ends by itself."""
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class Service:
    """settings: of every replica (see replica.py)."""

    def __init__(self, architecture: str, settings: dict[str, Any], stack: ExitStack) -> None:
        self.split = architecture.startswith("split")
        self.in_turn = architecture == "shared"
        self.cluster: Cluster | None = None
        self.killed = ""
        common = dict(settings)
        if "shared" in architecture:
            options = ClusterOptions(node_count=2, segment_bytes=128 << 20)
            self.cluster = stack.enter_context(Cluster(options))
            common["master"] = self.cluster.address
        if self.split:
            common["bootstrap"] = stack.enter_context(Bootstrap()).url
            roles = [("p0", "prefill"), ("d0", "decode")]
        else:
            roles = [(f"r{number}", "whole") for number in range(1 if architecture == "one" else 2)]
        transports = dict.fromkeys(dict(roles), settings["transports"])
        if ";" in settings["transports"]:  # one each: rdma ports that are joined by a cable
            transports = dict(zip(transports, settings["transports"].split(";"), strict=True))
        self.replicas = {
            name: Process(**common | {"name": name, "role": role, "transports": transports[name]})
            for name, role in roles
        }
        for replica in self.replicas.values():
            stack.callback(replica.close)
        for replica in self.replicas.values():
            replica.ready()
        prefills = [name for name, role in roles if role != "decode"]
        decodes = [name for name, role in roles if role == "decode"] or ["where it was prefilled"]
        self.router = Router(prefills, decodes)

    def answer(self, number: int, tokens: list[int], victim: str = "") -> dict[str, Any]:
        """A replica that dies is started again, empty, and the request is asked again; so it is
        when its partner of a hand-over has died. victim: killed while it is on its way."""
        for attempt in range(TRIES):
            route = self.router.route(
                [tuple(tokens[: at + PAGE]) for at in range(0, len(tokens), PAGE)]
            )
            try:
                said, dead = self._ask(number, tokens, route, "" if attempt else victim)
            finally:
                self.router.finished(route)
            for name in dead:
                self.router.leave(name)
                self.replicas[name].again()
                self.router.join(**{"decode" if name.startswith("d") else "prefill": name})
            if not dead:
                return said
        raise SystemExit(f"request {number} met a dead replica {TRIES} times")

    def _ask(
        self, number: int, tokens: list[int], route: Route, victim: str
    ) -> tuple[dict[str, Any], list[str]]:
        """The answer, and who died over it."""
        first = route.prefill
        if self.in_turn:
            names = list(self.replicas)
            first = names[number % len(names)]
        parts: dict[str, dict[str, Any]] = {}
        if self.split:
            parts[route.decode] = {
                "do": "decode", "tokens": tokens, "new": NEW_TOKENS, "room": route.room,
                "prefill": route.prefill,
            }  # fmt: skip
            parts[first] = {"do": "prefill", "tokens": tokens, "room": route.room}
        else:
            parts[first] = {"do": "serve", "tokens": tokens, "new": NEW_TOKENS}
        if victim:
            parts[first]["mark"] = MARKS.get(victim, "layer")
        said: dict[str, Any] = {}
        dead = []
        for name, words in parts.items():
            self.replicas[name].say(**words)
        for name in reversed(parts):
            try:
                heard = self.replicas[name].hear()
                if "mark" in heard:
                    self._kill(victim, route.decode if victim == "decode" else first)
                    if victim not in ("prefill", "replica"):
                        self.replicas[name].say(go="on")
                    heard = self.replicas[name].hear()
                said |= heard
            except BrokenPipeError:
                dead.append(name)
        return said, dead

    def _kill(self, victim: str, name: str) -> None:
        self.killed = victim
        if victim in ("node", "master"):
            assert self.cluster is not None
            (self.cluster.nodes[0] if victim == "node" else self.cluster.master).child.kill()
        else:
            self.replicas[name].kill()

    def settle(self) -> None:
        """As between two requests that do not follow at once: what was computed is stored."""
        for replica in self.replicas.values():
            replica.say(do="settle")
        for replica in self.replicas.values():
            replica.hear()

    def measure(self, pages: list[int]) -> list[list[float]]:
        """Fetching against computing (see replica.py); nothing without a store."""
        if self.cluster is None:
            return []
        first = next(iter(self.replicas.values()))
        first.say(do="measure", pages=pages)
        rows: list[list[float]] = first.hear().get("rows", [])
        return rows

    def reports(self) -> dict[str, dict[str, Any]]:
        for replica in self.replicas.values():
            replica.say(do="report")
        return {name: replica.hear() for name, replica in self.replicas.items()}
