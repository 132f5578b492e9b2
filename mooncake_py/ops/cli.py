"""`mooncake`: look into a cluster, put and get by hand, replay requests.

Exit codes: 0 success, 1 failure, 2 wrong usage, 3 no such object or node, 130 interrupted. With
--json the answer is one JSON value on standard output; errors are one line on standard error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from mooncake_py.config import size_bytes
from mooncake_py.errors import MooncakeError, ObjectNotFound, UsageError
from mooncake_py.master.commands import CopyObjects, DrainInfo, SetQuota
from mooncake_py.master.tenant import POLICIES
from mooncake_py.model import RELEASE
from mooncake_py.ops import drain as draining
from mooncake_py.ops import quota as quotas
from mooncake_py.ops.doctor import examine
from mooncake_py.ops.replay import ReplayOptions, replay
from mooncake_py.ops.report import as_dict, render
from mooncake_py.ops.sizes import size_text
from mooncake_py.ops.status import cluster_status
from mooncake_py.store.client import StoreClient

EXIT_FAILURE, EXIT_USAGE, EXIT_ABSENT, EXIT_INTERRUPTED = 1, 2, 3, 130
TRANSPORTS = {"shm": ("shm",), "tcp": ("tcp",), "both": ("shm", "tcp")}


def size(text: str) -> int:
    """4096, 256KiB, 1GiB."""
    try:
        return size_bytes(text)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


master_option = click.option(
    "--master", default="127.0.0.1:50051", show_default=True, help="host:port of mooncake-master"
)
timeout_option = click.option(
    "--timeout-ms", default=10_000, show_default=True, type=click.IntRange(1), help="of each call"
)
json_option = click.option("--json", "as_json", is_flag=True, help="answer in JSON")
tenant_option = click.option("--tenant", default="default", show_default=True, help="whose keys")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(RELEASE, package_name="mooncake_py", prog_name="mooncake")
def cli() -> None:
    """Tools for a mooncake_py cluster."""


@cli.command()
@click.argument("key")
@click.argument("source", metavar="[FILE]", type=click.File("rb"), default="-")
@tenant_option
@master_option
@timeout_option
@json_option
def put(
    key: str, source: IO[bytes], tenant: str, master: str, timeout_ms: int, as_json: bool
) -> None:
    """Store FILE (default: standard input) under KEY."""
    try:
        value = source.read()
    except OSError as error:
        raise OSError(error.errno, error.strerror, source.name) from None
    with StoreClient(master, tenant=tenant, timeout_ms=timeout_ms) as store:
        store.put(key, value)
    answer(as_json, {"key": key, "nbytes": len(value)}, f"{key}: {size_text(len(value))}")


@cli.command()
@click.argument("key")
@click.argument("target", metavar="[FILE]", default="-")
@tenant_option
@master_option
@timeout_option
def get(key: str, target: str, tenant: str, master: str, timeout_ms: int) -> None:
    """Write the object under KEY to FILE (default: standard output)."""
    with StoreClient(master, tenant=tenant, timeout_ms=timeout_ms) as store:
        value = store.get(key)
    assert isinstance(value, bytes)
    try:
        if target == "-":
            sys.stdout.buffer.write(value)
            sys.stdout.buffer.flush()
        else:
            Path(target).write_bytes(value)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = "standard output" if target == "-" else target
        raise OSError(error.errno, error.strerror, where) from None


@cli.command()
@click.argument("keys", nargs=-1, required=True)
@tenant_option
@master_option
@timeout_option
@json_option
def exists(keys: tuple[str, ...], tenant: str, master: str, timeout_ms: int, as_json: bool) -> None:
    """Say which KEYS hold an object; exit code 3 unless all do."""
    with StoreClient(master, tenant=tenant, timeout_ms=timeout_ms) as store:
        present = store.exists(list(keys))
    assert isinstance(present, list)
    words = [
        f"{key}: {'present' if there else 'absent'}"
        for key, there in zip(keys, present, strict=True)
    ]
    answer(as_json, dict(zip(keys, present, strict=True)), *words)
    if not all(present):
        sys.exit(EXIT_ABSENT)


@cli.command()
@click.argument("keys", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="also objects that are leased or pinned")
@tenant_option
@master_option
@timeout_option
@json_option
def rm(
    keys: tuple[str, ...], force: bool, tenant: str, master: str, timeout_ms: int, as_json: bool
) -> None:
    """Remove the objects under KEYS; absent ones are fine. Exit code 1 when one is kept."""
    with StoreClient(master, tenant=tenant, timeout_ms=timeout_ms) as store:
        present = store.exists(list(keys))
        outcomes = store.remove(list(keys), force=force)
    assert isinstance(outcomes, list)
    assert isinstance(present, list)
    kept = {key: o.cause for key, o in zip(keys, outcomes, strict=True) if o is not None}
    absent = [k for k, there in zip(keys, present, strict=True) if not there and k not in kept]
    gone = len(keys) - len(kept)
    words = [f"{gone - len(absent)} removed", *(f"was not there: {key}" for key in absent)]
    words += [f"kept: {key}: {why}; try --force" for key, why in kept.items()]
    answer(as_json, {"gone": gone, "absent": absent, "kept": kept}, *words)
    if kept:
        sys.exit(EXIT_FAILURE)


@cli.command()
@click.argument("prefix", default="")
@tenant_option
@master_option
@timeout_option
@json_option
def ls(prefix: str, tenant: str, master: str, timeout_ms: int, as_json: bool) -> None:
    """List the objects whose key begins with PREFIX: bytes, replicas, key (with --json: one JSON
    object a line)."""
    with StoreClient(master, tenant=tenant, timeout_ms=timeout_ms) as store:
        for found in store.list(prefix):
            row = {"key": found.key, "nbytes": found.nbytes, "replicas": found.replicas}
            answer(as_json, row, f"{found.nbytes:>14,}  {found.replicas}  {shown(found.key)}")


@cli.command()
@click.argument("key")
@tenant_option
@master_option
@timeout_option
@json_option
def locate(key: str, tenant: str, master: str, timeout_ms: int, as_json: bool) -> None:
    """Say on which nodes the object under KEY is, and by which way this host reads it; then read it
    once and show what each step took. Exit code 3 when there is none, 1 when none can be read."""
    with StoreClient(master, tenant=tenant, timeout_ms=timeout_ms) as store:
        found = store.explain(key)
    answer(as_json, asdict(found), str(found))
    if found.used < 0:
        sys.exit(EXIT_FAILURE if found.replicas else EXIT_ABSENT)


def shown(key: str) -> str:
    """Fit for a terminal: what would move its cursor or change its colours is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in key)


