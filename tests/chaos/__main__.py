"""`python -m tests.chaos [SEED] [--seconds N] [--round NAME] [--rdma PORTS]`: kill anything, lose
nothing.

Rounds share the seconds. Each prints its seed, what it did, and what it found; the exit code is 1
when promises were broken. With `--keep` the folder with histories and logs stays. With `--rdma`
objects travel by these ports ("mlx5_0,mlx5_1"), and all processes are on this host: the ports are.
MOONCAKE_CHAOS_SLOW=N makes all times N times as long: for a machine that is so slow.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integration")]

from chaos_network import inside, why_not  # noqa: E402 - its folder has just been added
from chaos_run import play, summary  # noqa: E402
from chaos_schedule import SLOW, Shape  # noqa: E402
from chaos_world import has_faketime  # noqa: E402

WITHIN = "CHAOS_IS_WITHIN"  # set in the process that has a network of its own
DATABASE_MIB = 8
LINES = 6  # of each process, where promises were broken


def shapes(network: bool, clocks: bool, etcd: bool, mounts: bool) -> dict[str, tuple[Shape, int]]:
    """Name -> cluster, share of the time."""
    found: dict[str, tuple[Shape, int]] = {}
    if etcd:
        found["etcd"] = Shape("etcd", 1, network=network, clocks=clocks), 4
        found["quorum"] = Shape("quorum", 3, master_count=3, network=network, clocks=clocks), 3
        found["full"] = Shape("full", 1, segment_mib=8, streams=True, network=network), 1
        found["tier"] = replace(found["full"][0], name="tier", disk_mib=24), 1
    found["embedded"] = Shape("embedded", 0, master_count=1, clocks=clocks, fills=mounts), 2
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev chaos", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=None)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--round", action="append", default=[], help="only this one")
    parser.add_argument("--rdma", metavar="PORTS", default="")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(3), "big")
    reason = why_not() if WITHIN not in os.environ else os.environ[WITHIN]
    if options.rdma:
        reason = "the ports of RDMA belong to this host"
    if WITHIN not in os.environ and not reason:
        command = inside(sys.executable, "-m", "tests.chaos", str(seed), *_again(options))
        return subprocess.run(command, check=False, env=os.environ | {WITHIN: ""}).returncode
    return _rounds(seed, options, reason)


def _again(options: argparse.Namespace) -> list[str]:
    words = ["--seconds", str(options.seconds), *(["--keep"] if options.keep else [])]
    return words + [word for name in options.round for word in ("--round", name)]


def _rounds(seed: int, options: argparse.Namespace, reason: str) -> int:
    network, etcd = not reason, shutil.which("etcd") is not None
    clocks = has_faketime() and not options.rdma
    if WITHIN in os.environ:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # Mounts are only made where they end with the run.
    mounts = network or os.environ.get("RDMA_VM") == "1"
    if reason:
        what = "cuts and delays of the network" + ("" if mounts else ", full disks")
        print(f"chaos: skipped: {what}: {reason}")
    if not clocks:
        why = "libfaketime is not installed"
        if options.rdma:  # which reads a file at each look at a clock
            why = "in a guest that costs more than all else"
        print(f"chaos: skipped: wall clocks that jump: {why}")
    if not etcd:
        print("chaos: skipped: several masters: etcd is not installed")
    chosen = {
        name: entry
        for name, entry in shapes(network, clocks, etcd, mounts).items()
        if not options.round or name in options.round
    }
    total = sum(share for _, share in chosen.values())
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    failed = False
    ports = tuple(port for port in options.rdma.split(",") if port)
    for name, (plain, share) in chosen.items():
        # One processor, and soft-RoCE on it: calls leave some of it for processes that start.
        shape = replace(plain, ports=ports, calls_per_second=10) if ports else plain
        seconds = max(10, options.seconds * share // total)
        command = f"./dev chaos {seed} --seconds {seconds} --round {name}"
        command += f" --rdma {options.rdma}" if ports else ""
        slow = f"MOONCAKE_CHAOS_SLOW={SLOW} " if SLOW > 1 else ""
        print(f"chaos: {slow}{command}", flush=True)
        database = None if shape.etcd_count else _database(folder / name, mounts)
        outcome = play(shape, seed, seconds, folder / name, database)
        print(summary(outcome), flush=True)
        for violation in outcome.violations[:20]:
            print(f"  VIOLATION {violation.at / 1e9:.3f} {violation}")
        if outcome.violations:
            failed = True
            print("\n".join(["  what was done:", *("    " + line for line in outcome.said)]))
            print(_logs(folder / name))
    if options.keep or failed:
        print(f"chaos: histories and logs are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)  # a mount point goes with its namespace
    return int(failed)


def _logs(folder: Path) -> str:
    """The ends of what the processes wrote to standard error: the folder may go with a guest."""
    lines = ["  what they said last:"]
    for path in sorted(folder.glob("*.stderr")):
        said = path.read_text(errors="replace").splitlines()[-LINES:]
        lines += [f"    {path.stem}: {line[:200]}" for line in said]
    return "\n".join(lines)


def _database(folder: Path, may_mount: bool) -> Path:
    """A small file system for the embedded database, which can be filled."""
    place = folder / "database"
    place.mkdir(parents=True)
    if may_mount:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DATABASE_MIB}m", "chaos", str(place)]
        subprocess.run(mount, check=True)
    return place


if __name__ == "__main__":
    sys.exit(main())
