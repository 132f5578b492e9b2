"""Four ways to serve a model with cached KV, on a small transformer with real logits.

    python examples/serving/serve.py ARCHITECTURE [--requests N] [--trace FILE] [--kill WHAT]

    one     one process: device and host pages (L1, L2)
    gateway two replicas with caches of their own behind a gateway that knows prefixes
    shared  two replicas that share the store (L3), requests dealt in turn
    split   a prefill and a decode process; the pages move layer by layer
    split-shared  the same, and prefill keeps its pages in the store

Every answer is compared with a run that has no cache: the logits behind the prompt, and those
behind the last generated token, must be equal bit for bit. `--kill` ends a process in the middle
with SIGKILL (replica, node or master, where there is one): answers stay right.

Prompts are the pages of a request trace (--trace FILE, or a generated one), a page of the trace
standing for a page of the model.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from decoder import PAGE, SHAPE, Decoder, pages_of

from mooncake_py.hicache.kv_pages import KvPages
from mooncake_py.ops.cluster import Cluster, ClusterOptions
from mooncake_py.ops.trace import PAGE_TOKENS, generate_trace, read_trace
from mooncake_py.pd import Bootstrap, Router

PROMPT_PAGES_MAX = 40
NEW_TOKENS = 4
ARCHITECTURES = ("one", "gateway", "shared", "split", "split-shared")
REPLICA = Path(__file__).with_name("replica.py")


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Byte tokens: equal pages of the trace are equal bytes."""
    trace = (
        read_trace(options.trace, options.requests)
        if options.trace
        else generate_trace(options.requests, seed=3)
    )
    found = []
    for request in trace:
        ids = request.hash_ids[:PROMPT_PAGES_MAX] or (0,)
        tokens = [byte for each in ids for byte in random.Random(each).randbytes(PAGE)]
        spare = (-request.input_length % PAGE_TOKENS) * PAGE // PAGE_TOKENS
        found.append(tokens[: len(tokens) - spare] or tokens[:1])
    return found


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
        self.hear()

    def say(self, **words: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
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
        self._start()

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)


class Reference:
    """No cache: every prompt is computed."""

    def __init__(self) -> None:
        self.model = Decoder()
        self.pages = range(PROMPT_PAGES_MAX + pages_of(NEW_TOKENS) + 1)
        self.pool = KvPages(SHAPE, len(self.pages))
        self.first_s: list[float] = []

    def answer(self, tokens: list[int], split: bool) -> tuple[Any, list[int], Any]:
        began = time.perf_counter()
        logits = self.model.prefill(self.pool, self.pages, tokens, 0)
        self.first_s.append(time.perf_counter() - began)
        first, text = logits, list(tokens)
        if split:  # the decode side begins with the prompt's last token
            logits = self.model.decode(self.pool, self.pages, tokens[-1], len(tokens) - 1)
        for _ in range(NEW_TOKENS):
            text.append(int(logits.argmax()))
            logits = self.model.decode(self.pool, self.pages, text[-1], len(text) - 1)
        return first, text, logits