@cli.command()
@click.option("--all", "zeros", is_flag=True, help="counters that are zero, too (--json has all)")
@master_option
@timeout_option
@json_option
def status(zeros: bool, master: str, timeout_ms: int, as_json: bool) -> None:
    """Show nodes, space and counters."""
    found = cluster_status(master, timeout_ms)
    answer(as_json, found.as_dict(), *found.lines(zeros))


@cli.command()
@click.argument("tenant", default="")
@click.option("--bytes", "bytes_max", type=size, metavar="SIZE", help="of extents, all replicas")
@click.option("--keys", "keys_max", type=click.IntRange(1), help="complete and in writing")
@click.option("--policy", type=click.Choice(POLICIES), help="of a put beyond it  [reject]")
@click.option("--remove", is_flag=True, help="the quota ends")
@master_option
@timeout_option
@json_option
def quota(tenant: str, master: str, timeout_ms: int, as_json: bool, **given: Any) -> None:
    """Show what TENANT (default: every one) holds and may hold, or set that.

    --bytes and --keys set a new quota; the one that is not given is without limit.
    """
    limits, remove = (given["bytes_max"], given["keys_max"]), given["remove"]
    limited = limits != (None, None)
    if limited == remove and (limited or given["policy"]):
        raise UsageError("a quota is --bytes or --keys or both; or --remove alone", remedy="")
    if limited or remove:
        if not tenant:
            raise UsageError("whose quota?", remedy="name the TENANT")
        bytes_max, keys_max = (limit or 0 for limit in limits)
        policy = given["policy"] or POLICIES[0]
        wish = SetQuota(tenant, bytes_max, keys_max, policy, remove)
        quotas.change(master, wish, timeout_ms)
    known = quotas.tenants(master, timeout_ms)
    found = [each for each in known if tenant in ("", each.name)]
    words = [quotas.line(each) for each in found] or [quotas.unknown(tenant, len(known))]
    answer(as_json, [quotas.as_dict(each) for each in found], *words)


@cli.command("drain")
@click.argument("what", metavar="NODE|SEGMENT")
@click.option("--cancel", is_flag=True, help="let it take new objects again")
@click.option("--wait-ms", default=600_000, show_default=True, type=click.IntRange(1))
@master_option
@json_option
def drain_command(what: str, cancel: bool, wait_ms: int, master: str, as_json: bool) -> None:
    """Move every object off a node (by name) or segment (by id), so that it can leave.

    Exit code 1 when something is left. It takes no new objects from then on; --cancel ends that.
    """
    if cancel:
        info = draining.cancel(master, what, min(wait_ms, 10_000))
        answer(as_json, draining.as_dict(info), f"{what} takes new objects again")
        return
    with _bars() as bars:
        task = bars.add_task(what, total=1)

        def progress(info: DrainInfo) -> None:
            done = info.moved + info.dropped + info.ended
            bars.update(task, completed=done, total=max(1, done + info.left))

        info = draining.drain(master, what, wait_ms, progress)
    answer(as_json, draining.as_dict(info), *draining.report(info))
    if info.state != "done":
        sys.exit(EXIT_FAILURE)


