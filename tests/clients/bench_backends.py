"""Backups, prefetches and queries of SGLang's storage interface, ours beside upstream's own.

    python tests/clients/bench_backends.py [--upstream VENV] [--pages 65536,262144,2097152]

Both backends get the same host pools of SGLang and the same calls: batches of 128 pages with
`batch_set_v1`, `batch_exists` and `batch_get_v1`, and one `batch_exists` of 4,096 pages. Every
contender runs in a process of its own, its memory in another one (`local`: in the same one, as
upstream's embedded clients have it). `prefetch_per_cpu` divides by the processor's seconds that
all threads of the contender took, so it can be compared on a busy machine, too. `--upstream`: a
virtual environment with upstream's wheel; its native libraries must be on LD_LIBRARY_PATH. Not a
test: it prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BATCH = 128
QUERY = 4_096
SEGMENT_BYTES = 1_280 << 20
STORE = "from mooncake.store import MooncakeDistributedStore as S; import sys, time\n"
STORAGE = STORE + (
    "s = S(); assert s.setup('127.0.0.1', 'P2PHANDSHAKE', int(sys.argv[1]), 16 << 20, 'tcp', '',"
    " sys.argv[2]) == 0; print('ready', flush=True); sys.stdin.read()"
)


def measure(kind: str, address: str, page_bytes: int, segment_bytes: int) -> dict[str, Any]:
    """In the contender's own process."""
    import sglang_pools as pools  # noqa: PLC0415 - SGLang is imported in the contenders only
    import torch  # noqa: PLC0415
    from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: PLC0415

    width = page_bytes // (2 * 2 * pools.PAGE)  # of all layers and heads together
    pools.LAYERS, pools.HEADS, pools.WIDTH = 4, width // 4 // 64, 64
    pool = pools.mha_pool("page_first", tokens=BATCH * pools.PAGE, heads=pools.HEADS)
    extra: dict[str, Any] = {
        "backend_name": "ours", "module_path": "mooncake_py.hicache",
        "class_name": "HiCacheBackend", "interface_v1": 1, "master": address,
    }  # fmt: skip
    if kind != "ours":
        extra = {
            "master_server_address": address, "local_hostname": "127.0.0.1", "protocol": "tcp",
            "metadata_server": "P2PHANDSHAKE", "device_name": "",
            "global_segment_size": segment_bytes,
        }  # fmt: skip
    name = "dynamic" if kind == "ours" else "mooncake"
    backend = StorageBackendFactory.create_backend(name, pools.config(extra), pool)
    backend.register_mem_pool_host(pool)
    indices = pools.indices(list(range(BATCH)))
    batches = max(3, min(16, (768 << 20) // (page_bytes * BATCH)))
    took: dict[str, list[float]] = {"backup": [], "exists": [], "prefetch": []}
    spent: dict[str, list[float]] = {what: [] for what in took}

    def timed(what: str, call: Any, expected: Any) -> None:
        start, before = time.perf_counter(), time.process_time()
        got = call()
        took[what].append(time.perf_counter() - start)
        spent[what].append(time.process_time() - before)
        assert got == expected, (what, got)

    everything = [True] * BATCH
    for turn in range(batches):
        keys = pools.hashes(BATCH, start=turn * BATCH)
        timed("backup", lambda keys=keys: backend.batch_set_v1(keys, indices), everything)
    raw = pool.kv_buffer.view(torch.uint8)
    before = raw[:, :64].clone()
    pool.kv_buffer.zero_()
    for turn in range(batches):
        keys = pools.hashes(BATCH, start=turn * BATCH)
        timed("exists", lambda keys=keys: backend.batch_exists(keys), BATCH)
        timed("prefetch", lambda keys=keys: backend.batch_get_v1(keys, indices), everything)
    assert torch.equal(raw[:, :64], before)
    result = {
        what: page_bytes * BATCH / statistics.median(times[1:]) / 1e9
        for what, times in took.items()
        if what != "exists"
    }
    cpu = statistics.median(spent["prefetch"][1:])
    result["prefetch_per_cpu"] = page_bytes * BATCH / cpu / 1e9
    if page_bytes <= 64 << 10:
        result |= query(backend, pools.hashes(QUERY), indices)
    backend.close()
    return result


def query(backend: Any, keys: list[str], indices: Any) -> dict[str, float]:
    """One question about thousands of pages that are all there."""
    for start in range(0, len(keys), BATCH):
        backend.batch_set_v1(keys[start : start + BATCH], indices)
    times = []
    for _ in range(9):
        start_s = time.perf_counter()
        assert backend.batch_exists(keys) == len(keys)
        times.append(1e3 * (time.perf_counter() - start_s))
    return {"exists_4096_first_ms": times[0], "exists_4096_ms": statistics.median(times)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def contender(kind: str, address: str, page_bytes: int, segment: int, path: list[str]) -> Any:
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), *path])}
    done = subprocess.run(
        [sys.executable, __file__, "--one", kind, address, str(page_bytes), str(segment)],
        env=settings, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        print(done.stdout[-500:], done.stderr[-2_000:], file=sys.stderr)
        return {}
    return json.loads(lines[-1])


def ours(page_bytes: int) -> Any:
    from mooncake_py.ops.cluster import Cluster, ClusterOptions  # noqa: PLC0415

    with Cluster(ClusterOptions(node_count=1, segment_bytes=SEGMENT_BYTES)) as cluster:
        return contender("ours", cluster.address, page_bytes, 0, [])


def upstream(venv: Path, page_bytes: int, local: bool) -> Any:
    port, metrics = free_port(), free_port()
    python = venv / "bin" / "python"
    site = next((venv / "lib").glob("python3*/site-packages"))
    shown = HERE / ".." / ".." / ".bench-upstream"
    shown.mkdir(exist_ok=True)
    if not (shown / "mooncake").exists():
        (shown / "mooncake").symlink_to(site / "mooncake")
        for libs in site.glob("mooncake*.libs"):
            (shown / libs.name).symlink_to(libs)
    with ExitStack() as stack:
        master = subprocess.Popen(
            [str(venv / "bin" / "mooncake_master"), f"--rpc_port={port}", "--rpc_address=127.0.0.1",
             f"--metrics_port={metrics}", "--enable_metric_reporting=false"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stack.callback(master.wait)
        stack.callback(master.kill)
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert master.poll() is None
        address = f"127.0.0.1:{port}"
        if not local:
            storage = subprocess.Popen(
                [str(python), "-c", STORAGE, str(SEGMENT_BYTES), address],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            stack.callback(storage.wait)
            stack.callback(storage.kill)
            assert storage.stdout is not None
            while storage.stdout.readline().strip() != "ready":
                assert storage.poll() is None
        segment = SEGMENT_BYTES if local else 0
        return contender("upstream", address, page_bytes, segment, [str(shown)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", type=Path)
    parser.add_argument("--pages", default="65536,262144,2097152")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        kind, address, page_bytes, segment = given.one
        print(json.dumps(measure(kind, address, int(page_bytes), int(segment))))
        return
    for page_bytes in map(int, given.pages.split(",")):
        rows = {"ours": ours(page_bytes)}
        if given.upstream:
            rows["upstream, other process"] = upstream(given.upstream, page_bytes, local=False)
            rows["upstream, embedded"] = upstream(given.upstream, page_bytes, local=True)
        for name, row in rows.items():
            text = "  ".join(f"{what} {value:8.2f}" for what, value in row.items())
            print(f"{page_bytes >> 10:5} KiB  {name:24}  {text}", flush=True)


if __name__ == "__main__":
    main()
