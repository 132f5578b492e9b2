"""`mooncake_master` for launch scripts: upstream's flags that matter, translated; others refused.

gflags style: `--name=value`, `--name value`, `-name=value`, dashes or underscores.
"""

from __future__ import annotations

import os
import sys

# What decides behaviour and has a meaning here -> how it is said to mooncake-master.
TRANSLATED = {
    "rpc_port": "listen port",
    "port": "listen port",
    "rpc_address": "listen host",
    "metrics_port": "metrics port",
    "metrics_host": "metrics host",
    "default_kv_lease_ttl": "lease_ms",
    "eviction_high_watermark_ratio": "watermark_high",
}
# What describes upstream's own machinery: here there is nothing to set.
NEEDLESS = frozenset(
    {
        "rpc_thread_num", "rpc_conn_timeout_seconds", "rpc_enable_tcp_no_delay", "max_threads",
        "enable_metric_reporting", "enable_http_metadata_server", "http_metadata_server_port",
        "http_metadata_server_host", "logtostderr", "v", "minloglevel", "enable_gc",
    }
)  # fmt: skip


def arguments_of(given: list[str]) -> list[str]:
    """The command line of mooncake-master. Raises SystemExit that names what is not known."""
    flags = parse(given)
    unknown = sorted(set(flags) - set(TRANSLATED) - NEEDLESS)
    if unknown:
        raise SystemExit(
            f"mooncake_master: not supported: {', '.join('--' + name for name in unknown)}. "
            f"Remedy: leave them out; supported are {', '.join('--' + name for name in TRANSLATED)}"
        )
    host = flags.get("rpc_address", "0.0.0.0")
    port = flags.get("rpc_port") or flags.get("port") or "50051"
    metrics_host = flags.get("metrics_host", "0.0.0.0")
    command = ["--listen", f"{host}:{port}"]
    command += ["--metrics", f"{metrics_host}:{flags.get('metrics_port', '9003')}"]
    command += ["--metadata", "memory"]  # as upstream's default: nothing outlives the process
    if "default_kv_lease_ttl" in flags:
        command += ["--set", f"lease_ms={flags['default_kv_lease_ttl']}"]
    if "eviction_high_watermark_ratio" in flags:
        command += ["--set", f"evict_high_ratio={flags['eviction_high_watermark_ratio']}"]
    return command


def parse(given: list[str]) -> dict[str, str]:
    flags: dict[str, str] = {}
    waiting = ""
    for word in given:
        if word.startswith("-"):
            if waiting:
                flags[waiting] = "true"
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
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


def main() -> None:
    command = [sys.executable, "-m", "mooncake_py.master.server", *arguments_of(sys.argv[1:])]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