@cli.command("copy")
@click.argument("keys", nargs=-1, required=True)
@click.option("--to", "to_node", required=True, metavar="NODE")
@click.option("--move-from", "from_node", default="", metavar="NODE", help="move from there")
@click.option("--tenant", default="default", show_default=True)
@master_option
@timeout_option
@json_option
def copy_command(  # noqa: PLR0913, PLR0917  (click hands over each option by itself)
    keys: tuple[str, ...],
    to_node: str,
    from_node: str,
    tenant: str,
    master: str,
    timeout_ms: int,
    as_json: bool,
) -> None:
    """Let the objects under KEYS have a replica on a node, or move there. Exit code 1 when one
    has not."""
    wish = CopyObjects(tenant, [key.encode() for key in keys], to_node, from_node)
    failed = draining.codes_in_words(keys, draining.copy(master, wish, timeout_ms))
    words = [f"{len(keys) - len(failed)} on {to_node}"]
    words += [f"not there: {key}: {why}" for key, why in failed.items()]
    answer(as_json, {"there": len(keys) - len(failed), "failed": failed}, *words)
    if failed:
        sys.exit(EXIT_FAILURE)


@cli.command()
@json_option
def doctor(as_json: bool) -> None:
    """Say what this machine has and lacks; exit code 1 when a required part is missing."""
    findings = examine()
    answer(as_json, [f.as_dict() for f in findings], *(f.line() for f in findings))
    if any(f.required and not f.ok for f in findings):
        sys.exit(EXIT_FAILURE)


def answer(as_json: bool, value: object, *lines: str) -> None:
    if as_json:
        click.echo(json.dumps(value))
    else:
        click.echo("\n".join(lines))


@cli.group()
def bench() -> None:
    """Put load on a cluster and measure."""


@bench.command("replay")
@click.option("--trace", type=click.Path(path_type=Path), help="JSON lines; default: a made trace")
@click.option("--requests", default=2000, show_default=True, help="replay at most so many")
@click.option("--page-bytes", type=size, default="256KiB", show_default=True)
@click.option("--capacity", type=size, default="1GiB", show_default=True, help="of all nodes")
@click.option("--nodes", default=2, show_default=True)
@click.option("--transports", type=click.Choice(tuple(TRANSPORTS)), default="both")
@click.option("--json", "json_file", type=click.File("w"), help="also write the figures here")
def bench_replay(json_file: IO[str] | None, transports: str, **options: Any) -> None:
    """Replay requests over a small cluster of real processes, verify every byte, and compare the
    hit rate with ideal caches.

    The cluster (a master, nodes, a writer and a reader) lives for this command only.
    """
    chosen = ReplayOptions(
        trace=options["trace"],
        requests_max=options["requests"],
        page_bytes=options["page_bytes"],
        capacity_bytes=options["capacity"],
        node_count=options["nodes"],
        transports=TRANSPORTS[transports],
    )
    with _bars() as bars:
        tasks: dict[str, TaskID] = {}

        def progress(process: str, done: int, total: int) -> None:
            if process not in tasks:
                tasks[process] = bars.add_task(process, total=total)
            bars.update(tasks[process], completed=done)

        report = replay(chosen, progress)
    Console().print(render(report))
    if json_file is not None:
        json.dump(as_dict(report), json_file, indent=2)
        json_file.write("\n")
    if report.problems():
        sys.exit(EXIT_FAILURE)


def _bars() -> Progress:
    return Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(bar_width=40),
        TextColumn("{task.completed:,} of {task.total:,}"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
    )


def _terminated(_signal: int, _frame: object) -> None:
    """SIGTERM unwinds like Ctrl-C does, so that what a command started is stopped."""
    raise KeyboardInterrupt


def main() -> None:
    signal.signal(signal.SIGTERM, _terminated)
    try:
        cli.main(prog_name="mooncake", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USAGE)
    except (KeyboardInterrupt, click.Abort):
        click.echo("mooncake: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except MooncakeError as error:
        click.echo(f"mooncake: {error}", err=True)
        absent, usage = isinstance(error, ObjectNotFound), isinstance(error, UsageError)
        sys.exit(EXIT_ABSENT if absent else EXIT_USAGE if usage else EXIT_FAILURE)
    except OSError as error:
        where = error.filename or "the output"
        remedy = "Remedy: name another file, or make room there"
        click.echo(f"mooncake: {where}: {error.strerror}. {remedy}", err=True)
        with suppress(OSError, ValueError):  # else what is left is tried, and fails, once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILURE)


if __name__ == "__main__":
    main()
