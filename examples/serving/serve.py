"""Four ways to serve a model with cached KV, on a small transformer with real logits.

    python examples/serving/serve.py ARCHITECTURE... [--requests N] [--trace FILE] [--kill WHAT]

    one     one process: device and host pages (L1, L2)
    gateway two replicas with caches of their own behind a gateway that knows prefixes
    shared  two replicas that share the store (L3), requests dealt in turn
    split   a prefill and a decode process; the pages move layer by layer
    split-shared  the same, and prefill keeps its pages in the store
    all     one after the other, side by side in one report

Every answer is compared with a run that has no cache: the logits behind the prompt, and those
behind the last generated token, must be equal bit for bit. `--kill` ends a process with SIGKILL
while it, or somebody who needs it, is in the middle of a request (replica, prefill, decode, node or
master, where there is one; "each": one after the other): answers stay right.

Prompts are the pages of a request trace (--trace FILE, a published one, of which whole
conversations are taken; or a generated one), a page of the trace standing for a page of the model.
`--picture FILE` draws the report.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

try:
    import torch
except ModuleNotFoundError:
    sys.exit(
        "serve.py: there is no torch in this environment. "
        "Remedy: pip install torch --index-url https://download.pytorch.org/whl/cpu"
    )

import report
from decoder import SHAPES
from report import Column
from service import ARCHITECTURES, Service, victims
from workload import Reference, prompts

from mooncake_py.hicache.kv_pages import LAYOUTS
from mooncake_py.hicache.tier_options import PREFETCH_POLICIES, WRITE_POLICIES
from mooncake_py.hicache.tier_picture import picture

MEASURED_PAGES = [2, 4, 8, 16, 32]


def serve(
    architecture: str, options: argparse.Namespace, work: list[list[int]], reference: Reference
) -> Column:
    kills = killings(architecture, options.kill, len(work))
    column = Column(architecture, len(work), sum(map(len, work)))
    settings: dict[str, Any] = {
        "attention": options.attention, "layout": options.layout, "device_pages": 96,
        "host_pages": 192, "transports": options.hand_over,
        "options": {
            "write_policy": options.write, "prefetch_policy": options.prefetch,
            "selective_hits": 1,
        },
    }  # fmt: skip
    with ExitStack() as stack:
        service = Service(architecture, settings, stack)
        for number, tokens in enumerate(work):
            victim = kills.get(number, "")
            got = service.answer(number, tokens, victim)
            if "error" in got:
                raise SystemExit(f"{architecture}, request {number}: {got['error']}")
            if victim and service.killed != victim:
                raise SystemExit(f"{architecture}, request {number}: no {victim} was killed")
            column.right += is_right(got, *reference.answer(tokens, service.split))
            column.first_s.append(got["first_s"])
            column.gaps_s += got["gaps_s"]
            if not kills:
                service.settle()
        column.add_reports(service.reports())
        if not kills:
            column.break_even = service.measure(MEASURED_PAGES)
    return column


def killings(architecture: str, kill: str, count: int) -> dict[int, str]:
    """Who dies at which request."""
    possible = victims(architecture)
    if kill == "each":
        return {(i + 1) * count // (len(possible) + 1): who for i, who in enumerate(possible)}
    if kill and kill not in possible:
        raise SystemExit(f"{architecture} has no {kill}, but: {', '.join(possible)}")
    return {count // 2: kill} if kill else {}


def is_right(
    got: dict[str, Any], logits: torch.Tensor, text: list[int], last: torch.Tensor
) -> bool:
    same = torch.equal(torch.tensor(got["logits"]), logits) and got["text"] == text
    return same and torch.equal(torch.tensor(got["last"]), last)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("architectures", nargs="+", choices=(*ARCHITECTURES, "all"))
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--trace", type=Path, help="a published trace")
    parser.add_argument(
        "--kill", default="", choices=("replica", "prefill", "decode", "node", "master", "each")
    )
    parser.add_argument("--attention", choices=tuple(SHAPES), default="gqa")
    parser.add_argument("--layout", choices=LAYOUTS, default="page_first", help="of the host pool")
    parser.add_argument("--write", choices=WRITE_POLICIES, default="write_through")
    parser.add_argument("--prefetch", choices=PREFETCH_POLICIES, default="timeout")
    parser.add_argument(
        "--hand-over", default="", metavar="TRANSPORTS",
        help='of split: "tcp", "shm", or for two joined ports "rdma:rxe0;rdma:rxe1"',
    )  # fmt: skip
    parser.add_argument("--picture", type=Path, help="an SVG file to write")
    return parser.parse_args()


def main() -> int:
    options = parse()
    names = ARCHITECTURES if "all" in options.architectures else options.architectures
    work = prompts(options.trace, options.requests)
    reference = Reference(options.attention)
    columns = [serve(name, options, work, reference) for name in names]
    tokens = sum(map(len, work))
    without = report.no_cache(len(work), tokens, reference.first_s, reference.gaps_s)
    print(report.table([without, *columns]))
    for column in columns:
        if column.break_even:
            print(report.break_even(column))
    if options.picture:
        drawn = [(column.name, column.numbers) for column in (without, *columns)]
        options.picture.write_text(picture(drawn))
    wrong = sum(column.requests - column.right for column in columns)
    total = len(columns) * len(work)
    print(f"{total - wrong} of {total} answers have the logits of the run without cache")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
