"""`mooncake_master` for launch scripts: upstream's flags that matter, translated; others refused.

gflags style: `--name=value`, `--name value`, `-name=value`, dashes or underscores, `--noname` for
a flag that is off. A flag of upstream's that is off, or at the value that it has anyway, asks for
nothing and is accepted.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

RPC_PORT, METRICS_PORT = "50051", "9003"
DEAD_MIN_MS = 2_000  # a node is suspect after one second, and dead later than that

# What decides behaviour and has a meaning here, in our words.
TRANSLATED = {
    "rpc_port": "the port of --listen",
    "port": "the port of --listen",
    "rpc_address": "the host of --listen",
    "metrics_port": "the port of --metrics",
    "metrics_host": "the host of --metrics",
    "default_kv_lease_ttl": "lease_ms",
    "max_kv_soft_pin_ttl": "soft_pin_max_ms",
    "eviction_high_watermark_ratio": "evict_high_ratio",
    "eviction_ratio": "evict_low_ratio, so far below it",
    "client_ttl": "dead_ms",
    "enable_ha": "--metadata etcd://...",
    "etcd_endpoints": "--metadata etcd://...",
    "ha_backend_type": "--metadata etcd://...",
    "ha_backend_connstring": "--metadata etcd://...",
    "cluster_id": "the prefix in --metadata etcd://...",
}
# What describes upstream's own machinery: here there is nothing to set.
NEEDLESS = frozenset(
    {
        "rpc_thread_num", "rpc_conn_timeout_seconds", "rpc_enable_tcp_no_delay", "max_threads",
        "enable_metric_reporting", "enable_http_metadata_server", "http_metadata_server_port",
        "http_metadata_server_host", "logtostderr", "alsologtostderr", "v", "minloglevel",
        "enable_gc", "memory_allocator", "allocation_strategy", "default_kv_soft_pin_ttl",
        "put_start_discard_timeout_sec", "put_start_release_timeout_sec",
        "enable_metadata_cleanup_on_timeout",
    }
)  # fmt: skip
# Values that ask for nothing, of flags that are otherwise refused.
OFF = frozenset({"false", "0", "no", "off", ""})
HELP = frozenset({"-h", "-help", "--help", "--helpfull", "--helpshort"})
_UNITS_MS = {"": 1, "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}


def arguments_of(given: list[str]) -> list[str]:
    """The command line of mooncake-master. Raises SystemExit that names what is not known."""
    flags = parse(given)
    unknown = sorted(
        name
        for name, value in flags.items()
        if name not in TRANSLATED and name not in NEEDLESS and value.lower() not in OFF
    )
    if unknown:
        raise SystemExit(
            f"mooncake_master: not supported: {', '.join('--' + name for name in unknown)}. "
            f"Remedy: leave them out; supported are {', '.join('--' + name for name in TRANSLATED)}"
        )
    host = flags.get("rpc_address", "0.0.0.0")
    port = next((flags[name] for name in ("rpc_port", "port") if number(flags, name)), RPC_PORT)
    metrics = f"{flags.get('metrics_host', '0.0.0.0')}:{flags.get('metrics_port', METRICS_PORT)}"
    command = ["--listen", f"{host}:{port}", "--metrics", metrics]
    command += ["--metadata", _metadata(flags)]
    for pair in _settings(flags):
        command += ["--set", pair]
    return command


def _metadata(flags: Mapping[str, str]) -> str:
    """In memory, as upstream's default: nothing outlives the process. With etcd it does."""
    if flags.get("enable_ha", "").lower() in OFF:
        return "memory"
    kind = flags.get("ha_backend_type", "etcd")
    members = flags.get("etcd_endpoints") or flags.get("ha_backend_connstring", "")
    if kind != "etcd" or not members:
        raise SystemExit(
            f"mooncake_master: --enable_ha over {kind!r} is not supported. "
            "Remedy: --ha_backend_type=etcd with --etcd_endpoints=HOST:PORT;HOST:PORT"
        )
    bare = members.replace("etcd://", "").replace("http://", "").replace(";", ",")
    return f"etcd://{bare}/{flags.get('cluster_id', 'mooncake_cluster')}"