class Service:
    """The processes of one architecture."""

    def __init__(self, architecture: str, stack: ExitStack) -> None:
        self.split = architecture.startswith("split")
        self.cluster: Cluster | None = None
        common: dict[str, Any] = {"device_pages": 96, "host_pages": 192}
        if "shared" in architecture:
            options = ClusterOptions(node_count=2, segment_bytes=128 << 20)
            self.cluster = stack.enter_context(Cluster(options))
            common["master"] = self.cluster.address
        if self.split:
            url = stack.enter_context(Bootstrap()).url
            roles = [("p0", "prefill"), ("d0", "decode")]
            common["bootstrap"] = url
        else:
            count = 1 if architecture == "one" else 2
            roles = [(f"r{number}", "whole") for number in range(count)]
        self.replicas = {name: Process(name=name, role=role, **common) for name, role in roles}
        for replica in self.replicas.values():
            stack.callback(replica.close)
        prefills = [name for name, role in roles if role != "decode"]
        decodes = [name for name, role in roles if role == "decode"] or ["where it was prefilled"]
        self.router = Router(prefills, decodes)
        self.in_turn = architecture == "shared"

    def answer(self, number: int, tokens: list[int]) -> dict[str, Any]:
        """A replica that dies is started again, empty, and asked again."""
        for _ in range(3):
            try:
                return self._ask(number, tokens)
            except BrokenPipeError:
                for replica in self.replicas.values():
                    if replica._process.poll() is not None or self.split:
                        replica.again()
        raise SystemExit("a replica died three times over one request")

    def _ask(self, number: int, tokens: list[int]) -> dict[str, Any]:
        route = self.router.route(
            [tuple(tokens[: at + PAGE]) for at in range(0, len(tokens), PAGE)]
        )
        try:
            if not self.split:
                names = list(self.replicas)
                name = names[number % len(names)] if self.in_turn else route.prefill
                self.replicas[name].say(do="serve", tokens=tokens, new=NEW_TOKENS)
                return self.replicas[name].hear()
            prefill, decode = self.replicas[route.prefill], self.replicas[route.decode]
            decode.say(
                do="decode", tokens=tokens, new=NEW_TOKENS, room=route.room, prefill=route.prefill
            )
            prefill.say(do="prefill", tokens=tokens, room=route.room)
            computed = prefill.hear()
            return computed | decode.hear()
        finally:
            self.router.finished(route)

    def kill(self, what: str) -> None:
        if what == "replica":
            next(iter(self.replicas.values())).kill()
        elif self.cluster is None:
            raise SystemExit(f"there is no {what} in this architecture")
        else:
            (self.cluster.nodes[0] if what == "node" else self.cluster.master).child.kill()


def run(options: argparse.Namespace) -> int:
    work = prompts(options)
    reference = Reference()
    first_s: list[float] = []
    gaps_s: list[float] = []
    tiers = {"L1": 0, "L2": 0, "L3": 0}
    wrong = 0
    with ExitStack() as stack:
        service = Service(options.architecture, stack)
        for number, tokens in enumerate(work):
            if options.kill and number == len(work) // 2:
                service.kill(options.kill)
            got = service.answer(number, tokens)
            if "error" in got:
                raise SystemExit(f"request {number}: {got['error']}")
            logits, text, last = reference.answer(tokens, service.split)
            same = torch.equal(torch.tensor(got["logits"]), logits) and got["text"] == text
            wrong += not (same and torch.equal(torch.tensor(got["last"]), last))
            first_s.append(got["first_s"])
            gaps_s += got["gaps_s"]
            for tier, pages in got["tiers"].items():
                tiers[tier] += pages
        reports = {}
        for name, replica in service.replicas.items():
            replica.say(do="report")
            reports[name] = replica.hear()
    pages = sum(pages_of(len(tokens)) for tokens in work)
    print(f"\n{options.architecture}: {len(work)} requests, {pages} pages of {PAGE} tokens")
    print(f"  {'':22}{'with cache':>12}{'without':>12}")
    without = statistics.median(reference.first_s)
    print(f"  {'time to first token':22}{ms(statistics.median(first_s))}{ms(without)}   (p50)")
    print(f"  {'between tokens':22}{ms(statistics.median(gaps_s))}{ms(statistics.median(gaps_s))}")
    for tier, count in tiers.items():
        print(f"  {'pages from ' + tier:22}{count:12}{0:12}")
    print(f"  {'pages computed':22}{pages - sum(tiers.values()):12}{pages:12}")
    for name, report in reports.items():
        for row, label, value in report["rows"]:
            if row in ("moved_bytes_total", "evicted_pages_total", "dropped_pages_total"):
                print(f"  {name} {row.removesuffix('_total'):14} {label:28}{value:14,.0f}")
    print_break_even(reports)
    print(f"  {len(work) - wrong} of {len(work)} answers have the logits of the run without cache")
    return 1 if wrong else 0


def print_break_even(reports: dict[str, Any]) -> None:
    """Fetching against computing, by what the replicas measured a page."""
    for name, report in reports.items():
        if report.get("fetch_s") and report.get("compute_s"):
            print(f"  {name}: prefix of pages   fetch from L3     compute")
            for count in (4, 16, 64):
                fetch, compute = count * report["fetch_s"], count * report["compute_s"]
                print(f"      {count:20}{ms(fetch)}{ms(compute)}")


def ms(seconds: float) -> str:
    return f"{seconds * 1000:9.2f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("architecture", choices=ARCHITECTURES)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--kill", choices=("replica", "node", "master"))
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