def _settings(flags: Mapping[str, str]) -> list[str]:
    found = []
    if "default_kv_lease_ttl" in flags:
        lease_ms = max(1, duration_ms("default_kv_lease_ttl", flags["default_kv_lease_ttl"]))
        found += [f"lease_ms={lease_ms}", f"lease_max_ms={max(60_000, lease_ms)}"]
    if "max_kv_soft_pin_ttl" in flags:
        limit_ms = duration_ms("max_kv_soft_pin_ttl", flags["max_kv_soft_pin_ttl"])
        found.append(f"soft_pin_max_ms={limit_ms}")
    if "client_ttl" in flags:  # seconds, where no unit stands
        silence_ms = duration_ms("client_ttl", flags["client_ttl"], bare=1_000)
        found.append(f"dead_ms={max(DEAD_MIN_MS, silence_ms)}")
    if "eviction_high_watermark_ratio" in flags or "eviction_ratio" in flags:
        high = ratio(flags, "eviction_high_watermark_ratio", 0.9)
        low = max(0.0, round(high - ratio(flags, "eviction_ratio", 0.05), 6)) or high
        found += [f"evict_high_ratio={high}", f"evict_low_ratio={low}"]
    return found


def number(flags: Mapping[str, str], name: str) -> int:
    value = flags.get(name, "0")
    if not value.isdigit():
        raise SystemExit(f"mooncake_master: --{name}={value!r} is no number")
    return int(value)


def ratio(flags: Mapping[str, str], name: str, otherwise: float) -> float:
    try:
        found = float(flags.get(name, otherwise))
    except ValueError:
        found = -1.0
    if not 0 < found <= 1:
        raise SystemExit(f"mooncake_master: --{name}={flags[name]!r} is no ratio above 0, up to 1")
    return found


def duration_ms(name: str, text: str, bare: int = 1) -> int:
    """`5000`, `5s`, `2m`. bare: milliseconds of one, where no unit stands."""
    match = re.fullmatch(r"(\d+)(ms|s|m|h)?", text.strip())
    if match is None:
        raise SystemExit(f"mooncake_master: --{name}={text!r} is no duration like 5000, 5s or 2m")
    return int(match[1]) * (_UNITS_MS[match[2]] if match[2] else bare)


def parse(given: list[str]) -> dict[str, str]:
    flags: dict[str, str] = {}
    waiting = ""
    known = {*TRANSLATED, *NEEDLESS}
    for word in given:
        if word.startswith("-"):
            if waiting:
                flags[waiting] = "true"
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            if not equals and name.startswith("no") and name[2:] in known:
                flags[name[2:]], waiting = "false", ""
                continue
            waiting = "" if equals else name
            if equals:
                flags[name] = value
        elif waiting:
            flags[waiting], waiting = word, ""
        else:
            raise SystemExit(f"mooncake_master: {word!r} is no flag")
    if waiting:
        flags[waiting] = "true"
    return flags


def usage() -> str:
    """Which flags mean what here."""
    lines = ["mooncake_master [--FLAG=VALUE ...], which runs mooncake-master. Supported flags:", ""]
    lines += [f"  --{name:31} {meaning}" for name, meaning in TRANSLATED.items()]
    needless = ", ".join(sorted(NEEDLESS))
    return "\n".join([*lines, "", f"Accepted, and without a meaning here: {needless}."])


def warning_of(arguments: list[str]) -> str:
    """What upstream's defaults mean for a command line of mooncake-master; "": nothing to say."""
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    listen, told = given["--listen"], []
    if listen.rpartition(":")[0].strip("[]") not in ("127.0.0.1", "localhost", "::1"):
        told.append(
            f"listens on {listen} without authentication: whoever reaches that port can read, "
            "replace and delete every object (--rpc_address=HOST: one of a trusted network)"
        )
    if given["--metadata"] == "memory":
        told.append(
            "keeps its metadata in memory: after a restart quotas and what is on disks alone are "
            "lost, and the rest is asked of the nodes (mooncake-master --metadata PATH keeps it)"
        )
    return "; ".join(told)


def main() -> None:
    if HELP & set(sys.argv[1:]):
        print(usage())
        return
    arguments = arguments_of(sys.argv[1:])
    if warning := warning_of(arguments):
        print(f"WARNING mooncake_master {warning}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "mooncake_py.master.server", *arguments]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
